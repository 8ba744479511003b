"""The arms of an idea or of an edit: flags of train.py, and the files of the project that train.

With flags of the book alone, an arm is trained by `python train.py` of a copy of the files. So
every function is trained as it is read there, and you can go on editing meanwhile. With other
flags it is trained by `python -m lab train` of such a copy. A folder is named by what its runs are
made of, so finished runs are used again, also by the next idea.
"""
import contextlib
import inspect
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import run as book
from lab.analysis.run_folders import Run
from lab.engine.credited import cells_of, shuffled
from lab.engine.errors import PROJECT, UserError
from lab.harness.made_of import files_of_model, made_of, program
from lab.harness.record import Json, digest_of as digest_of_file, find_folder
from lab.harness.settings import LabSettings, make_settings
from lab.harness.versions import START, digest_of, texts_of
from lab.tools.planned_runs import PlannedRun, as_typed

NOT_COPIED = {"runs", "docs", "models", "tests", "results", "reports", "__pycache__"}
LARGEST = 10_000_000  # bytes of a file that is copied, such as one that a task reads
OF_TIME = ("seconds", "per_second", "memory_bytes")  # ends of numbers that differ anyway
NOT_OF_RUN = ("seed", "out", "steps", "threads", "checkpoint_every")
PLACEBO = '''

# what follows was added by python -m lab idea: the values of {name}, at other tokens
import functools
from countdown_task import KINDS
from grpo import ADVANTAGES, checked

{cells_of}

{shuffled}

def placebo(function):
    @functools.wraps(function)
    def call(rollouts, **keywords):
        values = checked(function(rollouts, **keywords), rollouts, function.__name__)
        return shuffled(values, rollouts, "{kind}", {whole_answers})
    call.__name__ = "{name}_placebo"
    return call

{axis}(placebo({choices}["{name}"]))
'''


def is_of_book(flags: Json) -> bool:
    """Whether train.py alone trains with these flags; a placebo is another function there."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            book.read_settings(as_typed({name: x for name, x in flags.items()
                                         if name != "placebo"}))
    except (SystemExit, UserError):
        return False
    return True


def placebo_of(axis: str, name: str, kind: str, whole_answers: bool) -> str:
    """The text of a weighting or an advantage that has the values of another at other tokens."""
    choices = {"mitigation": "MITIGATIONS", "advantage": "ADVANTAGES"}[axis]
    return PLACEBO.format(name=name, kind=kind, whole_answers=whole_answers, axis=axis,
                          choices=choices, cells_of=inspect.getsource(cells_of),
                          shuffled=inspect.getsource(shuffled))


@dataclass
class Arm:
    """What is trained: plain GRPO, an idea, a placebo or an edit."""
    label: str
    flags: Json            # of train.py
    runs: Path             # the folder of all arms
    root: Path = PROJECT   # where its files lie
    added: str = ""        # to mitigations.py: a placebo

    def __post_init__(self) -> None:
        model = find_folder(str(self.flags.get("model", LabSettings.model))).resolve()
        self.flags = self.flags | {"model": str(model)}
        self.is_book = is_of_book(self.flags)
        self.settings = make_settings(self.flags)
        self.added = self.added if self.is_book else ""
        self.texts = self.texts_of_book() if self.is_book else program(self.settings, self.root)
        known = {name: value for name, value in self.flags.items() if name not in NOT_OF_RUN}
        files = [digest_of_file(path) for path in sorted(files_of_model(model))]
        if not self.is_book:  # further files, such as one that a task reads
            files += sorted(made_of(self.settings, self.root).values())
        self.folder = self.runs / f"{self.label}-{digest_of([known, self.texts, files])[:8]}"

    def texts_of_book(self) -> dict[str, str]:
        texts = texts_of(sorted(self.root.glob("*.py")), START | {
            self.settings.mitigation, self.settings.advantage}, root=self.root)
        return texts | ({"placebo": self.added} if self.added else {})

    def train_flags(self) -> Json:
        """The flags of its runs, where a placebo of the book is a weighting by its own name."""
        flags = dict(self.flags)
        kind = flags.pop("placebo", "") if self.added else ""
        axis = "advantage" if kind.startswith("advantages") else "mitigation"
        return flags | ({axis: f"{flags[axis]}_placebo"} if kind else {})

    def copied(self) -> Path:
        """A copy of its files."""
        code = self.folder / "code"
        if not code.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with book.whole(code) as path:
                shutil.copytree(self.root, path, ignore=not_copied)
                if self.added:
                    with open(path / "mitigations.py", "a") as file:
                        file.write(self.added)
        return code

    def planned_run(self, seed: int) -> PlannedRun:
        return PlannedRun(self.folder.name, seed, self.folder / f"s{seed}",
                          as_typed(self.train_flags()), self.settings.steps, self.copied(),
                          self.is_book, self.settings.checkpoint_every > 0)


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
