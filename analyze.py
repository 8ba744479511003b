"""What the credit files of a run say. Reads run folders, never a model.

    python analyze.py runs/none-grpo-s0         # findings, pictures, report.html in its analysis/
    python analyze.py runs/*                    # the arms compared, paired by seed

1. Read the run: settings, metrics, evaluations (analysis/runs.py).
2. Go through its credit files once and sum up what tokens were given (analysis/tally.py).
3. Make the tables, chapter by chapter: gains and where the gradient went stand in this file.
4. Draw the pictures and write the page (analysis/run_plots.py, analysis/page.py).

A is the advantage of a token, w its weight, p its probability, s = norm(onehot - p) the size of the
gradient of its log-prob at the logits. The size of a token's gradient is abs(A) w s. An earlier
experiment took A log p for it; its tables (analysis/earlier.py) are the last chapter, by their own
definitions and beside what should have been measured. More tables are in analysis/growth.py,
analysis/position_tables.py, analysis/regression.py and analysis/uncertainty.py, those of several
runs in analysis/compare.py.
"""
import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import mitigations  # noqa: F401  fills the lists of choices, so that flags of a run are known
from analysis import compare, earlier, run_plots
from analysis.answers import answers_of, steps_to_show
from analysis.growth import growth, growth_in_old_unit, growth_of_shares
from analysis.opening import opening
from analysis.page import (bullets, figure_of, folded, illustrated, named, paragraphs,
                           side_by_side, viewer, write_page)
from analysis.position_tables import (first_and_last_fifth, kinds_at_like_position,
                                      position_gradients)
from analysis.ratio_and_size import ratio_tables
from analysis.ratios import (OVER_REST, REST_WORDS, different_cells, mean_sizes, over_the_rest,
                             rest_columns, shares)
from analysis.regression import regression_tables
from analysis.runs import evaluations, read_runs
from analysis.sizes import size_label
from analysis.statistics import verdicts
from analysis.sums import PARTITIONS
from analysis.tables import NOTHING, Table, by_row, show, show_in_short
from analysis.tally import Tally, describe
from analysis.token_rows import write_token_rows
from analysis.uncertainty import forks, sections
from engine.errors import UserError
from harness.files import make_folder, replace_text, writing
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.program import run_as_program
from harness.progress import show_status

INTERVALS = ("All intervals are about this run, its groups drawn again; another seed can lie "
             "outside them.")
UNIT_LEGEND = (
    "A is the advantage of a token, w its weight, p its probability, s = norm(onehot - p) the size "
    "of the gradient of log p at the logits. The gradient of a token has the size abs(A) w s; "
    "shares are of summed sizes, directions do not enter. What --loss_norm sequence, a KL term, "
    "clipping and later epochs do to the loss is not in it.")
CHANGE, GRADIENT, UNSURE, EARLIER = (  # the chapters of a run's tables
    "What training changed", "Where the gradient went", "Where the model was unsure",
    "The tables of an earlier experiment, by its own definitions")
LEGENDS = {GRADIENT: [UNIT_LEGEND, INTERVALS], EARLIER: [earlier.LEGEND]}
FINDINGS = ("gradient by kind", "gradient by section", "first and last fifth")  # said in a sentence
FLAGS = {
    "output_dir": Flag(None, "folder for pictures and report.html; by default analysis/ in the "
                       "run, or comparison/ beside the runs"),
    "page_tokens": Flag(60_000, "tokens of the answers on the page of one run, at most", least=1),
    "baseline": Flag(None, "what the others are compared with: the name of an arm, or one of its "
                     "runs (default: plain GRPO)")}
SWITCHES = {  # take no value: a RUN may come after one
    "all": "print every table, not only findings",
    "earlier": "print the tables of an earlier experiment, by its own definitions",
    "json": "write every number of every table to analysis.json there, too",
    "csv": "write a row for every token to tokens.csv there, too"}
# flags that are refused with several runs, and what the error says they do
OF_ONE_RUN = {"steps": "chooses answers", "earlier": "prints tables", "csv": "writes the tokens"}


def main(argv: list[str]) -> None:
    flags = read_flags(argv)
    runs = read_runs(flags.runs)
    first_folder = runs[0]["folder"]
    if len(runs) == 1:
        if flags.baseline:
            raise UserError("--baseline needs several runs to compare")
        analyze_run(runs[0], Path(flags.output_dir or first_folder / "analysis"), flags)
        return
    for name, what in OF_ONE_RUN.items():
        if getattr(flags, name):
            raise UserError(f"--{name} {what} of one run: give one run only")
    compare_runs(runs, Path(flags.output_dir or first_folder.parent / "comparison"), flags)


