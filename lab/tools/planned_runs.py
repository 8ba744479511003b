"""Training runs of several arms and seeds: made side by side, and used again if they are finished.

    planned = [PlannedRun("none", 0, folder, flags, steps=60), ...]
    failed = make_runs(planned, command, 2)   # train what is missing, two runs at a time
    run = finished_run(planned[0])            # if it is finished

A planned run is a command of train.py, or of python -m lab train. It is made, resumed, or left as
it is.
Everything can be stopped at any moment, and the same command continues. A run that another process
is writing fails with a sentence.
"""
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lab.analysis.run_folders import Run
from lab.engine.errors import PROJECT, UserError, read_json
from lab.engine.model_folder import is_large
from lab.harness.flags import MOST_THREADS, Flag
from lab.harness.made_of import files_of_run, made_of
from lab.harness.read_record import missing_steps, refuse_other, run_config, steps_finished
from lab.harness.record import Json, find_folder
from lab.harness.screen import StopRequest, ctrl_c_calls, say, show_status
from lab.harness.settings import LabSettings, make_settings, read_flags
from lab.harness.versions import chosen_in, differing, version_of, versions_of
from run import lock, remove

PAUSE = 0.5             # seconds between two looks at the processes
PROCESSES = Flag(0, "how many runs are made at a time. 0 means one for each core that this program "
                 "may use, but for a large model and on a GPU one",
                 least=0, most=MOST_THREADS)
USUAL = {"questions": 8, "answers": 8, "steps": 60, "threads": 1}
NO_MODELS = {"checkpoint_every": 0}  # of a large one each has gigabytes
STEPS_OF_LARGE = 20  # on a CPU, where its recipe names none
NOT_TAKEN = ("seed", "out", "placebo", "resume", "continue", "config")  # flags of train.py
WITHOUT_EFFECT = {"out", "checkpoint_every", "track"}  # on the numbers of a run


