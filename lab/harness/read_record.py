"""What a resume asks of a run's record: its settings, and whether all steps are there. The numbers
of a run are read by lab/analysis/run_folders.py."""
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.engine.errors import UserError, read_json
from lab.harness.record import Json, checkpoint_folders, read_lines
from run import checkpoints, of_steps

MODES = 2  # lines of evaluations.jsonl for each evaluation: sampled and greedy
# entries of config.json that are no settings, which some files here and in analysis/ look into
ENTRIES = {"made_of": dict, "functions": dict, "versions": dict, "changed": list, "finished": int}


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
    if config.get("checkpoint_every") == 0 and config["steps"] in checkpoint_folders(run):
        kept.append(config["steps"])
    ended: int = config.get("finished", -1)
    return max([ended, *kept])


def is_complete(config: Json, metrics: Sequence[Json], evaluations: Sequence[Json]) -> bool:
    """Whether all steps are on record, and the evaluations after the last one."""
    steps = config["steps"]
    if max((line["step"] for line in metrics), default=0) < steps:
        return False
    if not config.get("eval_every"):
        return True
    return len([line for line in evaluations if line["step"] == steps]) >= MODES


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
