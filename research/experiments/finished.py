"""The finished runs of an experiment, and what all reports ask of them."""
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from analysis.runs import evaluations, read_run
from analysis.statistics import Estimate, paired_difference
from engine.errors import UserError
from harness.files import is_file, read_json
from research.experiments.experiments import Experiment
from research.experiments.plan import PlannedRun

START, END = 0, -1  # places among the evaluations of a run
MOST_NAMED = 8      # runs that are not finished
PROBED = Path("results/study-probes")


@dataclass
class Study:
    """What a report is made of. `runs[arm][seed]` is a finished run as `read_run` gives it."""
    experiment: Experiment
    planned: list[PlannedRun]
    folder: Path                        # for the pictures
    runs: dict[str, dict[int, dict]] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)

    def of(self, arm: str) -> dict[int, dict]:
        """The finished runs of an arm by seed."""
        return self.runs.get(arm, {})

    @property
    def settings(self):
        return self.planned[0].settings

    def intro(self) -> list[str]:
        finished = len(self.planned) - len(self.unfinished)
        lines = [self.experiment.question, f"{finished} of {len(self.planned)} runs are finished."]
        if self.unfinished:
            named, more = self.unfinished[:MOST_NAMED], len(self.unfinished) - MOST_NAMED
            if more > 0:
                named = [*named, f"and {more} more"]
            lines.append(f"Not yet: {', '.join(named)}.")
        return lines


def read_study(experiment: Experiment, planned: list[PlannedRun], folder: Path) -> Study:
    study = Study(experiment, planned, folder)
    for run in planned:
        if run.is_finished():
            study.runs.setdefault(run.arm, {})[run.seed] = read_run(run.folder)
        else:
            steps = run.effort().steps
            study.unfinished.append(f"{run.name} ({steps} of {run.settings.steps} steps)")
    if not study.runs:
        raise UserError(f"no run of {experiment.name} is finished yet: {study.unfinished[0]}")
    return study


def probed(probe: str, time: str) -> Path | None:
    """What python -m research probes has put together, if it has."""
    folder = PROBED / f"{probe}-{time}"
    return folder if is_file(folder / "numbers.json") else None


def cells_of_arms(probe: str, time: str, table: str, *columns: str) -> dict[str, list]:
    """These cells of each arm's row; nothing if the probe was not asked."""
    folder = probed(probe, time)
    if folder is None:
        return {}
    numbers = read_json(folder / "numbers.json")
    try:
        tables = {found["name"]: found for found in numbers["tables"]}
        return {row["arm"]: [cell_of(row[column]) for column in columns]
                for row in tables[table]["rows"]}
    except (KeyError, TypeError):
        raise UserError(f"{folder}/numbers.json has no table of {table}: python -m research probes "
                        f"--only {probe} --report_only writes it again") from None


def cell_of(stored):
    """An interval is a list in JSON."""
    return tuple(stored) if isinstance(stored, list) else stored


def evaluated(run: dict, place: int, mode: str = "sampled") -> dict:
    """The line of evaluations.jsonl at this place."""
    lines = evaluations(run, mode)
    if not lines:
        raise UserError(f"{run['folder']} has no evaluation: the report needs --eval_every")
    return lines[place]


def middle(run: dict) -> int:
    """The place of the evaluation in the middle of training."""
    return (len(evaluations(run, "sampled")) - 1) // 2


def solved(run: dict, place: int) -> np.ndarray:
    """(problems,) which held-out problems one sampled answer each solves."""
    return np.array(evaluated(run, place)["answer"], float)


def mean_success(runs: dict[int, dict], place: int) -> float:
    """Held out, sampled, over seeds."""
    return float(np.mean([evaluated(run, place)["success"] for run in runs.values()]))


def ahead(study: Study, arm: str, other: str, place: int) -> tuple[int, Estimate | None]:
    """How many seeds both arms have, and how far the first is ahead on held-out problems."""
    mine, theirs = study.of(arm), study.of(other)
    rows = [solved(mine[seed], place) - solved(theirs[seed], place)
            for seed in sorted(set(mine) & set(theirs))]
    return len(rows), paired_difference(np.stack(rows)) if rows else None


def training_success(run: dict) -> np.ndarray:
    """(steps,) of the training batches."""
    return np.array([line["success"] for line in run["metrics"]])


def moving_mean(values: np.ndarray, count: int) -> np.ndarray:
    """The mean of each value and those before it, `count` in all; of fewer there is none."""
    if len(values) < count:
        return np.zeros(0)
    return np.convolve(values, np.full(count, 1 / count), mode="valid")