@dataclass
class PlannedRun:
    arm: str
    seed: int
    folder: Path
    flags: list[str]  # of train.py, without --out, --seed and --steps
    steps: int
    project: Path = PROJECT         # the files that train
    is_book: bool = False           # whether train.py does, and not python -m lab train
    keeps_checkpoints: bool = True  # if not, it has none when it is finished

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        out, steps = str(self.folder.resolve()), ["--steps", str(self.steps)]
        if not self.keeps_checkpoints:
            steps += ["--checkpoint_every", "0"]
        if self.is_book and (self.folder / "config.json").exists():
            return ["train.py", "--resume", out, *steps]
        program = ["train.py"] if self.is_book else ["-m", "lab", "train", "--continue"]
        return [*program, "--out", out, *self.flags, *steps, "--seed", str(self.seed)]

    @property
    def settings(self) -> LabSettings:
        return make_settings(read_flags(
            [*self.flags, "--steps", str(self.steps), "--seed", str(self.seed)]))

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

    def start(self, threads: int) -> "subprocess.Popen[bytes]":
        """Start it in a session of its own. Ctrl-C at the terminal then reaches this program alone,
        which signals each of its runs once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if (self.folder / "config.json").exists():
            lock(self.folder).close()  # otherwise it is another program's, whose log it would write
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, *self.command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, cwd=self.project,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)})

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        """Tidy up after its process. If the run is not finished, an error says why."""
        if not self.is_finished():
            written = self.log.read_text(encoding="utf-8", errors="replace").strip()
            why = written.split("\n")[-1].strip() or "it printed nothing"
            if process.returncode == -signal.SIGKILL:
                why = ("it was killed. The system does that when there is not enough memory; "
                       "--processes 1 needs the least")
            raise UserError(f"{why} (log: {self.log})")
        if not self.keeps_checkpoints:  # of a large model each takes gigabytes
            remove(self.folder / "checkpoints")


@contextmanager
def noting(failed: dict[str, str], run: PlannedRun) -> Iterator[None]:
    """Keep and say the reason why a run failed, such as that another program writes it."""
    try:
        yield
    except UserError as error:
        failed.setdefault(run.arm, f"{run.name}: {error}")
        say(f"failed: {run.name}: {error}")


def make_runs(planned: list[PlannedRun], command: str, processes: int, threads: int = 1
              ) -> dict[str, str]:
    """Make the runs that are missing. Returns the reason for each arm that failed, whose other runs
    are then not begun. `command` is the command that was typed."""
    waiting = [run for run in planned if not run.is_finished()]
    say(f"{len(waiting)} of {len(planned)} runs have to be made, {processes} at a time")
    missing, done, begun = len(waiting), len(planned) - len(waiting), time.time()
    running: list[tuple[PlannedRun, subprocess.Popen[bytes]]] = []
    failed: dict[str, str] = {}
    stop = StopRequest()
    with ctrl_c_calls(stop.handle):
        try:
            while (waiting or running) and not stop.requested:
                while waiting and len(running) < processes:
                    run = waiting.pop(0)
                    if run.arm not in failed:
                        with noting(failed, run):
                            running.append((run, run.start(threads)))
                time.sleep(PAUSE)
                ended = [pair for pair in running if pair[1].poll() is not None]
                running = [pair for pair in running if pair not in ended]
                unmade = len(waiting) + len(running)
                left = time_left(begun, missing - unmade, unmade)
                for run, process in ended:
                    with noting(failed, run):
                        run.end(process)
                        done += 1
                        say(f"finished: {run.name} ({done} of {len(planned)}){left}")
                of_each = [f"{run.name} {run.steps_made()}/{run.steps}" for run, _ in running]
                show_status(", ".join([f"{done} of {len(planned)} finished{left}", *of_each]))
        finally:  # none are running unless it was stopped, or something went wrong here
            for _, process in running:  # each finishes its step and leaves a checkpoint
                process.send_signal(signal.SIGINT)
            for run, process in running:
                process.wait()
                with suppress(UserError):  # it is not finished
                    run.end(process)
            show_status("")
    if stop.requested:
        done = sum(run.is_finished() for run in planned)
        say(f"stopped. {done} of {len(planned)} runs are finished. Continue with: {command}")
        raise SystemExit(130)
    return failed


def common_settings(given: Json) -> Json:
    """The settings of all arms: those that are typed, and what else is usual."""
    if taken := {*NOT_TAKEN} & given.keys():
        raise UserError(f"--{min(taken)} cannot be given to this program, because it chooses the "
                        "seeds, folders and placebos of its arms itself")
    common = usual_settings(given) | given
    common = {"eval_every": common["steps"], "checkpoint_every": common["steps"]} | common
    if common["steps"] < 1:
        raise UserError(f"--steps {common['steps']}: with this, nothing is trained")
    if not common["eval_every"]:
        raise UserError("--eval_every 0: the verdict needs the evaluation at the end, because "
                        "success in training says little where problems are repeated. "
                        "--eval_tasks 100 makes the evaluation short")
    return common


def usual_settings(given: dict) -> dict:
    """The settings of all arms, unless something else is typed. A large model has half of the steps
    of its recipe: by then plain GRPO solves about two thirds of the problems. Later most groups
    have equal rewards, and then no method can differ."""
    s = make_settings(given)
    folder = find_folder(s.model)
    if not is_large(folder):
        return USUAL
    path = folder / "recipe.json"
    recipe = read_json(path) if path.exists() else {}
    if "steps" in recipe:
        return {"steps": recipe["steps"] // 2} | NO_MODELS
    if s.device == "cpu":
        return {"steps": STEPS_OF_LARGE} | NO_MODELS
    return USUAL | NO_MODELS


def as_typed(flags: dict) -> list[str]:
    """The flags of an arm as words of a command, without those that a planned run adds."""
    words = []
    for name, value in flags.items():
        if name != "steps":
            text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
            words += [f"--{name}", text]
    return words


def time_left(begun: float, made: int, left: int) -> str:
    """The time until the program ends, as ", about 9 min left", if the other runs take as long as
    those that were made here; "" before the first of them is finished."""
    if not made or not left:
        return ""
    seconds = (time.time() - begun) * left / made
    return f", about {max(1, round(seconds / 60))} min left"


def side_by_side(kinds: Iterable[LabSettings], processes: int) -> tuple[int, int]:
    """How many runs to make at a time, and how many threads each has. `processes` is what was
    typed; 0 means one for each core, but one in all if a run needs a GPU or all cores. The runs of
    a large model share the cores, and each of a small one has a thread."""
    kinds, cores = list(kinds), usable_cores()
    has_large = any(is_large(find_folder(s.model)) for s in kinds)
    is_alone = has_large or any(s.device != "cpu" for s in kinds)
    processes = processes or (1 if is_alone else cores)
    return processes, max(1, cores // processes) if has_large else 1


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux knows which this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def finished_run(planned: PlannedRun) -> Run | None:
    """The run of this plan, if it is finished. It is an error if it has other settings, was made of
    something else, such as a file that the task reads and that has changed, or lacks steps: what
    would be compared is not the same any more."""
    if not planned.is_finished():
        return None
    folder = planned.folder
    wrong = list(missing_steps(folder))
    if not planned.is_book:  # else its folder is named by all that it is made of
        wanted = planned.settings
        may_differ = WITHOUT_EFFECT if wanted.threads else {*WITHOUT_EFFECT, "threads"}  # 0: any
        refuse_other(folder, wanted, may_differ, "remove it, and the run is made again")
        wrong += [f"it is an earlier run, and since then {label} has changed"
                  for label in changed_since(folder, wanted, planned.project)]
    if wrong:
        raise UserError(f"{folder}: {wrong[0]}. Name another folder with --runs, or remove this "
                        "one, and the run is made again")
    return Run(folder)


def changed_since(run: Path, s: LabSettings, project: Path) -> list[str]:
    """The labels of what made this run and is another version now, of code and of data."""
    config = run_config(run)
    known = versions_of(run, chosen_in(config))
    now = version_of(files_of_run(s, project), chosen_in(config))
    found = differing(tuple(config.get("made_of", {}).items()), tuple(made_of(s, project).items()))
    for version in known.values() or [()]:  # one of earlier versions has no code
        found += differing(version, now)
    return found
