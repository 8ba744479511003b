"""A recipe: what the credit files of a run say. Reads run folders, never a model.

    python analyze.py runs/none-grpo-s0         # tables, pictures, report.html in its analysis/
    python analyze.py runs/*                    # the arms compared, paired by seed

1. Read the run: settings, metrics, evaluations (analysis/runs.py).
2. Go through its credit files once and sum up what tokens were given (analysis/tally.py).
3. Make the tables: gains, where the gradient went, growth. They stand in this file.
4. Draw the pictures and write the page (analysis/run_plots.py, analysis/page.py).

A is the advantage of a token, w its weight, p its probability, s = norm(onehot - p) the size of the
gradient of its log-prob at the logits. The gradient of a token is A w s. An earlier experiment took
A log p for it; its tables (analysis/earlier.py) are printed by their own definitions, beside what
should have been measured. More tables are in analysis/regression.py and analysis/uncertainty.py,
those of several runs in analysis/compare.py.
"""
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import mitigations  # noqa: F401  fills the lists of choices, so that flags of a run are known
from analysis import compare, earlier, run_plots
from analysis.earlier import ELSEWHERE, NOTHING, PUBLISHED
from analysis.page import episodes_of, steps_to_show, write_page
from analysis.positions import t_statistics
from analysis.ratios import mean_sizes, over_the_rest, pair, rest_columns, shares
from analysis.regression import regression_tables
from analysis.runs import evaluations, read_runs
from analysis.sizes import LABELS, size_label
from analysis.statistics import verdicts
from analysis.sums import PARTITIONS
from analysis.tables import Table, by_row, show, shown
from analysis.tally import Tally, describe
from analysis.uncertainty import forks, sections
from countdown_task import KINDS, SECTIONS
from engine.errors import UserError
from engine.files import make_folder, writing
from engine.flags import Flag, Parser, add_flags, with_defaults
from engine.program import run_as_program
from engine.progress import show_status

OVER_REST = ("over rest: mean {} over that of all other tokens; interval by drawing the groups "
             "again, Holm's correction over the rows (of this table alone)")
INTERVALS = ("All intervals are about this run, its groups drawn again; another seed can lie "
             "outside them.")
UNIT_LEGEND = (
    "A: advantage, w: weight, lp = log p, s = norm(onehot - p) the size of the gradient of log "
    "p at the logits. abs(A lp) is the size in the old unit, abs(A) w s that of the gradient; "
    "shares are of summed sizes, directions do not enter. What --loss_norm sequence, a KL term, "
    "clipping and later epochs do to the loss is not in it.")
IN_SHORT = ("gains", "gradient by kind", "gradient by section", "contribution", "ends",
            "like position", "t")
FLAGS = {
    "output_dir": Flag(None, "folder for pictures and report.html; by default analysis/ in the "
                       "run, or comparison/ beside the runs"),
    "page_tokens": Flag(60_000, "tokens of the answers on the page of one run, at most", least=1),
    "baseline": Flag(None, "what the others are compared with: the name of an arm, or one of its "
                     "runs (default: plain GRPO)")}


def main(argv: list[str]) -> None:
    flags = read_flags(argv)
    runs = read_runs(flags.runs)
    if len(runs) > 1 and flags.steps:
        raise UserError("--steps chooses answers of one run: give one run only")
    if len(runs) == 1 and flags.baseline:
        raise UserError("--baseline needs several runs to compare")
    if len(runs) == 1:
        analyze_run(runs[0], Path(flags.output_dir or runs[0]["folder"] / "analysis"), flags)
    else:
        beside = runs[0]["folder"].parent / "comparison"
        compare_runs(runs, Path(flags.output_dir or beside), flags)


def read_flags(argv: list[str]) -> SimpleNamespace:
    parser = add_flags(Parser("python analyze.py RUN [RUN ...] [flags]", __doc__), FLAGS)
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="run folders; with more than one they are compared")
    parser.add_argument("--json", action="store_true",  # takes no value: a RUN may come after it
                        help="write every number of every table to analysis.json there, too")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N",
                        help="steps whose answers the page shows (default: eight, evenly spaced)")
    return with_defaults({"steps": [], "json": False, **parser.read(argv)}, FLAGS)


