"""Reads run folders, never a model: where the credit went in one run, and which differences between runs are real.

    python analyze.py runs/none-grpo-s0         # tables, pictures and report.html in runs/none-grpo-s0/analysis
    python analyze.py runs/*                    # the arms compared, paired by seed

Every table of an earlier experiment is printed by its own definitions, and beside it what should have been measured.
A is the advantage of a token, w its weight, p its probability, s = norm(onehot - p) the size of the gradient of its
log-prob at the logits. `A lp` (lp = log p) is what that experiment called the gradient; the gradient is `A w s`.
"""
import argparse
import json
import sys
import textwrap
from pathlib import Path

import numpy as np

from analysis import compare
from analysis import earlier
from analysis import plots
from analysis import page
from countdown_task import KINDS, SECTIONS
from analysis.earlier import ELSEWHERE, NOTHING, PUBLISHED
from analysis.statistics import paired_difference, verdicts
from engine.errors import UserError
from analysis.tables import Table, by_row, show, shown
from engine.files import make_folder
from engine.progress import show_status
from engine.files import writing
from engine.settings import Parser, run_as_program, underscores
from analysis.tally import LABELS, PARTITIONS, Tally, mean_sizes, over_the_rest, pair, size, t_statistics, text_of

REST = "over rest: mean {} over that of all other tokens; interval by drawing the groups again, Holm's correction over the rows (of this table alone)"
EARLIER = ("An earlier experiment (github.com/Ja-Crispy/GRPO-Zero) logged advantage * log_prob of every token and called it the gradient: the old "
           "unit below. Its classes came from a regex: reasoning is digits and operators, structure whole tags, filler the rest. pub.* is what it "
           "published, phase 1 and 2 its two attempts. A group is the answers to one question.")
UNIT_LEGEND = ("A: advantage, w: weight, lp = log p, s = norm(onehot - p) the size of the gradient of log p at the logits. abs(A lp) is the "
               "size in the old unit, abs(A) w s that of the gradient; shares are of summed sizes, directions do not enter. What --loss_norm "
               "sequence, a KL term, clipping and later epochs do to the loss is not in it.")
ONE_RUN = "All intervals are about this run, its groups drawn again; another seed can lie outside them."
IN_SHORT = ("gains", "gradient by kind", "gradient by section", "contribution", "ends", "like position", "t")
PLACES = {  # the pictures of each section of the page
    "gains": ("learning_curve",), "contribution": ("histograms", "log_prob_and_gradient"), "gradient by position": ("position",),
    "class by position": ("class_by_position",), "sections": ("entropy_and_gradient", "weights"), "growth": ("over_training", "length_and_entropy"),
    "arms": ("learning_curves",), "final success, sampled": ("differences",), "stability": ("gradient_norm",),
    "credit by class": ("credit_by_class",)}


def all_tables(run: dict, tally: Tally | None) -> list[Table]:
    tables = [gains(run)] if any(len(compare.evaluations(run, mode)) > 1 for mode in ("sampled", "greedy")) else []
    if tally is None:
        return tables
    return [*tables, class_gradients(tally, "kind"), class_gradients(tally, "section"), earlier.contributions(tally), earlier.positions(tally),
            position_gradients(tally), earlier.ends(tally), earlier.signs(tally), earlier.classes(tally), class_gradients(tally, "class"),
            earlier.what_filler_is(tally), earlier.classes_by_fifth(tally), like_positions(tally), *regressions(tally), earlier.t_table(tally),
            earlier.top_tokens(tally), forks(tally), sections(tally), growth(run, tally), growth_of_shares(tally)]


