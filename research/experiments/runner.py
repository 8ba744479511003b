"""Make the runs of an experiment: several at a time, each a process of its own.

Every run is `python train.py --continue`, which starts it, resumes it or passes over it. So the
experiment can be stopped at any moment, and the same command goes on. One that fails does not stop
the others.
"""
import os
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass

from harness.files import append_line, is_there, make_folder, writing
from harness.flags import MOST_THREADS, Flag
from harness.hints import python_command
from harness.progress import say, show_status
from harness.stopping import StopRequest
from research.experiments.plan import Effort, PlannedRun, in_words, seconds_left

PROCESSES = Flag(0, "runs at a time; 0 is one for each core that this program may use", least=0,
                 most=MOST_THREADS)
PAUSE = 0.2            # seconds between two looks at the processes
BETWEEN_STATUS = 2.0   # seconds
SECONDS = "seconds.jsonl"  # beside the runs: how long each took, also what was computed in vain


@dataclass
class Attempt:
    """A run that is being made."""
    run: PlannedRun
    process: subprocess.Popen
    start: float


class Runner:
    """`make_all` makes what is not finished; `failed` are the runs that went wrong after that."""

    def __init__(self, runs: list[PlannedRun], processes: int):
        self.runs, self.processes = runs, processes
        self.waiting = deque(run for run in runs if not run.is_finished())
        self.running: list[Attempt] = []
        self.failed: list[PlannedRun] = []
        self.finished = len(runs) - len(self.waiting)
        self.efforts = {run.name: run.effort() for run in runs}
        self.status_shown = 0.0

    def make_all(self) -> bool:
        """Returns whether it came to its end; not if somebody stopped it."""
        told = False
        with StopRequest() as stop:
            try:
                while self.running or self.waiting and not stop.asked:
                    if stop.asked and not told:
                        self.tell_to_stop()
                        told = True
                    while self.waiting and len(self.running) < self.processes and not stop.asked:
                        self.start(self.waiting.popleft())
                    time.sleep(PAUSE)
                    self.collect(stop.asked)
                    self.show()
            finally:
                self.end_the_rest()
        return not stop.asked

    def start(self, run: PlannedRun) -> None:
        """In a session of its own: Ctrl-C at the terminal reaches this program alone, which tells
        its runs, so that they are told once."""
        make_folder(run.log.parent)
        command = [sys.executable, *run.command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with writing(run.log), open(run.log, "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True)
        self.running.append(Attempt(run, process, time.monotonic()))

    def tell_to_stop(self) -> None:
        """A run that is told once finishes its step and keeps a checkpoint; told twice it ends at
        once. SIGTERM, as it works before Python is awake, and where SIGINT is ignored."""
        for attempt in self.running:
            attempt.process.terminate()

    def end_the_rest(self) -> None:
        """There are none left unless something went wrong, or somebody is in a hurry."""
        self.tell_to_stop()
        for attempt in self.running:
            attempt.process.wait()
        show_status("")

    def collect(self, was_stopped: bool) -> None:
        """Take note of the processes that have ended."""
        ended = [attempt for attempt in self.running if attempt.process.poll() is not None]
        for attempt in ended:
            self.running.remove(attempt)
            self.note_end(attempt, was_stopped)

    def note_end(self, attempt: Attempt, was_stopped: bool) -> None:
        run, status = attempt.run, attempt.process.returncode
        seconds = round(time.monotonic() - attempt.start, 1)
        append_line(run.folder.with_name(SECONDS), {"run": run.name, "seconds": seconds,
                                                    "status": status})
        self.efforts[run.name] = run.effort()
        if status == 0 and run.is_finished():
            self.finished += 1
            self.announce(f"finished: {run.name} ({self.finished} of {len(self.runs)})")
        elif not was_stopped:
            self.failed.append(run)
            self.announce(f"failed: {run.name}: {last_line(run)}")

    def announce(self, text: str) -> None:
        show_status("")
        say(text)

    def show(self) -> None:
        """The status line: how many are finished, which are running, what went wrong, time left."""
        now = time.monotonic()
        if now - self.status_shown < BETWEEN_STATUS:
            return
        self.status_shown = now
        for attempt in self.running:
            self.efforts[attempt.run.name] = attempt.run.effort()
        show_status(self.status())

    def status(self) -> str:
        parts = [f"{self.finished} of {len(self.runs)} finished"]
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        to_do = [*self.waiting, *(attempt.run for attempt in self.running)]
        if to_do:
            done = [run for run in self.runs if run not in to_do and run not in self.failed]
            left = seconds_left([*done, *to_do], self.efforts, self.processes)
            parts.append("time left unknown" if left is None else f"{in_words(left)} left")
        for attempt in self.running:
            run = attempt.run
            parts.append(f"{run.name} {self.efforts[run.name].steps}/{run.steps}")
        return ", ".join(parts)


def last_line(run: PlannedRun) -> str:
    """Of a run's log: the sentence that it ended with."""
    try:
        lines = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{run.log} cannot be read"
    written = [line.strip() for line in lines if line.strip()]
    return written[-1] if written else "it printed nothing"


def end_with(failed: list[PlannedRun]) -> None:
    """Name what went wrong; the exit status says so, too."""
    for run in failed:
        say(f"failed: {run.name}: {last_line(run)} (log: {run.log})")
    if failed:
        raise SystemExit(1)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux knows which this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_runs(runs: list[PlannedRun], processes: int) -> None:
    """Folder and command of every run, what is finished, and how long the rest takes."""
    efforts = {run.name: run.effort() for run in runs}
    finished = [run for run in runs if run.is_finished()]
    for number, run in enumerate(runs):
        state = "finished" if run in finished else how_far(run, efforts[run.name].steps)
        print(f"{number:3d}  {run.folder}  ({state})\n    {python_command(*run.command)}")
    print(f"\n{len(finished)} of {len(runs)} runs are finished")
    if len(finished) < len(runs):
        print(f"the rest, {processes} at a time: {takes(runs, efforts, processes)}")


def takes(runs: list[PlannedRun], efforts: dict[str, Effort], processes: int) -> str:
    """How long what is left of these runs takes."""
    left = seconds_left(runs, efforts, processes)
    return in_words(left) if left is None else f"{in_words(left)}, evaluations not counted"


def how_far(run: PlannedRun, steps: int) -> str:
    return f"{steps} of {run.steps} steps" if is_there(run.folder) else "not begun"


def make_runs(runs: list[PlannedRun], processes: int, go_on: str) -> list[PlannedRun]:
    """Returns those that failed. `go_on` is the command that was typed."""
    runner = Runner(runs, processes)
    if runner.waiting:
        say(f"{len(runner.waiting)} of {len(runs)} runs are to be made, {processes} at a time: "
            f"{takes(runs, runner.efforts, processes)}")
    elif len(runs) == 1:
        say(f"finished already: {runs[0].name}")
    came_to_its_end = runner.make_all()
    if not came_to_its_end:
        say(f"stopped, {runner.finished} of {len(runs)} runs are finished. Go on with: {go_on}")
        raise SystemExit(130)
    return runner.failed
