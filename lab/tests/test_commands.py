"""Every command of the overview: its help, a test that runs it, and the pages that name it."""
import re

import pytest
from conftest import ROOT, project_files

from lab.engine.errors import UserError
from lab import __main__ as overview


def test_a_command_has_its_line_in_the_overview_and_a_wrong_name_is_told(capsys):
    overview.main([])
    printed = capsys.readouterr().out
    assert all(re.search(f"python -m lab {name} ", printed) for name in overview.MODULES)
    with pytest.raises(UserError, match="there is no command bord, only preflight"):
        overview.main(["bord"])


def test_the_overview_has_the_questions_and_commands_of_the_readme():
    table = (ROOT / "README.md").read_text().partition("| you ask |")[2].partition("\n\n")[0]
    listed = {}
    for question, commands in re.findall(r"^\| (.*?) \| (`.*`) \|$", table, flags=re.M):
        plain = re.sub(r"\[(.*)\]\(.*\)", r"\1", question)
        listed[plain] = re.findall(r"`(\w+)`", commands)
    assert listed == {question: list(commands) for question, commands in overview.COMMANDS.items()}


def test_a_program_that_judges_ends_with_its_status():
    with pytest.raises(SystemExit) as ended:
        overview.main(["diagnose", "nowhere"])
    assert ended.value.code == 2


def test_a_command_that_is_gone_is_in_the_log():
    log = (ROOT / "lab/LOG.md").read_text(encoding="utf-8")
    for name in overview.RETIRED:
        assert name not in overview.MODULES
        assert re.search(f"`python -m\\s(research|lab)\\s{name}", log), name
    with pytest.raises(UserError, match="board last stood in commit f19f84f4. lab/LOG.md"):
        overview.main(["board"])


@pytest.mark.parametrize("name", overview.MODULES)
def test_help_shows_what_a_command_asks(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        overview.main([name, "--help"])
    assert stopped.value.code == 0
    assert re.search(f"python -m lab[ .]{name} ", " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize("name", overview.MODULES)
def test_a_test_runs_each_command(name):
    """By what it prints and writes, so a command that is new needs one, too."""
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "lab/tests").rglob("test_*.py")]
    module = re.escape(overview.MODULES[name])
    is_run = re.compile(rf'\["{name}", |run_probe\("{name}", |\b{name}\.main\(|'
                        rf'from {module} import (.*, )?main\b|import {module} as ')
    assert any(is_run.search(text) for text in tests)


def test_a_page_names_no_command_that_is_gone_without_its_commit():
    """The log names them all, with the commit at its top."""
    gone = []
    for page in project_files("**/*.md"):
        if page.name == "LOG.md":
            continue
        text = page.read_text(encoding="utf-8")
        if "python -m research" in text and page.name != "CHANGELOG.md":  # which says what is new
            gone.append(f"{page.name}: research")
        for paragraph in text.split("\n\n"):
            for name in re.findall(r"python -m lab (\w+)", paragraph):
                if name not in overview.MODULES and overview.RETIRED.get(
                        name, "f19f84f4") not in paragraph:
                    gone.append(f"{page.name}: {name}")
    assert not gone
