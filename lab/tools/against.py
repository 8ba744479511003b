"""Is my version of the files better than another one? `python -m lab idea --against HEAD`.

Edit any function of the book or of the lab. Nothing else is needed:

    python -m lab idea --against HEAD                     # your files, and those of the commit
    python -m lab idea --against HEAD --seeds 4 --steps 30
    python -m lab idea --against ../unchanged             # another copy of this project
    python -m lab idea --against runs/none-grpo-s0        # the files that made this run

1. First it names the definitions that differ. If there are none that count
   (lab/harness/versions.py), nothing is trained.
2. Both versions are copied into --runs, each into a folder that is named by its settings and by the
   version as a whole, and trained from there. So you can go on editing meanwhile. Finished runs are
   used again, also those of an edit that is committed later, against which the next one is
   compared.
3. After the first pair it stops if both runs are the same to the last bit: then a run with these
   flags never calls what differs. Else it goes on to a verdict, as for an idea. There are no
   placebos. With flags of the book both versions are trained by their train.py. The files that made
   a run of the book have no other door.
"""
import io
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

from lab.engine.errors import PROJECT, UserError
from lab.harness.record import Json
from lab.harness.screen import say
from lab.harness.settings import LabSettings, make_settings
from lab.harness.tasks import file_of_task
from lab.harness.versions import differing
from lab.tools.arms import Arm, decide, is_the_same, not_copied, runs_of
from lab.tools.planned_runs import common_settings
from run import code_folders

EDIT = "your edit"
LABELS = 40  # definitions that are named


def compare_versions(own: SimpleNamespace, typed: Json, command: str) -> None:
    given = common_settings(make_settings(typed).typed)
    s, runs = make_settings(given), Path(own.runs)
    with tempfile.TemporaryDirectory() as temporary:
        root, name = other_version(own.against, Path(temporary))
        add_task(s, root)
        mine, other = Arm("version", given, runs), Arm("version", given, runs, root)
        refuse_what_is_not_there(other, name)
        if mine.version == other.version:
            return say(textwrap.fill(
                f"Nothing differs between {EDIT} and {name} that counts, so nothing is trained. "
                "Comments, docstrings, functions that nothing names, such as methods that are not "
                "chosen, and files that a run with these flags does not import do not count.", 100))
        print_changes(mine, other, name)
        for arm in (other, mine):
            arm.copied()  # while the files of the commit are there
    mine.label, other.label, arms = EDIT, name, {"plain": other, "idea": mine}
    pair = runs_of(arms, range(1), command, own.processes)
    if is_the_same(pair["plain"][0], pair["idea"][0]):
        return say(textwrap.fill(
            "Both runs of seed 0 are the same to the last bit, so no other seeds are trained: "
            "what differs changes no number of a run with these flags.", 100))
    decide(arms, EDIT, name, f"{EDIT} {mine.folder.name}", own, command)


def other_version(typed: str, empty: Path) -> tuple[Path, str]:
    """The folder of the other version, and its name. The files of a commit are unpacked. Those that
    made a run are its last ones."""
    folder = next(iter(code_folders(Path(typed))[::-1]), Path(typed))
    if (folder / "train.py").is_file():
        shutil.copytree(folder, empty, ignore=not_copied, dirs_exist_ok=True)
        return empty.resolve(), typed
    try:
        packed, short = (subprocess.run(["git", "-C", str(PROJECT), *words], check=True,
                                        capture_output=True).stdout for words in (
            ["archive", "--format=tar", typed], ["rev-parse", "--short", typed]))
    except FileNotFoundError:
        raise UserError(f"--against {typed}: git is not installed. Name a folder that has another "
                        "copy of the project") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"--against {typed} is no folder of the project, no run with code/ "
                        f"and no commit: {error.stderr.decode().strip()}") from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(empty, filter="data")
    return empty.resolve(), f"{typed} ({short.decode().strip()})"


def add_task(s: LabSettings, root: Path) -> None:
    """A new task's file, and what lies beside it, are yours in both versions."""
    for path in file_of_task(s.task).parent.glob("*.py"):
        if path.is_relative_to(PROJECT) and not (root / path.relative_to(PROJECT)).exists():
            (root / path.relative_to(PROJECT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to(PROJECT))


def refuse_what_is_not_there(other: Arm, version: str) -> None:
    if not (other.is_book or (other.root / "lab/run.py").exists()):
        raise UserError(f"{version} has no lab, which these flags need: leave out those that "
                        "train.py does not know")
    defined = {label.split(" (")[0] for label, _ in other.version}
    for name in {other.settings.mitigation, other.settings.advantage} - defined:
        raise UserError(f"{version} has no {name}. With plain GRPO a new method is compared by "
                        f"python -m lab idea {name}")


def print_changes(mine: Arm, other: Arm, name: str) -> None:
    say(f"{EDIT} is compared with {name}. These differ:")
    labels = differing(other.version, mine.version)
    for label in labels[:LABELS]:
        say(f"  {label}")
    if len(labels) > LABELS:
        say(f"  and {len(labels) - LABELS} more")
    files = (f"{mine.settings.task.replace('.', '/')}.py", "countdown_task.py", "lab/countdown.py")
    if any(label.endswith(f"({file})") for label in labels for file in files):
        say("The task differs, so each version counts success by its own task.")
