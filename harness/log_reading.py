"""The logs of a run, read: each line is of this run, and no step is missing.

Whether a column holds what it should is asked by whoever writes it (harness/own_code.py,
harness/tasks.py).
"""
from pathlib import Path

from engine.errors import UserError
from harness.files import read_lines
from harness.identity import MODES, check_origin, run_id_on_record

MAY_BE_MISSING = {  # in a run of an older version or of another trainer; columns by log
    "metrics.jsonl": ("success", "entropy", "gradient_norm", "seconds"),
    "evaluations.jsonl": ("shown",), "samples.jsonl": ()}


def lines_of_run(run: Path, name: str) -> list[dict]:
    """The lines of a log, each of which is of this run."""
    wanted = {"run_id": run_id_on_record(run)}
    lines = read_lines(run / name)
    for number, line in enumerate(lines, 1):
        check_origin(f"{run / name}, line {number}", line, wanted)
        for column in MAY_BE_MISSING[name]:
            line.setdefault(column)
    return lines


def last_step(run: Path) -> int:
    """The last step on record; 0 before the first."""
    return max((line["step"] for line in lines_of_run(run, "metrics.jsonl")), default=0)


def missing_evaluations(config: dict, evaluations: list[dict], done: int) -> list[tuple[int, str]]:
    """Step and mode of those that a run with `done` steps has to have. A probe evaluates nothing;
    its config.json has no `ranks`."""
    every = config.get("eval_every", 0) if "ranks" in config else 0
    if not every:
        return []
    steps = [*range(0, done + 1, every)]
    if done == config["steps"] and done % every:
        steps.append(done)
    made = {(line["step"], line.get("mode")) for line in evaluations}
    modes = MODES[config.get("eval_modes", "both")]
    return [(step, mode) for step in steps for mode in modes if (step, mode) not in made]


def refuse_gaps(run: Path, config: dict, metrics: list[dict], evaluations: list[dict],
                done: int) -> None:
    """Stop unless every step up to `done` is on record, in order, with its evaluation."""
    path = run / "metrics.jsonl"
    for number, line in enumerate(metrics, 1):
        if line["step"] != number:
            raise UserError(f"{path}, line {number} is step {line['step']}: lines are missing, "
                            "doubled or out of order")
    if len(metrics) < done:
        raise UserError(f"{path} has {len(metrics)} lines, while there are files from after step "
                        f"{done}: lines are missing")
    for step, mode in missing_evaluations(config, evaluations, done):
        raise UserError(f"{run}/evaluations.jsonl has lost the {mode} evaluation at step {step}: "
                        f"{done} steps are done. --resume makes it again once the checkpoints from "
                        f"step {step} on are moved away; without one from before, train again "
                        "with another --out")
