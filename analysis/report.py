"""Around the tables of analyze.py: its flags, sentences, the page, what is printed."""
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from analysis.page import Picture, bullets, figure_of, folded, paragraphs, section_of, viewer
from analysis.runs import Run, evaluations, is_done, steps_done, task_of
from analysis.tables import Table, show, show_in_short
from analysis.tally import Tally
from engine.errors import UserError
from harness.record import Json
from harness.screen import change, show_status
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.settings import OPTIONS

GRADIENT, NOTES = "Where the gradient went", "The notes' tables"  # chapters of the page
LEGENDS = {GRADIENT: [
    "A is the advantage of a token, w its weight, p its probability, s = norm(onehot - p) the size "
    "of the gradient of log p at the logits. The gradient of a token has the size abs(A) w s; "
    "shares are of summed sizes, directions do not enter. What --loss_norm sequence, a KL term, "
    "clipping and later epochs do to the loss is not in it.",
    "Intervals: over this run's groups. They do not cover seed-to-seed variation."], NOTES: [
    "The notes are those of an earlier experiment (github.com/Ja-Crispy/GRPO-Zero): Qwen2.5-0.5B, "
    "100 steps of Countdown, 303,042 tokens. They called A log p the contribution of a token and "
    "took it for its gradient; the gradient has the size abs(A) w s, which stands beside it. The "
    "notes' figures are of that run. Same: within a quarter of theirs, or as a table says."]}
PLACES = {  # the table of the page that a picture stands below; two others have their own place
    "growth": "over_training", "gradient by position": "position", "notes bins": "notes",
    "arms": "learning_curves"}
FLAGS = {
    "output_dir": Flag(None, "folder for pictures and report.html; by default analysis/ in the "
                       "run, or comparison/ beside the runs"),
    "baseline": Flag(None, "the arm that the others are compared with (default: plain GRPO)"),
    "notes": Flag(False, "print the tables of the notes that this lab began with"),
    "all": Flag(False, "print every table, not only findings")}


def read_flags(argv: list[str], description: str) -> SimpleNamespace:
    parser = make_parser("python analyze.py [RUN ...] [flags]", description, FLAGS)
    parser.add_argument("runs", nargs="*", metavar="RUN", default=[],
                        help="run folders; several are compared; by default the newest in runs/")
    flags = with_defaults(parser.read(argv), FLAGS)
    if len(flags.runs) == 1 and flags.baseline:
        raise UserError("--baseline needs several runs to compare")
    return flags


def compared(runs: list[Run]) -> str:
    config, lines = runs[0]["config"], runs[0]["evaluations"]
    success = (f"Held-out success is that on the same {len(lines[0]['answer']):,} problems, which "
               "none of the runs trained on." if lines
               else "They were not evaluated on held-out problems.")
    return (f"{len(runs)} runs of {config['model']}, {config['steps']} steps. "
            f"{task_in_words(config)}. {success}")


def task_in_words(config: Mapping[str, object]) -> str:
    """A task says what a right answer is in its `solved`."""
    if {"imported", "trainer"} & config.keys():
        return "A run of another program"
    means = getattr(task_of(config), "solved", "the score that its task calls answer is 1")
    return f"Task {config.get('task', OPTIONS['task'].default)}: a problem is solved if {means}"


def opening(run: Run) -> list[str]:
    imported = run["config"].get("imported")
    if isinstance(imported, list):
        return list(map(str, imported))
    sentences = []
    if not is_done(run):
        sentences.append(f"This run is not finished: step {steps_done(run)} of "
                         f"{run['config']['steps']} so far.")
    lines = headline(run)
    if len(lines) > 1:
        sentences.append(f"{lines[0]['mode'].capitalize()} answers solved "
                         f"{change(lines[0], lines[-1])}.")
    if not run["steps"]:
        sentences.append("There are no credit files, so nothing is known of single tokens.")
    return sentences


def headline(run: Run) -> list[Json]:
    return evaluations(run, "sampled") or evaluations(run, "greedy")


def describe(run: Run, tally: Tally | None) -> str:
    config = run["config"]
    made = (f"{config['mitigation']}, {config.get('advantage', 'grpo')}, seed "
            f"{config.get('seed', 0)}")
    text = (f"{run['folder']}: {'imported' if 'imported' in config else made}, "
            f"{config.get('model', 'unknown model')}")
    if tally:
        text += (f"; {tally.tokens:,} tokens of {tally.answers.sum():,} answers to "
                 f"{tally.groups:,} problems, steps {tally.steps[0]} to {tally.steps[-1]}")
    sampled, on_record = config.get("temperature", 1), config.get("columns_temperature", 1)
    if on_record is None:
        text += "; of which temperature log p, entropy and s are, its files do not say"
    elif not sampled == on_record == 1:
        text += (f"; sampled at temperature {sampled}; log p, entropy and s are those of "
                 f"temperature {on_record}")
    return text


def run_page(sentences: list[str], findings: list[str], chapters: dict[str, list[Table]],
             pictures: list[Picture]) -> list[str]:
    """What the run did, step by step; where the gradient went. Then the other tables, folded."""
    figures, others = figures_of(pictures), dict(chapters)
    method, description, *told = sentences
    body = [paragraphs([method]), paragraphs(told, "lead"), paragraphs([description], "note"),
            viewer(figures.get("learning_curve", ""))]
    if "credit_by_kind" in figures:
        tables = chapter_body(GRADIENT, others.pop(GRADIENT), figures)
        body += [f"<h2>{GRADIENT}</h2>",
                 f"<div class=beside><div>{figures['credit_by_kind']}</div>"
                 f"<div>{bullets(findings)}</div></div>", folded("Its tables", tables, 3)]
    return [*body, *folded_chapters(others, figures)]


def comparison_page(intro: list[str], chapters: dict[str, list[Table]],
                    pictures: Sequence[Picture]) -> list[str]:
    """Which arm is better, with the curves; then the other tables, folded."""
    figures, ((_, first), *others) = figures_of(pictures), chapters.items()
    return [paragraphs(intro), *chapter_body("", first, figures),
            *folded_chapters(dict(others), figures)]


def figures_of(pictures: Sequence[Picture]) -> dict[str, str]:
    return {picture[0].stem: figure_of(*picture) for picture in pictures}


def folded_chapters(chapters: dict[str, list[Table]], figures: dict[str, str]) -> list[str]:
    return [folded(title, chapter_body(title, tables, figures))
            for title, tables in chapters.items()]


def chapter_body(title: str, tables: list[Table], figures: dict[str, str]) -> list[str]:
    return [paragraphs(LEGENDS.get(title, []), "note"),
            *(section_of(table, figures.get(PLACES.get(table.name, ""), "")) for table in tables)]


def tell(texts: list[str], first: list[Table], chapters: dict[str, list[Table]], folder: Path,
         with_all: bool) -> None:
    """Print what is said and the tables that come first, or all; and what lies in the folder."""
    show_status("")
    if with_all:
        show(texts, [])
        for title, tables in chapters.items():
            show(LEGENDS.get(title, []), tables)
    else:
        show_in_short(texts, first)
    print(f"\npage: {folder / 'report.html'}, with its pictures beside it")
    if not with_all:
        print("--all prints every table")
