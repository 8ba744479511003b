"""Every command of the overview: its help, its smallest work, and the pages that name it."""
import re

import pytest
from conftest import ROOT
from logs import random_log

from engine.errors import UserError
from lab import __main__ as overview
from lab.publish.results import pages

SAMPLED = "--questions 2 --answers 4 --max_new_tokens 24 --threads 1"
SMALLEST = {  # what each command is typed with here; {run} is a run, {plan} a plan, {model} a model
    "experiment": "later --report_only --arms gdpo",
    "exact": "--length 2 --answers 2 --only rloo --threads 1",
    "signal": f"{SAMPLED} --batches 4 --only rloo --model {{model}}",
    "dial": "--worlds 4/2 --steps 2 --seeds 2 --only none",
    "decided": "--problems 2 --of_each 2 --continuations 2 --certain 0.5 --threads 1",
    "card": "dr_grpo --model {model} --questions 2 --answers 4 --max_new_tokens 24 --threads 1",
    "notes": "{run}",
    "phase1": f"{SAMPLED} --model {{model}}",
    "rank": "--questions 6 --answers 8 --max_new_tokens 24 --threads 1 --model {model} "
            "--measured_k 0 --critic_batches 0",
    "sparsity": f"{SAMPLED} --run {{trained}}",
    "baseline": f"{SAMPLED} --model {{model}}",
    "show": "sparsity",
    "publish": "--check"}


def test_a_command_has_its_line_in_the_overview_and_a_wrong_name_is_told(capsys):
    overview.main([])
    printed = capsys.readouterr().out
    assert all(f"python -m lab {name} " in printed for name in overview.MODULES)
    with pytest.raises(UserError, match="there is no probe or experiment bord, only experiment"):
        overview.main(["bord"])


def test_a_command_that_is_gone_is_in_the_log():
    log = (ROOT / "lab/LOG.md").read_text(encoding="utf-8")
    for name in overview.RETIRED:
        assert name not in overview.MODULES and f"`python -m research {name}" in log
    with pytest.raises(UserError, match="board last stood in commit f19f84f4. lab/LOG.md"):
        overview.main(["board"])


@pytest.mark.parametrize("name", overview.MODULES)
def test_help_shows_what_a_command_asks(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        overview.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"python -m lab {name} " in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, learner, recorded):
    folder, _ = random_log(tmp_path_factory.mktemp("logs") / "run")
    return {"run": folder, "model": learner, "trained": recorded}


@pytest.mark.parametrize("name", overview.MODULES)
def test_a_command_does_its_smallest_work(name, folders, tmp_path, monkeypatch, capsys):
    """A command that is new needs a line in SMALLEST."""
    monkeypatch.chdir(tmp_path)
    overview.main([name, *SMALLEST[name].format(**folders).split()])
    assert capsys.readouterr().out


def test_a_page_names_no_command_that_is_gone_without_its_commit():
    """The log names them all, with the commit at its top."""
    gone = []
    for page in pages():
        if page.name == "LOG.md":
            continue
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            for name in re.findall(r"python -m lab (\w+)", paragraph):
                if name not in overview.MODULES and "f19f84f4" not in paragraph:
                    gone.append(f"{page.name}: {name}")
    assert not gone
