"""What the page of a run has besides tables: its flags, its sentences, its page, how it prints."""
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from lab.analysis.page import Picture, bullets, figure_of, folded, paragraphs, section_of, viewer
from lab.analysis.run_folders import PLAIN_SETTINGS, Run, evaluations, is_done, steps_done, task_of
from lab.analysis.tables import Table, show, show_in_short
from lab.analysis.tally import Tally
from lab.engine.errors import UserError
from lab.harness.record import Json
from lab.harness.screen import show_status
from lab.harness.flags import Flag, read

TRAINING = "How the run went"  # these three are the chapters of a run's page
GRADIENT = "Where the gradient went"
CHANGE = "What a step changed"  # a part of GRADIENT with a picture of its own
LEGENDS = {GRADIENT: [
    "A is the advantage of a token, w its weight, p its probability, and s = norm(onehot - p) the "
    "size of the gradient of log p at the logits. The gradient's size at the logits is abs(A) w s. "
    "A share of the gradient is a share of the sum of these sizes, so the directions of gradients "
    "do not count. The sizes leave out what --loss_norm sequence, a KL term, clipping and later "
    "epochs do to the loss."]}
SHORT_LEGEND = [
    "The gradient of a token has the size abs(A) w s at the logits. A is the token's advantage, w "
    "its weight, p its probability, and s = norm(onehot - p). The share of the squares is a share "
    "of the sum of (A w s)^2, on which the variance of the gradient depends.",
    "The push of a token, A w s^2, is what its own term of the loss would do to its log-prob, if "
    "nothing else moved it. Its change is the log-prob after the step minus before, at the same "
    "prefix."]
PICTURE_BELOW = {  # table: the picture below it; two other pictures stand elsewhere on the page
    "growth": "over_training", "gradient by position": "position",
    "arms": "learning_curves"}
CONTINUATIONS = 200  # for each value: an interval of a credit then reaches 0.1 to each side
FLAGS = {
    "output_dir": Flag(None, "folder for the pictures and report.html. By default it is "
                       "analysis/ in the run, or for several runs comparison/ beside them"),
    "baseline": Flag(None, "the arm that the others are compared with, by the name that the "
                     "tables give it (default: plain GRPO)"),
    "all": Flag(False, "print every table, and what its columns mean")}


def read_analysis_flags(argv: list[str], description: str) -> SimpleNamespace:
    flags = read(argv, "python -m lab page [RUN ...] [flags]", description, FLAGS, {
        "[RUN ...]": "run folders. Several are compared with each other. By default it is the "
                     "newest in runs/"})
    if len(flags.run) == 1 and flags.baseline:
        raise UserError("--baseline needs several runs to compare")
    return flags


def describe_comparison(runs: list[Run]) -> str:
    config, lines = runs[0]["config"], runs[0]["evaluations"]
    success = "They were not evaluated on held-out problems."
    if lines:
        success = (f"Held-out success was measured on the same {len(lines[0]['answer']):,} "
                   f"problems for all runs, and none of the runs trained on them.")
    return (f"These are {len(runs)} runs of {config['model']}, each of {config['steps']} steps. "
            f"{task_in_words(config)}. {success}")


def task_in_words(config: Mapping[str, object]) -> str:
    """A sentence that says which task a run has, and what solves one of its problems."""
    if "task" not in config:
        return "The task is not on record"
    means = getattr(task_of(config), "solved", "the score that its task calls answer is 1")
    return f"In {task_name(config)} a problem is solved if {means}"


def task_name(config: Mapping[str, object]) -> str:
    """Countdown, of countdown_task"""
    return str(config["task"]).removesuffix("_task").replace("_", " ").capitalize()


def opening(run: Run) -> list[str]:
    """Sentences about the run: the notes that its config.json has, and how it went."""
    sentences = [*map(str, run["config"].get("notes", [])), *changes_of(run)]
    if not is_done(run):
        sentences.append(f"This run is not finished: step {steps_done(run)} of "
                         f"{run['config']['steps']} so far.")
    lines = main_evaluations(run)
    if len(lines) > 1:
        first, last = lines[0], lines[-1]
        answers = f"{first['mode'].capitalize()} answers"
        if first["mode"] == "greedy":
            answers += ", which take the likeliest token at every place,"
        sentences.append(
            f"{answers} solved {solved_in_words(first)} of "
            f"{len(first['answer']):,} held-out problems at step {first['step']}, and "
            f"{solved_in_words(last)} at step {last['step']}.")
    if not run["steps"]:
        sentences.append("There are no credit files, so nothing is known about single tokens.")
    return sentences


def changes_of(run: Run) -> list[str]:
    """A sentence for what a run's record lacks, and for each time that it went on with changed
    files."""
    from lab.harness.read_record import missing_steps
    name = run["folder"].name
    missing = [f"The record of {name} is not whole: {what}."
               for what in missing_steps(run["folder"])]
    return missing + [f"{name} went on after step {one['after_step']} with changed files: "
                      f"{', '.join(one['files'])}." for one in run["config"].get("changed", [])]


def changes_of_all(runs: list[Run]) -> list[str]:
    """The same of several runs; and which of them were made with another model, file or code under
    the same name."""
    sentences = []
    first: dict[tuple[object, ...], tuple[str, str]] = {}  # the digest, and a run with it
    for run in runs:
        sentences += changes_of(run)
        config, name, others = run["config"], run["folder"].name, []
        methods = config["mitigation"], config.get("advantage")
        for thing, digest in config.get("made_of", {}).items():
            # of mitigations.py the digest is that of the functions that a run uses
            same = (thing, *methods) if thing == "mitigations.py" else (thing,)
            known, by = first.setdefault(same, (digest, name))
            if known != digest:
                others.append(f"another {thing} than {by}")
        if others:
            more = f", and {len(others) - 1} more" if len(others) > 1 else ""
            sentences.append(f"{name} was made with {others[0]}{more}.")
    return sentences


