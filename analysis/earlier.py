"""The tables of an earlier experiment by its own definitions, and beside each the right figure.

The experiment trained Qwen2.5-0.5B with GRPO, logged `advantage * log_prob` of every token and
took it for the gradient (github.com/Ja-Crispy/GRPO-Zero). Its published figures stand here for
orientation: they are another model's.
"""
import numpy as np

from analysis.positions import t_statistics
from analysis.ratios import early_over_late, mean_sizes, pair
from analysis.sizes import LABELS, size_label
from analysis.statistics import permutation_p, verdicts
from analysis.sums import NORMALISED, PARTITIONS, SIGNS
from analysis.tables import NOTHING, Table, by_row, shown
from analysis.tally import Tally
from analysis.vocabulary import CLASSES, text_of
from engine.labels import KINDS
from harness.run_folder import run_config

LEGEND = (
    "An earlier experiment (github.com/Ja-Crispy/GRPO-Zero) logged advantage * log_prob of every "
    "token and called it the gradient: the old unit below. Its classes came from a regex: "
    "reasoning is digits and operators, structure whole tags, filler the rest. pub.* and "
    "published* are its figures, phase 1 and 2 its two attempts. They are those of another model "
    "(Qwen2.5-0.5B-Instruct, its own problems, 303,042 tokens): for orientation, not for "
    "comparison. A group is the answers to one problem.")
ELSEWHERE = "* published figures of another model, for orientation"
WORDS = {  # full headings of the columns of these tables
    "A lp": "mean A log p", "A w lp": "mean A w log p", "lp": "log p", "log p": "mean log p",
    "abs(A lp)": "mean abs(A log p), old unit", "abs(A w lp)": "mean abs(A w log p)",
    "abs(A) s": "mean abs(A) s, gradient", "abs(A) w s": "mean abs(A) w s, weighted gradient",
    "pub.*": "published*", "log p*": "published* log p",
    "95%": "95% interval", "spread": "standard deviation", "of all": "share of all tokens",
    "bin": "tenth of the answer, from 0"}
PUBLISHED = {
    "mean": 0.079, "spread": 1.168, "mean size": 0.307, "smallest": -28.0, "largest": 33.3,
    "early over late": 1.6,
    "position": (0.347194, 0.366896, 0.329356, 0.303315, 0.318367,
                 0.306196, 0.305382, 0.300810, 0.270468, 0.212966),
    "position log p": (-0.598505, -0.679701, -0.610746, -0.515499, -0.532835,
                       -0.503752, -0.537406, -0.560431, -0.511919, -0.258263),
    "signs": (-0.560, 0.242),  # mean contribution where z is above 0, and where it is not
    "classes": {  # tokens, share, mean log p, mean contribution, mean size
        "filler": (205_410, 0.678, -0.555, 0.0786, 0.333),
        "reasoning": (97_632, 0.322, -0.489, 0.0793, 0.254)},
    "filler by fifth": (0.3579, 0.3656, 0.3176, 0.3890, 0.2356),
    "reasoning by fifth": (0.3458, 0.2084, 0.2977, 0.2362, 0.2568),
    "filler over reasoning": 1.31, "filler over reasoning, standardised": 1.24,
    "phase 1": (0.83, 0.019, None),  # share of abs(t) > 3, of abs(t) < 1.5, mean abs(t)
    "phase 2": (0.20, 0.39, 1.92),
    "top": {"filler": r"' '  '>'  'answer'  ','  ' </'  ' to'  '>\n'",
            "reasoning": "'1'  '2'  '3'  '4'  '5'  '6'  ' -'"}}
PUBLISHED_DISCOUNTED = {  # what it published of its run with a discount of 0.75
    "classes": {"filler": (None, None, None, None, 0.348),
                "reasoning": (None, None, None, None, 0.247)},
    "filler by fifth": (0.386, 0.380, 0.345, 0.378, 0.235),
    "reasoning by fifth": (0.244, 0.190, 0.357, 0.242, 0.237),
    "filler over reasoning": 1.41, "filler over reasoning, standardised": None}


