"""The sentences on the page of a run: what was trained, and how it went."""
from collections.abc import Mapping

from analyze import MEASURES
from lab.analysis.comparison import in_short
from lab.analysis.run_folders import PLAIN_SETTINGS, Run, task_named, task_of
from lab.harness.read_record import missing_steps
from lab.harness.record import Json
from lab.harness.versions import changes_of_run


def task_in_words(config: Mapping[str, object]) -> str:
    """A sentence that says which task a run has, and what solves one of its problems."""
    if not task_named(config):
        return "The task is not on record."
    means = getattr(task_of(config), "solved", "the score that its task calls answer is 1")
    return f"In {task_name(config)} a problem is solved if {means}."


def task_name(config: Mapping[str, object]) -> str:
    """Countdown, of countdown_task"""
    return task_named(config).removesuffix("_task").replace("_", " ").capitalize()


def opening(run: Run) -> list[str]:
    """Sentences about the run: the notes that its config.json has, and how it went."""
    sentences = [*map(str, run.config.get("notes", [])), *changes_of(run)]
    if not run.is_done:
        sentences.append(f"This run is not finished: step {run.last_step} of "
                         f"{run.config['steps']} so far.")
    lines = main_evaluations(run)
    if len(lines) > 1:
        first, last = lines[0], lines[-1]
        problems = len(first[MEASURES[run.measure][3]])
        verb = "solved" if run.measure == "success" else "had a mean reward of"
        answers = f"{first['mode'].capitalize()} answers"
        if first["mode"] == "greedy":
            answers += ", which take the likeliest token at every place,"
        sentences.append(
            f"{answers} {verb} {with_interval(run, first)} of {problems:,} held-out problems at "
            f"step {first['step']}, and {with_interval(run, last)} at step {last['step']}.")
    if not run.steps:
        sentences.append("There are no credit files, so nothing is known about single tokens.")
    return sentences


def changes_of(run: Run) -> list[str]:
    """A sentence for what a run's record lacks, and for each time that it went on with changed
    files."""
    name = run.folder.name
    missing = [f"The record of {name} is not whole: {what}."
               for what in missing_steps(run.folder)]
    return missing + [f"{name} went on after step {step} with changed files: {in_short(labels)}."
                      for step, labels in changes_of_run(run.folder, run.config).items()]


def with_interval(run: Run, line: Json) -> str:
    """49.7% (95% interval 47.2% to 52.3%)"""
    mean, low, high = (run.shown(line[name]) for name in MEASURES[run.measure][:3])
    return f"{mean} (95% interval {low} to {high})"


def outcome_of(run: Run, shown: Json) -> str:
    """What came of an answer to a held-out problem, which an evaluation shows."""
    if run.measure == "reward":
        return f"reward {shown['reward']:.3g}"
    return "right" if shown["answer"] else "wrong"


def main_evaluations(run: Run) -> list[Json]:
    return run.evaluated("sampled") or run.evaluated("greedy")


def describe(run: Run) -> str:
    """Sentences that say what was trained, and how."""
    config = run.config
    model = config.get("model", "an unknown model")
    method = (f"the weighting {config['mitigation']} and the advantage "
              f"{config.get('advantage', 'grpo')}")
    text = f"{run.folder} trained {model} with {method}, seed {config.get('seed', 0)}."
    sampled, on_record = config.get("temperature", 1), config.get("columns_temperature", 1)
    if not sampled == on_record == 1:
        joint = "and" if sampled == on_record else "but"
        text += (f" It was sampled at temperature {sampled}, {joint} log p, entropy and s were "
                 f"computed at temperature {on_record}.")
    return text


def title_of(run: Run) -> str:
    """Plain GRPO on Countdown, 100 steps, seed 0"""
    config = run.config
    words = []
    for axis, plain in PLAIN_SETTINGS.items():
        name = config.get(axis, plain)
        if name != plain:
            words.append(f"{axis.replace('mitigation', 'weighting')} {name}")
    method = ", ".join(words) or "plain GRPO"
    of_task = f" on {task_name(config)}" if task_named(config) else ""
    count = f"{config['steps']} steps"
    if not run.is_done:
        count = f"{run.last_step} of {count}"
    return f"{method[0].upper()}{method[1:]}{of_task}, {count}, seed {config.get('seed', 0)}"