def gains(run: dict) -> Table:
    """The gain is paired: the same held-out problems at the start and at the end."""
    rows, finding = [], ""
    for mode in ("sampled", "greedy"):
        lines = compare.evaluations(run, mode)
        if len(lines) > 1:
            start, end = lines[0], lines[-1]
            gain = paired_difference((np.array(end["answer"], float) - np.array(start["answer"]))[None])
            rows.append([mode, len(end["answer"]), start["success"], end["success"], gain.value, gain.interval,
                         *(end.get(f"{name}_mean") for name in ("format", "finished", "length"))])
            word = "rose" if gain.low > 0 else "fell" if gain.high < 0 else "did not clearly change"
            finding += f" Held-out success ({mode}) {word}: {start['success']:.1%} at step {start['step']}, {end['success']:.1%} at {end['step']}."
    rows.append(["pub.*", 128, 0.0, 0.15, 0.15, None, None, None, 42])
    formats = {"mode": "", "problems": ",d", "start": ".1%", "end": ".1%", "gain": "+.1%", "95% interval": "+.1%", "format": ".2f",
               "finished": ".1%", "length": ".0f"}
    return Table("gains", "Held-out success, from the first evaluation to the last", by_row(formats, rows), finding.strip(), [ELSEWHERE])


def shares(tally: Tally, partition: str, blocks=slice(None)) -> np.ndarray:
    """Of each cell, its share of the gradient."""
    sizes = tally.total(partition, f"abs {tally.final}", blocks)
    return sizes / max(sizes.sum(), 1e-300)


def class_gradients(tally: Tally, partition: str) -> Table:
    tokens, names, share = tally.count(partition), PARTITIONS[partition], shares(tally, partition)
    here = np.flatnonzero(tokens)
    rest = [over_the_rest(tally, partition, tally.final)[i] for i in here]
    said = verdicts(rest)
    columns = {partition: ("", [names[i] for i in here]), "tokens": (".1%", tokens[here] / tally.tokens), "gradient": (".1%", share[here]),
               **mean_sizes(tally, partition, "gradient", here), "over rest": (".2f", [e.value for e in rest]),
               "95%": (".2f", [e.interval for e in rest]), "difference": ("", said)}
    most = int(share.argmax())
    noun = {"kind": f"{names[most]} tokens", "section": f"the {names[most]} section", "class": f"{names[most]} (by the regex)"}[partition]
    told = [f"{names[i]} {max(e.value, 0.01):.2f}{' or less' * (e.value < 0.01)}" for i, e, words in zip(here, rest, said)
            if words in ("more", "less")]
    finding = f"Most of the gradient went to {noun}: {share[most]:.1%} of the summed sizes, for {tokens[most] / tally.tokens:.1%} of the tokens."
    finding += f" A token's gradient over that of all others: {', '.join(told)}." if told else ""
    titles = {"kind": "Where the gradient went, by kind of token", "section": "Where the gradient went, by section",
              "class": "The gradient by the earlier regex classes"}
    return Table(f"gradient by {partition}", titles[partition], columns, finding if share[most] else NOTHING, [REST.format(size(tally.final))])


def position_gradients(tally: Tally) -> Table:
    rest = over_the_rest(tally, "position", tally.final)
    columns = {"bin": ("", [str(i) for i in range(10)]), "entropy": (".3f", tally.mean("position", "entropy")),
               "s": (".3f", tally.mean("position", "s")), **mean_sizes(tally, "position", "gradient"), "over rest": (".2f", [e.value for e in rest]),
               "95%": (".2f", [e.interval for e in rest]), "difference": ("", verdicts(rest))}
    value = np.nan_to_num([e.value for e in rest], nan=0, posinf=0)
    finding = f"The largest gradient is that of bin {value.argmax()}: {value.max():.2f} times that of all other tokens." if value.any() else NOTHING
    return Table("gradient by position", "Ten bins of relative position, the gradient", columns, finding, [REST.format(size(tally.final))])