def solved_in_words(line: Json) -> str:
    """49.7% (95% interval 47.2% to 52.3%)"""
    return (f"{line['success']:.1%} (95% interval {line['success_low']:.1%} to "
            f"{line['success_high']:.1%})")


def main_evaluations(run: Run) -> list[Json]:
    return evaluations(run, "sampled") or evaluations(run, "greedy")


def describe(run: Run, tally: Tally | None) -> str:
    """Sentences that say what was trained, how, and what is on record."""
    config = run["config"]
    model = config.get("model", "an unknown model")
    method = (f"the weighting {config['mitigation']} and the advantage "
              f"{config.get('advantage', 'grpo')}")
    if config.get("loss") == "dpo":
        method = "DPO, on pairs of answers"
    text = f"{run['folder']} trained {model} with {method}, seed {config.get('seed', 0)}."
    if tally:
        text += (f" It recorded {tally.tokens:,} tokens of {tally.answers.sum():,} answers to "
                 f"{tally.groups:,} problems, in steps {tally.steps[0]} to {tally.steps[-1]}.")
    sampled, on_record = config.get("temperature", 1), config.get("columns_temperature", 1)
    if not sampled == on_record == 1:
        joint = "and" if sampled == on_record else "but"
        text += (f" It was sampled at temperature {sampled}, {joint} log p, entropy and s were "
                 f"computed at temperature {on_record}.")
    return text


def title_of(run: Run) -> str:
    """Plain GRPO on Countdown, 100 steps, seed 0"""
    config = run["config"]
    words = []
    for axis, plain in PLAIN_SETTINGS.items():
        name = config.get(axis, plain)
        if name != plain:
            words.append(f"{axis.replace('mitigation', 'weighting')} {name}")
    method = ", ".join(words) or "plain GRPO"
    of_task = f" on {task_name(config)}" if "task" in config else ""
    count = f"{config['steps']} steps"
    if not is_done(run):
        count = f"{steps_done(run)} of {count}"
    return f"{method[0].upper()}{method[1:]}{of_task}, {count}, seed {config.get('seed', 0)}"


def run_page(sentences: list[str], findings: dict[str, str], chapters: dict[str, list[Table]],
             pictures: list[Picture]) -> list[str]:
    """The body of a run's page: what the run did, step by step, where the gradient went, and what a
    step changed; then the other tables, folded. `findings` has each finding by its table's name."""
    figures, others = figures_of(pictures), dict(chapters)
    task, description, *outcome = sentences
    body = [paragraphs([task]), paragraphs(outcome, "lead"), paragraphs([description], "note"),
            viewer(figures.get("learning_curve", ""))]
    if "gradient_by_kind" in figures:
        of_change = [text for name, text in findings.items() if name == "change by kind"]
        others_found = [text for text in findings.values() if text not in of_change]
        body += beside(GRADIENT, figures["gradient_by_kind"], others_found)
        if "change_by_kind" in figures:
            body += beside(CHANGE, figures["change_by_kind"], of_change)
        tables = chapter_body(GRADIENT, others.pop(GRADIENT), figures)
        body.append(folded("The tables behind these pictures", tables, 3))
    return [*body, *folded_chapters(others, figures)]


def beside(title: str, figure: str, findings: list[str]) -> list[str]:
    return [f"<h2>{title}</h2>",
            f"<div class=beside><div>{figure}</div><div>{bullets(findings)}</div></div>"]


def comparison_page(intro: list[str], chapters: dict[str, list[Table]],
                    pictures: Sequence[Picture]) -> list[str]:
    """The body of a comparison's page: which arm is better, with the curves; then the other tables,
    folded."""
    figures, ((_, first), *others) = figures_of(pictures), chapters.items()
    return [paragraphs(intro), *chapter_body("", first, figures),
            *folded_chapters(dict(others), figures)]


def figures_of(pictures: Sequence[Picture]) -> dict[str, str]:
    return {picture[0].stem: figure_of(*picture) for picture in pictures}


def folded_chapters(chapters: dict[str, list[Table]], figures: dict[str, str]) -> list[str]:
    return [folded(title, chapter_body(title, tables, figures))
            for title, tables in chapters.items()]


def chapter_body(title: str, tables: list[Table], figures: dict[str, str]) -> list[str]:
    body = [paragraphs(LEGENDS.get(title, []), "note")]
    for table in each_note_once(tables):
        picture = PICTURE_BELOW.get(table.name, "")
        body.append(section_of(table, figures.get(picture, "")))
    return body


def each_note_once(tables: list[Table]) -> Iterator[Table]:
    """The tables of a chapter, each note below the first table that has it."""
    known: set[str] = set()
    for table in tables:
        yield replace(table, notes=[note for note in table.notes if note not in known])
        known.update(table.notes)


def print_report(texts: list[str], first: list[Table], chapters: dict[str, list[Table]],
                 folder: Path, with_all: bool) -> None:
    """Print the texts, and the first tables or all of them; then say where the page lies."""
    show_status("")
    if with_all:
        show(texts, [])
        for title, tables in chapters.items():
            show(LEGENDS.get(title, []), each_note_once(tables))
    else:
        show_in_short(texts, first)
    print(f"\nThe page is {folder / 'report.html'}. Its pictures lie beside it.")
    if not with_all:
        print("With --all every table is printed, and what its columns mean.")
