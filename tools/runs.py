"""Training runs side by side: what is missing is made, a process for each core.

A planned run is a command of train.py with --continue, so it is made, gone on with, or passed over.
Everything can be stopped at any moment, and the same command goes on. A run that keeps no
checkpoints is then ended at once, and begins again. A run that another process is writing fails
with a sentence.
"""
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from analysis.runs import is_done, read_run
from engine.errors import UserError
from harness.record import PROJECT, locked, writing
from harness.screen import MESSAGE, StopRequest, say, show_status

PAUSE = 0.5             # seconds between two looks at the processes
AT_ONCE = b"\nstopping; a run that is half made begins again\n"
PR_SET_PDEATHSIG = 1    # <sys/prctl.h>


@dataclass
class PlannedRun:
    arm: str
    seed: int
    folder: Path
    flags: list[str]  # of train.py, --out, --seed and --steps aside
    steps: int
    program: tuple[str, ...] = (str(PROJECT / "train.py"),)
    seconds: float = 0.0  # that it will take, if somebody knows
    threads: int = 1  # unless its flags say so
    keeps_checkpoints: bool = True  # otherwise it leaves none when it is stopped, either

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        return [*self.program, "--continue", "--out", str(self.folder), *self.flags,
                "--steps", str(self.steps), "--seed", str(self.seed)]

    def is_finished(self) -> bool:
        try:
            return (self.folder / "config.json").exists() and is_done(read_run(self.folder))
        except UserError as error:
            raise UserError(f"{error}. Remove {self.folder}, and it is made again") from None

    def steps_made(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def steps_kept(self) -> int:
        """Those that need not be made again when it is started."""
        return self.steps_made() if self.keeps_checkpoints else 0

    @property
    def stop_signal(self) -> signal.Signals:
        """Told by SIGTERM, a run finishes its step and keeps a checkpoint: of a large model that
        is gigabytes."""
        return signal.SIGTERM if self.keeps_checkpoints else signal.SIGKILL


class Runs:
    """`make` makes what is not finished. `failed` has what went wrong, by arm: the others of that
    arm are not begun, and with `all_or_nothing` no others at all."""

    def __init__(self, planned: list[PlannedRun], processes: int, all_or_nothing: bool = False):
        self.planned, self.processes, self.all_or_nothing = planned, processes, all_or_nothing
        self.waiting = [run for run in planned if not run.is_finished()]
        self.running: list[tuple[PlannedRun, subprocess.Popen]] = []
        self.failed: dict[str, str] = {}
        self.given_up = 0
        self.started: dict[str, tuple[float, int]] = {}  # when, after how many steps
        self.seconds, self.steps = 0.0, 0  # of all that was finished here

    @property
    def finished(self) -> int:
        return len(self.planned) - len(self.waiting) - len(self.running) - self.given_up

    def make(self) -> bool:
        """Returns whether it came to its end; not if somebody stopped it."""
        keeps_steps = any(run.keeps_checkpoints for run in self.planned)
        with StopRequest(MESSAGE if keeps_steps else AT_ONCE) as stop:
            try:
                while not stop.asked and (self.waiting or self.running) and not (
                        self.failed and self.all_or_nothing):
                    self.start_some()
                    time.sleep(PAUSE)
                    self.collect()
                    self.show()
            finally:  # none are running unless it was stopped, or something went wrong
                for run, process in self.running:
                    process.send_signal(run.stop_signal)  # once
                for _, process in self.running:
                    process.wait()
                show_status("")
        return not stop.asked

    def start_some(self) -> None:
        while self.waiting and len(self.running) < self.processes:
            run = self.waiting.pop(0)
            self.started[run.name] = time.monotonic(), run.steps_kept()
            try:
                self.start(run)
            except UserError as error:  # another program writes it
                self.give_up(run, str(error))

    def start(self, run: PlannedRun) -> None:
        """In a session of its own: Ctrl-C at the terminal reaches this program alone, which tells
        its runs, so that they are told once."""
        run.log.parent.mkdir(parents=True, exist_ok=True)
        if run.folder.is_dir():
            with locked(run.folder):
                pass  # its log is the other's, so that what our program says there can be missed
        with writing(run.log), open(run.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *run.command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(run.threads)},
                start_new_session=True, preexec_fn=partial(stop_with_parent, run.stop_signal))
        self.running.append((run, process))

    def collect(self) -> None:
        for run, process in list(self.running):
            if process.poll() is None:
                continue
            self.running.remove((run, process))
            if run.is_finished():
                started_at, steps_before = self.started[run.name]
                self.seconds += time.monotonic() - started_at
                self.steps += run.steps - steps_before
                say(f"finished: {run.name} ({self.finished} of {len(self.planned)})"
                    f"{self.time_left()}")
            else:
                self.give_up(run, f"{why_it_ended(process, run.log)} (log: {run.log})")

    def give_up(self, run: PlannedRun, reason: str) -> None:
        if not self.all_or_nothing:
            say(f"failed: {run.name}: {reason}")
        self.failed.setdefault(run.arm, f"{run.name}: {reason}")
        others = [other for other in self.waiting if other.arm != run.arm]
        self.given_up += 1 + len(self.waiting) - len(others)
        self.waiting = others

    def show(self) -> None:
        parts = [f"{self.finished} of {len(self.planned)} finished{self.time_left()}"]
        parts += [f"{run.name} {run.steps_made()}/{run.steps}" for run, _ in self.running]
        show_status(", ".join(parts))

    def time_left(self) -> str:
        """", about 9 min left": of the busiest process, if each run that waits goes to the one that
        is free first. A run takes what was foretold of it, or once one is finished what those take
        that are, with their imports and evaluations."""
        loads = [0.0] * self.processes
        missing = [(run, run.steps - run.steps_made()) for run, _ in self.running]
        missing += [(run, run.steps - run.steps_kept()) for run in self.waiting]
        for run, steps in missing:
            a_step = self.seconds / self.steps if self.steps else run.seconds / run.steps
            loads[loads.index(min(loads))] += a_step * steps
        return f", {in_words(max(loads))} left" if max(loads) else ""


def stop_with_parent(stop_signal: signal.Signals) -> None:
    """In the new process: where the system can do so, it is told to stop when its parent is gone,
    also after kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, stop_signal)


def why_it_ended(process: subprocess.Popen, log: Path) -> str:
    if process.returncode == -signal.SIGKILL:
        return "it was killed, as the system does when memory runs out. --processes 1 takes least"
    return last_line(log)


def last_line(log: Path) -> str:
    written = log.read_text(encoding="utf-8", errors="replace").strip()
    return written.split("\n")[-1].strip() or "it printed nothing"


def make_runs(planned: list[PlannedRun], processes: int, command: str,
              before: Callable[[], None] = lambda: None,
              all_or_nothing: bool = False) -> dict[str, str]:
    """Returns those that failed, with the reason. `command` is the command that was typed, `before`
    is done once it is said how long it will take."""
    runs = Runs(planned, processes, all_or_nothing)
    say(f"{len(runs.waiting)} of {len(planned)} runs are to be made, {processes} at a time"
        f"{runs.time_left()}")
    before()
    if not runs.make():
        finished = sum(run.is_finished() for run in planned)
        say(f"stopped, {finished} of {len(planned)} runs are finished. Go on with: {command}")
        raise SystemExit(130)
    return runs.failed


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux knows which this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_words(seconds: float) -> str:
    """1 h 20 min of 4,800; half a minute counts as one."""
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"about {hours} h {minutes:02d} min" if hours else f"about {minutes} min"