def like_positions(tally: Tally) -> Table:
    """Is a class ahead because of where it stands?"""
    asked = [(f"filler/reasoning ({LABELS[unit]})", "class", unit, 0, 1) for unit in tally.units]
    asked += [(f"{name}/rest ({LABELS[tally.final]})", "kind", tally.final, k, None) for k, name in enumerate(KINDS)
              if tally.count("kind")[k] and name != "end"]  # which has its own place in every answer
    found = [pair(tally, *question) for _, *question in asked]
    fifths = [pair(tally, *question, bins=5)[1].value if question[0] == "class" else None for _, *question in asked]
    said = verdicts([like for _, like in found])
    columns = by_row({"ratio": "", "crude": ".2f", "95%": ".2f", "fifths": ".2f", "20ths": ".2f", "95% of it": ".2f", "difference": ""}, [
        ["filler/reasoning (pub.*)", PUBLISHED["filler over reasoning"], None, PUBLISHED["filler over reasoning, standardised"], None, None, ""],
        *([name, crude.value, crude.interval, five, like.value, like.interval, words]
          for (name, *_), (crude, like), five, words in zip(asked, found, fifths, said))])
    last = len(tally.units) - 1  # the unit that counts
    old, new = found[0][1], found[last][1]
    words = {"more": "filler gets more", "less": "reasoning gets more"}.get(said[last], "no difference seen")
    finding = NOTHING if not np.isfinite(new.value) else (
        f"Filler over reasoning at like position: {old.value:.2f} in the old unit, {new.value:.2f} as gradient "
        f"(95%: {shown(new.interval, '.2f')}); {words}.")
    return Table("like position", "One class over another, crude and at like position", columns, finding,
                 ["fifths, 20ths: standardised over so many bins of relative position; within five wide bins position still plays a part, so the "
                  "interval and Holm's correction over the rows are for twenty; the published tables give 1.24 with fifths", ELSEWHERE])


def regressions(tally: Tally) -> list[Table]:
    return [regression(tally, unit, "reasoning" if unit == "contribution" else "a word") for unit in tally.units if unit in tally.regressions]


def regression(tally: Tally, unit: str, against: str) -> Table:
    mean, found = tally.mean("all", f"abs {unit}")[0], tally.regressions[unit].estimates()
    tested = [term for term in found if term not in ("constant", "abs(A)")]
    said = dict(zip(tested, verdicts([found[term] for term in tested], null=0.0)))
    columns = {"term": ("", list(found)), "coefficient": ("+.4f", [e.value for e in found.values()]),
               "95%": ("+.4f", [e.interval for e in found.values()]),
               "of the mean": ("+.1%", [e.value / mean if mean else None for e in found.values()]),
               "difference": ("", [said.get(term, "") for term in found])}
    told = [f"{term} {found[term].value / mean:+.0%}" for term in tested if mean and said[term] in ("more", "less")]
    finding = f"In shares of the mean {size(unit)}: {', '.join(told)}." if told else "No term is clearly different from 0."
    return Table(f"regression of {unit}", f"Regression of {size(unit)} on position, class and advantage; classes against {against}", columns,
                 "With position, class and abs(A) side by side: " + finding[0].lower() + finding[1:],
                 ["tenths of the answer against the first one; errors clustered by group; Holm's correction over tenths and classes"])


def forks(tally: Tally) -> Table:
    words = tally.vocabulary
    common = np.flatnonzero(words.count >= max(10, 0.0005 * tally.tokens))
    order = common[np.argsort(-words.entropy[common] / words.count[common])]
    shown_tokens = [*order[:10], *order[::-1][:10]]

    def mean(values):
        return values[shown_tokens] / words.count[shown_tokens]

    columns = {"": ("", ["forking"] * len(order[:10]) + ["following"] * len(order[:10])),
               "token": ("", [repr(text_of(tally.tokenizer, i)) for i in shown_tokens]),
               "kind": ("", [KINDS[words.kinds[i].argmax()] for i in shown_tokens]), "count": (",.0f", words.count[shown_tokens]),
               "entropy": (".3f", mean(words.entropy)), "log p": (".3f", mean(words.log_prob)), size(tally.final): (".4f", mean(words.gradient))}
    finding = "No token is frequent enough."
    if len(order):
        high, low = (f"{text_of(tally.tokenizer, i)!r} (mean entropy {words.entropy[i] / words.count[i]:.3g})" for i in (order[0], order[-1]))
        finding = f"Most uncertain where it drew {high}, surest where it drew {low}."
    return Table("forks", "Forking tokens (highest mean entropy) and following tokens (lowest)", columns, finding,
                 ["of tokens that make up at least 0.05% of the run and occur ten times; entropy of the distribution they were drawn from"])


