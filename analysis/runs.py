"""Reading run folders: settings, metrics, evaluations, and which steps have a credit file."""
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np

from engine.errors import UserError
from harness.credit_file import checkpoint_folders
from harness.credit_reading import credit_steps, read_columns
from harness.files import is_there, paths_in
from harness.identity import Evaluation
from harness.log_reading import (RunConfig, StepLine, lines_of_run, missing_evaluations,
                                 refuse_gaps, run_config)
from harness.settings import Settings
from harness.tasks import load_task

PLAIN = {"mitigation": "none", "advantage": "grpo", "loss": "policy", "placebo": "none"}


class Run(TypedDict):
    folder: Path
    config: RunConfig
    steps: list[int]  # with a credit file
    metrics: list[StepLine]
    evaluations: list[Evaluation]


def read_runs(folders: list[str]) -> list[Run]:
    """The runs in these folders. One that was named wrongly is an error; one that a pattern like
    runs/* caught is passed over, with a line."""
    runs, several = [], len(folders) > 1
    for folder in {os.path.realpath(name): Path(name) for name in folders}.values():
        if not is_there(folder):
            raise UserError(f"{folder} does not exist")
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


def read_run(folder: str | Path) -> Run:
    folder = Path(folder)
    config = run_config(folder)
    run: Run = {"folder": folder, "config": config, "steps": credit_steps(folder),
                "metrics": lines_of_run(folder, StepLine),
                "evaluations": lines_of_run(folder, Evaluation)}
    counts = [len(line["answer"]) for line in run["evaluations"]]
    for number, count in enumerate(counts, 1):  # differences are paired by problem
        if count != counts[0] or not count:
            raise UserError(f"{folder / 'evaluations.jsonl'}, line {number} has {count} answers, "
                            f"line 1 has {counts[0]}: they should be to the same problems")
    refuse_gaps(folder, config, run["metrics"], run["evaluations"], steps_made(run))
    lost = {line["step"] for line in run["metrics"]} - set(run["steps"])
    if lost and run["steps"]:
        print(f"note: {folder / 'credit'} has lost the files of {len(lost)} steps, the first is "
              f"step {min(lost)}: what follows of tokens is of the others", file=sys.stderr)
    return run


def steps_made(run: Run) -> int:
    """Up to which step all has to be on record. What training writes comes in order: the evaluation
    before the first step, then of each step its credit file, its line of metrics, its evaluation
    and its checkpoint. Of the last step all that follows may be missing; -1 if nothing has to be
    there. Probes leave credit files alone, and no `ranks` in config.json."""
    done = steps_done(run)
    kept = [step for step, path in checkpoint_folders(run["folder"]).items() if paths_in(path)]
    if done or "ranks" in run["config"]:
        kept += [step - 1 for step in run["steps"][-1:]]
    return max([done - 1, *kept])


def evaluations(run: Run, mode: str) -> list[Evaluation]:
    """Those that were `sampled` or `greedy`, in the order of their steps."""
    lines = [line for line in run["evaluations"] if line["mode"] == mode]
    return sorted(lines, key=lambda line: line["step"])


def share_asked_before(run: Run) -> float:
    """The share of the problems of training that were asked before, by their prompts in the credit
    files. A few may be by chance, many where a list of problems is read again."""
    prompts: list[bytes] = []
    for step in run["steps"]:
        columns = read_columns(run["folder"], step)
        ends = columns["prompt_start"][1:]
        prompts += [ids.tobytes() for ids in np.split(columns["prompt_ids"], ends)]
    return 1 - len(set(prompts)) / len(prompts) if prompts else 0.0


def steps_done(run: Run) -> int:
    return max((line["step"] for line in run["metrics"]), default=0)


def is_done(run: Run) -> bool:
    steps = run["config"]["steps"]
    missing = missing_evaluations(run["config"], run["evaluations"], steps, steps)
    return steps_done(run) >= steps and not missing


def task_of(config: Mapping[str, object]) -> type | None:
    """The class of a run's task; None if its module is not there any more."""
    try:
        return load_task(config.get("task", Settings.task))
    except (UserError, OSError):  # a name that no file can have
        return None
