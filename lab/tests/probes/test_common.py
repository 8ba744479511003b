"""What the probes share: a folder with numbers, a screen of findings."""
import json

from lab.analysis.tables import Table
from lab.harness.flags import Flag
from lab.probes.common import COMMON, Findings, command_of, run_probe

KNOWN = {**COMMON, "model": Flag("models/tiny", "a folder"), "note": Flag(None, "a text")}


def measured(args, folder):
    columns = {"arm": ("", [f"arm {n}" for n in range(60)]),
               "95%": ("+.1f", [(0.5, 1.5)] * 60)}
    gains = Table("gains", "The gains", columns, "One idea.\nAnother idea.",
                  headings={"95%": "95% interval"})
    checks = Table("checks", "Checks", {"left": ("d", [1])}, "The sides agree.\nTo 2e-7.")
    return Findings("Who gains?", ["model x: 2 problems.", "How to read it."], [gains, checks])


def run(folder, *flags, measure=measured):
    run_probe("gains", "A probe.", KNOWN, measure, ["--out", str(folder), *flags])


def test_a_probe_prints_its_first_table_or_all(tmp_path, capsys):
    run(tmp_path / "x")
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines()[:-3]) and "Checks" not in out
    assert "- One idea." in out and "95% interval" in out and "How to read it." in out
    run(tmp_path / "y", "--all")
    out = capsys.readouterr().out
    assert "arm 59" in out and "## Checks" in out and "How to read it." in out


def test_numbers_command_and_settings_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_probe("gains", "A probe.", KNOWN, measured, ["--note", "a b", "--seed", "3"])
    numbers = json.loads((tmp_path / "results/gains-s3/numbers.json").read_text())
    assert numbers["command"] == "python -m lab gains --note 'a b' --seed 3"
    assert numbers["measured"] == "gains" and numbers["settings"]["seed"] == 3
    assert numbers["settings"].keys() == {*KNOWN, "out", "all"}
    assert len(numbers["tables"][0]["rows"]) == 60
    text = (tmp_path / "results/gains-s3/printed.txt").read_text()
    command, commit, _, *printed = text.splitlines()
    assert command == numbers["command"] and commit.startswith(f"commit {numbers['git_commit']}")
    assert any(line.startswith("| arm 59 ") for line in printed) and "## Checks" in text


def test_the_command_leaves_out_what_changes_no_number():
    typed = {"all": True, "out": "x", "model": "runs/it's"}
    assert command_of("exact", typed) == "python -m lab exact --model 'runs/it'\"'\"'s'"
