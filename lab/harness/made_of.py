"""What a run of the lab is made of: the files of code that it can load, which are copied into its
folder, and a digest of each file of data that flags name, and of those of the model. What a
function opens by itself is not seen.
"""
import ast
import os
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from lab.engine.errors import PROJECT
from lab.engine.methods import MODULES, MODULES_OF_ADVANTAGES
from lab.harness.record import digest_of, find_folder
from lab.harness.settings import LabSettings
from run import name_in_copy

START = ("lab.__main__", "lab.run", "lab.countdown")
STDLIB = Path(os.__file__).parent
OF_PACKAGES = {"site-packages", "dist-packages"}  # names of the folders they are installed in


def made_of(s: LabSettings, root: Path = PROJECT) -> dict[str, str]:
    """The digest of each file of data by its path: from the project's folder, or the whole path of
    a file that lies elsewhere."""
    files = set[Path]()
    for name, value in s.to_json().items():
        path = find_folder(value) if isinstance(value, str) and name != "out" else None
        if path and path.is_file():
            files.add(path)
        elif path and (path / "config.json").is_file():  # the model, and one of a --teacher
            files |= files_of_model(path)
    paths = [Path(os.path.abspath(path)) for path in sorted(files)]
    return {path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path):
            digest_of(path) for path in paths}


def changed_data(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The files whose content of then is in none of now."""
    return {name: digest for name, digest in before.items() if digest not in now.values()}


def files_of_model(folder: Path) -> set[Path]:
    return {path for path in folder.glob("*")
            if path.suffix in (".json", ".jinja", ".safetensors") and path.is_file()}


def files_of_run(s: LabSettings, root: Path = PROJECT) -> dict[str, Path]:
    """The files of code that a run can load, each with its name in a copy, if the project lies in
    `root`. They follow from its settings, and not from what else this process has loaded."""
    modules = [module for name, known in (
        (s.mitigation, MODULES), (s.advantage, MODULES_OF_ADVANTAGES))
        for module, names in known.items() if name in names.split()]
    start = [f"{module.replace('.', '/')}.py" for module in (*START, *modules, s.task)]
    return imported(start, root, ("lab/tests/", *["lab/gpu/"] * (s.device == "cpu")))


def imported(start: list[str], root: Path, without: tuple[str, ...] = ()) -> dict[str, Path]:
    """These files of the project, and those that they import, also in a function, and so on; none
    of Python's own, of an installed package, or whose name begins as one of `without`."""
    places = [root, *(Path(place) for place in sys.path if Path(place).resolve() != PROJECT)]
    found, waiting, seen = dict[str, Path](), list(start), set[str]()
    while waiting:
        name = waiting.pop()
        path = next((place / name for place in places if (place / name).is_file()), Path())
        is_own = not (path.is_relative_to(STDLIB) or OF_PACKAGES & {*path.parts})
        if path.is_file() and is_own and not name.startswith(without):
            found[name] = path
            more = imports_of(path.read_bytes(), tuple(name.split("/")[:-1]))
            waiting += more - seen
            seen |= more
    return {name if path.is_relative_to(root) else name_in_copy(path.resolve()).as_posix(): path
            for name, path in found.items()}


@lru_cache(2000)
def imports_of(content: bytes, package: tuple[str, ...]) -> set[str]:
    """The names of all files that this one may import; many of them are no files."""
    modules = {package}
    with suppress(SyntaxError, ValueError):  # Python says so when it is imported
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                modules |= {tuple(name.name.split(".")) for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                outer = package[:len(package) - node.level + 1] if node.level else ()
                module = (*outer, *filter(None, (node.module or "").split(".")))
                modules |= {(*module, name.name) for name in node.names}
    names = {"/".join(module[:end]) for module in modules for end in range(1, len(module) + 1)}
    return {f"{name}{end}" for name in names for end in (".py", "/__init__.py")}
