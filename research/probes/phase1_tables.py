"""The tables and the picture of phase 1: what was published, the five flaws, the controls."""
from pathlib import Path

import numpy as np
import torch

from analysis.earlier import PUBLISHED
from analysis.plots import COLOURS, panels, save
from analysis.statistics import Estimate, verdicts
from analysis.tables import Table, by_row, shown
from analysis.positions import t_statistics
from analysis.sums import SIGNS
from analysis.vocabulary import CLASSES
from countdown_task import BRACKET, KINDS, NUMBER, OPERATOR, WORD
from engine.rollouts import Rollouts
from research.probes.pictures import legend_under, more_ticks
from research.probes.phase1_statistics import (
    BINS, FIGURES, NEXT_TERM, TERM_COUNT, TERM_S, TERM_SIZE, Account, cell_ratio, class_ratio,
    early_over_late, figures, mean_figure, mean_in, sums_by_cell, within_answers)

EARLY_OVER_LATE, FILLER_OVER_REASONING = 4.0, 1.75  # published of phase 1
DRAWS = 20  # random subsets of the answers


def values_and_intervals(heading: str, spec: str, estimates: list[Estimate]) -> dict[str, tuple]:
    return {heading: (spec, [e.value for e in estimates]),
            f"95%, {heading}": (spec, [e.interval for e in estimates])}


def interval_words(columns: dict[str, tuple]) -> dict[str, str]:
    """The full headings of the columns with intervals."""
    return {heading: f"95% interval of {heading.removeprefix('95%, ')}"
            for heading in columns if heading.startswith("95%, ")}


def phases_table(accounts: dict[str, Account]) -> Table:
    t_of_phase_1 = PUBLISHED["phase 1"]
    published = {
        "phase 1": [*t_of_phase_1, *t_of_phase_1, EARLY_OVER_LATE, FILLER_OVER_REASONING],
        "phase 2": [None, None, None, *PUBLISHED["phase 2"], PUBLISHED["early over late"],
                    PUBLISHED["filler over reasoning"]]}
    columns, texts = {"": ("", FIGURES)}, {}
    for name, values in accounts.items():
        estimates = figures(values)
        if name in published:
            columns[f"pub. {name}"] = (".3f", published[name])
        columns |= values_and_intervals(name, ".3f", estimates)
        texts[name] = dict(zip(FIGURES, [shown(e.value, ".2f") for e in estimates]))
    one, logits = texts["phase 1"], texts["abs(A) s"]
    finding = (
        f"In phase 1 abs(t) is above 3 at a share of {one['size: abs(t) > 3']} of the positions "
        f"for the size and of {one['signed: abs(t) > 3']} for the signed number (published: "
        f"{t_of_phase_1[0]:.2f}).\n"
        f"In phase 1 early tokens get {one['early over late']} times what late ones get "
        f"(published: {EARLY_OVER_LATE:.2f}); in the gradient at the logits "
        f"{logits['early over late']} times.\n"
        f"In phase 1 filler gets {one['filler over reasoning']} times what reasoning gets "
        f"(published: {FILLER_OVER_REASONING:.2f}); in the gradient at the logits "
        f"{logits['filler over reasoning']} times.")
    notes = [
        "size: norm(g), abs(A log p), abs(A) s; signed: mean of g over its dimensions, A log p, "
        "A s; filler and reasoning are told apart by the earlier experiment's regex",
        "published: figures of other models (phase 1: Qwen3-4B, 100 answers; phase 2: "
        "Qwen2.5-0.5B-Instruct), for orientation. It was not published which number went into "
        "phase 1's t; phase 2's early over late is the first tenth over the last",
        "The intervals of t are rough: few answers reach late positions."]
    title = "Phase 1 beside phase 2, and beside the gradient that GRPO applies at the logits"
    published_words = {f"pub. {name}": f"published of {name}" for name in published}
    return Table("phases", title, columns, finding, notes,
                 {"": "measure", **published_words, **interval_words(columns)})


