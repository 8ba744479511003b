"""Which room of the lab may import which, and what no line of the lab and of the examples may
contain."""
import sys
from graphlib import TopologicalSorter

import pytest

from conftest import BOOK, ROOT, project_files
from test_import_rules import FILES, INSTALLED, UNPICKLERS, forbidden, imports, wrong_imports

DOORS = {  # files that talk to other tools, and what only they may import
    "lab.gpu.kernels": {"triton"},
    "lab.trl.trl_trainer": {"trl", "transformers", "accelerate"},
    "lab.trl.exact_trl": {"trl", "transformers", "datasets"}, "lab.formula.adapters": {"trl"},
    "examples.reasoning_gym_task": {"reasoning_gym"}, "examples.question_answer": {"pyarrow"},
    "lab.harness.chat_template": {"jinja2"}}  # torch requires it
PATHS = [path for package in ("lab", "examples") for path in project_files(f"{package}/**/*.py")
         if ROOT / package / "tests" not in path.parents]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PATHS + FILES}


def absolute(path, what):
    """What is imported, with its dots resolved if they are relative."""
    inner = what.lstrip(".")
    level = len(what) - len(inner)
    folder = path.parents[level - 1]
    return f"{name_of(folder / '__init__.py')}.{inner}" if level else what


def modules_of(path):
    """The modules of this project that are imported: of `grpo.update` it is grpo."""
    for what, _ in imports(path):
        parts = absolute(path, what).split(".")
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        if parts:
            yield ".".join(parts)


def test_the_lab_imports_no_example():
    assert not [path for path in PATHS if name_of(path).startswith("lab.")
                for name in modules_of(path) if name.startswith("examples")]


# rooms of the lab, and those that lie above them
ABOVE = {"engine": ("credit", "harness", "analysis", "tools", "probes"),
         "credit": ("harness", "analysis", "tools", "probes"),
         "harness": ("credit", "analysis", "tools", "probes"),
         "analysis": ("tools", "probes")}


@pytest.mark.parametrize("room", ABOVE)
def test_no_room_of_the_lab_imports_one_that_lies_above_it(room):
    """What a method declares, and how a step uses its values, lies in engine. There harness finds
    methods by name (lab/engine/methods.py)."""
    above = tuple(f"lab.{room}." for room in ABOVE[room])
    assert not [(path, name) for path in PATHS if name_of(path).startswith(f"lab.{room}.")
                for name in modules_of(path) if f"{name}.".startswith(above)]


def test_no_imports_go_in_a_circle():
    graph = {name: {*modules_of(path)} - {name} for name, path in MODULES.items()}
    for part in ("lab.formula.credit", "lab.formula.curves"):  # opened where a search comes to it
        graph["lab.formula.search"].discard(part)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_only_the_named_packages_are_imported():
    known = INSTALLED | {*BOOK, "lab", "examples"} | {*sys.stdlib_module_names} - UNPICKLERS

    def is_wrong(path, what):
        return absolute(path, what).split(".")[0] not in known | DOORS.get(name_of(path), set())

    assert not wrong_imports(PATHS, is_wrong)


def test_nothing_is_evaluated_unpickled_asserted_or_caught_unnamed():
    assert not forbidden(PATHS)
