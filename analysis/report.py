"""Around the tables of analyze.py: its flags, the page that they stand on, what is printed."""
import json
from pathlib import Path
from types import SimpleNamespace

from analysis.page import (Picture, bullets, figure_of, folded, illustrated, named, paragraphs,
                           side_by_side, viewer)
from analysis.tables import Table, show, show_in_short
from analysis.runs import newest_run
from engine.errors import UserError
from harness.files import replace_text
from harness.flags import Flag, Parser, add_flags, with_defaults

GRADIENT = "Where the gradient went"  # chapter of the page
GRADIENT_LEGEND = [
    "A is the advantage of a token, w its weight, p its probability, s = norm(onehot - p) the size "
    "of the gradient of log p at the logits. The gradient of a token has the size abs(A) w s; "
    "shares are of summed sizes, directions do not enter. What --loss_norm sequence, a KL term, "
    "clipping and later epochs do to the loss is not in it.",
    "Intervals: bootstrap over this run's groups. They do not cover seed-to-seed variation."]
EARLIER = "The tables of an earlier experiment, by its own definitions"
EARLIER_LEGEND = (
    "An earlier experiment (github.com/Ja-Crispy/GRPO-Zero) logged advantage * log_prob of every "
    "token and called it the gradient: the old unit below. Its classes came from a regex: "
    "reasoning is digits and operators, structure whole tags, filler the rest. pub.* and "
    "published* are its figures, phase 1 and 2 its two attempts. They are those of another model "
    "(Qwen2.5-0.5B-Instruct, its own problems, 303,042 tokens): for orientation, not for "
    "comparison.")
LEGENDS = {GRADIENT: GRADIENT_LEGEND, EARLIER: [EARLIER_LEGEND]}
PLACES = {  # the table of the page that a picture stands below; two others have their own place
    "growth": ("over_training",), "gradient by position": ("position",),
    "contribution": ("contributions", "log_prob_and_gradient"), "arms": ("learning_curves",)}
FLAGS = {
    "output_dir": Flag(None, "folder for pictures and report.html; by default analysis/ in the "
                       "run, or comparison/ beside the runs"),
    "baseline": Flag(None, "what the others are compared with: the name of an arm, or one of its "
                     "runs (default: plain GRPO)")}
SWITCHES = {  # take no value: a RUN may come after one
    "all": "print every table, not only findings; those of an earlier experiment are among them, "
           "and on the page, too",
    "json": "write every number of every table to analysis.json there, too",
    "csv": "write a row for every token to tokens.csv there, too"}
# flags that are refused with several runs, and what the error says they do
OF_ONE_RUN = {"steps": "chooses answers", "csv": "writes the tokens"}


def read_flags(argv: list[str], description: str) -> SimpleNamespace:
    parser = add_flags(Parser("python analyze.py [RUN ...] [flags]", description), FLAGS)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders; several are compared "
                        "(default: the one in runs/ that wrote last)")
    for name, help_text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=help_text)
    parser.add_argument("--steps", type=int, nargs="+", metavar="N",
                        help="steps whose answers the page shows (default: eight, evenly spaced)")
    empty = {"runs": [], "steps": [], **dict.fromkeys(SWITCHES, False)}
    flags = with_defaults(empty | parser.read(argv), FLAGS)
    flags.runs = flags.runs or [newest_run()]
    if len(flags.runs) == 1 and flags.baseline:
        raise UserError("--baseline needs several runs to compare")
    for name, what in OF_ONE_RUN.items():
        if len(flags.runs) > 1 and getattr(flags, name):
            raise UserError(f"--{name} {what} of one run: give one run only")
    return flags


def run_page(sentences: list[str], findings: list[str], chapters: dict[str, list[Table]],
             pictures: list[Picture]) -> list[str]:
    """What the run did, step by step; where the gradient went. Then the other tables, folded."""
    curve, credit = ("".join(figure_of(*picture) for picture in named(pictures, (name,)))
                     for name in ("learning_curve", "credit_by_kind"))
    about, description, *opening_sentences = sentences
    body = [paragraphs([about]), paragraphs(opening_sentences, "lead"),
            paragraphs([description], "note"), viewer(curve)]
    others = dict(chapters)
    if credit:
        tables = chapter_body(GRADIENT, others.pop(GRADIENT), pictures)
        body += [f"<h2>{GRADIENT}</h2>", side_by_side(credit, bullets(findings)),
                 folded("Its tables", tables, 3)]
    return [*body, *folded_chapters(others, pictures)]


def comparison_page(intro: list[str], chapters: dict[str, list[Table]],
                    pictures: list[Picture]) -> list[str]:
    """Which arm is better, with the curves; then the other tables, folded."""
    (_, first), *others = chapters.items()
    return [paragraphs(intro), *illustrated(first, pictures, PLACES),
            *folded_chapters(dict(others), pictures)]


def folded_chapters(chapters: dict[str, list[Table]], pictures: list[Picture]) -> list[str]:
    return [folded(title, chapter_body(title, tables, pictures))
            for title, tables in chapters.items()]


def chapter_body(title: str, tables: list[Table], pictures: list[Picture]) -> list[str]:
    return [paragraphs(LEGENDS.get(title, []), "note"), *illustrated(tables, pictures, PLACES)]


def print_report(texts: list[str], first: list[Table], chapters: dict[str, list[Table]],
                 flags: SimpleNamespace) -> None:
    """What is said, and the tables that come first; with --all every table."""
    if not flags.all:
        return show_in_short(texts, first)
    show(texts, [])
    for title, tables in chapters.items():
        show(LEGENDS.get(title, []), tables)


def write_numbers(folder: Path, chapters: dict[str, list[Table]]) -> None:
    tables = [table.to_json() for tables in chapters.values() for table in tables]
    replace_text(folder / "analysis.json", json.dumps(tables, indent=1, allow_nan=False) + "\n")


def print_written(folder: Path, flags: SimpleNamespace) -> None:
    """What was written, and which flags say more."""
    print(f"\npage: {folder / 'report.html'}, with its pictures beside it")
    if flags.json:
        print(f"numbers: {folder / 'analysis.json'}")
    if flags.csv:
        print(f"a row for every token: {folder / 'tokens.csv'}")
    if not flags.all:
        print("--all prints every table, --json writes every number")
