"""Around the tables of analyze.py: its flags, the page that they stand on, what is printed."""
import json
from pathlib import Path
from types import SimpleNamespace

from analysis import compare
from analysis.page import (Picture, bullets, figure_of, folded, illustrated, named, paragraphs,
                           side_by_side, viewer)
from analysis.tables import NOTHING, Table, show, show_in_short
from engine.errors import UserError
from harness.files import replace_text
from harness.flags import Flag, Parser, add_flags, with_defaults

GRADIENT_LEGEND = [
    "A is the advantage of a token, w its weight, p its probability, s = norm(onehot - p) the size "
    "of the gradient of log p at the logits. The gradient of a token has the size abs(A) w s; "
    "shares are of summed sizes, directions do not enter. What --loss_norm sequence, a KL term, "
    "clipping and later epochs do to the loss is not in it.",
    "Intervals: bootstrap over this run's groups. They do not cover seed-to-seed variation."]
FINDINGS = ("gradient by kind", "gradient by section", "first and last fifth")  # said in a sentence
IN_SHORT = ("gradient by kind", "gains")  # the tables that are printed
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


def read_flags(argv: list[str], description: str) -> SimpleNamespace:
    parser = add_flags(Parser("python analyze.py RUN [RUN ...] [flags]", description), FLAGS)
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="run folders; with more than one they are compared")
    for name, help_text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=help_text)
    parser.add_argument("--steps", type=int, nargs="+", metavar="N",
                        help="steps whose answers the page shows (default: eight, evenly spaced)")
    switched_off = dict.fromkeys(SWITCHES, False)
    flags = with_defaults({"steps": [], **switched_off, **parser.read(argv)}, FLAGS)
    if len(flags.runs) == 1 and flags.baseline:
        raise UserError("--baseline needs several runs to compare")
    for name, what in OF_ONE_RUN.items():
        if len(flags.runs) > 1 and getattr(flags, name):
            raise UserError(f"--{name} {what} of one run: give one run only")
    return flags


def findings_of(chapters: dict[str, list[Table]]) -> list[str]:
    """The sentences of the tables in FINDINGS that found something."""
    tables = sum(chapters.values(), [])
    return [t.finding for t in tables if t.name in FINDINGS and t.finding != NOTHING]


def run_page(sentences: list[str], findings: list[str], chapters: dict[str, list[Table]],
             legends: dict[str, list[str]], pictures: list[Picture], places: dict[str, tuple],
             has_answers: bool) -> list[str]:
    """What the run did; its answers; where the credit went. Then all tables, folded."""
    curve, credit = ("".join(figure_of(*picture) for picture in named(pictures, (name,)))
                     for name in ("learning_curve", "credit_by_kind"))
    description, *opening_sentences = sentences
    words = paragraphs(opening_sentences, "lead") + paragraphs([description], "note")
    body = [side_by_side(words, curve)]
    if has_answers:
        body.append(viewer())
    if credit:
        body += ["<h2>Where the credit went</h2>", side_by_side(credit, bullets(findings))]
    for title, tables in chapters.items():
        legend = paragraphs(legends.get(title, []), "note")
        body.append(folded(title, [legend, *illustrated(tables, pictures, places)]))
    return body


def comparison_page(found: compare.Report) -> list[str]:
    """Which arm is better, with the curves; then the other tables, folded."""
    first = [table for table in found.tables if table.name in found.first]
    body = [paragraphs(found.intro, "note"), *illustrated(first, found.pictures, found.places)]
    for title, names in compare.CHAPTERS.items():
        tables = [table for table in found.tables if table.name.startswith(names)]
        if tables:
            body.append(folded(title, illustrated(tables, found.pictures, found.places)))
    return body


def print_run(texts: list[str], chapters: dict[str, list[Table]], legends: dict[str, list[str]],
              flags: SimpleNamespace) -> None:
    """Findings and a table or two; with --all every table, with --earlier the last chapter."""
    if not flags.all and not (flags.earlier and len(chapters) > 1):
        tables = {table.name: table for table in sum(chapters.values(), [])}
        show_in_short(texts, [tables[name] for name in IN_SHORT if name in tables])
        return
    if flags.all:
        show(texts, [])
    for title, tables in chapters.items() if flags.all else list(chapters.items())[-1:]:
        show(legends.get(title, []), tables)


def print_comparison(found: compare.Report, flags: SimpleNamespace) -> None:
    if flags.all:
        show(found.intro, found.tables, found.short)
    else:
        first = [table for table in found.tables if table.name in found.first]
        show_in_short([*found.intro, *found.short], first)


def write_numbers(folder: Path, tables: list[Table]) -> None:
    text = json.dumps([table.to_json() for table in tables], indent=1, allow_nan=False)
    replace_text(folder / "analysis.json", text + "\n")


def print_written(folder: Path, pictures: int, flags: SimpleNamespace) -> None:
    """What was written, and which flags say more."""
    print(f"\npage: {folder / 'report.html'}; {pictures} pictures beside it")
    if flags.json:
        print(f"numbers: {folder / 'analysis.json'}")
    if flags.csv:
        print(f"a row for every token: {folder / 'tokens.csv'}")
    if not flags.all:
        of_one_run = "" if len(flags.runs) > 1 else "--earlier those of an earlier experiment, "
        print(f"--all prints every table, {of_one_run}--json writes every number")
