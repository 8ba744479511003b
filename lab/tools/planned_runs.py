"""Training runs of several arms and seeds: planned, made side by side, and used again.

    experiment = Experiment(plan_run)           # plan_run("span", 3): a PlannedRun
    keys = [("none", 0), ("span", 0), ("none", 1), ("span", 1)]
    failed = experiment.make(keys, command, 2)  # train what is missing, two runs at a time
    arms = experiment.arms(keys)                # arms["span"][0] is a finished run
    gains(over_baseline(arms, "none"))          # in pairs (lab/analysis/comparison.py)

`lab idea` and `python -m lab experiment` are such experiments. `finished_run` decides for all of
them whether a finished run is used again.

A planned run is a command of train.py with --continue, so it is made, resumed, or left as it is.
Everything can be stopped at any moment, and the same command continues. A run that another process
is writing fails with a sentence.
"""
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.analysis.run_folders import Run, read_run
from lab.engine.errors import PROJECT, UserError
from lab.harness.flags import MOST_THREADS, Flag
from lab.harness.made_of import made_of
from lab.harness.read_record import missing_steps, run_config, steps_finished
from lab.harness.record import find_folder
from lab.harness.resume import differing, refuse_other
from lab.harness.screen import StopRequest, say, show_status
from run import lock, remove
from lab.harness.settings import LabSettings, is_large, make_settings, read_flags

PAUSE = 0.5             # seconds between two looks at the processes
PROCESSES = Flag(0, "how many runs are made at a time. 0 means one for each core that this program "
                 "may use, but for a large model and on a GPU one",
                 least=0, most=MOST_THREADS)

WITHOUT_EFFECT = {"out", "checkpoint_every", "track"}  # on the numbers of a run
Key = tuple[str, int]  # arm and seed
Arms = dict[str, dict[int, Run]]  # finished runs, by arm and seed


@dataclass
class PlannedRun:
    arm: str
    seed: int
    folder: Path
    flags: list[str]  # of train.py, without --out, --seed and --steps
    steps: int
    program: tuple[str, ...] = (str(PROJECT / "train.py"),)
    threads: int = 1      # unless its flags say so
    keeps_checkpoints: bool = True  # if not, it has none when it is finished

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        words = [*self.program, "--continue", "--out", str(self.folder), *self.flags,
                 "--steps", str(self.steps), "--seed", str(self.seed)]
        if not self.keeps_checkpoints:
            words += ["--checkpoint_every", "0"]
        return words

    def is_finished(self) -> bool:
        if not (self.folder / "config.json").exists():
            return False
        try:
            return steps_finished(self.folder) >= self.steps
        except UserError as error:
            raise UserError(f"{error}. Remove {self.folder}, and the run is made again") from None

    def steps_made(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


class Runs:
    """The planned runs, of which `make` makes those that are not finished.

    `failed` has what went wrong, by arm. When a run has failed, the others of its arm are not
    started. Those that have started are finished.
    """

    def __init__(self, planned: list[PlannedRun], processes: int):
        self.planned, self.processes = planned, processes
        self.waiting = [run for run in planned if not run.is_finished()]
        self.running: list[tuple[PlannedRun, subprocess.Popen[bytes]]] = []
        self.failed: dict[str, str] = {}
        self.given_up = 0
        self.finished_before, self.started_at = len(planned) - len(self.waiting), time.time()

    @property
    def finished(self) -> int:
        return len(self.planned) - len(self.waiting) - len(self.running) - self.given_up

    def make(self) -> bool:
        """Make them. Returns False if it was stopped by Ctrl-C or SIGTERM."""
        with StopRequest() as stop:
            try:
                while (self.waiting or self.running) and not stop.requested:
                    self.start_some()
                    time.sleep(PAUSE)
                    self.collect()
                    self.show()
            finally:  # none are running unless it was stopped, or something went wrong here
                for _, process in self.running:  # each ends its step, and leaves a checkpoint
                    process.send_signal(signal.SIGTERM)
                for _, process in self.running:
                    process.wait()
                show_status("")
        return not stop.requested

    def start_some(self) -> None:
        while self.waiting and len(self.running) < self.processes:
            run = self.waiting.pop(0)
            try:
                self.start(run)
            except UserError as error:  # another program writes it
                self.give_up(run, str(error))

    def start(self, run: PlannedRun) -> None:
        """Start a run in a session of its own. Ctrl-C at the terminal then reaches this program
        alone, which signals each of its runs once."""
        run.log.parent.mkdir(parents=True, exist_ok=True)
        if (run.folder / "config.json").exists():
            lock(run.folder).close()  # otherwise it is another program's, whose log it would write
        with open(run.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *run.command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(run.threads)},
                start_new_session=True)
        self.running.append((run, process))

    def collect(self) -> None:
        for run, process in list(self.running):
            if process.poll() is None:
                continue
            self.running.remove((run, process))
            if run.is_finished():
                if not run.keeps_checkpoints:  # of a large model each takes gigabytes
                    remove(run.folder / "checkpoints")
                say(f"finished: {run.name} ({self.finished} of {len(self.planned)})"
                    f"{self.time_left()}")
            else:
                self.give_up(run, f"{why_it_ended(process, run.log)} (log: {run.log})")

    def give_up(self, run: PlannedRun, reason: str) -> None:
        """Keep the reason, and drop the runs that are not started because of it."""
        self.failed.setdefault(run.arm, f"{run.name}: {reason}")
        dropped = [other for other in self.waiting if other.arm == run.arm]
        self.waiting = [other for other in self.waiting if other not in dropped]
        self.given_up += 1 + len(dropped)
        say(f"failed: {run.name}: {reason}")

    def show(self) -> None:
        parts = [f"{self.finished} of {len(self.planned)} finished{self.time_left()}"]
        parts += [f"{run.name} {run.steps_made()}/{run.steps}" for run, _ in self.running]
        show_status(", ".join(parts))

    def time_left(self) -> str:
        """The time until the program ends, as ", about 9 min left", if the other runs take as long
        as those that were made here; "" before the first of them is finished."""
        made = self.finished - self.finished_before
        left = len(self.waiting) + len(self.running)
        if not made or not left:
            return ""
        seconds = (time.time() - self.started_at) * left / made
        return f", about {max(1, round(seconds / 60))} min left"