def reward_table(accounts: dict[str, Account], shuffled: dict[str, Account]) -> Table:
    phase_1 = accounts["phase 1"]
    places, rows = phase_1.places, {}
    for name, values in accounts.items():
        rank, answers = within_answers(places, phase_1.size, values.size)
        change = np.abs(shuffled[name].signed - values.signed)
        whole = max(np.abs(values.signed).sum(), 1e-300)
        rows[name] = (name, rank.value, rank.interval, answers, change.max(initial=0.0),
                      change.sum() / whole)
    left = (places.length[places.answer] - places.position).astype(float)
    rank, answers = within_answers(places, phase_1.size, left)
    rows["left"] = ("tokens still to come", rank.value, rank.interval, answers, None, None)
    logits_rank, logits_change = rows["abs(A) s"][1], rows["abs(A) s"][5]
    finding = (
        "With rewards shuffled over all answers the largest change of a token in phase 1 is "
        f"{rows['phase 1'][4]:.3g}, because no reward enters it.\n"
        f"Shuffled rewards change the gradient at the logits by {logits_change:.0%} of its size.\n"
        "Within an answer the size of phase 1 has a rank correlation of "
        f"{shown(logits_rank, '+.2f')} with that gradient, and of {shown(rank.value, '+.2f')} with "
        "the number of tokens still to come.")
    formats = {"size": "", "rank correlation": "+.2f", "95%": "+.2f", "answers": ",d",
               "largest change": ".3g", "changes, of all sizes": ".0%"}
    notes = ["rank correlation: Spearman's with the size of phase 1 within answers, mean over "
             "answers and then problems. Where A is not 0, phase 2 ranks the tokens of an answer "
             "as abs(log p) does, and abs(A) s as s does. changes: of the signed number, when "
             "rewards are shuffled"]
    return Table("wrong gradient", "Flaw 1, the wrong gradient: phase 1 knows no reward",
                 by_row(formats, list(rows.values())), finding, notes,
                 {"95%": "95% interval", "changes, of all sizes": "sum of changes over sizes"})


def position_table(phase_1: Account, zero_counted: Account, terms: dict[str, Account]) -> Table:
    accounts = {"phase 1: all terms added": phase_1,
                "the same, the last token's 0 counted": zero_counted, **terms}
    ratios = {name: early_over_late(values) for name, values in accounts.items()}
    columns = {
        "of a token": ("", list(accounts)),
        "early": (".4g", [mean_at_end(values, 0) for values in accounts.values()]),
        "late": (".4g", [mean_at_end(values, 2) for values in accounts.values()]),
        **values_and_intervals("early over late", ",.2f", list(ratios.values())),
        "difference": ("", verdicts(list(ratios.values()), ("early more", "late more")))}
    times = {name: f"{shown(e.value, ',.2f')} times" for name, e in ratios.items()}
    finding = (
        f"{times[TERM_COUNT]} as many loss terms reach early tokens as late ones.\n"
        f"One term alone gives early tokens {times[TERM_SIZE]} as much on average, the term of the "
        f"next token {times[NEXT_TERM]}.\n"
        "The mean s of the terms that reach early tokens, small where the model is sure of what "
        f"follows, is {times[TERM_S]} that of the terms that reach late ones.")
    answers = len(np.unique(terms[TERM_SIZE].places.answer))
    notes = [f"from the third row on: {answers} answers whose loss terms were taken one at a time, "
             "not divided by n; equal terms: (sum of sizes)^2 / sum of squared sizes. Differences "
             "are named after Holm's correction over the rows."]
    title = "Flaw 2, position: is early over late a matter of how many loss terms reach a token?"
    return Table("position", title, columns, finding, notes, interval_words(columns))


def mean_at_end(values: Account, end: int) -> float | None:
    there = values.places.end == end
    return values.size[there].mean() if there.any() else None


