"""What the pages tell a reader to paste works as it stands there."""
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT

SHORT = ["--model", str(ROOT / "models/tiny"), "--threads", "1", "--questions", "2", "--answers", "4",
         "--max_new_tokens", "32", "--steps", "1", "--eval_every", "1", "--eval_tasks", "8",
         "--checkpoint_every", "0"]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the program to paste into."""
    folder = tmp_path_factory.mktemp("copy")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for room in ("engine", "credit", "analysis", "tools"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def train(folder, *flags) -> str:
    command = [sys.executable, "train.py", *SHORT, *flags]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_task_of_ones_own_is_one_file(project):
    """The page's task shares nothing with Countdown: own problems, own prompt, own labels."""
    (project / "my_task.py").write_text(blocks("docs/your_own_task.md")[0])
    printed = train(project, "--task", "my_task", "--count", "4")
    folder = project / re.search(r"writing to (\S+)", printed)[1]
    assert "largest of " in printed and folder.name.startswith("my_task-")
    config = json.loads((folder / "config.json").read_text())
    assert config["task"] == "my_task" and config["count"] == 4 and "numbers" not in config
    assert config["reward"] == "answer + 0.1 format"
    with np.load(folder / "credit/step_000001.npz") as credit:
        assert not credit["section"].any() and len(credit["group"]) == 8


def test_an_advantage_of_ones_own_is_one_function(project):
    """Signed credit: another choice of --advantage with a flag, on record token by token."""
    [pasted] = [block for block in blocks("docs/weightings.md") if "def my_credit" in block]
    source = (project / "grpo.py").read_text()
    (project / "grpo.py").write_text(source + "\nfrom engine.flags import Share\n\n\n" + pasted)
    printed = train(project, "--advantage", "my_credit", "--process", "0.25", "--seed", "1")
    folder = project / re.search(r"writing to (\S+)", printed)[1]
    assert "none-my_credit-process0.25-" in folder.name
    with np.load(folder / "credit/step_000001.npz") as credit:
        assert np.ptp(credit["advantage"]) > 0 and (credit["advantage"] < 0).any()


def test_every_test_that_a_page_names_exists():
    """A promise is kept by the test beside it."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {(page, *name) for page in pages
             for name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())}
    assert len(named) > 15
    for page, path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{page.name}: {path}::{test}"


def test_every_link_of_a_page_leads_somewhere():
    """Files that a page links to exist, and so do the headings behind a #."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"]
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if link.startswith("http"):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in headings(target), f"{page.name}: {link}"


def headings(page) -> set[str]:
    """As GitHub names them: lower case, punctuation gone, spaces as hyphens."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
