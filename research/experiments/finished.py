"""The finished runs of an experiment, and what a report asks of them."""
from dataclasses import dataclass, field

import numpy as np

from analysis.runs import evaluations, read_run
from analysis.statistics import Estimate, paired_difference
from engine.errors import UserError
from research.experiments.experiments import Experiment
from research.experiments.plan import PlannedRun

START, END = 0, -1    # places among the evaluations of a run
MOST_NAMED = 8        # runs that are not finished
SEEN = 0.05
FEWEST_SEEDS = 2      # before anything is said: a single run may collapse, in any arm


@dataclass
class Study:
    """What a report is made of. `runs[arm][seed]` is a finished run as `read_run` gives it."""
    experiment: Experiment
    planned: list[PlannedRun]
    runs: dict[str, dict[int, dict]] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the reason by the name of the run

    def of(self, arm: str) -> dict[int, dict]:
        """The finished runs of an arm by seed."""
        return self.runs.get(arm, {})

    def intro(self) -> list[str]:
        finished = sum(map(len, self.runs.values()))
        lines = [self.experiment.question, f"{finished} of {len(self.planned)} runs are finished."]
        named, more = self.unfinished[:MOST_NAMED], self.unfinished[MOST_NAMED:]
        if named:
            rest = [f"and {len(more)} more"] if more else []
            lines.append(f"Not yet: {', '.join([*named, *rest])}.")
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


def evaluated(run: dict, place: int) -> dict:
    """The line of evaluations.jsonl at this place, of sampled answers."""
    return evaluations(run, "sampled")[place]


def middle(run: dict) -> int | None:
    """The place of the evaluation in the middle of training, if there is one."""
    count = len(evaluations(run, "sampled"))
    return (count - 1) // 2 if count > 2 else None


def late_success(run: dict) -> float:
    """The mean of the sampled evaluations after the middle of training: the last one alone has the
    chance of its answers in it, and of where the curve just was."""
    lines = evaluations(run, "sampled")
    late = [line["success"] for line in lines if 2 * line["step"] > run["config"]["steps"]]
    return float(np.mean(late or lines[-1]["success"]))


def success_by_seed(runs: dict[int, dict], place: int) -> list[float]:
    """Held out, sampled."""
    return [evaluated(run, place)["success"] for run in runs.values()]


def ahead(study: Study, arm: str, other: str, place: int) -> tuple[int, Estimate | None]:
    """How many seeds both arms have, and how far the first is ahead on held-out problems."""
    mine, theirs = study.of(arm), study.of(other)
    rows = [np.array(evaluated(mine[seed], place)["answer"], float)
            - evaluated(theirs[seed], place)["answer"] for seed in sorted(set(mine) & set(theirs))]
    return len(rows), paired_difference(np.stack(rows)) if rows else None


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


def curve_of(run: dict, price: str) -> tuple[np.ndarray, np.ndarray]:
    """Held-out success, sampled, against the price."""
    lines, cost = evaluations(run, "sampled"), cost_of(run, price)
    return cost[[line["step"] for line in lines]], np.array([line["success"] for line in lines])


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


def moving_mean(values: np.ndarray, count: int) -> np.ndarray:
    """The mean of each value and those before it, `count` in all; of fewer there is none."""
    if len(values) < count:
        return np.zeros(0)
    return np.convolve(values, np.full(count, 1 / count), mode="valid")