def sections(tally: Tally) -> Table:
    cells, tokens = PARTITIONS["section by kind"], tally.count("section by kind")
    here = np.flatnonzero(tokens)
    means = {name: tally.mean("section by kind", name)[here] for name in ("entropy", "weight", "s")}
    columns = {"section": ("", [cells[i][0] for i in here]), "kind": ("", [cells[i][1] for i in here]), "tokens": (",d", tokens[here]),
               **{name: (".3f", values) for name, values in means.items()}, **mean_sizes(tally, "section by kind", "gradient", here),
               "gradient": (".1%", shares(tally, "section by kind")[here])}
    often = np.where(tokens[here] >= 0.0005 * tally.tokens, means["entropy"], -1)
    section, kind = cells[here[often.argmax()]]
    return Table("sections", "Entropy, weight and gradient by section and kind", columns,
                 f"The most uncertain are {kind} tokens in the {section} section (mean entropy {often.max():.2f}).",
                 ["sections: think up to </think>, answer between the answer tags, other the rest; gradient: share of it"])


def parts_of_training(tally: Tally, count: int = 10) -> dict[str, np.ndarray]:
    """Blocks of steps, ten of them at most, by the steps they hold."""
    parts = {}
    for blocks in np.array_split(np.arange(len(tally.blocks)), min(count, len(tally.blocks))):
        first, last = tally.blocks[blocks[0]][0], tally.blocks[blocks[-1]][-1]
        parts[f"{first}" if first == last else f"{first}-{last}"] = blocks
    return parts


def growth(run: dict, tally: Tally) -> Table:
    parts, success = parts_of_training(tally), {line["step"]: line["success"] for line in run["metrics"]}

    def mean_success(blocks):
        known = [success[step] for block in blocks for step in tally.blocks[block] if step in success]
        return np.mean(known) if known else None

    def over_3(blocks):
        t = t_statistics(tally.positions.counts[blocks].sum(0), *tally.positions.sums["contribution"][:, blocks].sum(1))
        return (np.abs(t) > 3).mean() if len(t) else None

    def quotient(partition, unit, above, below):
        means = [tally.mean(partition, f"abs {unit}", blocks) for blocks in parts.values()]
        return [mean[above] / mean[below] if mean[below] else None for mean in means]

    def overall(measure):
        return [tally.mean("all", measure, blocks)[0] for blocks in parts.values()]

    answers = {name: tally.positions.answers[blocks].sum() for name, blocks in parts.items()}
    flat = [tally.positions.flat_answers[blocks].sum() / answers[name] for name, blocks in parts.items()]
    old, new = overall("abs contribution"), overall(f"abs {tally.final}")
    columns = {"steps": ("", list(parts)), "success": (".1%", [mean_success(blocks) for blocks in parts.values()]),
               "length": (".1f", [tally.total("all", "tokens", blocks)[0] / answers[name] for name, blocks in parts.items()]),
               "entropy": (".3f", overall("entropy")), "flat": (".0%", flat), "old": (".4f", old), "new": (".4f", new),
               "f/r old": (".2f", quotient("class", "contribution", 0, 1)), "f/r new": (".2f", quotient("class", tally.final, 0, 1)),
               "e/l": (".2f", quotient("ends", tally.final, 0, 2)), "t>3": (".0%", [over_3(blocks) for blocks in parts.values()])}
    return Table("growth", "Over training", columns,
                 f"From the first to the last part of training: mean size {old[0]:.3f} to {old[-1]:.3f} in the old unit, {new[0]:.3f} to "
                 f"{new[-1]:.3f} as gradient; answers in groups without spread {flat[0]:.0%} to {flat[-1]:.0%}.",
                 [f"flat: answers in groups whose rewards are all equal; old: mean abs(A lp); new: mean {size(tally.final)}; "
                  f"f/r: filler over reasoning; e/l: first fifth over last, {size(tally.final)}; t>3: share of positions with abs(t) > 3, A lp"])