def analyze_run(run: dict, folder: Path, flags: SimpleNamespace) -> None:
    steps = steps_to_show(run, flags.steps)
    make_folder(folder)
    tally = None
    if run["steps"]:
        tally = Tally(run["folder"])
        tally.read(show_status)
    tables = run_tables(run, tally)
    short = [table.finding for table in tables if table.name in IN_SHORT and table.finding]
    show_status("pictures and page")
    with writing(folder):
        pictures = run_plots.draw_run(run, tally, folder)
    episodes = []
    if tally:
        episodes = episodes_of(run["folder"], tally.tokenizer, steps, flags.page_tokens)
    summary = describe(run, tally)
    intro = [summary, earlier.LEGEND, UNIT_LEGEND, INTERVALS]
    write_page(folder / "report.html", run["folder"].name, intro, short, tables, pictures,
               run_plots.PLACES, episodes)
    print(textwrap.fill(summary, 100))
    if not tally:
        print("no credit files: nothing is known of single tokens")
    show(short, tables, (INTERVALS, earlier.LEGEND, UNIT_LEGEND))
    finish(folder, tables, len(pictures), flags.json)


def run_tables(run: dict, tally: Tally | None) -> list[Table]:
    tables = []
    if any(len(evaluations(run, mode)) > 1 for mode in ("sampled", "greedy")):
        tables.append(gains(run))
    if tally is None:
        return tables
    return [*tables,
            class_gradients(tally, "kind"), class_gradients(tally, "section"),
            earlier.contributions(tally), earlier.positions(tally), position_gradients(tally),
            earlier.ends(tally), earlier.signs(tally), earlier.classes(tally),
            class_gradients(tally, "class"), earlier.what_filler_is(tally),
            earlier.classes_by_fifth(tally), like_positions(tally), *regression_tables(tally),
            earlier.t_table(tally), earlier.top_tokens(tally), forks(tally), sections(tally),
            growth(run, tally), growth_of_shares(tally)]


def gains(run: dict) -> Table:
    """The gain is paired: the same held-out problems at the start and at the end."""
    rows, findings = [], []
    for mode in ("sampled", "greedy"):
        lines = evaluations(run, mode)
        if len(lines) < 2:
            continue
        start, end = lines[0], lines[-1]
        gain = compare.paired_gain(start, end)
        more = [end.get(f"{name}_mean") for name in ("format", "finished", "length")]
        rows.append([mode, len(end["answer"]), start["success"], end["success"], gain.value,
                     gain.interval, *more])
        change = "did not clearly change"
        if gain.low > 0 or gain.high < 0:
            change = "rose" if gain.low > 0 else "fell"
        findings.append(f"Held-out success ({mode}) {change}: {start['success']:.1%} at step "
                        f"{start['step']}, {end['success']:.1%} at {end['step']}.")
    rows.append(["pub.*", 128, 0.0, 0.15, 0.15, None, None, None, 42])
    formats = {"mode": "", "problems": ",d", "start": ".1%", "end": ".1%", "gain": "+.1%",
               "95% interval": "+.1%", "format": ".2f", "finished": ".1%", "length": ".0f"}
    return Table("gains", "Held-out success, from the first evaluation to the last",
                 by_row(formats, rows), " ".join(findings), [ELSEWHERE])


def class_gradients(tally: Tally, partition: str) -> Table:
    """Where the gradient went: by kind of token, by section, or by the earlier regex classes."""
    names, tokens = PARTITIONS[partition], tally.count(partition)
    share = shares(tally, partition)
    used = np.flatnonzero(tokens)
    rest = over_the_rest(tally, partition, tally.final)
    rest = [rest[i] for i in used]
    verdict = verdicts(rest)
    columns = {partition: ("", [names[i] for i in used]),
               "tokens": (".1%", tokens[used] / tally.tokens),
               "gradient": (".1%", share[used]),
               **mean_sizes(tally, partition, "gradient", used),
               **rest_columns(rest, verdict)}
    titles = {"kind": "Where the gradient went, by kind of token",
              "section": "Where the gradient went, by section",
              "class": "The gradient by the earlier regex classes"}
    most = int(share.argmax())
    finding = NOTHING
    if share[most]:
        wording = {"kind": "{} tokens", "section": "the {} section", "class": "{} (by the regex)"}
        finding = (f"Most of the gradient went to {wording[partition].format(names[most])}: "
                   f"{share[most]:.1%} of the summed sizes, for {tokens[most] / tally.tokens:.1%} "
                   "of the tokens.")
        finding += different_cells([names[i] for i in used], rest, verdict)
    return Table(f"gradient by {partition}", titles[partition], columns, finding,
                 [OVER_REST.format(size_label(tally.final))])


