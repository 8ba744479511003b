"""The runs of an experiment: the folder and the command of each, and how far it is.

A planned run is known from its flags alone, before anything is computed; what is on disk says the
rest. So an experiment can be stopped at any moment, and nothing has to be kept beside the runs.
"""
import shlex
from dataclasses import dataclass
from pathlib import Path

from analysis.runs import read_run
from harness.command_line import read_flags
from harness.credit_file import step_of
from engine.errors import UserError
from harness.files import PROJECT, is_there
from harness.resume import (is_finished, refuse_other_sources, refuse_to_overwrite,
                            what_differs)
from harness.identity import run_config
from harness.log_reading import lines_of_run
from harness.run_folder import RunFolder
from harness.settings import Settings, make_settings
from research.experiments.experiments import Experiment
from research.experiments.prices import METHODS
from research.pointers import NAMES as POINTERS

EVALUATED_SECONDS = 0.0033  # of an answer in an evaluation of the default run, on one core


@dataclass
class State:
    """How far a run is: steps on record, the seconds they took, and whether it is whole. A run in
    trouble can be neither made nor counted."""
    steps: int = 0
    seconds: float = 0.0
    finished: bool = False
    trouble: str = ""


class Planned:
    """What `arm`, `seed` and `folder` say of a run, or of a probe."""
    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.name}.log")


@dataclass
class PlannedRun(Planned):
    arm: str
    seed: int
    folder: Path
    flags: list[str]    # of train.py
    settings: Settings  # what train.py makes of them

    @property
    def steps(self) -> int:
        return self.settings.steps

    @property
    def seconds_a_step(self) -> float:
        """Of one core, with the shipped model (prices.py). A method that is not there counts as
        plain GRPO."""
        values = self.settings.to_json()
        an_answer = max(seconds for flags, seconds, *_ in METHODS.values()
                        if all(str(values.get(name.removeprefix("--"))) == value
                               for name, value in zip(flags.split()[::2], flags.split()[1::2])))
        return an_answer * self.settings.questions * self.settings.answers

    def evaluated_after(self, step: int) -> int:
        """Answers of the evaluations that are left."""
        s = self.settings
        if not s.eval_every:
            return 0
        times = -(-(s.steps - step) // s.eval_every) + (step == 0)
        return times * s.eval_tasks * (s.eval_answers + (s.eval_modes == "both"))

    @property
    def command(self) -> list[str]:
        program = [str(PROJECT / "train.py")]
        if self.settings.mitigation in POINTERS:
            program = ["-m", "research.train"]
        return [*program, *self.flags]

    def state(self) -> State:
        """As it is on disk; a folder that is damaged, or is of another run, is in trouble."""
        if not is_there(self.folder):
            return State()
        try:
            self.refuse_another()
            finished = self.is_finished()
            if finished:
                read_run(self.folder)  # raises where a line is not of this program
            return State(*self.progress(), finished)
        except UserError as error:
            return State(trouble=str(error))

    def is_finished(self) -> bool:
        run = RunFolder(self.folder)
        checkpoints = run.checkpoints()
        done = step_of(checkpoints[-1]) if checkpoints else 0
        config = self.settings.to_json() | run_config(self.folder)
        return is_finished(run, config, self.settings, done)

    def progress(self) -> tuple[int, float]:
        lines = lines_of_run(self.folder, "metrics.jsonl")
        return len(lines), sum((line["seconds"] or 0.0 for line in lines), 0.0)

    def refuse_another(self) -> None:
        """The folder may hold a run with other settings, or of a model that has changed since."""
        difference = what_differs(self.settings)
        if difference:
            refuse_to_overwrite(self.folder, difference)
        made_of = run_config(self.folder).get("made_of") or {}
        try:
            refuse_other_sources(made_of, self.settings, set(made_of))
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None


def plan_runs(experiment: Experiment, out: str, seeds: int) -> list[PlannedRun]:
    """All arms with seed 0, then all with seed 1, and so on: whatever is finished is paired."""
    return [plan_run(experiment, arm, seed, out) for seed in experiment.numbers(seeds)
            for arm in experiment.arms]


def plan_run(experiment: Experiment, arm: str, seed: int, out: str) -> PlannedRun:
    """One thread each: runs side by side are faster than threads are, and each is the same run
    whatever runs beside it."""
    folder = Path(out) / experiment.place / f"{arm}-s{seed}"
    flags = ["--continue", "--threads", "1", "--out", str(folder)]
    flags += shlex.split(f"{experiment.common} {experiment.arms[arm]}")
    flags += ["--seed", str(seed)]
    given = read_flags(flags)
    given.pop("continue")
    return PlannedRun(arm, seed, folder, flags, make_settings(given))


def seconds_left(runs: list[PlannedRun], states: dict[str, State], processes: int) -> float:
    """Until all of these runs are finished. A step takes what it took so far in its arm, or else
    what it took here before. `states` are by the name of the run."""
    left = []
    for run in runs:
        done = states[run.name].steps
        of_arm = [states[other.name] for other in runs if other.arm == run.arm]
        known = sum(state.steps for state in of_arm)
        each = sum(state.seconds for state in of_arm) / known if known else run.seconds_a_step
        left.append(each * max(0, run.steps - done)
                    + EVALUATED_SECONDS * run.evaluated_after(done))
    return max(sum(left) / processes, max(left, default=0.0))


def in_words(seconds: float) -> str:
    """1 h 20 min of 4,800; half a minute counts as one."""
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"about {hours} h {minutes:02d} min" if hours else f"about {minutes} min"