def read_flags(argv: list[str]) -> SimpleNamespace:
    parser = add_flags(Parser("python analyze.py RUN [RUN ...] [flags]", __doc__), FLAGS)
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="run folders; with more than one they are compared")
    for name, help_text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=help_text)
    parser.add_argument("--steps", type=int, nargs="+", metavar="N",
                        help="steps whose answers the page shows (default: eight, evenly spaced)")
    switched_off = dict.fromkeys(SWITCHES, False)
    return with_defaults({"steps": [], **switched_off, **parser.read(argv)}, FLAGS)


def analyze_run(run: dict, folder: Path, flags: SimpleNamespace) -> None:
    """Tables, pictures and the page of one run into the folder; what matters on the screen."""
    steps = steps_to_show(run, flags.steps)
    make_folder(folder)
    tally = tally_of(run) if run["steps"] else None
    chapters = run_chapters(run, tally)
    tables = list(chain.from_iterable(chapters.values()))
    if flags.json:
        write_numbers(folder, tables)
    if flags.csv:
        write_token_rows(run, folder / "tokens.csv", show_status)
    show_status("pictures and page")
    with writing(folder):
        pictures = run_plots.draw_run(run, tally, folder)
    answers = []
    if tally:
        answers = answers_of(run["folder"], tally.tokenizer, steps, flags.page_tokens)
    sentences, findings = [describe(run, tally), *opening(run)], findings_of(tables)
    page = run_page(sentences, findings, chapters, pictures, bool(answers))
    write_page(folder / "report.html", run["folder"].name, page, answers)
    show_status("")
    print_run([*sentences, *findings], chapters, tables, flags)
    print(f"\n{written(folder, len(pictures), flags)}")


def tally_of(run: dict) -> Tally:
    """Read all credit files of the run, and sum up what its tokens were given."""
    tally = Tally(run["folder"])
    tally.read(show_status)
    return tally


def run_chapters(run: dict, tally: Tally | None) -> dict[str, list[Table]]:
    """The tables by what they are about; those of the earlier experiment come last."""
    change = []
    if any(len(evaluations(run, mode)) > 1 for mode in ("sampled", "greedy")):
        change.append(gains(run))
    if tally is None:
        return {CHANGE: change}
    old_regression, *new_regressions = regression_tables(tally)
    return {
        CHANGE: [*change, growth(run, tally)],
        GRADIENT: [
            class_gradients(tally, "kind"), class_gradients(tally, "section"),
            growth_of_shares(tally), position_gradients(tally), first_and_last_fifth(tally),
            kinds_at_like_position(tally), *new_regressions, *ratio_tables(tally)],
        UNSURE: [forks(tally), sections(tally)],
        EARLIER: [
            earlier.published_success(), earlier.contributions(tally), earlier.positions(tally),
            earlier.ends(tally), earlier.signs(tally), earlier.classes(tally),
            class_gradients(tally, "class"), earlier.what_filler_is(tally),
            earlier.classes_by_fifth(tally), earlier.filler_at_like_position(tally),
            old_regression, earlier.t_table(tally), earlier.top_tokens(tally),
            growth_in_old_unit(tally)]}


def findings_of(tables: list[Table]) -> list[str]:
    """The sentences of the tables in FINDINGS that found something."""
    findings = [table.finding for table in tables if table.name in FINDINGS]
    return [finding for finding in findings if finding != NOTHING]


def run_page(sentences: list[str], findings: list[str], chapters: dict[str, list[Table]],
             pictures: list, has_answers: bool) -> list[str]:
    """What the run did; its answers; where the credit went. Then all tables, folded."""
    figures = dict.fromkeys(run_plots.ON_TOP, "")
    for path, caption in named(pictures, run_plots.ON_TOP):
        figures[path.stem] = figure_of(path, caption)
    description, *opening_sentences = sentences
    words = paragraphs(opening_sentences, "lead") + paragraphs([description], "note")
    body = [side_by_side(words, figures["learning_curve"])]
    if has_answers:
        body.append(viewer())
    if figures["credit_by_kind"]:
        body.append("<h2>Where the credit went</h2>")
        body.append(side_by_side(figures["credit_by_kind"], bullets(findings)))
    for title, tables in chapters.items():
        here = pictures_of(tables, pictures, run_plots.PLACES)
        legend = paragraphs(LEGENDS.get(title, []), "note")
        body.append(folded(title, [legend, *illustrated(tables, here, run_plots.PLACES)]))
    return body