def growth_of_shares(tally: Tally) -> Table:
    parts = parts_of_training(tally)
    by_kind, by_section = (np.stack([shares(tally, partition, blocks) for blocks in parts.values()]) for partition in ("kind", "section"))
    columns = {"steps": ("", list(parts)), **{kind: (".1%", by_kind[:, k]) for k, kind in enumerate(KINDS)},
               **{section: (".1%", by_section[:, i]) for i, section in enumerate(SECTIONS)}}
    k = int(np.abs(by_kind[-1] - by_kind[0]).argmax())
    return Table("growth of shares", "Over training: the share of the gradient that each kind and section got", columns,
                 f"What changed most is the share of {KINDS[k]} tokens: {by_kind[0, k]:.0%} to {by_kind[-1, k]:.0%} of the gradient.")


def read_runs(folders: list[str]) -> list[dict]:
    """What is no run is an error when it was meant, and passed over, with a line, when a pattern like runs/* caught it."""
    runs, several = [], len(folders) > 1
    for folder in {Path(folder).resolve(): folder for folder in folders}.values():  # a folder named twice counts once
        if not Path(folder).exists():
            raise UserError(f"{folder} does not exist")
        if several and not (Path(folder) / "config.json").is_file():
            print(f"passed over: {folder} is not a run folder, it has no config.json", file=sys.stderr)
            continue
        if list(Path(folder).glob("*/config.json")) and not (Path(folder) / "config.json").is_file():
            raise UserError(f"{folder} is not a run folder, but holds some: did you mean {folder}/*?")
        run = compare.read_run(folder)
        if run["metrics"] or run["evaluations"] or run["steps"]:
            runs.append(run)
        elif several:
            print(f"passed over: {folder} has no finished step yet", file=sys.stderr)
    if not runs:
        raise UserError(f"none of these is a run folder with a finished step: {', '.join(folders)}")
    return runs


def make_parser() -> Parser:
    parser = Parser(usage="python analyze.py RUN [RUN ...] [flags]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; with more than one they are compared")
    parser.add_argument("--output_dir", metavar="FOLDER",
                        help="for pictures and report.html; by default analysis/ in the run, or comparison/ beside the runs")
    parser.add_argument("--json", action="store_true", help="write every number of every table to analysis.json there, too")
    parser.add_argument("--baseline", metavar="ARM",
                        help="what the others are compared with: the name of an arm, or one of its runs (default: plain GRPO)")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="the steps whose answers the page shows (default: eight, evenly spaced)")
    return parser


def main(argv: list[str]) -> None:
    args = make_parser().parse_args([underscores(argument) for argument in argv])
    runs = read_runs(args.runs)
    if args.output_dir == "":
        raise UserError("--output_dir needs the name of a folder")
    if len(runs) == 1:
        if args.baseline:
            raise UserError("--baseline needs several runs to compare")
        analyze_run(runs[0], Path(args.output_dir or runs[0]["folder"] / "analysis"), args)
    else:
        if args.steps:
            raise UserError("--steps chooses answers of one run: give one run only")
        compare_runs(runs, Path(args.output_dir or runs[0]["folder"].parent / "comparison"), args)


def analyze_run(run: dict, folder: Path, args) -> None:
    chosen = steps_to_show(run, args.steps)
    make_folder(folder)
    tally = Tally(run["folder"], status=show_status) if run["steps"] else None
    tables = all_tables(run, tally)
    short = [table.finding for table in tables if table.name in IN_SHORT and table.finding]
    show_status("pictures and page")
    with writing(folder):
        pictures = plots.draw_run(run, tally, folder)
    episodes = page.episodes_of(run["folder"], tally.tokenizer, chosen) if tally else []
    intro = [describe(run, tally), EARLIER, UNIT_LEGEND, ONE_RUN]
    written = write(folder, run["folder"].name, intro, short, tables, pictures, PLACES, episodes, args.json)
    print(textwrap.fill(describe(run, tally), 100))
    if not tally:
        print("no credit files: nothing is known of single tokens")
    show(short, tables, (ONE_RUN, EARLIER, UNIT_LEGEND))
    print("\n" + written)