def why_it_ended(process: subprocess.Popen[bytes], log: Path) -> str:
    if process.returncode == -signal.SIGKILL:
        return ("it was killed. The system does that when there is not enough memory; --processes "
                "1 needs the least")
    return last_line(log)


def last_line(log: Path) -> str:
    written = log.read_text(encoding="utf-8", errors="replace").strip()
    return written.split("\n")[-1].strip() or "it printed nothing"


def make_runs(planned: list[PlannedRun], processes: int, command: str) -> dict[str, str]:
    """Make the runs that are missing; returns those that failed, with the reason. `command` is the
    command that was typed."""
    runs = Runs(planned, processes)
    say(f"{len(runs.waiting)} of {len(planned)} runs have to be made, {processes} at a time")
    if not runs.make():
        finished = sum(run.is_finished() for run in planned)
        say(f"stopped. {finished} of {len(planned)} runs are finished. Continue with: {command}")
        raise SystemExit(130)
    return runs.failed


def side_by_side(kinds: Iterable[LabSettings], processes: int) -> tuple[int, int]:
    """How many runs to make at a time, and how many threads each has. `processes` is what was
    typed; 0 stands for the number that suits the kind of run that needs the most. The runs of a
    large model share the cores, and each of a small one has a thread."""
    kinds = list(kinds)
    processes = processes or min(map(runs_at_a_time, kinds))
    has_large = any(is_large(find_folder(s.model)) for s in kinds)
    return processes, max(1, usable_cores() // processes) if has_large else 1


def kinds_of(planned: Iterable[PlannedRun]) -> list[LabSettings]:
    """The settings of these runs, without those that differ in the seed alone."""
    flags = dict.fromkeys(tuple(run.flags) for run in planned)
    return [make_settings(read_flags(list(words))) for words in flags]


def runs_at_a_time(s: LabSettings) -> int:
    """The number of runs with these settings to make side by side: one for each core; of a large
    model, and on a GPU, 1."""
    return 1 if s.device != "cpu" or is_large(find_folder(s.model)) else usable_cores()


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux knows which this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def settings_of(planned: PlannedRun) -> LabSettings:
    flags = [*planned.flags, "--steps", str(planned.steps), "--seed", str(planned.seed)]
    return make_settings(read_flags(flags))


def finished_run(planned: PlannedRun) -> Run | None:
    """The run of this plan, if it is finished; one that is not what the plan says is an error."""
    if not planned.is_finished():
        return None
    run, wanted = read_run(planned.folder), settings_of(planned)
    may_differ = WITHOUT_EFFECT if wanted.threads else {*WITHOUT_EFFECT, "threads"}  # 0: any
    refuse_other(planned.folder, wanted, may_differ, "remove it, and the run is made again")
    refuse_changed(planned)
    return run


def refuse_changed(planned: PlannedRun) -> None:
    """Refuse a run that was made of something else, such as a file that the task reads and that has
    changed, or whose record was changed: what would be compared is not the same any more."""
    before = run_config(planned.folder).get("made_of", {})
    wrong = list(missing_steps(planned.folder))
    if changed := differing(before, made_of(settings_of(planned))):
        wrong.append(f"it is an earlier run, and since then {changed[0]} has changed")
    if wrong:
        raise UserError(f"{planned.folder}: {wrong[0]}. Name another folder with --runs, or remove "
                        "this one, and the run is made again")


@dataclass
class Experiment:
    """Planned runs by arm and seed, and those of them that are finished."""
    plan_run: Callable[[str, int], PlannedRun]
    found: dict[Key, Run] = field(default_factory=dict)  # in their folders, each read once

    def run(self, arm: str, seed: int) -> Run | None:
        """The run if it is finished."""
        key = arm, seed
        if key not in self.found:
            run = finished_run(self.plan_run(arm, seed))
            if run:
                self.found[key] = run
        return self.found.get(key)

    def arms(self, keys: Iterable[Key]) -> Arms:
        """Those of these runs that are finished."""
        arms: Arms = {}
        for arm, seed in keys:
            run = self.run(arm, seed)
            if run:
                arms.setdefault(arm, {})[seed] = run
        return arms

    def missing(self, keys: Iterable[Key]) -> list[PlannedRun]:
        return [self.plan_run(*key) for key in keys if not self.run(*key)]

    def make(self, keys: Iterable[Key], command: str, processes: int,
             threads: int = 1) -> dict[str, str]:
        """Train what is missing of these runs. Returns the arms that failed, with the reason."""
        planned = [replace(self.plan_run(*key), threads=threads) for key in keys]
        return make_runs(planned, processes, command)
