"""Reading run folders: settings, metrics, evaluations, and which steps have a credit file."""
import os
import sys
from collections.abc import Callable
from pathlib import Path

from engine.errors import UserError
from harness.credit_file import LARGEST, checkpoint_folders
from harness.credit_reading import credit_steps
from harness.files import did_you_mean, is_file, is_there, paths_in
from harness.flags import shortened
from harness.identity import (MODES, lines_of_run, missing_evaluations, refuse_gaps,
                              run_config)

NEEDED = ("mitigation", "steps", "seed", "model")  # every run's config.json says what they are


def read_runs(folders: list[str]) -> list[dict]:
    """The runs in these folders. One that was named wrongly is an error; one that a pattern like
    runs/* caught is passed over, with a line."""
    runs, several = [], len(folders) > 1
    for folder in {os.path.realpath(name): Path(name) for name in folders}.values():
        if not is_there(folder):
            raise UserError(f"{folder} does not exist{did_you_mean(folder)}")
        if several and not is_there(folder / "config.json"):
            print(f"passed over: {folder} is not a run folder, it has no config.json",
                  file=sys.stderr)
            continue
        run = read_run(folder)
        if run["metrics"] or run["evaluations"] or run["steps"]:
            runs.append(run)
        elif several:
            print(f"passed over: {folder} has no finished step yet", file=sys.stderr)
    if not runs:
        raise UserError(f"none of these is a run folder with a finished step: {', '.join(folders)}")
    return runs


def newest_run() -> str:
    """The run in runs/ that wrote last, for whoever names none."""
    written = {folder: max(os.stat(path).st_mtime for path in paths_in(folder) if is_file(path))
               for folder in paths_in("runs") if is_there(folder / "config.json")}
    if not written:
        raise UserError("there is no run in runs/ yet: python train.py --mitigation none makes one")
    newest = max(written, key=written.get)
    print(f"no run is named, so this is the one that wrote last: {newest}", file=sys.stderr)
    return str(newest)


def read_run(folder: str | Path) -> dict:
    folder = Path(folder)
    config = run_config(folder)
    for key in NEEDED:
        if key not in config:
            raise UserError(f"{folder / 'config.json'} says nothing of {key}")
    run = {"folder": folder, "config": config, "steps": credit_steps(folder)}
    for name in VALUES:
        run[name] = lines_of_run(folder, f"{name}.jsonl")
        check_lines(folder / f"{name}.jsonl", run[name], VALUES[name])
    check_evaluations(folder / "evaluations.jsonl", run["evaluations"])
    refuse_gaps(folder, config, run["metrics"], run["evaluations"], steps_made(run))
    return run


def is_number(value) -> bool:
    """True and False are none, and neither is what no float can hold."""
    return type(value) in (int, float) and abs(value) <= LARGEST  # not so for NaN


def is_share(value) -> bool:
    return is_number(value) and 0 <= value <= 1


def is_step(value) -> bool:
    return type(value) is int and 0 <= value < 2 ** 31


def are_answers(values) -> bool:
    """The share of right answers to each of the held-out problems: 0 or 1 of a single answer."""
    return isinstance(values, list) and all(map(is_share, values))


def or_null(is_right: Callable) -> Callable:
    return lambda value: value is None or is_right(value)


VALUES = {  # what is read of each line, and what it has to be
    "metrics": {"step": is_step, "success": or_null(is_share), "entropy": or_null(is_number),
                "gradient_norm": or_null(is_number), "seconds": or_null(is_number)},
    "evaluations": {"step": is_step, "mode": lambda value: value in MODES["both"],
                    "success": is_share, "success_low": is_share, "success_high": is_share,
                    "format_mean": is_number, "finished_mean": is_number,
                    "length_mean": is_number, "answer": are_answers,
                    "shown": or_null(lambda value: isinstance(value, list))}}


def check_lines(path: Path, lines: list[dict], tests: dict) -> None:
    """A number that may be null may also be missing, in a run of an older version."""
    for number, line in enumerate(lines, 1):
        for key, is_right in tests.items():
            value = line.setdefault(key)
            if not is_right(value):
                raise UserError(f"{path}, line {number} is not of this program: its {key} is "
                                f"{shortened(repr(value))}")


def check_evaluations(path: Path, lines: list[dict]) -> None:
    """Differences are paired by problem."""
    for number, line in enumerate(lines, 1):
        count = len(line["answer"])
        if count != len(lines[0]["answer"]) or not count:
            raise UserError(f"{path}, line {number} has {count} answers, line 1 has "
                            f"{len(lines[0]['answer'])}: they should be to the same problems")


def steps_made(run: dict) -> int:
    """Up to which step all has to be on record. What training writes comes in order: the evaluation
    before the first step, then of each step its credit file, its line of metrics, its evaluation
    and its checkpoint. Of the last step all that follows may be missing; -1 if nothing has to be
    there. Probes leave credit files alone, and no `ranks` in config.json."""
    done = steps_done(run)
    kept = [step for step, path in checkpoint_folders(run["folder"]).items() if paths_in(path)]
    if done or "ranks" in run["config"]:
        kept += [step - 1 for step in run["steps"][-1:]]
    return max([done - 1, *kept])


def evaluations(run: dict, mode: str) -> list[dict]:
    """Those that were `sampled` or `greedy`, in the order of their steps."""
    lines = [line for line in run["evaluations"] if line["mode"] == mode]
    return sorted(lines, key=lambda line: line["step"])


def steps_done(run: dict) -> int:
    return max((line["step"] for line in run["metrics"]), default=0)


def is_done(run: dict) -> bool:
    """Whether it has all its steps, and their evaluations."""
    steps = run["config"]["steps"]
    missing = missing_evaluations(run["config"], run["evaluations"], steps)
    return steps_done(run) >= steps and not missing