def different_cells(names: list[str], rest: list, verdict: list[str]) -> str:
    cells = []
    for name, estimate, word in zip(names, rest, verdict):
        if word in ("more", "less"):
            or_less = " or less" if estimate.value < 0.01 else ""
            cells.append(f"{name} {max(estimate.value, 0.01):.2f}{or_less}")
    return f" A token's gradient over that of all others: {', '.join(cells)}." if cells else ""


def position_gradients(tally: Tally) -> Table:
    rest = over_the_rest(tally, "position", tally.final)
    columns = {"bin": ("", [str(i) for i in range(10)]),
               "entropy": (".3f", tally.mean("position", "entropy")),
               "s": (".3f", tally.mean("position", "s")),
               **mean_sizes(tally, "position", "gradient"), **rest_columns(rest, verdicts(rest))}
    value = np.nan_to_num([e.value for e in rest], nan=0, posinf=0)
    finding = NOTHING
    if value.any():
        finding = (f"The largest gradient is that of bin {value.argmax()}: {value.max():.2f} times "
                   "that of all other tokens.")
    return Table("gradient by position", "Ten bins of relative position, the gradient", columns,
                 finding, [OVER_REST.format(size_label(tally.final))])


def like_positions(tally: Tally) -> Table:
    """Is a class ahead because of where it stands?"""
    questions = [(f"filler/reasoning ({LABELS[unit]})", "class", unit, 0, 1)
                 for unit in tally.units]
    for k, name in enumerate(KINDS):
        if tally.count("kind")[k] and name != "end":  # which has its own place in every answer
            questions.append((f"{name}/rest ({LABELS[tally.final]})", "kind", tally.final, k, None))
    estimates = [pair(tally, *question) for _, *question in questions]
    verdict = verdicts([like for _, like in estimates])
    rows = [["filler/reasoning (pub.*)", PUBLISHED["filler over reasoning"], None,
             PUBLISHED["filler over reasoning, standardised"], None, None, ""]]
    for (name, *question), (crude, like), word in zip(questions, estimates, verdict):
        fifths = pair(tally, *question, bins=5)[1].value if question[0] == "class" else None
        rows.append([name, crude.value, crude.interval, fifths, like.value, like.interval, word])
    formats = {"ratio": "", "crude": ".2f", "95%": ".2f", "fifths": ".2f", "20ths": ".2f",
               "95% of it": ".2f", "difference": ""}
    last = len(tally.units) - 1  # the unit that counts
    return Table("like position", "One class over another, crude and at like position",
                 by_row(formats, rows),
                 filler_in_words(estimates[0][1], estimates[last][1], verdict[last]),
                 ["fifths, 20ths: standardised over so many bins of relative position; within five "
                  "wide bins position still plays a part, so the interval and Holm's correction "
                  "over the rows are for twenty; the published tables give 1.24 with fifths",
                  ELSEWHERE])


def filler_in_words(old, new, verdict: str) -> str:
    if not np.isfinite(new.value):
        return NOTHING
    meaning = {"more": "filler gets more", "less": "reasoning gets more"}
    return (f"Filler over reasoning at like position: {old.value:.2f} in the old unit, "
            f"{new.value:.2f} as gradient (95%: {shown(new.interval, '.2f')}); "
            f"{meaning.get(verdict, 'no difference seen')}.")


def parts_of_training(tally: Tally, count: int = 10) -> dict[str, np.ndarray]:
    """Blocks of steps, ten of them at most, by the steps they hold."""
    parts = {}
    for blocks in np.array_split(np.arange(len(tally.blocks)), min(count, len(tally.blocks))):
        first, last = tally.blocks[blocks[0]][0], tally.blocks[blocks[-1]][-1]
        parts[f"{first}" if first == last else f"{first}-{last}"] = blocks
    return parts