def published_of(tally: Tally) -> dict:
    """Its figures; where the run has the discount that it also published figures of, those."""
    config = run_config(tally.run)
    if (config["mitigation"], config.get("think_discount")) == ("outcome_conditional", 0.75):
        return PUBLISHED | PUBLISHED_DISCOUNTED
    return PUBLISHED


def published_success() -> Table:
    """What the earlier experiment reached on its own held-out problems."""
    formats = {"mode": "", "problems": "d", "start": ".1%", "end": ".1%", "gain": "+.1%",
               "length": "d"}
    rows = [["sampled", 128, 0.0, 0.15, 0.15, 42]]
    return Table("published success", "Held-out success as it was published",
                 by_row(formats, rows), "It went from 0% to 15% of 128 problems.", [ELSEWHERE],
                 {"length": "tokens an answer"})


def contributions(tally: Tally) -> Table:
    """Beside the old unit what the earlier log could not show: the gradient and the weights."""
    names = ("mean", "spread", "mean size", "smallest", "largest")
    columns = {"": ("", names)}
    for unit in tally.units:
        columns[LABELS[unit]] = (".4f", contribution_column(tally, unit))
    columns["weight"] = (".4f", contribution_column(tally, "weight"))
    columns["pub.* A lp"] = (".3f", [PUBLISHED[name] for name in names])
    notes = ["spread: the sample's standard deviation; mean size: the mean of the absolute values"]
    if tally.weights_are_one:
        notes.append("all weights are 1: weighted and unweighted are the same")
    return Table("contribution", "What a token was given: the old unit and the gradient, signed",
                 columns, largest_in_words(tally), [*notes, ELSEWHERE],
                 {"A lp": "A log p, old unit", "A w lp": "A w log p", "A s": "A s, gradient",
                  "A w s": "A w s, weighted gradient", "pub.* A lp": "published* A log p"})


def contribution_column(tally: Tally, measure: str) -> tuple:
    mean, spread = tally.mean("all", measure)[0], tally.spread("all", measure)[0]
    size = mean if measure == "weight" else tally.mean("all", f"abs {measure}")[0]
    return mean, spread, size, *tally.sums.extremes[measure]


def largest_in_words(tally: Tally) -> str:
    times = {}
    for unit in ("contribution", tally.final):
        mean = tally.mean("all", f"abs {unit}")[0]
        if not mean:
            return NOTHING
        times[unit] = max(map(abs, tally.sums.extremes[unit])) / mean
    w, included = ("", "") if tally.weights_are_one else (" w", ", weights included")
    return (f"The largest size is {times['contribution']:.0f} times the mean size in the old unit "
            f"and {times[tally.final]:.0f} times as gradient{included}: A log p has no limit as p "
            f"goes to 0, the gradient is at most sqrt(2) abs(A){w}.")


def positions(tally: Tally) -> Table:
    columns = {"bin": ("", [str(i) for i in range(10)]),
               "tokens": (",d", tally.count("position")),
               "log p": (".3f", tally.mean("position", "log_prob")),
               "A lp": (".4f", tally.mean("position", "contribution")),
               "spread": (".3f", tally.spread("position", "contribution")),
               **mean_sizes(tally, "position", "contribution"),
               "pub.*": (".3f", PUBLISHED["position"]),
               "log p*": (".2f", PUBLISHED["position log p"])}
    peak = int(np.nanargmax(tally.mean("position", "abs contribution")))
    return Table("position", "Ten bins of relative position, in the old unit", columns,
                 f"In the old unit the largest mean size is that of bin {peak} (published: bin 1).",
                 [ELSEWHERE], {**WORDS, "pub.*": "published* mean size"})


