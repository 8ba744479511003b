"""What a run is made of, as digests. harness/resume.py compares them.

A run's numbers follow from its settings, the model's files, the code that computes a step, and the
files that its flags name. These files may be edited while a run is stopped, and a run that went on
then would be half of one thing and half of another, without a word. So config.json has a digest of
each, which --resume compares: it refuses to go on, and --accept_changes goes on, which is written
down, and analyze.py says it.

Comments, docstrings and the form of a line do not count. Of mitigations.py only the functions count
that a run uses, because every idea is written there. What is not seen: a file that a function opens
by itself, and what was edited by hand in the folder of the run.
"""
import ast
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.choices import METHODS, module_of
from engine.errors import PROJECT
from engine.model_folder import base_of
from harness.record import digest_of, digest_of_text, find_folder
from harness.settings import Settings
from harness.tasks import load_task

NOT_OF_A_STEP = ("analysis", "harness", "lab", "tools", "tests")


def made_of(s: Settings) -> dict[str, str]:
    """The digest of each file of the model and of the code, and of those that flags name."""
    folder = find_folder(s.model)
    model = [path for folder in {folder, base_of(folder)} for path in folder.iterdir()
             if path.suffix in (".json", ".safetensors")]
    files = [*code_files(s), *named_files(s), *model]
    return {shown(path): digest_of_part(path, s) for path in sorted(files)}


def code_files(s: Settings) -> set[Path]:
    """The files whose code the numbers of a run depend on: those of a step, and the project's other
    files that are loaded, but for those of methods that the run does not have."""
    files = {PROJECT / name for name in ("train.py", "grpo.py", "qwen2_model.py")}
    files |= set((PROJECT / "engine").glob("*.py"))
    chosen = {METHODS[axis][getattr(s, axis)].__module__ for axis in METHODS}
    methods = {module_of(one) for choices in METHODS.values() for one in choices.data.values()}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if name in methods - chosen - {"mitigations"}:
            continue
        if path.suffix == ".py" and PROJECT in path.parents and "site-packages" not in path.parts:
            if path.relative_to(PROJECT).parts[0] not in NOT_OF_A_STEP:
                files.add(path)
    # two of harness/ are part of a task: one scores the answers, the other writes prompts
    task: Any = load_task(s.task)
    if task.score.__module__ == "harness.short_task":
        files.add(PROJECT / "harness/short_task.py")
    if s.method_flags.get("examples"):
        files.add(PROJECT / "harness/solved_problems.py")
    return files


def named_files(s: Settings) -> list[Path]:
    values = [find_folder(value) for value in s.to_json().values()
              if isinstance(value, str) and value]
    return [path for path in values if path.is_file()]


def shown(path: Path) -> str:
    """The path of a file from the project's folder; its whole path if it is not in there."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(PROJECT)) if PROJECT in path.parents else str(path)


def digest_of_part(path: Path, s: Settings) -> str:
    """The digest of a file; of Python code, that of what it does."""
    if path.suffix != ".py":
        return digest_of(path)
    names = None
    if path == PROJECT / "mitigations.py":
        names = frozenset(("rescaled_weight", s.mitigation, s.advantage))
    facts = path.stat()
    return digest_of_code(path, names, facts.st_size, facts.st_mtime_ns)


@lru_cache(10_000)  # all code takes 0.3 s
def digest_of_code(path: Path, names: frozenset[str] | None, size: int, changed: int) -> str:
    """The digest of what Python code does; with `names`, of what these functions do. It is kept, as
    that of another file (`digest_of_file`)."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # Python says so when it is imported
        return digest_of(path)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
                node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    if names:
        tree.body = used_by(set(names), tree.body)
    return digest_of_text(ast.unparse(tree))


def used_by(names: set[str], body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a file that define these names, and all that they use of the file."""
    used: list[ast.stmt] = []
    while True:
        new = [node for node in body if node not in used and defined_by(node) & names]
        if not new:
            return [node for node in body if node in used]
        used += new
        for node in new:
            names = names | {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def defined_by(node: ast.stmt) -> set[str]:
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {getattr(target, "id", getattr(target, "name", "")) for target in targets}
