"""Without the packages that can be taken away the lab trains and analyses, and its tests hold."""
import ast
import re
import shutil

import pytest
from conftest import REMOVABLE, ROOT, project_files
from runs import program

pytestmark = pytest.mark.slow

LAB = ("*", "models/**/*", *(f"{package}/**/*" for package in (
    "engine", "harness", "credit", "analysis", "tools", "examples", "docs", "tests")))
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A copy of all that is not in those packages."""
    folder = tmp_path_factory.mktemp("lab")
    for path in (path for pattern in LAB for path in project_files(pattern) if path.is_file()):
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    assert not [package for package in REMOVABLE if (folder / package).exists()]
    return folder


STEP = """
import analyze, train
train.main("--threads 1 --questions 2 --answers 4 --steps 1 --max_new_tokens 48 --eval_every 0 "
           "--out runs/one".split())
analyze.main(["runs/one", "--all"])
"""


def test_a_step_is_trained_and_analysed(lab):
    said = program(lab, "-c", STEP)
    assert "## How the averages changed over training" in said
    assert (lab / "runs/one/analysis/report.html").is_file()


ONE = "|".join(REMOVABLE)
NAMES_ONE = re.compile(rf"(?<![\w-])({ONE})[./]\w|'({ONE})'|-m ({ONE})\b")
READERS = {"project_files", "is_taken_away", "REMOVABLE"}  # of conftest.py
IN_A_COPY = {"project", "elsewhere"}  # fixtures that are a copy of the program


def used_by(name, body):
    """The statements of a file that define this name, and all that they use of the file."""
    names, used = {name}, []
    while True:
        new = [node for node in body if node not in used and defined_by(node) & names]
        if not new:
            return used
        used += new
        for node in new:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def defined_by(node):
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {getattr(target, "id", getattr(target, "name", "")) for target in targets}


def noticing(path, readers):
    """The functions of a file of tests whose code, with what it uses of its file, names a package
    that can be taken away, or calls a reader of the project's files."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.FunctionDef):
            code = "\n".join(map(ast.unparse, used_by(node.name, body)))
            if IN_A_COPY & {argument.arg for argument in node.args.args}:
                continue
            if NAMES_ONE.search(code) or readers & set(re.findall(r"\w+", code)):
                yield node.name


def test_no_other_test_imports_them():
    """So all are collected without them. Code that is tested has its own rule
    (test_import_rules.py)."""
    for path in project_files("tests/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "asname")]
            for name in [*names, getattr(node, "module", None) or ""]:
                assert name.split(".")[0] not in REMOVABLE, f"{path.name}:{node.lineno}"


def test_what_could_notice_holds(lab):
    """All tests that name such a package, list the project's files, or call a helper that does: the
    import rules, the pages with their links, and others. Left out are the two that count what a
    program loads, which no such package changes, and those that work in a copy of the program,
    because there it is missing anyway."""
    readers = set(READERS)
    for path in (lab / "tests").glob("*.py"):
        if not path.name.startswith("test_"):
            readers |= set(noticing(path, READERS))
    readers.remove("copy_project")
    chosen = []
    for path in sorted((lab / "tests").rglob("test_*.py")):
        if path.name != "test_taken_away.py":
            chosen += [f"{path.relative_to(lab)}::{name}" for name in noticing(path, readers)
                       if name.startswith("test_") and "not_grow" not in name]
    assert "tests/test_docs.py::test_every_link_of_a_page_leads_somewhere" in chosen
    program(lab, *PYTEST, *chosen)