def ends(tally: Tally) -> Table:
    """The earlier experiment mixed two definitions; here is one for all, and its own beside it."""
    estimates = {unit: early_over_late(tally, "ends", unit) for unit in tally.units}
    in_order = list(estimates.values())
    far = [early_over_late(tally, "far ends", unit).value for unit in estimates]
    published = {"contribution": PUBLISHED["early over late"]}
    columns = {"size": ("", [size_label(unit) for unit in estimates]),
               "early over late": (".2f", [e.value for e in in_order]),
               "95%": (".2f", [e.interval for e in in_order]),
               "difference": ("", verdicts(in_order, ("early more", "late more"))),
               "by absolute position": (".2f", far),
               "pub.*": (".1f", [published.get(unit) for unit in estimates])}
    final, finding = estimates[tally.final], NOTHING
    if np.isfinite(final.value):
        finding = (f"The first fifth of an answer gets {final.value:.2f} times the gradient of the "
                   f"last fifth (95%: {shown(final.interval, '.2f')}); in the old unit "
                   f"{estimates['contribution'].value:.2f}.")
    return Table("ends", "Early over late: the first fifth of the answers over the last fifth",
                 columns, finding,
                 ["a token counts where its middle stands, (t + 1/2) / length; by absolute "
                  "position: tokens below the 20% quantile of absolute position over those above "
                  "the 80% quantile (in long answers only), as the earlier code computed it; its "
                  "text divided bin 0 by bin 9", ELSEWHERE], WORDS)


def signs(tally: Tally) -> Table:
    def both(values_of) -> list:
        return [*values_of("sign"), *values_of("normalised")]

    def means(measure: str) -> list:
        return both(lambda partition: tally.mean(partition, measure))

    unknown = [None] * len(SIGNS)
    columns = {"with": ("", [*SIGNS, *NORMALISED]),
               "tokens": (",d", both(tally.count)),
               "answers": (",d", unknown + tally.sums.answers.tolist()),
               "A lp": ("+.3f", means("contribution"))}
    for unit in tally.units:
        columns[size_label(unit)] = (".3f", means(f"abs {unit}"))
    columns["pub.*"] = ("+.3f", unknown + list(PUBLISHED["signs"]))
    none = tally.total("sign", "tokens")[SIGNS.index("A = 0")] / tally.tokens
    return Table("signs", "By the sign of the advantage", columns,
                 "The signs are a tautology: log p is never positive, so A log p always has the "
                 f"sign of -A. {none:.0%} of the tokens had no advantage at all; the earlier table "
                 "counted those as negative.",
                 ["z: the reward normalised in its group", ELSEWHERE],
                 {**WORDS, "with": "advantage A or reward z"})


def classes(tally: Tally) -> Table:
    units = [unit for unit in tally.units if "contribution" in unit]
    rows = class_rows(tally, "class", "regex", units)
    for name, figures in published_of(tally)["classes"].items():
        rows.append([f"{name} (pub.*)", *figures, *[None] * (len(units) - 1)])
    rows += class_rows(tally, "kind", "span", units)
    rows += class_rows(tally, "section", "section", units)
    formats = {"class": "", "tokens": ",d", "of all": ".1%", "log p": ".3f", "A lp": "+.4f",
               **{size_label(unit): ".4f" for unit in units}}
    mean, spread = tally.mean("class", "contribution"), tally.spread("class", "contribution")
    finding = (f"Signed means of filler and reasoning: {shown(mean[0], '+.4f')} and "
               f"{shown(mean[1], '+.4f')}, beside spreads of {shown(spread[0], '.2f')} and "
               f"{shown(spread[1], '.2f')}. Their sign says how advantages and log-probs go "
               "together over answers; it is no credit to a class.")
    title = "Classes of tokens in the old unit: by the earlier regex, and by spans of the text"
    return Table("classes", title, by_row(formats, rows), finding, [ELSEWHERE], WORDS)


def class_rows(tally: Tally, partition: str, made_by: str, units: list[str]) -> list[list]:
    tokens = tally.count(partition)
    measures = ("log_prob", "contribution", *(f"abs {unit}" for unit in units))
    means = [tally.mean(partition, measure) for measure in measures]
    rows = []
    for i, name in enumerate(PARTITIONS[partition]):
        if tokens[i] or partition == "class":
            share = tokens[i] / tally.tokens
            rows.append([f"{name} ({made_by})", tokens[i], share, *(mean[i] for mean in means)])
    return rows