def print_run(texts: list[str], chapters: dict[str, list[Table]], tables: list[Table],
              flags: SimpleNamespace) -> None:
    """Findings and a table or two, or what --all and --earlier ask for."""
    by_name = {table.name: table for table in tables}
    small = [by_name[name] for name in ("gradient by kind", "gains") if name in by_name]
    old_tables = chapters.get(EARLIER, [])
    if flags.all:
        legend = LEGENDS[GRADIENT] if old_tables else []
        show([*texts, *legend], [table for table in tables if table not in old_tables])
    elif not (flags.earlier and old_tables):
        show_in_short(texts, small)
    if old_tables and (flags.earlier or flags.all):
        show(LEGENDS[EARLIER], old_tables)


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
        if gain.low > 0:
            change = "rose"
        elif gain.high < 0:
            change = "fell"
        findings.append(f"Held-out success ({mode}) {change}: {start['success']:.1%} at step "
                        f"{start['step']}, {end['success']:.1%} at {end['step']}.")
    formats = {"mode": "", "problems": ",d", "start": ".1%", "end": ".1%", "gain": "+.1%",
               "95% interval": "+.1%", "format": ".2f", "finished": ".1%", "length": ".0f"}
    return Table("gains", "Held-out success, from the first evaluation to the last",
                 by_row(formats, rows), " ".join(findings),
                 ["the gain is paired: the same problems at the start and at the end; format, "
                  "finished and tokens are those of the end"],
                 {"95% interval": "95% interval of the gain", "length": "tokens an answer"})


def class_gradients(tally: Tally, partition: str) -> Table:
    """Where the gradient went: by kind of token, by section, or by the earlier regex classes. The
    last columns compare a token of each with the mean of all other tokens."""
    names, tokens = PARTITIONS[partition], tally.count(partition)
    share = shares(tally, partition)
    used = np.flatnonzero(tokens)  # those that occur in this run
    used_names = [names[i] for i in used]
    ratios = over_the_rest(tally, partition, tally.final)
    ratios = [ratios[i] for i in used]
    verdict = verdicts(ratios)
    columns = {partition: ("", used_names),
               "tokens": (".1%", tokens[used] / tally.tokens),
               "gradient": (".1%", share[used]),
               **mean_sizes(tally, partition, "gradient", used),
               **rest_columns(ratios, verdict)}
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
        finding += different_cells(used_names, ratios, verdict)
    return Table(f"gradient by {partition}", titles[partition], columns, finding,
                 [OVER_REST.format(size_label(tally.final))],
                 {**REST_WORDS, "tokens": "share of the tokens", "gradient": "of the gradient"})


def compare_runs(runs: list[dict], folder: Path, flags: SimpleNamespace) -> None:
    make_folder(folder)
    report = compare.report_on(runs, flags.baseline, folder, show_status)
    if flags.json:
        write_numbers(folder, report.tables)
    write_page(folder / "report.html", "Runs compared", comparison_page(report))
    show_status("")
    if flags.all:
        show(report.intro, report.tables, report.short)
    else:
        first = [table for table in report.tables if table.name in report.first]
        show_in_short([*report.intro, *report.short], first)
    print(f"\n{written(folder, len(report.pictures), flags)}")


def comparison_page(report: compare.Report) -> list[str]:
    """Which arm is better, with the curves; then the other tables, folded."""
    body = [paragraphs(report.intro, "note")]
    first = [table for table in report.tables if table.name in report.first]
    here = pictures_of(first, report.pictures, report.places)
    body += illustrated(first, here, report.places)
    for title, names in compare.CHAPTERS.items():
        tables = [table for table in report.tables if table.name.startswith(names)]
        if tables:
            here = pictures_of(tables, report.pictures, report.places)
            body.append(folded(title, illustrated(tables, here, report.places)))
    return body


def pictures_of(tables: list[Table], pictures: list, places: dict[str, tuple]) -> list:
    """The pictures that stand below these tables; `places` are their names, by table."""
    names = []
    for table in tables:
        names += places.get(table.name, ())
    return named(pictures, names)


def write_numbers(folder: Path, tables: list[Table]) -> None:
    text = json.dumps([table.to_json() for table in tables], indent=1, allow_nan=False)
    replace_text(folder / "analysis.json", text + "\n")


def written(folder: Path, pictures: int, flags: SimpleNamespace) -> str:
    """What was written, and which flags say more."""
    lines = [f"page: {folder / 'report.html'}; {pictures} pictures beside it"]
    if flags.json:
        lines.append(f"numbers: {folder / 'analysis.json'}")
    if flags.csv:
        lines.append(f"a row for every token: {folder / 'tokens.csv'}")
    if not flags.all:
        of_one_run = "" if len(flags.runs) > 1 else "--earlier those of an earlier experiment, "
        lines.append(f"--all prints every table, {of_one_run}--json writes every number")
    return "\n".join(lines)


if __name__ == "__main__":
    run_as_program("analyze.py", main)