def distance_table(rollouts: Rollouts, chosen: torch.Tensor, norms: torch.Tensor) -> Table:
    """Distances in powers of two: 1, 2, 3-4, 5-8, ..."""
    pairs = torch.ones_like(norms).tril(-1) * rollouts.mask[chosen].cpu()[..., None]
    b, i, j = (index.numpy() for index in pairs.nonzero(as_tuple=True))
    power = np.ceil(np.log2(i - j)).astype(int)
    names = [distance_name(k) for k in range(int(power.max(initial=0)) + 1)]
    question = rollouts.group[chosen].cpu().numpy()[b]
    by_question = sums_by_cell(question, power, len(names), norms.numpy()[b, i, j])
    total = by_question.sum(0)
    ratios = [cell_ratio(by_question, k, 0) for k in range(len(names))]
    columns = {"tokens back": ("", names), "pairs": (",.0f", total[0]),
               "mean size": (".4f", [mean_in(total, [k]) for k in range(len(names))]),
               **values_and_intervals("over that at 1", ".3f", ratios),
               "of all sizes": (".1%", total[1] / max(total[1].sum(), 1e-300))}
    title = "Flaw 2, position: the size of one loss term, by how far back the token stands"
    return Table("distance", title, columns,
                 headings={**interval_words(columns), "over that at 1": "over that at 1 back",
                           "95%, over that at 1": "95% interval of it"})


def distance_name(power: int) -> str:
    return f"{2 ** power // 2 + 1}-{2 ** power}" if power > 1 else str(power + 1)


def classes_table(accounts: dict[str, Account], rollouts: Rollouts) -> Table:
    code_of_kind = np.full(len(KINDS), 2)
    code_of_kind[WORD] = 0
    code_of_kind[[NUMBER, OPERATOR, BRACKET]] = 1
    headings = ("regex", "like place", "spans", "spans, like place")
    ratios = []
    for values in accounts.values():
        by_span = code_of_kind[values.places.flat(rollouts.kind).astype(int)]
        ratios.append([*class_ratio(values, values.places.naive), *class_ratio(values, by_span)])
    columns = {"size": ("", list(accounts))}
    for heading, estimates in zip(headings, zip(*ratios)):
        columns |= values_and_intervals(heading, ".2f", estimates)
    crude, like, spans, spans_like = (shown(e.value, ".2f") for e in ratios[0])
    finding = (
        f"In phase 1 filler, told apart by the regex, gets {crude} times what reasoning gets, and "
        f"{like} times at like positions (1 if it were early over late in disguise).\n"
        f"Told apart by the spans of the text, words get {spans} times what numbers, operators and "
        f"brackets get, at like positions {spans_like} times.")
    notes = [f"like place: both weighted to the same spread over {BINS} bins of relative position; "
             "spans: words over numbers, operators and brackets; tags and spaces are neither"]
    title = "Flaws 2 and 5, position and crude classes: filler over reasoning"
    return Table("classes", title, columns, finding, notes,
                 {"regex": "by the regex", "like place": "by the regex, at like places",
                  "spans": "by spans", "spans, like place": "by spans, at like places",
                  **dict.fromkeys(interval_words(columns), "95% interval of it")})


def kinds_table(accounts: dict[str, Account], rollouts: Rollouts) -> Table:
    places = accounts["phase 1"].places
    kind = places.flat(rollouts.kind).astype(int)
    filler = places.naive == CLASSES.index("filler")
    cells = {f"{name} (regex)": places.naive == code for code, name in enumerate(CLASSES)}
    cells |= {f"{name} (span)": kind == code for code, name in enumerate(KINDS)}
    cells = {name: cell for name, cell in cells.items() if cell.any()}

    def of_filler(cell):
        return float((cell & filler).sum() / max(filler.sum(), 1))

    columns = {"class": ("", list(cells)),
               "tokens": (",d", [int(cell.sum()) for cell in cells.values()]),
               "of the regex's filler": (".1%", [of_filler(cell) for cell in cells.values()]),
               "mean place": (".2f", [places.relative[cell].mean() for cell in cells.values()])}
    for name, values in accounts.items():
        columns[name] = ".2f", [over_mean(values.size, cell) for cell in cells.values()]
    notes = ["phase 1, phase 2, abs(A) s: mean size over the mean of all tokens; mean place: 0 at "
             "the start of an answer, 1 at its end"]
    title = "Flaw 5, crude classes: what the regex calls filler, and what each kind of token gets"
    return Table("kinds", title, columns, notes=notes)