def what_filler_is(tally: Tally) -> Table:
    counts = tally.count("class by kind").reshape(len(CLASSES), len(KINDS))
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    columns = {"by regex": ("", CLASSES), "tokens": (",d", counts.sum(1)),
               **{kind: (".1%", shares[:, k]) for k, kind in enumerate(KINDS)}}
    parts = [f"{shares[0, k]:.0%} {KINDS[k]}" for k in np.argsort(-shares[0])
             if shares[0, k] >= 0.005]
    return Table("regex", "What the regex classes are made of", columns,
                 f"Filler, by the regex, is {', '.join(parts) or 'empty'}.")


def classes_by_fifth(tally: Tally) -> Table:
    """Fifth by fifth, and in each the classes that occur there."""
    tokens = tally.count("class by fifth")
    cells = [(fifth, c) for fifth in range(5) for c in range(len(CLASSES)) if tokens[5 * c + fifth]]
    order = [5 * c + fifth for fifth, c in cells]
    parts, before = [], None
    for fifth, _ in cells:
        parts.append(f"{20 * fifth}-{20 * fifth + 20}%" if fifth != before else "")
        before = fifth
    known = published_of(tally)
    filler, reasoning = known["filler by fifth"], known["reasoning by fifth"]
    by_class = [filler, reasoning, [None] * 5]
    published = [by_class[c][fifth] for fifth, c in cells]
    published_ahead = sum(np.greater(filler, reasoning))
    columns = {"part": ("", parts),
               "class": ("", [CLASSES[c] for _, c in cells]),
               "tokens": (",d", tokens[order]),
               "log p": (".3f", tally.mean("class by fifth", "log_prob")[order]),
               **mean_sizes(tally, "class by fifth", cells=order, spec=".3f"),
               "pub.*": (".3f", published)}
    ahead = []
    for unit in tally.units:
        sizes = tally.mean("class by fifth", f"abs {unit}")
        ahead.append(f"in {int((sizes[:5] > sizes[5:10]).sum())} of 5 bins by {size_label(unit)}")
    return Table("class by position", "Classes (regex) in five bins of relative position", columns,
                 f"Filler is ahead of reasoning {', '.join(ahead)} (published: {published_ahead} "
                 "of 5 in the old unit).", [ELSEWHERE], {**WORDS, "pub.*": "published* abs(A lp)"})


def t_table(tally: Tally) -> Table:
    rows = []
    for phase in ("phase 1", "phase 2"):
        over, under, mean = PUBLISHED[phase]
        rows.append([f"{phase}*", over, None, None, under, None, mean, ""])
    rows.append(["no effect", 0.0027, None, None, 0.866, None, 0.80, ""])
    many, finding = int((tally.positions.counts.sum(0) > 1).sum()), "No position occurs twice."
    if many:
        rows += [t_row(tally, unit) for unit in tally.units]
        finding = t_in_words(rows[-1])  # the last unit is the one that counts
    formats = {"unit": "", "over 3": ".1%", "shuffled": ".1%", "95%": ".1%", "under 1.5": ".1%",
               "shuffled, too": ".1%", "mean": ".2f", "over 3?": ""}
    return Table("t", f"abs(t), one t per absolute position over all answers ({many} positions)",
                 by_row(formats, rows), finding,
                 ["tokens of one answer share one advantage, so these t are not independent and no "
                  "test; the shuffled columns show what they look like when credit has nothing to "
                  "do with the answer. More than shuffled means that advantage and what stands at "
                  "a position go together over answers, length included; no effect: independent "
                  "normal draws", ELSEWHERE],
                 {"over 3": "abs(t) over 3", "shuffled": "the same, shuffled",
                  "95%": "95% interval, shuffled", "under 1.5": "abs(t) under 1.5",
                  "shuffled, too": "the same, shuffled", "mean": "mean abs(t)",
                  "over 3?": "more than shuffled?"})


