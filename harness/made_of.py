"""What a run is made of, and whether it still is.

A run's numbers follow from its settings, the model's folder, the code that computes a step, and the
files that these read. All of this may be edited while a run is stopped, and a run that went on then
would be half of one thing and half of another, without a word. So a run writes down digests:

    made_of.json          of each thing that it is made of
    digests.jsonl         of its record: of each line of a log, and of each credit file
    trainer/state.json    of each file of a checkpoint

They are compared, by `differences`:

    train.py --resume        refuses to go on; --accept_changes goes on, and writes that down
    analysis/experiment.py   does not use a finished run again
    analyze.py               says it beside its findings

What counts as code: the files that compute a step, the task's file and what it imports, and with
another weighting or advantage than plain GRPO's all files that this may import. Of mitigations.py
only the functions count that a run uses, because every idea is written there. Comments, docstrings
and the form of a line do not count. What counts as a file that code reads: those that a flag names,
and those that a function of yours reads and does not write, which Python reports
(sys.addaudithook). A file that a library opens without Python, such as a safetensors file, is not
seen.
"""
import ast
import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import PROJECT, UserError, read_json
from harness.record import (DIGESTS, GOES_BACK, LOGS, Json, digest_of, digest_of_text,
                            digests_of_record, find_folder, read_lines, replace_text, run_config)
from harness.settings import CHANGEABLE, Settings

NAME = "made_of.json"
PLAIN = ("none", "grpo")
NOT_OF_A_STEP = ("analysis", "harness", "research", "tools")  # packages that compute no step
# of a run's own name and place, or seen only in how it is made
NOT_COMPARED = {"out", *CHANGEABLE}
# absolute paths of the files that a user's code has opened to read, and of those it has written
opened: set[str] = set()
written: set[str] = set()
NOT_FILES = ("/proc/", "/sys/", "/dev/")  # what stands there is of the machine, and of the moment


def watch_opened_files() -> None:
    """From now on note which files a user's code opens to read. There is no way to end that."""
    if not watch_opened_files.__dict__.setdefault("is_on", False):
        watch_opened_files.__dict__["is_on"] = True
        sys.addaudithook(note_opened)


def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.rename"):
        return
    path = arguments[1] if event == "os.rename" else arguments[0]
    mode = "w" if event == "os.rename" else arguments[1]
    if not isinstance(path, (str, os.PathLike)) or not isinstance(mode, str):
        return
    if not str(path).endswith((".py", ".pyc")) and is_users(sys._getframe(1)):
        is_written = any(letter in mode for letter in "wax+")
        (written if is_written else opened).add(os.path.abspath(path))


def is_users(frame: Any) -> bool:
    """Whether the innermost frame that belongs to no library belongs to a user's code: a file at
    the top of the project, in examples/, or outside of it."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_absolute() and is_own(file, ()):
            inside = file.relative_to(PROJECT).parts if PROJECT in file.parents else ("",)
            return len(inside) == 1 or inside[0] == "examples"
        frame = frame.f_back
    return False


def parts_of_run(s: Settings) -> dict[str, Json]:
    """The digests of what a run with these settings is made of, in three parts: settings, the
    model's files, and other files and functions."""
    values = {name: value for name, value in s.to_json().items() if name not in NOT_COMPARED}
    model = {path.name: digest_of(path) for path in sorted(find_folder(s.model).iterdir())
             if path.is_file()}
    named = {find_folder(value) for name, value in values.items()
             if name != "model" and isinstance(value, str) and value}
    files = code_files(s) | {path for path in named if path.is_file()} | read_by_users()
    digests = {shown(path): digest_of_part(path) for path in sorted(files)}
    for name, text in functions_of(s).items():
        digests[f"the function {name} of mitigations.py"] = digest_of_text(text)
    return {"settings": values, "model": model, "files": digests}


def shown(path: Path) -> str:
    """The name of a file of the project from there, of another one its whole path."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(PROJECT)) if PROJECT in path.parents else str(path)


def read_by_users() -> set[Path]:
    """The files that a user's code has read, but for those that it writes, too, such as a cache."""
    only_read = {name for name in opened - written if not name.startswith(NOT_FILES)}
    return {path for path in map(Path, only_read) if path.is_file()}


def digest_of_part(path: Path) -> str:
    """The digest of a file; of Python code, that of what it does."""
    if path.suffix != ".py":
        return digest_of(path)
    return digest_of_code(path, path.stat().st_mtime_ns)


