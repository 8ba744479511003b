"""The notebook runs from its first cell to its last, wherever it was started."""
import json
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, is_taken_away, project_files

NOTEBOOK = ROOT / "docs/first_look.ipynb"
FEWER = {'"8", "--answers", "8"': '"4", "--answers", "4"', '"30"': '"2"', '"10"': '"1"',
         '"200"': '"8"'}


def cells(kind: str) -> list[str]:
    """The texts of the notebook's cells of this kind, code or markdown."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def with_fewer_steps(cell: str) -> str:
    """The cell; where it names the flags, a run of seconds."""
    if not cell.startswith("FLAGS = "):
        return cell
    for usual, fewer in FEWER.items():
        assert usual in cell, f"the flags of the notebook have no {usual}"
        cell = cell.replace(usual, fewer)
    return cell


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the program for the notebook to write its runs into."""
    folder = tmp_path_factory.mktemp("copy")
    for path in project_files("*.py"):
        shutil.copy(path, folder)
    for room in ("engine", "harness", "credit", "analysis", "tools", "models/tiny"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs").mkdir()
    return folder


def run_as_script(folder, script: str) -> str:
    """What the cells print in a process of their own."""
    (folder / "notebook.py").write_text(script, encoding="utf-8")
    result = subprocess.run([sys.executable, "notebook.py"], cwd=folder, capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_cell_runs_from_the_folder_of_the_notebook(project):
    """Two runs, which differ in the weights of the first step alone, and their comparison."""
    script = "\n\n".join(map(with_fewer_steps, cells("code")))
    printed = run_as_script(project / "docs", script)
    assert printed.count("done. Everything is in") == 2
    assert "weight  1.00   gradient" in printed and "one seed" in printed
    plain, paid = [text.split("\n\n")[0] for text in printed.split("reward 1.1, advantage")[1:]]
    assert pieces(plain) == pieces(paid) and plain != paid


def pieces(answer: str) -> list[str]:
    """The tokens of a printed answer and their probabilities."""
    return [line.partition("   weight")[0] for line in answer.splitlines() if "   weight" in line]


def test_the_notebook_is_small_and_of_no_machine():
    """What its cells print is kept, for whoever reads it without running it, but no picture, which
    nothing would tell from an old one; and no folder is named."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 50_000 and '"stdout"' in text and '"image/png"' not in text
    assert "/tmp" not in text and "/home" not in text and "Traceback" not in text


def test_lines_of_the_notebook_fit_a_screen():
    for cell in cells("code"):
        assert max(map(len, cell.splitlines())) <= 100


def test_every_link_of_the_notebook_leads_to_a_file():
    links = re.findall(r"\]\(([^)\s#]+)", "\n".join(cells("markdown")))
    assert len(links) > 3
    for link in links:
        target = (NOTEBOOK.parent / link).resolve()
        assert target.exists() or is_taken_away(target), link
