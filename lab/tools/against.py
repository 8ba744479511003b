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
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from lab.analysis.comparison import Arms
from lab.analysis.run_folders import Run
from lab.analysis.verdict import Tries, Verdict
from lab.engine.errors import PROJECT, UserError
from lab.harness.record import Json
from lab.harness.screen import python_command, say
from lab.harness.settings import LabSettings, make_settings
from lab.harness.tasks import file_of_task
from lab.harness.versions import shown
from lab.tools.arms import NOT_COPIED, Arm, is_the_same, not_copied
from lab.tools.planned_runs import common_settings, make_runs, side_by_side

EDIT = "your edit"
LINES = 12  # of a changed definition that are shown


def compare_versions(own: SimpleNamespace, typed: Json, command: str) -> None:
    given = common_settings(make_settings(typed).typed)
    s, runs = make_settings(given), Path(own.runs)
    with tempfile.TemporaryDirectory() as temporary:
        root, name = other_version(own.against, Path(temporary))
        add_task(s, root)
        mine, other = Arm("version", given, runs), Arm("version", given, runs, root)
        refuse_what_is_not_there(other, name)
        if mine.texts == other.texts:
            return say(textwrap.fill(
                f"Nothing differs between {EDIT} and {name} that a run with these flags can reach, "
                "so nothing is trained. Comments, docstrings, methods that are not chosen and "
                "files that are not loaded do not count.", 100))
        print_changes(mine, other, name)
        for arm in (other, mine):
            arm.copied()  # while the files of the commit are there
    arms = {"plain": other, "idea": mine}

    def made(seeds: range) -> Arms:
        planned = {(key, seed): arm.planned_run(seed)
                   for seed in seeds for key, arm in arms.items()}
        if failed := make_runs([*planned.values()], command, *side_by_side([s], own.processes)):
            raise UserError("; ".join(failed.values()))
        return {key: {seed: Run(arm.folder / f"s{seed}") for seed in seeds}
                for key, arm in arms.items()}

    pair = made(range(1))
    if is_the_same(pair["plain"][0], pair["idea"][0]):
        return say(textwrap.fill(
            "Both runs of seed 0 are the same to the last bit, so no other seeds are trained: "
            "what differs changes no number of a run with these flags.", 100))
    tries = Tries(f"{EDIT} {mine.folder.name}", mine.folder.name, other.folder / "tries.json")
    verdict = Verdict(EDIT, made(range(own.seeds)), tries, name)
    if verdict.needs_second_look():
        say(f"{EDIT} is better than {name} on these seeds, so both are trained again on "
            f"{own.seeds} new seeds")
        verdict.add(made(range(own.seeds, 2 * own.seeds)))
    verdict.print_findings()
    of_arms = " ".join(f"{shlex.quote(str(arm.folder))}/s*/" for arm in arms.values())
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


def add_task(s: LabSettings, root: Path) -> None:
    """A new task's file, and what lies beside it, are yours in both versions."""
    for path in file_of_task(s.task).parent.glob("*.py"):
        if path.is_relative_to(PROJECT) and not (root / path.relative_to(PROJECT)).exists():
            (root / path.relative_to(PROJECT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to(PROJECT))


def refuse_what_is_not_there(other: Arm, version: str) -> None:
    for name in (other.settings.mitigation, other.settings.advantage):
        if not any(label.startswith(f"{name} (") for label in other.texts):
            raise UserError(f"{version} has no {name}. With plain GRPO a new method is compared "
                            f"by python -m lab idea {name}")


def print_changes(mine: Arm, other: Arm, name: str) -> None:
    say(f"{EDIT} is compared with {name}. A run can reach these differences:")
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