@cache
def digest_of_code(path: Path, changed: int) -> str:
    """`changed` is the time of the last change: a file that was changed is read again."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # Python says so when it is imported
        return digest_of(path)
    return digest_of_text(ast.unparse(without_docstrings(tree)))


def without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
                node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def functions_of(s: Settings) -> dict[str, str]:
    """The source of each function of mitigations.py that a run uses, with all that it needs of
    this file."""
    names = ["rescaled_weight"]
    for chosen in (MITIGATIONS[s.mitigation], ADVANTAGES[s.advantage]):
        if chosen.__module__ == "mitigations":
            names.append(chosen.__name__)
    source = (PROJECT / "mitigations.py").read_text(encoding="utf-8")
    return {name: needed_by(name, source) for name in names}


@cache
def needed_by(name: str, source: str) -> str:
    """The source of what a file defines under this name, and of all of the file's names that it
    uses, one after the other."""
    defined: dict[str, list[ast.stmt]] = {}
    for node in without_docstrings(ast.parse(source)).body:
        targets = [node] if hasattr(node, "name") else getattr(node, "targets", [])
        targets = targets or [getattr(node, "target", None)]
        for target in targets:
            of_node = getattr(target, "name", None) or getattr(target, "id", None)
            if of_node:
                defined.setdefault(of_node, []).append(node)
    known: dict[str, str] = {}
    wanted = [name]
    while wanted:
        one = wanted.pop()
        if one in known or one not in defined:
            continue
        known[one] = "\n".join(ast.unparse(node) for node in defined[one])
        for node in defined[one]:
            wanted += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return "\n".join(known[one] for one in sorted(known))


def code_files(s: Settings) -> set[Path]:
    """The files whose code the numbers of a run depend on, but for mitigations.py."""
    files = {PROJECT / name for name in ("train.py", "grpo.py", "qwen2_model.py")}
    files |= set((PROJECT / "engine").glob("*.py"))
    task = sys.modules.get(s.task)
    used = {getattr(one, "__module__", None) for one in vars(task).values()} if task else set()
    # the task's, what it has from elsewhere and what it imports; a reward alone needs Countdown
    files |= with_imports(set(files_of({s.task, Settings.task, *filter(None, used)})))
    if (s.mitigation, s.advantage) != PLAIN:
        methods = {MITIGATIONS[s.mitigation].__module__, ADVANTAGES[s.advantage].__module__}
        files |= with_imports(set(files_of(methods)))
    return {path for path in files if is_own(path)} - {PROJECT / "mitigations.py"}


def files_of(modules: Iterable[str]) -> list[Path]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in list(modules)]
    return [Path(name) for name in files if name and name.endswith(".py") and os.path.isabs(name)]


def with_imports(files: set[Path]) -> set[Path]:
    """Add to these files those that they import, also those that a function imports when it is
    called, which are not loaded yet."""
    known, new = set(), files
    while new:
        known |= new
        found = {path for file in new for path in imported_by(file, file.stat().st_mtime_ns)}
        new = set(filter(is_own, found)) - known
    return known


@cache
def imported_by(file: Path, changed: int) -> set[Path]:
    """The files of the project, or beside this one, that it imports; `changed` is the time of its
    last change."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError:  # Python says so when it is imported
        return set()
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = [node.module] if node.module else []
            names += module + [".".join([*module, alias.name]) for alias in node.names]
    paths = {folder.joinpath(*name.split(".")) for name in names
             for folder in (PROJECT, file.parent)}
    files = {path.with_suffix(".py") for path in paths} | {path / "__init__.py" for path in paths}
    return {path for path in files if path.is_file()}


def is_own(path: Path, not_of_a_step: tuple[str, ...] = NOT_OF_A_STEP) -> bool:
    """Whether the numbers of a run may depend on this file. They do not if it belongs to Python, to
    an installed package, or to a package of this project that computes no step."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if PROJECT in path.parents:
        return path.relative_to(PROJECT).parts[0] not in not_of_a_step
    return Path(sys.base_prefix) not in path.parents


def identity_of(parts: Json) -> str:
    """Sixteen characters that tell a run from others: they follow from its settings."""
    return digest_of_text(json.dumps(parts["settings"], sort_keys=True, default=str))[:16]


def write_down(folder: Path, s: Settings, accepted: Iterable[Json] = ()) -> Json:
    """Write made_of.json. It is written before the first step, and again before a checkpoint if a
    user's code has opened more files by then."""
    parts: Json = {**parts_of_run(s), "accepted": list(accepted)}
    replace_text(folder / NAME, json.dumps(parts, indent=2, default=str) + "\n")
    return parts


