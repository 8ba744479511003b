"""Reading run folders: settings, metrics, evaluations, and which steps have a credit file."""
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import numpy as np

from lab.engine.methods import METHODS
from lab.engine.errors import UserError, did_you_mean
from lab.harness.flags import Flag, check_value, flags_of
from lab.harness.step_lines import METRICS
from lab.harness.read_record import credit_steps, is_complete, read_columns, run_config
from lab.harness.record import Json, read_lines
from lab.harness.tasks import load_task
from lab.harness.settings import MODES, OPTIONS

PLAIN_SETTINGS = {"mitigation": "none", "advantage": "grpo", "placebo": "none"}


class Run(TypedDict):
    folder: Path
    config: Json
    steps: list[int]  # with a credit file
    metrics: list[Json]
    evaluations: list[Json]


def existing(name: str | None = None) -> Path:
    """A run folder as it was typed; without a name the newest in runs/, which is printed."""
    if name:
        path = Path(name)
        if not path.exists():
            hint = did_you_mean(path) or ": python train.py --mitigation none makes a run"
            if (Path("runs") / path).exists():
                hint = f"; did you mean {Path('runs') / path}?"
            raise UserError(f"{path} does not exist{hint}")
        return path
    configs = list(Path("runs").glob("*/config.json"))
    if not configs:
        raise UserError("which run? There is none in runs/ yet: python train.py makes one")
    newest = max(configs, key=lambda path: path.stat().st_mtime).parent
    print(f"{newest}, the newest run")
    return newest


def read_run(folder: str | Path) -> Run:
    folder = Path(folder)
    config = run_config(folder)
    refuse_other_types(folder, config)
    return {"folder": folder, "config": config, "steps": credit_steps(folder),
            "metrics": read_metrics(folder),
            "evaluations": read_evaluations(folder)}


def refuse_other_types(folder: Path, config: Json) -> None:
    """Refuse a setting of another type than its flag has, as a config.json may have that somebody
    has edited. A user may have changed the type of a method's own flag since the run was made."""
    flags_of_run = flags_of_methods(config)
    for name, flag in OPTIONS.items():
        if name not in flags_of_run and name in config:
            try:  # a method may have gone since
                check_value(name, config[name], replace(flag, choices=()))
            except UserError as error:
                raise UserError(f"{folder / 'config.json'}: {error}") from None


def read_metrics(folder: Path) -> list[Json]:
    """The lines of metrics.jsonl; a metric that a line lacks is None."""
    return [dict.fromkeys(METRICS) | line for line in read_lines(folder / "metrics.jsonl")]


NUMBERS = ("success_low", "success_high", "format_mean", "finished_mean", "length_mean")


def read_evaluations(folder: Path) -> list[Json]:
    """The lines of evaluations.jsonl, whose answers are compared problem by problem."""
    path = folder / "evaluations.jsonl"
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        answers = line.get("answer")
        if not isinstance(answers, list) or len(answers) != len(lines[0]["answer"]) or not all(
                isinstance(answer, int | float) for answer in answers):
            raise UserError(f"{path}, line {number}: answer should be a list with a number for "
                            "each held-out problem, the same ones in every line")
        if line.get("mode") not in MODES or not isinstance(line.get("success"), int | float):
            raise UserError(f"{path}, line {number}: mode should be {' or '.join(MODES)}, and "
                            "success a number")
        for name in NUMBERS:
            if not isinstance(line.get(name), int | float):
                raise UserError(f"{path}, line {number}: {name} should be a number, and is "
                                f"{line.get(name)!r:.80}")
    return lines


def evaluations(run: Run, mode: str) -> list[Json]:
    """The evaluations that were `sampled` or `greedy`, in the order of their steps."""
    lines = [line for line in run["evaluations"] if line["mode"] == mode]
    return sorted(lines, key=lambda line: line["step"])


def share_seen_before(run: Run) -> float:
    """The share of the training problems that the model had seen before, by their prompts in the
    credit files. A few may repeat by luck, many where a list of problems is read again. Problems
    that all have one prompt, as games with a secret, differ in something else: none is repeated."""
    prompts: list[bytes] = []
    for step in run["steps"]:
        columns = read_columns(run["folder"], step)
        ends = columns["prompt_start"][1:]
        prompts += [ids.tobytes() for ids in np.split(columns["prompt_ids"], ends)]
    different = len(set(prompts))
    return 1 - different / len(prompts) if different > 1 else 0.0


def steps_done(run: Run) -> int:
    return max((line["step"] for line in run["metrics"]), default=0)


def is_done(run: Run) -> bool:
    return is_complete(run["config"], run["metrics"], run["evaluations"])


def task_of(config: Mapping[str, object]) -> type | None:
    """The class of a run's task; None if the task is not on record, or its module is not there any
    more."""
    if "task" not in config:
        return None
    try:
        return load_task(config["task"])
    except (UserError, OSError):  # a name that no file can have
        return None


def flags_of_methods(config: Mapping[str, object]) -> dict[str, Flag]:
    """The flags of a run's weighting and advantage, if these exist here."""
    flags: dict[str, Flag] = {}
    for axis, choices in METHODS.items():
        name = str(config.get(axis))  # the defaults have no flags
        if name in choices:
            flags |= flags_of(choices[name])
    return flags
