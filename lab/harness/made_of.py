"""What a run is made of: the digest of each file that its numbers follow from.

They are the files of this project that can change a step, the task's file and what it imports, the
files that flags name, and those of the model. config.json has the digests. Such a file may be
edited while a run is stopped, and what follows is then not what the run that was never stopped
would have given: `--resume` says which files differ, and goes on. What a function opens by itself
is not seen.
"""
import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.engine.errors import PROJECT
from lab.harness.record import digest_of, digest_of_text, find_folder
from lab.harness.settings import LabSettings
from lab.harness.tasks import file_of_task

METHODS_FILE = PROJECT / "mitigations.py"
OF_A_STEP = ("train.py", "run.py", "grpo.py", "mitigations.py", "countdown_task.py",
             "qwen2_model.py", "lab/countdown.py",
             "lab/engine/*.py", "lab/harness/*.py", "lab/credit/*.py")
STDLIB = Path(sysconfig.get_path("stdlib"))
OF_PACKAGES = {"site-packages", "dist-packages"}  # names of the folders they are installed in


def made_of(s: LabSettings) -> dict[str, str]:
    """The digest of each file by its path: from the project's folder, or the whole path of a file
    that lies elsewhere."""
    files = {path for pattern in OF_A_STEP for path in PROJECT.glob(pattern)}
    files |= with_imports([METHODS_FILE, file_of_task(s.task)])
    files |= files_of_model(find_folder(s.model))
    for value in s.to_json().values():
        if isinstance(value, str) and value and find_folder(value).is_file():
            files.add(find_folder(value))
    for value in s.keywords.values():  # a model that a method takes, as --teacher
        if isinstance(value, str) and value and (find_folder(value) / "config.json").is_file():
            files |= files_of_model(find_folder(value))
    digests = {shown(path): digest_of(path) for path in sorted(files)}
    methods = without_others(METHODS_FILE.read_text(encoding="utf-8"), {s.mitigation, s.advantage})
    return digests | {shown(METHODS_FILE): digest_of_text(methods)}


def files_of_model(folder: Path) -> set[Path]:
    return {path for path in folder.glob("*")
            if path.suffix in (".json", ".jinja", ".safetensors") and path.is_file()}


def shown(path: Path) -> str:
    path = Path(os.path.abspath(path))
    return str(path.relative_to(PROJECT)) if PROJECT in path.parents else str(path)


def with_imports(paths: list[Path]) -> set[Path]:
    """These files, those that they import, also within a function, and so on; but none of Python's
    own or of an installed package."""
    found: set[Path] = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imports_of(path)
    return found


def imports_of(path: Path) -> Iterator[Path]:
    """The files that a file imports, found beside it or on Python's path; and the __init__.py of
    its package, which runs before it."""
    package = path.parent.parent if path.name == "__init__.py" else path.parent
    if (package / "__init__.py").is_file():
        yield package / "__init__.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # Python says so when it is imported
        return
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{name.name}".strip(".") for name in node.names)]
        for name in filter(None, names):
            yield from files_of(name, path.parent)


def files_of(module: str, beside: Path) -> Iterator[Path]:
    """The file of a module in the first place that has it; none if that place holds what is
    installed."""
    for place in (beside, *map(Path, sys.path)):
        base = place.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                if not is_installed(path):
                    yield path.resolve()
                return


def is_installed(path: Path) -> bool:
    """Whether a file is Python's own or of an installed package: beside Python, in the folder of a
    user or of the whole system."""
    return STDLIB in path.parents or bool(OF_PACKAGES & {*path.parts})


def without_others(text: str, chosen: set[str]) -> str:
    """The text of mitigations.py without the methods that a run does not have, without lines that
    are comments, and without empty lines. A method counts if it is chosen, or if what counts names
    it. So another idea in the file changes nothing."""
    body = ast.parse(text).body
    others = {node.name: node for node in body
              if isinstance(node, ast.FunctionDef | ast.ClassDef) and is_method(node)}
    counts = chosen
    while counts:
        others = {name: node for name, node in others.items() if name not in counts}
        kept = [node for node in body if node not in others.values()]
        counts = others.keys() & names_in(kept)
    lines = text.splitlines()
    for node in others.values():
        first, end = node.decorator_list[0].lineno - 1, node.end_lineno or 0
        lines[first:end] = [""] * (end - first)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def is_method(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a function or a class stands below @mitigation or @advantage."""
    return bool(names_in(node.decorator_list) & {"mitigation", "advantage"})


def names_in(nodes: Sequence[ast.AST]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}
