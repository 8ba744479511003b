"""What a run of the lab is made of: a digest of each definition that it can reach, by the book's
`texts_of`, and of each file of data.

The definitions are those of the book and of the lab, without parts of the book that the lab
replaces, and all that stand in the task's file and in what this and mitigations.py import. The
files are those that flags name, and those of the model. Any of them may be edited while a run is
stopped, and what follows is then not what the run that was never stopped would have given:
`--resume` says what differs, and goes on. What a function opens by itself is not seen.
"""
import ast
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from lab.engine.errors import PROJECT
from lab.harness.record import digest_of, find_folder
from lab.harness.settings import CHANGEABLE, LabSettings
from lab.harness.tasks import file_of_task
from run import definitions, shown, texts_of
from run import digest_of as digest_of_text

OF_A_STEP = ("train.py", "run.py", "grpo.py", "mitigations.py", "countdown_task.py",
             "qwen2_model.py", "lab/countdown.py",
             "lab/engine/*.py", "lab/harness/*.py", "lab/credit/*.py")
# parts of the book in whose place a run of the lab has others (lab/harness/run.py, lab/engine)
REPLACED = {"Training (train.py)", "weights (mitigations.py)",
            *(f"{name} (grpo.py)" for name in (
                "sample", "advantages", "log_probs", "AdamW.step", "Learner.log_probs",
                "Learner.divergence", "Learner.micro_batches")),
            *(f"Run.{name} (run.py)" for name in (
                "make_parts", "encode", "made_of", "record", "state", "write_model", "put_back")),
            *(f"{name} (qwen2_model.py)" for name in (
                "generate", "rotary", "Attention.forward", "Decoder.forward", "Qwen2.forward",
                "Qwen2.logits"))}
# lab/countdown.py has others of these two; a task of one's own may inherit them
REPLACED_BY_LAB_TASK = {"Task.prompt_for (countdown_task.py)", "Task.score (countdown_task.py)"}
STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
OF_PACKAGES = {"site-packages", "dist-packages"}  # names of the folders they are installed in


def made_of(s: LabSettings, root: Path = PROJECT) -> dict[str, str]:
    """The digest of each definition by its label, and of each file by its path: from the project's
    folder, or the whole path of a file that lies elsewhere."""
    files = files_of_model(find_folder(s.model))
    for value in s.to_json().values():
        if isinstance(value, str) and value and find_folder(value).is_file():
            files.add(find_folder(value))
    for value in s.keywords.values():  # a model that a method takes, as --teacher
        if isinstance(value, str) and value and (find_folder(value) / "config.json").is_file():
            files |= files_of_model(find_folder(value))
    digests = {label: digest_of_text(text) for label, text in program(s, root).items()}
    return digests | {shown(Path(os.path.abspath(path)), root): digest_of(path)
                      for path in sorted(files)}


def digest_of_run(s: LabSettings, root: Path = PROJECT) -> str:
    """Eight characters, which change with whatever a run is made of, and with its settings, but for
    the seed and what a resumed run may change."""
    settings = {name: value for name, value in s.to_json().items()
                if name not in ("seed", "out", *CHANGEABLE)}
    return digest_of_text([settings, sorted(made_of(s, root).items())])[:8]


def program(s: LabSettings, root: Path = PROJECT) -> dict[str, str]:
    """The text of each definition that a run can reach, if the project lies in `root`."""
    task = file_of_task(s.task)
    if task.is_relative_to(PROJECT):
        task = root / task.relative_to(PROJECT)
    own = [root / "mitigations.py", task]
    of_gpu = {*root.glob("lab/gpu/*.py")}
    files = {path for pattern in OF_A_STEP for path in root.glob(pattern)}
    files |= set() if s.device == "cpu" else of_gpu
    names = {"train", "LabRun", "Run", s.mitigation, s.advantage}
    imported = with_imports([path for path in own if path.is_file()], root)
    for path in imported - files - of_gpu:
        with suppress(OSError, SyntaxError, ValueError):  # Python says so when it is imported
            names |= defined_in(path)
            files.add(path)
    return texts_of(sorted(files), names, replaced(s), root)


def replaced(s: LabSettings) -> set[str]:
    """The parts of the book that a run with these settings does not call."""
    has_lab_task = s.task in ("countdown_task", "lab.countdown")
    return REPLACED | (REPLACED_BY_LAB_TASK if has_lab_task else set())


def defined_in(path: Path) -> set[str]:
    return {name for name, _, _ in definitions(path.read_text(encoding="utf-8"))}


def files_of_model(folder: Path) -> set[Path]:
    return {path for path in folder.glob("*")
            if path.suffix in (".json", ".jinja", ".safetensors") and path.is_file()}


def with_imports(paths: list[Path], root: Path = PROJECT) -> set[Path]:
    """These files, those that they import, also within a function, and so on; but none of Python's
    own or of an installed package."""
    found: set[Path] = set()
    waiting = list(paths)

    @cache
    def on_path(module: str) -> str | None:
        package, _, name = module.rpartition(".")
        if not (file := package and on_path(package)):
            return file_of(module, [str(root), *sys.path])
        is_own = file.endswith("__init__.py") and not is_installed(file)
        return file_of(name, [os.path.dirname(file)]) if is_own else None

    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imports_of(path, on_path)
    return found


def imports_of(path: Path, on_path: Callable[[str], str | None]) -> Iterator[Path]:
    """The files that a file imports, found beside it or on Python's path; and the __init__.py of
    its package, which runs before it."""
    package = path.parent.parent if path.name == "__init__.py" else path.parent
    if (package / "__init__.py").is_file():
        yield package / "__init__.py"
    with suppress(SyntaxError, ValueError):  # Python says so when it is imported
        for module in modules_in(path.read_text(encoding="utf-8")):
            file = file_of(module, [str(path.parent)]) or on_path(module)
            if file and not is_installed(file):
                yield Path(file).resolve()


@lru_cache(1000)
def modules_in(file: str) -> list[str]:
    """The names that a file's text imports, each of which may be a module."""
    found = set[str]()
    for node in ast.walk(ast.parse(file)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{name.name}".strip(".") for name in node.names)}
    return sorted(found - {""})


def file_of(module: str, places: list[str]) -> str | None:
    """The file of a module in the first of these folders that has it."""
    for place in places:
        base = os.path.join(place, *module.split("."))
        for path in (f"{base}.py", os.path.join(base, "__init__.py")):
            if os.path.isfile(path):
                return path
    return None


def is_installed(path: str) -> bool:
    """Whether a file is Python's own or of an installed package: beside Python, in the folder of a
    user or of the whole system."""
    return path.startswith(STDLIB) or not OF_PACKAGES.isdisjoint(path.split(os.sep))
