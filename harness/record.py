"""The logs of a run: which lines have to be there after so many steps, and what is missing."""
from pathlib import Path

from engine.errors import UserError
from harness.files import read_lines
from harness.identity import check_origin, run_id_on_record

MODES = ("sampled", "greedy")  # of an evaluation


def lines_of_run(run: Path, name: str) -> list[dict]:
    """The lines of a log, each of which is of this run."""
    wanted = {"run_id": run_id_on_record(run)}
    lines = read_lines(run / name)
    for number, line in enumerate(lines, 1):
        check_origin(f"{run / name}, line {number}", line, wanted)
    return lines


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
    return [(step, mode) for step in steps for mode in MODES if (step, mode) not in made]


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
                        f"--eval_every is {config['eval_every']}, and {done} steps are done")