def over_mean(size: np.ndarray, cell: np.ndarray) -> float | None:
    return size[cell].mean() / size.mean() if size.any() else None


def t_table(real: Account, random: Account, rng: np.random.Generator) -> Table:
    """t at each position for more and more answers, at positions that half of the answers reach.

    With all positions, more answers would also mean more positions that few answers reach.
    """
    by_answer = [sums_by_cell(values.places.answer, values.places.position,
                              values.places.inside.shape[1], number)
                 for values in (real, random) for number in (values.size, values.signed)]
    answers = len(by_answer[0])
    common = by_answer[0][:, 0].sum(0) >= answers / 2
    rows = []
    for n in [*(25 * 2 ** k for k in range(20) if 25 * 2 ** k < answers), answers]:
        subsets = [rng.permutation(answers)[:n] for _ in range(DRAWS)]
        t = [[t_statistics(*sums[subset].sum(0)[:, common]) for subset in subsets]
             for sums in by_answer]
        size = mean_over_draws(t[0], "mean abs(t)")
        rows.append((str(n), size, size / n ** 0.5,
                     *(mean_over_draws(of_subsets, "abs(t) > 3") for of_subsets in t)))
    formats = {"answers": "", "mean abs(t), size": ".2f", "over sqrt(n)": ".2f", "size": ".1%",
               "signed": ".1%", "size, random text": ".1%", "signed, random text": ".1%"}
    title = (f"Flaw 3, t: share of abs(t) > 3, at the {int(common.sum())} positions that half of "
             "the answers reach")
    notes = [f"n answers: mean over {DRAWS} random subsets; random text: tokens drawn evenly from "
             "the vocabulary. Of normal draws, 0.3% are above 3."]
    headings = {"over sqrt(n)": "the same over sqrt(n)", "size": "abs(t) > 3, size",
                "signed": "abs(t) > 3, signed", "size, random text": "size, random text",
                "signed, random text": "signed, random text"}
    return Table("t", title, by_row(formats, rows), t_finding(rows[0], rows[-1]), notes, headings)


def mean_over_draws(of_subsets: list[np.ndarray], figure: str) -> np.float64:
    return np.mean([mean_figure(t, figure) for t in of_subsets])


def t_finding(fewest: tuple, most: tuple) -> str:
    """From the rows with the fewest and with the most answers."""
    few, _, _, few_above, *_ = fewest
    many, _, _, many_above, signed_above, random_above, _ = most
    return (
        f"From {few} to {many} answers the mean abs(t) of the size goes from "
        f"{shown(fewest[1], '.2f')} to {shown(most[1], '.2f')}, and the share above 3 from "
        f"{shown(few_above, '.1%')} to {shown(many_above, '.1%')}: a size is never negative, so "
        "its t grows with the number of answers.\n"
        f"With {many} answers of random text the share above 3 is {shown(random_above, '.1%')}.\n"
        f"The share of the signed number is {shown(signed_above, '.1%')}, on real answers.")


