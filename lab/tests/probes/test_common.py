"""What the probes share: a folder with numbers, a screen of findings."""
import json

import pytest

from lab.analysis.tables import Table
from lab.engine.errors import UserError
from lab.harness.flags import Flag
from lab.probes.common import COMMON, Findings, command_of, run_probe

KNOWN = {**COMMON, "model": Flag("models/tiny", "a folder"), "note": Flag(None, "a text")}


def measured(args, folder):
    columns = {"arm": ("", [f"arm {n}" for n in range(60)]),
               "95%": ("+.1f", [(0.5, 1.5)] * 60)}
    gains = Table("gains", "The gains", columns, ["One idea", "Another idea."],
                  headings={"95%": "95% interval"})
    checks = Table("checks", "Checks", {"left": ("d", [1])})
    return Findings("Who gains?", ["model x: 2 problems.", "How to read it."], [gains, checks])


def run(folder, *flags, measure=measured):
    run_probe("gains", "A probe.", KNOWN, measure, ["--out", str(folder), *flags])


def test_a_probe_prints_its_tables(tmp_path, capsys):
    run(tmp_path / "x")
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines() if str(tmp_path) not in line)
    for part in ("How to read it.", "One idea.", "95% interval", "arm 59", "## Checks"):
        assert part in out


def test_nothing_is_left_of_a_probe_that_is_refused(tmp_path, monkeypatch):
    def refused(args, folder):
        raise UserError("nothing to measure")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nothing to measure"):
        run("results/gains", measure=refused)
    assert not list(tmp_path.iterdir())


def test_numbers_command_and_settings_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_probe("gains", "A probe.", KNOWN, measured, ["--note", "a b", "--seed", "3"])
    numbers = json.loads((tmp_path / "results/gains-s3/numbers.json").read_text())
    assert numbers["command"] == "python -m lab gains --note 'a b' --seed 3"
    assert numbers["measured"] == "gains" and numbers["settings"]["seed"] == 3
    assert numbers["settings"].keys() == {*KNOWN, "out"}
    assert len(numbers["tables"][0]["rows"]) == 60
    text = (tmp_path / "results/gains-s3/printed.txt").read_text()
    command, commit, _, *printed = text.splitlines()
    assert command == numbers["command"] and commit.startswith(f"commit {numbers['git_commit']}")
    assert any(line.startswith("| arm 59 ") for line in printed) and "## Checks" in text


def test_the_command_leaves_out_what_changes_no_number():
    typed = {"out": "x", "model": "runs/it's"}
    assert command_of("exact", typed) == "python -m lab exact --model 'runs/it'\"'\"'s'"
