"""Make the runs of an experiment: several at a time, each a process of its own.

Every run is `python train.py --continue`, which starts it, resumes it or passes over it. So the
experiment can be stopped at any moment, and the same command goes on. One that fails does not stop
the others. Two runners of one experiment share its runs: one that another process is writing is
waited for, and made here if that process ends before its last step.
"""
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

from engine.errors import UserError
from harness.files import is_folder, is_there, locked, make_folder, writing
from harness.flags import MOST_THREADS, Flag
from harness.progress import python_command, say, show_status
from harness.program import StopRequest
from research.experiments.plan import PlannedRun, State, in_words, seconds_left

FLAGS = {
    "processes": Flag(0, "runs at a time; 0 is one for each core that this program may use",
                      least=0, most=MOST_THREADS),
    "out": Flag("runs/study", "folder of the runs; each experiment has its own below it"),
    "dry_run": Flag(False, "list what is to be made, and start nothing"),
    "report_only": Flag(False, "say what the finished ones show, and start nothing")}
PAUSE = 1.0            # seconds between two looks at the processes
PR_SET_PDEATHSIG = 1   # <sys/prctl.h>


class Runner:
    """`make_all` makes what is not finished; `failed` has what went wrong, with the reason."""

    def __init__(self, runs: list[PlannedRun], processes: int):
        self.runs, self.processes = runs, processes
        self.states = {run.name: run.state() for run in runs}
        self.failed = {name: state.trouble for name, state in self.states.items() if state.trouble}
        self.waiting = deque(run for run in self.not_failed()
                             if not self.states[run.name].finished)
        self.running: list[tuple[PlannedRun, subprocess.Popen]] = []
        self.elsewhere: list[PlannedRun] = []  # another process is making these

    @property
    def finished(self) -> int:
        return sum(state.finished for state in self.states.values())

    def not_failed(self) -> list[PlannedRun]:
        return [run for run in self.runs if run.name not in self.failed]

    def make_all(self) -> bool:
        """Returns whether it came to its end; not if somebody stopped it."""
        told = False
        with StopRequest() as stop:
            try:
                while self.running or (self.waiting or self.elsewhere) and not stop.asked:
                    if stop.asked and not told:
                        self.tell_to_stop()
                        told = True
                    while self.waiting and len(self.running) < self.processes and not stop.asked:
                        self.start(self.waiting.popleft())
                    time.sleep(PAUSE)
                    self.collect(stop.asked)
                    self.show()
            finally:  # none are left unless something went wrong, or somebody is in a hurry
                self.tell_to_stop()
                for _, process in self.running:
                    process.wait()
                show_status("")
        return not stop.asked

    def start(self, run: PlannedRun) -> None:
        """In a session of its own: Ctrl-C at the terminal reaches this program alone, which tells
        its runs, so that they are told once."""
        if is_written(run):
            return self.wait_for(run)
        make_folder(run.log.parent)
        with writing(run.log), open(run.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *run.command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True, preexec_fn=stop_with_runner)
        self.running.append((run, process))

    def wait_for(self, run: PlannedRun) -> None:
        say(f"waiting for {run.name}: another process is making it")
        self.elsewhere.append(run)

    def tell_to_stop(self) -> None:
        """A run that is told once finishes its step and keeps a checkpoint; told twice it ends at
        once. SIGTERM, as it works before Python is awake, and where SIGINT is ignored."""
        for _, process in self.running:
            process.terminate()

    def collect(self, was_stopped: bool) -> None:
        """Take note of the processes that have ended, and of the runs that others leave."""
        for run, process in list(self.running):
            if process.poll() is None:
                continue
            self.running.remove((run, process))
            if self.is_finished(run):
                continue
            if is_written(run):
                self.wait_for(run)
            elif not was_stopped:
                self.failed[run.name] = f"{last_line(run)} (log: {run.log})"
                say(f"failed: {run.name}: {self.failed[run.name]}")
        for run in [run for run in self.elsewhere if not is_written(run)]:
            self.elsewhere.remove(run)
            if not self.is_finished(run):
                self.waiting.append(run)

    def is_finished(self, run: PlannedRun) -> bool:
        """As it is on disk now; people are told."""
        self.states[run.name] = run.state()
        if self.states[run.name].finished:
            say(f"finished: {run.name} ({self.finished} of {len(self.runs)})")
        return self.states[run.name].finished

    def show(self) -> None:
        """A status line: what is finished, what went wrong, time left, which are running."""
        for run, _ in self.running:
            with suppress(UserError):  # its end will say so
                self.states[run.name] = State(*run.progress())
        parts = [f"{self.finished} of {len(self.runs)} finished"]
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        left = seconds_left(self.not_failed(), self.states, self.processes)
        parts.append(f"{in_words(left)} left")
        parts += [f"{run.name} elsewhere" for run in self.elsewhere]
        for run, _ in self.running:
            parts.append(f"{run.name} {self.states[run.name].steps}/{run.steps}")
        show_status(", ".join(parts))


def stop_with_runner() -> None:
    """In the new process: where the system can do so, it is told to stop when the runner is gone,
    also after kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def is_written(run: PlannedRun) -> bool:
    if is_folder(run.folder):
        try:
            with locked(run.folder):
                pass
        except BlockingIOError:
            return True
    return False


def last_line(run: PlannedRun) -> str:
    """Of a run's log: the sentence that it ended with."""
    lines = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
    written = [line.strip() for line in lines if line.strip()]
    return written[-1] if written else "it printed nothing"


def make_runs(runs: list[PlannedRun], processes: int, go_on: str) -> dict[str, str]:
    """Returns those that failed, with the reason. `go_on` is the command that was typed."""
    runner = Runner(runs, processes)
    say(f"{len(runner.waiting)} of {len(runs)} runs are to be made, {processes} at a time")
    if not runner.make_all():
        say(f"stopped, {runner.finished} of {len(runs)} runs are finished. Go on with: {go_on}")
        raise SystemExit(130)
    return runner.failed


def end_with(failed: dict[str, str]) -> None:
    """Name what went wrong; the exit status says so, too."""
    for name, reason in failed.items():
        say(f"failed: {name}: {reason}")
    if failed:
        raise SystemExit(1)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux knows which this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_runs(runs: list[PlannedRun], processes: int) -> None:
    """Folder and command of every run, what is finished, and how long the rest takes."""
    states = {run.name: run.state() for run in runs}
    for number, run in enumerate(runs):
        print(f"{number:3d}  {run.folder}  ({how_far(run, states[run.name])})\n"
              f"    {python_command(*run.command)}")
    finished = sum(state.finished for state in states.values())
    print(f"\n{finished} of {len(runs)} runs are finished")
    if finished < len(runs):
        print(f"the rest, {processes} at a time: {in_words(seconds_left(runs, states, processes))}"
              " (where no step is on record, by what the shipped model took on one core; other "
              "methods than those timed may take longer)")


def how_far(run: PlannedRun, state: State) -> str:
    if state.trouble:
        return f"failed: {state.trouble}"
    if state.finished:
        return "finished"
    return f"{state.steps} of {run.steps} steps" if is_there(run.folder) else "not begun"
