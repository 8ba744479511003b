"""What a resume asks of a run's record: is it the run that is meant, are all steps there, and what
has changed since it stopped? The numbers of a run are read by lab/analysis/run_folders.py."""
from collections.abc import Iterator
from pathlib import Path

import torch

from lab.engine.errors import UserError, read_json, say
from lab.harness.record import Json, checkpoint_folders, read_lines
from lab.harness.settings import DEFAULTS, LabSettings
from run import checkpoints, of_steps

MODES = 2  # lines of evaluations.jsonl for each evaluation: sampled and greedy
# entries of config.json that are no settings, which some files here and in analysis/ look into
ENTRIES = {"made_of": dict, "versions": dict, "changed": list, "finished": int}


def run_config(run: Path) -> Json:
    path = run / "config.json"
    config = read_json(path) if path.exists() else {}
    if "mitigation" not in config:
        raise UserError(f"{run} is not a run folder: it has no config.json of a run")
    for name, kind in ENTRIES.items():
        if not isinstance(config.get(name, kind()), kind):
            raise UserError(f"{path}: {name} is {config[name]!r:.80}, and should be another thing")
    return config


def steps_finished(run: Path) -> int:
    """The steps for which nothing is missing: those of the last checkpoint. A run that keeps no
    checkpoints leaves the model of its last step, and then writes their number. Until then it is
    -1."""
    config, kept = run_config(run), [*checkpoints(run)]
    if "model_config" not in config and (run / "code").exists():  # of the book
        lines = read_lines(run / "metrics.jsonl")
        whole = lines and not [*missing_steps(run)] and is_evaluated(run, lines[-1]["step"])
        return lines[-1]["step"] if whole else -1
    if config.get("checkpoint_every") == 0 and config["steps"] in checkpoint_folders(run):
        kept.append(config["steps"])
    ended: int = config.get("finished", -1)
    return max([ended, *kept])


def is_evaluated(run: Path, step: int) -> bool:
    at = [line["step"] for line in read_lines(run / "evaluations.jsonl")].count(step)
    return at >= MODES or not run_config(run).get("eval_every")


def credit_steps(run: Path) -> list[int]:
    """The steps that have a credit file. Files with other names, as a backup, are left out."""
    return sorted(of_steps(Path(run).glob("credit/*.npz")))


def missing_steps(run: Path, done: int | None = None) -> Iterator[str]:
    """Sentences about what the record lacks up to step `done`, or up to the last one on record. A
    user may have removed the credit files, if it is all of them."""
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl")]
    last = max(steps, default=0) if done is None else done
    steps = [step for step in steps if step <= last]
    if len(steps) != last or steps != sorted(set(steps)):
        yield f"metrics.jsonl does not have one line for each of the steps 1 to {last}, in order"
    files = [step for step in credit_steps(run) if step <= last]
    if files and len(files) != last:
        yield f"not every one of the steps 1 to {last} has a credit file"
    config = run_config(run)
    evaluated = [line["step"] for line in read_lines(run / "evaluations.jsonl")]
    # a run that is being made has not evaluated its last step yet
    due = range(0, last + 1 if done else last, config.get("eval_every") or last + 1)
    if config.get("eval_every"):
        for at in due:
            if evaluated.count(at) != MODES:
                yield f"evaluations.jsonl does not have all lines of step {at}"
                break  # the first one is enough: there may be a damaged line of step 2 ** 40


def refuse_other(folder: Path, s: LabSettings, may_differ: set[str], way_out: str) -> None:
    """Raise an error unless the run in this folder has these settings."""
    config = run_config(folder)
    for name, value in s.to_json().items():
        before = config.get(name, DEFAULTS.get(name, value))  # earlier versions had fewer
        if name not in may_differ and before != value:
            raise UserError(f"{folder} was made with --{name} {before} instead of {value}: "
                            f"{way_out}")


def say_what_differs(folder: Path, done: int) -> None:
    """Say in which respects a run that was never stopped would give other numbers."""
    if not done:
        return
    torch_before = run_config(folder).get("versions", {}).get("torch")
    if torch_before not in (None, torch.__version__):
        say(f"the {done} steps that are made had torch {torch_before}, and this is "
            f"{torch.__version__}: what follows may differ in the last digits from a run that was "
            "never stopped")
    for sentence in missing_steps(folder, done):
        say(sentence)