def steps_to_show(run: dict, wanted: list[int] | None) -> list[int]:
    steps = run["steps"]
    if missing := [step for step in wanted or [] if step not in steps]:
        there = f"credit files of {len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no credit files"
        raise UserError(f"--steps {missing[0]}: {run['folder']} has {there}")
    if wanted or not steps:
        return list(dict.fromkeys(wanted or []))
    return [steps[i] for i in sorted({round(x) for x in np.linspace(0, len(steps) - 1, 8)})]


def describe(run: dict, tally: Tally | None) -> str:
    c, done = run["config"], max([line["step"] for line in run["metrics"]], default=0)
    text = f"{run['folder']}: {c['mitigation']}, {c.get('advantage', 'grpo')}, seed {c.get('seed', 0)}, {c.get('model', 'unknown model')}"
    text += "" if done >= c["steps"] else f", step {done} of {c['steps']} so far"
    if tally:
        first, last = tally.steps[0], tally.steps[-1]
        text += f"; {tally.tokens:,} tokens of {tally.answers:,} answers to {tally.groups:,} questions, steps {first} to {last}"
        gaps = last - first + 1 - len(tally.steps)
        text += f" ({gaps} steps in between have no credit file)" if gaps else ""
    return text


def compare_runs(runs: list[dict], folder: Path, args) -> None:
    make_folder(folder)
    parts = compare.alike(runs, compare.setting_of)
    intro = [f"{len(runs)} runs."] + ([compare.what_differs(parts)] if len(parts) > 1 else [])
    comparisons = [compare.Comparison(part, args.baseline) for part in parts]
    if args.baseline and not any(c.baseline_was_named for c in comparisons):
        names = ", ".join(name for comparison in comparisons for name in comparison.arms)
        raise UserError(f"--baseline {args.baseline} is neither one of these runs nor one of the arms: {names}")
    tables, pictures, short, places = [], [], [], dict(PLACES)
    for i, comparison in enumerate(comparisons, 1):
        found = compare.all_tables(comparison, show_status)
        with writing(folder):
            pictures += plots.draw_comparison(comparison, found, folder, f"_{i}" if len(parts) > 1 else "")
        short += [table.finding for table in found if table.name in ("arms", compare.PRIMARY) and table.finding]
        if len(parts) > 1:  # the pictures have the set in their names, too
            places |= {f"{name} {i}": tuple(f"{picture}_{i}" for picture in names) for name, names in PLACES.items()}
            for table in found:
                table.name, table.title = f"{table.name} {i}", f"{table.title} (set {i})"
        tables += found
    written = write(folder, "Runs compared", intro, short, tables, pictures, places, [], args.json)
    print("\n".join(textwrap.fill(text, 100) for text in intro))
    show(short, tables)
    print("\n" + written)


def write(folder: Path, title: str, intro: list[str], short: list[str], tables: list[Table], pictures: list, places: dict, episodes: list[dict],
          as_json: bool) -> str:
    page.write_page(folder / "report.html", title, intro, short, tables, pictures, places, episodes)
    if as_json:
        with writing(folder / "analysis.json"):
            text = json.dumps([table.to_json() for table in tables], indent=1, allow_nan=False)
            (folder / "analysis.json").write_text(text + "\n", encoding="utf-8")
    show_status("")
    return f"page: {folder / 'report.html'}" + (f"; numbers: {folder / 'analysis.json'}" if as_json else "") + f"; {len(pictures)} pictures beside it"


if __name__ == "__main__":
    run_as_program("analyze.py", main)
