"""Is my version of the files better than another one? `python -m lab idea --against HEAD`.

Edit any function of the book or of the lab that a run of the lab calls. Nothing else is needed:

    python -m lab idea --against HEAD                     # your files, and those of the commit
    python -m lab idea --against HEAD --seeds 4 --steps 30
    python -m lab idea --against ../unchanged             # another copy of this project

1. First it prints the definitions that differ and that a run with these flags can reach, without
   comments. If there are none, nothing is trained.
2. Both versions are copied into --runs, each into a folder that is named by what a run of it is
   made of, and trained from there. So you can go on editing meanwhile. Finished runs are used
   again, also those of an edit that is committed later, against which the next one is compared.
3. After the first pair it stops if both runs are the same to the last bit. Else it goes on to a
   verdict, as for an idea. There are no placebos.
"""
import difflib
import io
import json
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from lab.analysis.comparison import Arms
from lab.analysis.run_folders import Run
from lab.analysis.verdict import Tries, Verdict
from lab.engine.errors import PROJECT, UserError
from lab.harness.made_of import (OF_A_STEP, defined_in, digest_of_run, program, replaced,
                                 with_imports)
from lab.harness.record import Json, find_folder
from lab.harness.screen import python_command, say
from lab.harness.settings import LabSettings, make_settings
from lab.harness.tasks import file_of_task
from lab.tools.planned_runs import (PlannedRun, as_typed, common_settings, make_runs, side_by_side)
from run import digest_of, shown, texts_of, whole

BOOK = [name for name in OF_A_STEP if "/" not in name]
EDIT = "your edit"
NOT_COPIED = {"runs", "docs", "models", "tests", "results", "reports", "__pycache__"}
LARGEST = 10_000_000  # bytes of a file that is copied, such as one that a task reads
OF_TIME = ("seconds", "per_second", "memory_bytes")  # ends of numbers that differ anyway
UNTRAINED = ("differs, but `lab idea` trains by runs of the lab, which has another part in its "
             "place. Train both versions by `python train.py` with the same seeds, and give the "
             "runs to python -m lab compare")
LINES = 12  # of a changed definition that are shown


@dataclass
class Version:
    """A version of the project: its name, where it lies, and the texts that its runs can reach."""
    name: str
    root: Path
    settings: LabSettings

    def __post_init__(self) -> None:
        self.texts = program(self.settings, self.root)
        known = self.settings.steps, digest_of_run(self.settings, self.root)
        self.digest = digest_of(known)[:8]

    def copied(self, runs: Path) -> Path:
        """The folder of its runs, in which its files are copied."""
        folder = runs / f"version-{self.digest}"
        if not (folder / "code").exists():
            folder.mkdir(parents=True, exist_ok=True)
            with whole(folder / "code") as code:
                shutil.copytree(self.root, code, ignore=not_copied)
        return folder


def compare_versions(own: SimpleNamespace, typed: Json, command: str) -> None:
    given = common_settings(make_settings(typed).typed)
    given["model"] = str(find_folder(str(given.get("model", LabSettings.model))).resolve())
    s, runs = make_settings(given), Path(own.runs)
    with tempfile.TemporaryDirectory() as temporary:
        root, name = other_version(own.against, Path(temporary))
        add_task(s, root)
        mine, other = Version(EDIT, PROJECT, s), Version(name, root, s)
        refuse_what_is_not_there(other)
        untrained = untrained_edits(s, other.root)
        if mine.texts == other.texts and untrained:
            raise UserError(f"{', '.join(untrained)} {UNTRAINED}")
        if mine.texts == other.texts:
            return say(textwrap.fill(
                f"Nothing differs between {EDIT} and {name} that a run with these flags can reach, "
                "so nothing is trained. Comments, docstrings, methods that are not chosen and "
                "files that are not loaded do not count.", 100))
        print_changes(mine, other)
        if untrained:
            say(textwrap.fill(f"And {', '.join(untrained)} {UNTRAINED}", 100))
        folders = {"plain": other.copied(runs), "idea": mine.copied(runs)}

    def made(seeds: range) -> Arms:
        planned = {(arm, seed): PlannedRun(
            folder.name, seed, folder / f"s{seed}", as_typed(given), s.steps,
            (str(folder / "code/train.py"),), s.checkpoint_every > 0)
            for seed in seeds for arm, folder in folders.items()}
        if failed := make_runs([*planned.values()], command, *side_by_side([s], own.processes)):
            raise UserError("; ".join(failed.values()))
        return {arm: {seed: Run(folder / f"s{seed}") for seed in seeds}
                for arm, folder in folders.items()}

    pair = made(range(1))
    if is_the_same(pair["plain"][0], pair["idea"][0]):
        return say(textwrap.fill(
            "Both runs of seed 0 are the same to the last bit, so no other seeds are trained: "
            "what differs changes no number of a run with these flags.", 100))
    tries = Tries(f"{EDIT} {mine.digest}", mine.digest, folders["plain"] / "tries.json")
    verdict = Verdict(EDIT, made(range(own.seeds)), tries, name)
    if verdict.needs_second_look():
        say(f"{EDIT} is better than {name} on these seeds, so both are trained again on "
            f"{own.seeds} new seeds")
        verdict.add(made(range(own.seeds, 2 * own.seeds)))
    verdict.print_findings()
    of_arms = " ".join(f"{shlex.quote(str(folder))}/s*/" for folder in folders.values())
    say(f"\nTo repeat all of it: {command}\nFor the curves of all runs: "
        f"{python_command('-m', 'lab', 'compare')} {of_arms}")


