"""Without the packages that can be taken away the lab trains and analyses, and its tests hold."""
import shutil

import pytest
from conftest import REMOVABLE, ROOT, project_files
from runs import program

LAB = ("*", "models/*", "models/tiny/*", *(f"{package}/**/*" for package in (
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


def test_a_step_is_trained_and_analysed(lab):
    program(lab, "train.py", "--threads", "1", "--questions", "2", "--answers", "4", "--steps", "1",
            "--max_new_tokens", "48", "--eval_every", "0", "--out", "runs/one")
    said = program(lab, "analyze.py", "runs/one", "--all")
    assert "## How the averages changed over training" in said
    assert (lab / "runs/one/analysis/report.html").is_file()


def test_every_test_of_the_lab_can_be_collected(lab):
    program(lab, *PYTEST, "--collect-only")


PAGES = ["tests/test_docs.py::test_every_test_that_a_page_names_exists",
         "tests/test_docs.py::test_every_link_of_a_page_leads_somewhere"]


def test_the_import_rules_and_the_pages_hold(lab):
    """The tests that look at other packages."""
    program(lab, *PYTEST, "-k", "not grow", "tests/test_import_rules.py", *PAGES)