def growth(run: dict, tally: Tally) -> Table:
    success = {line["step"]: line["success"] for line in run["metrics"]}
    parts = parts_of_training(tally)
    rows = [growth_row(tally, name, blocks, success) for name, blocks in parts.items()]
    formats = {"steps": "", "success": ".1%", "length": ".1f", "entropy": ".3f", "flat": ".0%",
               "old": ".4f", "new": ".4f", "f/r old": ".2f", "f/r new": ".2f", "e/l": ".2f",
               "t>3": ".0%"}
    columns, label = by_row(formats, rows), size_label(tally.final)
    old, new, flat = (columns[name][1] for name in ("old", "new", "flat"))
    return Table("growth", "Over training", columns,
                 f"From the first to the last part of training: mean size {old[0]:.3f} to "
                 f"{old[-1]:.3f} in the old unit, {new[0]:.3f} to {new[-1]:.3f} as gradient; "
                 f"answers in groups without spread {flat[0]:.0%} to {flat[-1]:.0%}.",
                 ["flat: answers in groups whose rewards are all equal; old: mean abs(A lp); "
                  f"new: mean {label}; f/r: filler over reasoning; e/l: first fifth over last, "
                  f"{label}; t>3: share of positions with abs(t) > 3, A lp"])


def growth_row(tally: Tally, name: str, blocks: np.ndarray, success: dict) -> list:
    def ratio_of(partition: str, unit: str, above: int, below: int) -> float | None:
        mean = tally.mean(partition, f"abs {unit}", blocks)
        return mean[above] / mean[below] if mean[below] else None

    def overall(measure: str) -> float:
        return tally.mean("all", measure, blocks)[0]

    steps = np.concatenate([tally.blocks[block] for block in blocks])
    known = [success[step] for step in steps if step in success]
    answers = tally.positions.answers[blocks].sum()
    t = t_statistics(tally.positions.counts[blocks].sum(0),
                     *tally.positions.sums["contribution"][:, blocks].sum(1))
    return [name,
            np.mean(known) if known else None,
            tally.total("all", "tokens", blocks)[0] / answers,
            overall("entropy"),
            tally.positions.flat_answers[blocks].sum() / answers,
            overall("abs contribution"),
            overall(f"abs {tally.final}"),
            ratio_of("class", "contribution", 0, 1),
            ratio_of("class", tally.final, 0, 1),
            ratio_of("ends", tally.final, 0, 2),
            (np.abs(t) > 3).mean() if len(t) else None]


def growth_of_shares(tally: Tally) -> Table:
    parts = parts_of_training(tally)
    kinds = np.stack([shares(tally, "kind", blocks) for blocks in parts.values()])
    of_sections = np.stack([shares(tally, "section", blocks) for blocks in parts.values()])
    columns = {"steps": ("", list(parts))}
    columns |= {kind: (".1%", kinds[:, k]) for k, kind in enumerate(KINDS)}
    columns |= {section: (".1%", of_sections[:, i]) for i, section in enumerate(SECTIONS)}
    k = int(np.abs(kinds[-1] - kinds[0]).argmax())
    return Table("growth of shares",
                 "Over training: the share of the gradient that each kind and section got", columns,
                 f"What changed most is the share of {KINDS[k]} tokens: {kinds[0, k]:.0%} to "
                 f"{kinds[-1, k]:.0%} of the gradient.")


def compare_runs(runs: list[dict], folder: Path, flags: SimpleNamespace) -> None:
    make_folder(folder)
    report = compare.report_on(runs, flags.baseline, folder, show_status)
    write_page(folder / "report.html", "Runs compared", report.intro, report.short, report.tables,
               report.pictures, report.places, [])
    print("\n".join(textwrap.fill(text, 100) for text in report.intro))
    show(report.short, report.tables)
    finish(folder, report.tables, len(report.pictures), flags.json)


def finish(folder: Path, tables: list[Table], pictures: int, as_json: bool) -> None:
    """Write the numbers, and say what was written."""
    show_status("")
    written = f"page: {folder / 'report.html'}"
    if as_json:
        path = folder / "analysis.json"
        text = json.dumps([table.to_json() for table in tables], indent=1, allow_nan=False)
        with writing(path):
            path.write_text(text + "\n", encoding="utf-8")
        written += f"; numbers: {path}"
    print(f"\n{written}; {pictures} pictures beside it")


if __name__ == "__main__":
    run_as_program("analyze.py", main)
