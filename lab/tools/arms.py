"""The arms of an idea or of an edit: flags of train.py, and the files of the project that train.

With flags of the book alone, an arm is trained by `python train.py` of a copy of the files. So
every function is trained as it is read there, and you can go on editing meanwhile. With other
flags it is trained by `python -m lab train` of such a copy. A folder is named by its settings, by
the version of its files as a whole (lab/harness/versions.py), and by its data. So finished runs are
used again, also by the next idea, and not after an edit that counts.
"""
import contextlib
import inspect
import io
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

import grpo
import run as book
from lab.analysis.comparison import Arms
from lab.analysis.run_folders import Run
from lab.analysis.verdict import Tries, Verdict
from lab.engine.errors import PROJECT, UserError
from lab.engine.methods import METHODS
from lab.engine.rollouts import Rollouts
from lab.harness.made_of import files_of_run, imported, made_of
from lab.harness.record import Json, find_folder
from lab.harness.screen import python_command, say
from lab.harness.settings import LabSettings, make_settings
from lab.harness.versions import chosen_in, digest_of, version_of
from lab.tools.planned_runs import (PlannedRun, as_typed, finished_run, make_runs,
                                    side_by_side)

NOT_COPIED = {"runs", "docs", "models", "tests", "results", "reports", "__pycache__"}
LARGEST = 10_000_000  # bytes of a file that is copied, such as one that a task reads
# what only the lab's batch has
OF_LAB = {*dir(Rollouts)} - {*dir(Tensor), *dir(grpo.Rollouts), *grpo.Rollouts.__annotations__}
OF_TIME = ("seconds", "per_second", "memory_bytes")  # ends of numbers that differ anyway
NOT_OF_RUN = ("seed", "out", "steps", "threads", "checkpoint_every")


def is_of_book(flags: Json) -> bool:
    """Whether train.py alone trains with these flags: it has no placebos and no classes as methods,
    and its batch has less than the lab's."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            s = book.read_settings(as_typed(flags))
    except (SystemExit, UserError):
        return False
    chosen = [METHODS[axis][getattr(s, axis)] for axis in METHODS]
    return all(inspect.isfunction(method) and not OF_LAB & {*method.__code__.co_names}
               for method in chosen)


class Arm:
    """What is trained: plain GRPO, an idea, a placebo or an edit. `flags` are those of `lab train`,
    `runs` is the folder of all arms, and its files lie in `root`."""

    def __init__(self, label: str, flags: Json, runs: Path, root: Path = PROJECT):
        model = find_folder(str(flags.get("model", LabSettings.model))).resolve()
        flags = flags | {"model": str(model)}
        self.label, self.root = label, root
        self.settings, self.is_book = make_settings(flags), is_of_book(flags)
        files = imported(["train.py"], root) if self.is_book else files_of_run(self.settings, root)
        self.version = version_of(files, chosen_in(flags))
        known = sorted((name, x) for name, x in flags.items() if name not in NOT_OF_RUN)
        self.typed = as_typed(flags)
        data = sorted(made_of(self.settings, root).values())
        made = digest_of([known, self.version, data])
        self.folder = runs / f"{label}-{made[:8]}"

    def copied(self) -> Path:
        """A copy of the project, with which it trains."""
        code = self.folder / "code"
        if not code.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with book.whole(code) as path:
                shutil.copytree(self.root, path, ignore=not_copied)
        return code

    def planned_run(self, seed: int) -> PlannedRun:
        steps, keeps = self.settings.steps, self.settings.checkpoint_every > 0
        return PlannedRun(self.label, seed, self.folder / f"s{seed}", self.typed, steps,
                          self.copied(), self.is_book, keeps)


def runs_of(arms: dict[str, Arm], seeds: range, command: str, processes: int) -> Arms:
    """The runs of each arm by seed. Those that are missing are trained, all arms of a seed before
    the next seed."""
    planned = {(key, seed): arm.planned_run(seed) for seed in seeds for key, arm in arms.items()}
    kinds = [arm.settings for arm in arms.values()]
    if failed := make_runs([*planned.values()], command, *side_by_side(kinds, processes)):
        raise UserError("; ".join(failed.values()))
    return {key: {seed: finished_run(planned[key, seed]) for seed in seeds} for key in arms}


def decide(arms: dict[str, Arm], name: str, over: str, tried: str, own: SimpleNamespace,
           command: str) -> None:
    """Train the arms, and print whether the one called idea is better than the one called plain, of
    which people read `name` and `over`. `tried` is what the list of tries calls it."""
    tries = Tries(tried, arms["idea"].folder.name, arms["plain"].folder / "tries.json")
    first = runs_of(arms, range(own.seeds), command, own.processes)
    verdict = Verdict(name, first, tries, over)
    if verdict.needs_second_look():
        say(f"{name} is better than {over} on these seeds, so all arms are trained again on "
            f"{own.seeds} new seeds")
        verdict.add(runs_of(arms, range(own.seeds, 2 * own.seeds), command, own.processes))
    verdict.print_findings()
    folders = " ".join(f"{shlex.quote(str(arm.folder))}/s*/" for arm in arms.values())
    say(f"\nTo repeat all of it: {command}\nFor the curves of all runs: "
        f"{python_command('-m', 'lab', 'compare')} {folders}")


def not_copied(folder: str, names: list[str]) -> set[str]:
    """What no run needs, such as hidden files, a virtual environment, large data."""
    return {name for name in names for path in [Path(folder, name)]
            if name.startswith(".") or name in NOT_COPIED or (path / "pyvenv.cfg").exists()
            or not path.exists() or path.is_file() and path.stat().st_size > LARGEST}


def is_the_same(one: Run, other: Run) -> bool:
    """Whether two runs have the same numbers in each step and in each evaluation."""
    def numbers(run: Run) -> str:
        return json.dumps([{name: value for name, value in line.items()
                            if not name.endswith(OF_TIME)}
                           for line in (*run.metrics, *run.evaluations)])
    return numbers(one) == numbers(other)
