"""The runs of an experiment: the folder and the command of each, and how far it is.

A planned run is known from its flags alone, before anything is computed; what is on disk says the
rest. So an experiment can be stopped at any moment, and nothing has to be kept beside the runs.
"""
import shlex
from dataclasses import dataclass
from pathlib import Path

from harness.command_line import read_flags
from harness.credit_file import step_of
from engine.errors import UserError
from harness.files import PROJECT, is_file, is_there, read_lines
from harness.provenance import refuse_other_sources
from harness.resume import is_finished, refuse_to_overwrite, what_differs
from harness.run_folder import RunFolder, run_config
from harness.settings import Settings, make_settings
from research.experiments.experiments import Experiment


@dataclass
class Effort:
    """What a run has behind it: its steps, and the seconds that they took."""
    steps: int
    seconds: float


@dataclass
class Pace:
    """How many were done in how many seconds."""
    count: int = 0
    seconds: float = 0.0

    def add(self, count: int, seconds: float) -> None:
        self.count += count
        self.seconds += seconds

    @property
    def each(self) -> float:
        return self.seconds / self.count


@dataclass
class PlannedRun:
    arm: str
    seed: int
    folder: Path
    flags: list[str]    # of train.py
    settings: Settings  # what train.py makes of them

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"

    @property
    def steps(self) -> int:
        return self.settings.steps

    @property
    def answers_a_step(self) -> int:
        return self.settings.questions * self.settings.answers

    @property
    def command(self) -> list[str]:
        return [str(PROJECT / "train.py"), *self.flags]

    @property
    def log(self) -> Path:
        """What train.py prints."""
        return self.folder.with_name(f"{self.name}.log")

    def is_finished(self) -> bool:
        if not is_file(self.folder / "config.json"):
            return False
        run = RunFolder(self.folder)
        checkpoints = run.checkpoints()
        done = step_of(checkpoints[-1]) if checkpoints else 0
        return is_finished(run, run_config(self.folder), self.settings, done)

    def effort(self) -> Effort:
        lines = read_lines(self.folder / "metrics.jsonl")
        return Effort(len(lines), sum(line.get("seconds") or 0.0 for line in lines))

    def refuse_another(self) -> None:
        """The folder may hold a run with other settings, or of a model that has changed since."""
        if not is_there(self.folder):
            return
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
    runs = []
    most = max(experiment.seeds_of(arm, seeds) for arm in experiment.arms)
    for seed in range(most):
        for arm in experiment.arms:
            if seed < experiment.seeds_of(arm, seeds):
                runs.append(plan_run(experiment, arm, seed, out))
    return runs


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


def seconds_left(runs: list[PlannedRun], efforts: dict[str, Effort],
                 processes: int) -> float | None:
    """Until all of these runs are finished, from the steps on record; None if there are none yet.

    A step takes what one of its arm took so far. Of an arm without any step the answers take what
    an answer took in the other arms. `efforts` are by the name of the run.
    """
    pace, of_all = {}, Pace()
    for run in runs:
        steps, seconds = efforts[run.name].steps, efforts[run.name].seconds
        pace.setdefault(run.arm, Pace()).add(steps, seconds)
        of_all.add(steps * run.answers_a_step, seconds)
    if not of_all.count:
        return None
    left = []
    for run in runs:
        one_step = of_all.each * run.answers_a_step
        if pace[run.arm].count:
            one_step = pace[run.arm].each
        left.append(one_step * max(0, run.steps - efforts[run.name].steps))
    return max(sum(left) / processes, max(left))


def in_words(seconds: float | None) -> str:
    """1 h 20 min of 4,800; half a minute counts as one."""
    if seconds is None:
        return "no step is done yet that says how long it takes"
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"about {hours} h {minutes:02d} min" if hours else f"about {minutes} min"