def training_table(accounts: dict[str, Account], rollouts: Rollouts) -> Table:
    """What each account gives to answers that training makes likelier, ignores, makes rarer."""
    sign_of_answer = 1 - np.sign(rollouts.advantage[:, 0].cpu().numpy()).astype(int)
    flat_advantage = accounts["phase 1"].places.flat(rollouts.advantage)
    sign_of_token = 1 - np.sign(flat_advantage).astype(int)
    answers = np.bincount(sign_of_answer, minlength=3)
    share = answers / len(sign_of_answer)
    columns = {"with": ("", SIGNS), "answers": (",d", answers), "of all": (".1%", share)}
    for name, values in accounts.items():
        totals = np.bincount(sign_of_token, values.size, 3)
        shares = totals / values.size.sum() if values.size.any() else [None] * 3
        columns[name] = (".1%", shares)
    _, equal, against = (shown(share, ".1%") for share in columns["phase 1"][1])
    finding = (
        f"{share[1]:.1%} of the answers belong to groups of equal rewards and get no gradient in "
        f"training; phase 1 gives them {equal} of its size.\n"
        f"Another {against} of phase 1 goes to answers with A < 0, which training makes less "
        "likely.")
    return Table("after the fact", "Flaw 4, after the fact: what training did with these answers",
                 columns, finding, ["phase 1, phase 2, abs(A) s: shares of summed sizes"],
                 {"with": "answers with", "of all": "of all answers"})


def controls_table(controls: dict[str, Account]) -> Table:
    estimates = {name: figures(values) for name, values in controls.items()}
    of_figure = dict(zip(FIGURES, zip(*estimates.values())))
    columns = {"phase 1 of": ("", list(controls))}
    for name in ("early over late", "filler over reasoning"):
        columns |= values_and_intervals(name, ".2f", of_figure[name])
    for name in FIGURES[:-2]:
        spec = ".2f" if "mean" in name else ".1%"
        columns[name] = (spec, [e.value for e in of_figure[name]])
    sentences = [f"Phase 1 of {name}: early over late {shown(early.value, '.2f')}, filler over "
                 f"reasoning {shown(filler.value, '.2f')}."
                 for name, (*_, early, filler) in estimates.items()]
    return Table("controls", "The same where nothing was earned, or nothing learned", columns,
                 "\n".join(sentences), headings=interval_words(columns))


def tenths_table(accounts: dict[str, Account]) -> Table:
    columns = {"tenth": ("", [str(i + 1) for i in range(10)])}
    for name, values in accounts.items():
        places = values.places
        sums = sums_by_cell(places.question, places.tenth, 10, values.size).sum(0)
        means = [mean_in(sums, [i]) / mean_in(sums) for i in range(10)] if sums[1].any() else None
        columns[name] = (".2f", means or [None] * 10)
    title = "Size by tenth of the answer, over the mean of all tokens"
    return Table("tenths", title, columns)


def draw(tenths: Table, distance: Table, folder: Path) -> tuple[Path, str]:
    figure, (left, right) = panels(2)
    _, *accounts = tenths.columns.items()
    for (name, (_, values)), colour in zip(accounts, COLOURS):
        left.plot(range(1, 11), np.array(values, float), color=colour, marker="o", ms=3, lw=1.4,
                  label=name)
    left.set(xlabel="tenth of the answer", ylabel="size, over the mean of all",
             xticks=range(1, 11), title="Which part of an answer gets more?")
    legend_under(left, ncols=3)
    draw_distance(right, distance)
    return save(figure, folder, "size_by_place",
                "Size by tenth of the answer in five accounts, and of one loss term by how far "
                "back a token stands")


def draw_distance(axis, distance: Table) -> None:
    """Distances without an interval, known from few problems, are left to the table."""
    names, _, _, ratios, intervals, _ = (values for _, values in distance.columns.values())
    known = [k for k, (low, _) in enumerate(intervals) if np.isfinite(low)]
    axis.plot(range(len(known)), [ratios[k] for k in known], color=COLOURS[0], marker="o", ms=3,
              lw=1.4)
    axis.set(xlabel="tokens back", ylabel="size of one loss term, over that at 1", yscale="log",
             title="How far back does one loss term reach?")
    more_ticks(axis)
    axis.set_xticks(range(len(known)), [names[k] for k in known], fontsize=8)