def t_row(tally: Tally, unit: str) -> list:
    counts = tally.positions.counts.sum(0)
    t = np.abs(t_statistics(counts, *tally.positions.sums[unit].sum(1)))
    null = np.abs(t_statistics(counts, *tally.positions.shuffled[unit]))
    over, shuffled = (t > 3).mean(), (null > 3).mean(1)
    low, high = np.quantile(shuffled, (0.025, 0.975))
    verdict = "as shuffled"
    if permutation_p(over, shuffled) < 0.05:
        verdict = "more" if over > shuffled.mean() else "fewer"
    return [LABELS[unit], over, shuffled.mean(), (low, high), (t < 1.5).mean(), (null < 1.5).mean(),
            t.mean(), verdict]


def t_in_words(row: list) -> str:
    meaning = {"as shuffled": "nothing to see.", "fewer": "fewer than by chance.",
               "more": "advantage goes with what stands there. Answer length alone can explain "
                       "this, so it is no evidence of credit."}
    _, over, shuffled, (low, high), *_, verdict = row
    return (f"{over:.0%} of the positions have abs(t) > 3 as gradient, {shuffled:.0%} ({low:.0%} "
            f"to {high:.0%}) with the answers of a group shuffled: {meaning[verdict]}")


def top_tokens(tally: Tally) -> Table:
    vocabulary, by_kind = tally.vocabulary, tally.vocabulary.kinds

    def most(counts: np.ndarray) -> str:
        order = np.argsort(-counts, kind="stable")[:7]
        return "  ".join(repr(text_of(tally.tokenizer, i)) for i in order if counts[i])

    rows = []
    for c, name in enumerate(CLASSES):
        rows.append([f"{name} (regex)", most(vocabulary.count * (vocabulary.class_of == c))])
    rows += [[f"{name} (pub.*)", texts] for name, texts in PUBLISHED["top"].items()]
    for k, name in enumerate(KINDS):
        if by_kind[:, k].any():
            rows.append([f"{name} (span)", most(by_kind[:, k])])
    tags = by_kind[:, KINDS.index("tag")] > vocabulary.count / 2
    filler = vocabulary.class_of == CLASSES.index("filler")
    pieces = most(vocabulary.count * (tags & filler)) or "none"
    return Table("top tokens", "The most frequent tokens of each class",
                 by_row({"class": "", "tokens": ""}, rows),
                 f"Pieces of tags among the regex's filler: {pieces}.", [ELSEWHERE])


def filler_at_like_position(tally: Tally) -> Table:
    """Is filler ahead because of where it stands?"""
    estimates = [pair(tally, "class", unit, 0, 1) for unit in tally.units]
    verdict = verdicts([like for _, like in estimates])
    known = published_of(tally)
    rows = [["published*", known["filler over reasoning"], None,
             known["filler over reasoning, standardised"], None, None, ""]]
    for unit, (crude, like), word in zip(tally.units, estimates, verdict):
        fifths = pair(tally, "class", unit, 0, 1, bins=5)[1].value
        rows.append([f"filler/reasoning ({LABELS[unit]})", crude.value, crude.interval, fifths,
                     like.value, like.interval, word])
    formats = {"ratio": "", "crude": ".2f", "95%": ".2f", "fifths": ".2f", "20ths": ".2f",
               "95% of it": ".2f", "difference": ""}
    finding = filler_in_words(estimates[0][1], estimates[-1][1], verdict[-1])
    return Table("like position", "Filler over reasoning, crude and at like position",
                 by_row(formats, rows), finding,
                 ["within five wide bins position still plays a part, so the interval and Holm's "
                  "correction over the rows are for twenty; the published tables give 1.24 with "
                  "fifths", ELSEWHERE],
                 {"ratio": "filler over reasoning", "crude": "as it is",
                  "95%": "95% interval", "fifths": "at like position, five bins",
                  "20ths": "at like position, twenty bins", "95% of it": "95% interval of that"})


def filler_in_words(old, new, verdict: str) -> str:
    meaning = {"more": "filler gets more", "less": "reasoning gets more"}
    return (f"Filler over reasoning at like position: {old.value:.2f} in the old unit, "
            f"{new.value:.2f} as gradient (95%: {shown(new.interval, '.2f')}); "
            f"{meaning.get(verdict, 'no difference seen')}.")
