"""The finished runs of an experiment, and what a report asks of them."""
from dataclasses import dataclass, field

import numpy as np

from analysis.runs import evaluations, read_run
from analysis.statistics import Estimate, mean_over
from engine.errors import UserError
from research.experiments.experiments import Experiment
from research.experiments.plan import PlannedRun

START, END = 0, -1    # places among the evaluations of a run
MOST_NAMED = 8        # runs that are not finished
SEEN = 0.05
FEWEST_SEEDS = 3      # before anything is said: two may agree by luck


@dataclass
class Study:
    """What a report is made of. `runs[arm][seed]` is a finished run as `read_run` gives it."""
    experiment: Experiment
    planned: list[PlannedRun]
    runs: dict[str, dict[int, dict]] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the reason by the name of the run

    def intro(self) -> list[str]:
        finished = sum(map(len, self.runs.values()))
        lines = [self.experiment.question, f"{finished} of {len(self.planned)} runs are finished."]
        if self.unfinished:
            more = len(self.unfinished) - MOST_NAMED
            rest = [f"and {more} more"] if more > 0 else []
            lines.append(f"Not yet: {', '.join([*self.unfinished[:MOST_NAMED], *rest])}.")
        return lines + [f"Failed: {name}: {reason}" for name, reason in self.failed.items()]


def read_study(experiment: Experiment, planned: list[PlannedRun]) -> Study:
    """A run that cannot be read is named with the reason, and the others are read."""
    study = Study(experiment, planned)
    for run in planned:
        state = run.state()
        if state.finished and not state.trouble:
            made = read_run(run.folder)
            if evaluations(made, "sampled"):
                study.runs.setdefault(run.arm, {})[run.seed] = made
                continue
            state.trouble = f"{run.folder} has no evaluation: a report needs --eval_every"
        if state.trouble:
            study.failed[run.name] = state.trouble
        else:
            study.unfinished.append(f"{run.name} ({state.steps} of {run.steps} steps)")
    if not study.runs:
        raise UserError(f"no run of {experiment.name} is finished. {study.intro()[-1]}")
    return study


PRICES = {  # what a run costs, from its metrics
    "seconds": ("processor_seconds",), "tokens": ("tokens", "extra_tokens"),
    "rewards": ("answers", "extra_answers")}


def cost_of(run: dict, price: str) -> np.ndarray:
    """(1 + steps,) what the training has cost after each step, evaluations not counted. What
    answers have cost that were there before is not known."""
    if run["config"].get("pairs") and price != "seconds":
        return np.full(1 + len(run["metrics"]), np.nan)
    answers = run["config"]["questions"] * run["config"]["answers"]
    steps = [sum({"answers": answers, **line}.get(key) or 0 for key in PRICES[price])
             for line in run["metrics"]]
    return np.cumsum([0.0, *steps])


def values_of(run: dict) -> dict:
    """What tables are made of and results keep: success at every evaluation, and the price."""
    lines = evaluations(run, "sampled")
    steps = [line["step"] for line in lines]
    costs = {price: cost_of(run, price)[steps] for price in PRICES}
    known = {price: cost.round(3).tolist() for price, cost in costs.items()
             if np.isfinite(cost[-1])}
    return {"steps": steps, "success": [line["success"] for line in lines], **known}


# one run as values_of has it; of an arm, by seed; of an experiment, by arm
Curve = dict[str, list]
OfArm = dict[int, Curve]
Values = dict[str, OfArm]


def late_success(curve: Curve) -> float:
    """The mean of the evaluations after the middle of training: the last one alone has the chance
    of its answers in it, and of where the curve just was."""
    steps, success = map(np.array, (curve["steps"], curve["success"]))
    return float(success[2 * steps > steps[-1]].mean()) if steps[-1] else curve["success"][-1]


def paired(mine: dict[int, float], theirs: dict[int, float], tests: int = 1) -> Estimate:
    """The mean difference over the seeds that both have, by Student's t."""
    return mean_over([mine[seed] - theirs[seed] for seed in mine if seed in theirs], tests)


def verdict_on(seeds: int, difference: float, p: float) -> str:
    if seeds < FEWEST_SEEDS or not np.isfinite(p):
        return "too few seeds"
    if p >= SEEN:
        return "open"
    return "ahead" if difference > 0 else "behind"


def told_apart(verdicts: dict[str, str]) -> list[str]:
    """`verdicts` by arm, as two sentences."""
    def named(word: str) -> str:
        return ", ".join(arm for arm in verdicts if verdicts[arm] == word) or "no arm"

    return [f"Ahead of plain GRPO: {named('ahead')}.", f"Behind it: {named('behind')}."]


def numbers(runs: dict[int, dict], key: str) -> list[list[float]]:
    """Of each run this number of its steps, where a step has it."""
    return [[line[key] for line in run["metrics"] if line.get(key) is not None]
            for run in runs.values()]