def other_version(typed: str, empty: Path) -> tuple[Path, str]:
    """The folder of the other version, and its name. The files of a commit are unpacked."""
    if Path(typed, "train.py").is_file():
        shutil.copytree(typed, empty, ignore=not_copied, dirs_exist_ok=True)
        return empty.resolve(), typed
    try:
        packed, short = (subprocess.run(["git", "-C", str(PROJECT), *words], check=True,
                                        capture_output=True).stdout for words in (
            ["archive", "--format=tar", typed], ["rev-parse", "--short", typed]))
    except FileNotFoundError:
        raise UserError(f"--against {typed}: git is not installed. Name a folder that has another "
                        "copy of the project") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"--against {typed} is no folder of the project and no commit: "
                        f"{error.stderr.decode().strip()}") from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for one in archive:
            if not {*Path(one.name).parts} & NOT_COPIED:
                archive.extract(one, empty, filter="data")
    return empty.resolve(), f"{typed} ({short.decode().strip()})"


def not_copied(folder: str, names: list[str]) -> set[str]:
    """What no run needs, such as hidden files, a virtual environment, large data."""
    return {name for name in names for path in [Path(folder, name)]
            if name.startswith(".") or name in NOT_COPIED or (path / "pyvenv.cfg").exists()
            or not path.exists() or path.is_file() and path.stat().st_size > LARGEST}


def add_task(s: LabSettings, root: Path) -> None:
    """A new task's file, and what it imports, are yours in both versions."""
    for path in with_imports([file_of_task(s.task)]):
        if path.is_relative_to(PROJECT) and not (root / path.relative_to(PROJECT)).exists():
            (root / path.relative_to(PROJECT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to(PROJECT))


def refuse_what_is_not_there(other: Version) -> None:
    for name in (other.settings.mitigation, other.settings.advantage):
        if not any(label.startswith(f"{name} (") for label in other.texts):
            raise UserError(f"{other.name} has no {name}. With plain GRPO a new method is compared "
                            f"by python -m lab idea {name}")


def untrained_edits(s: LabSettings, root: Path) -> list[str]:
    """The parts of the book that differ, and in whose place a run of the lab has others."""
    mine, other = (texts_of([place / name for name in BOOK],
                            set.union(*(defined_in(place / name) for name in BOOK)), (), place)
                   for place in (PROJECT, root))
    return [label for label in sorted(replaced(s) & mine.keys()) if mine[label] != other.get(label)]


def print_changes(mine: Version, other: Version) -> None:
    say(f"{mine.name} is compared with {other.name}. A run can reach these differences:")
    labels = [label for label in sorted({*mine.texts, *other.texts})
              if mine.texts.get(label) != other.texts.get(label)]
    for label in labels:
        for line in difference(label, other.texts.get(label, ""), mine.texts.get(label, "")):
            say(line)
    files = (shown(file_of_task(mine.settings.task), PROJECT), "countdown_task.py",
             "lab/countdown.py")
    if any(label.endswith(f"({file})") for label in labels for file in files):
        say("The task differs, so each version counts success by its own task.")


def difference(label: str, before: str, now: str) -> Iterator[str]:
    only = " is new" if now else " is reached no more"
    yield f"  {label}" + ("" if before and now else only)
    if before and now:
        lines = [line for line in difflib.unified_diff(
            before.splitlines(), now.splitlines(), n=0, lineterm="")
            if not line.startswith(("---", "+++", "@@"))]
        yield from (f"    {line:.120}" for line in lines[:LINES])
        if len(lines) > LINES:
            yield f"    and {len(lines) - LINES} more lines"


def is_the_same(one: Run, other: Run) -> bool:
    """Whether two runs have the same numbers in each step and in each evaluation."""
    def numbers(run: Run) -> str:
        return json.dumps([{name: value for name, value in line.items()
                            if not name.endswith(OF_TIME)}
                           for line in (*run.metrics, *run.evaluations)])
    return numbers(one) == numbers(other)