def has_opened_more(parts: Json) -> bool:
    """Whether a user's code has read a file that is not written down, or has written one that is.
    """
    known = parts["files"].keys()
    return (any(shown(path) not in known for path in read_by_users())
            or any(shown(Path(name)) in known for name in written))


def kept(folder: Path) -> Json | None:
    """What made_of.json says; None if the run has none, because it is older or not of train.py."""
    path = folder / NAME
    if not path.exists():
        return None
    parts = read_json(path)
    if not all(isinstance(parts.get(name), dict) for name in ("settings", "model", "files")):
        raise UserError(f"{path} is damaged: it lacks settings, model or files")
    return parts


def digests_of_folder(folder: Path) -> dict[str, str]:
    """The digest of every file of a checkpoint, by its name, but for trainer/state.json, which
    holds them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in files}
    return {name: digest_of(path) for path, name in names.items() if name != "trainer/state.json"}


def differences(folder: Path, s: Settings | None = None, checkpoint: Path | None = None,
                done: int | None = None) -> Iterator[str]:
    """What differs from what a run was made of, in words. With settings `s`, which a program is
    going to use, all parts are compared; without them only the record. `checkpoint` is the one that
    a run continues from after `done` steps; what it recorded later will be made again."""
    before = kept(folder)
    if before is not None:
        yield from of_settings(before["settings"], run_config(folder))
        if s is not None:
            yield from of_parts(before, parts_of_run(s), s, needs_first_model=not done)
    if done != 0:  # a run that starts again makes all of its record anew
        yield from of_record(folder, done)
    if checkpoint is not None:
        yield from of_checkpoint(checkpoint, done)


def of_settings(before: Json, config: Json) -> Iterator[str]:
    for name, value in before.items():
        if name not in NOT_COMPARED and config.get(name, value) != value:
            yield f"config.json says {name} {config[name]}, and the run was made with {value}"


def of_parts(before: Json, now: Json, s: Settings, needs_first_model: bool) -> Iterator[str]:
    if needs_first_model or s.kl > 0 or s.loss == "dpo":
        for name, digest in before["model"].items():
            if now["model"].get(name) != digest:
                yield f"{name} of the model folder {s.model} has changed"
    for name, digest in before["files"].items():
        if name in now["files"]:
            is_same = now["files"][name] == digest
        else:  # a file that has not been opened yet, or one that is gone
            path = PROJECT / name
            is_same = not name.startswith("the function ") and path.is_file() and (
                digest_of_part(path) == digest)
        if not is_same:
            yield f"{name} has changed"
    for name, digest in now["files"].items():
        earlier = namesakes(name, before["files"])
        if name not in before["files"] and earlier and digest not in earlier.values():
            yield f"{name} is another file than {next(iter(earlier))}, which the run has read"


def namesakes(name: str, files: Json) -> Json:
    """The files of this name in other folders, with their digests: what a relative path leads to
    depends on where the command is typed. Not Python code, which has a fixed place."""
    path = Path(name)
    if path.suffix == ".py":
        return {}
    return {other: digest for other, digest in files.items() if Path(other).name == path.name}


def of_record(folder: Path, done: int | None = None) -> Iterator[str]:
    """Lines of logs and credit files that were changed, moved, lost or added, up to step `done`, or
    up to the last one. The run may be writing meanwhile: then it has written down more at the
    second look."""
    lines = read_lines(folder / DIGESTS)
    if lines and lines[-1]["file"] == GOES_BACK:  # a kill came while a resumed run removed lines
        done = lines[-1]["step"] if done is None else min(done, lines[-1]["step"])
    at_first = by_file(lines, done)
    found = by_file(digests_of_record(folder), done)
    lines = read_lines(folder / DIGESTS)
    if not lines:  # an older run, or one of another program
        yield from missing_steps(found)
        return
    written = by_file(lines, done)
    last = lines[-1]["file"] if done is None else ""  # a kill may have come before its line
    for name in LOGS:
        least = len(at_first.get(name, [])) - (name == last)
        if wrong := wrong_line(name, found.get(name, []), written.get(name, []), least):
            yield wrong
    wrong_files = list(wrong_credit(found, written, run_config(folder).get("steps", 0)))
    if wrong_files:
        others = f", and {len(wrong_files) - 1} more" if len(wrong_files) > 1 else ""
        yield f"{wrong_files[0]}{others}"


def by_file(lines: list[Json], done: int | None) -> dict[str, list[Json]]:
    files: dict[str, list[Json]] = {}
    for line in lines:
        if done is None or line["step"] <= done:
            files.setdefault(str(line.get("file")), []).append(line)
    return files


def wrong_line(name: str, found: list[Json], written: list[Json], least: int) -> str:
    """The first line of a log that is not as it was written. Of those that were written, only the
    last may be missing, beyond the `least` number."""
    for number, (now, before) in enumerate(zip(found, written), 1):
        if now != before:
            return (f"line {number} of {name} is not the one of step {before['step']} that the "
                    "run wrote there")
    if len(found) > len(written):
        return f"line {len(written) + 1} of {name} was not written by the run"
    if len(found) < least:
        return f"{name} has lost its last lines, from step {written[len(found)]['step']} on"
    return ""


def wrong_credit(found: dict[str, list[Json]], written: dict[str, list[Json]],
                 steps: int) -> Iterator[str]:
    """The credit files that are not as they were written. A kill may have left one that is not
    written down, of the step after the last line of metrics.jsonl. A user may have removed all."""
    names = {name for name in {*found, *written} if name.startswith("credit/")}
    if not names & found.keys():
        return
    last = max((line["step"] for line in written.get(LOGS[0], [])), default=0)
    for name in sorted(names):
        now, before = found.get(name), written.get(name)
        if now is None:
            yield f"{name} is missing"
        elif before is None:
            if now[0]["step"] != last + 1 or last >= steps:
                yield f"{name} was not written by the run"
        elif now != before:
            yield f"{name} is not the one that the run wrote"


def missing_steps(found: dict[str, list[Json]]) -> Iterator[str]:
    """What an older run, which wrote down no digests, says of steps that are missing."""
    lines = {line["step"] for line in found.get(LOGS[0], [])}
    files = {one[0]["step"] for name, one in found.items() if name.startswith("credit/")}
    wanted = set(range(1, max(lines, default=0) + 1))
    if wanted - lines:
        yield f"metrics.jsonl has no line of step {min(wanted - lines)}"
    if files and wanted - files:
        yield f"there is no credit file of step {min(wanted - files)}"


def of_checkpoint(checkpoint: Path, done: int | None) -> Iterator[str]:
    """A checkpoint of another step or run, or one of which a file has changed."""
    state = read_json(checkpoint / "trainer" / "state.json")
    if state.get("step") != done:
        yield f"{checkpoint} holds the state after step {state.get('step')}"
    before = kept(checkpoint.parent.parent)
    if before is not None and state.get("run", identity_of(before)) != identity_of(before):
        yield f"{checkpoint} is of another run"
    files = state.get("files", {} if before is None else None)  # an older run has none
    if not isinstance(files, dict):
        yield f"{checkpoint}/trainer/state.json has no digests of its files"
    else:
        now = digests_of_folder(checkpoint)
        for name, digest in files.items():
            if now.get(name) != digest:
                yield f"{checkpoint / name} has changed"


def state_of_checkpoint(checkpoint: Path, step: int, parts: Json) -> Json:
    """The content of trainer/state.json, when all other files of the checkpoint are written."""
    return {"step": step, "run": identity_of(parts), "files": digests_of_folder(checkpoint)}


def not_known(folder: Path) -> str:
    """What cannot be compared, because an older run did not write it down; empty if there is
    nothing."""
    missing = [name for name in (NAME, DIGESTS) if not (folder / name).exists()]
    if not missing:
        return ""
    what = {NAME: "what it is made of", DIGESTS: "its record"}
    return (f"{folder} has no {' and no '.join(missing)}, so it is not known whether "
            f"{' and '.join(what[name] for name in missing)} has changed")


def accepted_before(folder: Path) -> list[str]:
    """A sentence for each change that --accept_changes has let pass."""
    parts = kept(folder) or {}
    return [f"after step {one['after_step']}: {one['changes']}"
            for one in parts.get("accepted", [])]
