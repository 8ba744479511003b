"""Probes with several seeds: planned, put together by hand-made numbers, refused when mixed."""
import json
from pathlib import Path

import pytest

from analysis.tables import Table
from research.__main__ import main
from research.experiments import probes, published
from research.experiments.over_seeds import over_seeds
from research.experiments.plan import State, plan_runs
from research.experiments.probes import PlannedProbe, plan_probes, gather


def table(rows, name="kind"):
    columns = {"kind": "", "of all": ".1%", "decided": ".1%", "95%": ".1%", "verdict": ""}
    cells = {column: (spec, [row[i] for row in rows])
             for i, (column, spec) in enumerate(columns.items())}
    return Table(name, "Where it is decided", cells)


SEEDS = [table([["word", 0.3, 0.1, (0.0, 0.2), "too much"], ["tag", 0.1, 0.5, (0.4, 0.6), "even"]]),
         table([["word", 0.2, 0.4, (0.3, 0.5), "even"], ["tag", 0.1, None, (None, None), "even"],
                ["end", 0.1, 0.1, (0.0, 0.1), "even"]]),
         table([["word", 0.7, 0.2, (0.0, 0.4), "too much"], ["tag", 0.1, 0.3, (0.1, 0.5), "even"]])]


def test_a_number_is_the_median_and_its_interval_the_range():
    """A row that a seed lacks is left out, an unknown number counts for nothing."""
    together = over_seeds(SEEDS)
    assert together.rows == [("word", 0.3, 0.2, (0.1, 0.4), "too much (2 of 3)"),
                             ("tag", 0.1, 0.4, (0.3, 0.5), "even")]
    assert together.headings["95%"] == "lowest to highest"
    assert together.finding.startswith("Medians of 3 seeds, ")


def numbers_of(probe, seed_table, commit="a" * 40, seconds=10.0):
    probe.folder.mkdir(parents=True)
    numbers = {"measured": probe.probe, "quick_look": False, "settings": {},
               "git_commit": commit, "versions": {}, "seconds": seconds, "in_short": ["of one"],
               "tables": [seed_table.to_json()]}
    numbers["command"] = " ".join(["python", *probe.command[:-2]])
    (probe.folder / "numbers.json").write_text(json.dumps(numbers))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Three seeds of one probe are there."""
    monkeypatch.chdir(tmp_path)
    planned = [PlannedProbe("rule", "third", seed, Path("model")) for seed in range(3)]
    for probe, seed_table in zip(planned, SEEDS):
        numbers_of(probe, seed_table)
    return planned


def test_the_seeds_of_a_probe_are_one_result(measured, capsys):
    gather(measured)
    command = "python -m research publish results/study-probes/rule-third"
    assert f"rule-third: 3 seeds; {command}" in capsys.readouterr().out
    numbers = json.loads(Path("results/study-probes/rule-third/numbers.json").read_text())
    assert numbers["name"] == "rule_third" and numbers["measured"] == "rule"
    assert numbers["command"] == "python -m research probes --only rule"
    assert numbers["seconds"] == 30.0 and numbers["in_short"] == []
    assert numbers["tables"][0]["rows"][0]["decided"] == 0.2


def test_it_is_published_under_its_own_name_with_the_codes_that_made_it(
        measured, tmp_path, monkeypatch):
    path = measured[2].folder / "numbers.json"
    path.write_text(path.read_text().replace("a" * 40, "b" * 40))
    gather(measured)
    monkeypatch.setattr(published, "RESULTS", tmp_path / "kept")
    path = published.publish(Path("results/study-probes/rule-third"))
    assert path == tmp_path / "kept/rule_third.json"
    assert [code["runs"] for code in json.loads(path.read_text())["made_by"]] == [
        ["rule-third-s0", "rule-third-s1"], ["rule-third-s2"]]


def test_one_seed_has_no_interval(measured, capsys):
    gather(measured[:1])
    assert "only seed 0 is measured" in capsys.readouterr().out
    assert not Path("results/study-probes").exists()


def test_each_probe_looks_at_the_model_before_and_after_a_third(tmp_path):
    planned = plan_probes(["rule", "scoreboard"], plan_runs(probes.LOOKED_AT, str(tmp_path), 2))
    assert [probe.name for probe in planned[:5]] == [
        "rule-before-s0", "rule-third-s0", "scoreboard-before-s0", "scoreboard-third-s0",
        "rule-before-s1"]
    assert planned[0].model is None
    assert planned[1].model == tmp_path / "third/none-s0/checkpoints/step_000020"
    assert planned[1].command[1:3] == ["research", "rule"]


def test_what_is_measured_and_what_was_measured_with_other_flags(measured):
    assert measured[0].state() == State(1, 10.0, True)
    later = PlannedProbe("rule", "third", 7, Path("model"))
    assert later.state() == State()
    path = measured[1].folder / "numbers.json"
    path.write_text(path.read_text().replace("--seed 1", "--seed 1 --questions 3"))
    state = measured[1].state()
    assert not state.finished and "-third-s1 was measured by" in state.trouble
    assert "--questions 3" in state.trouble


def test_a_dry_run_lists_runs_and_probes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["probes", "--dry_run", "--seeds", "2", "--only", "rule"])
    printed = capsys.readouterr().out
    assert "runs/study/third/none-s1  (not begun)" in printed
    assert "results/probes/rule-third-s1  (not begun)" in printed
    assert "results/probes/scoreboard" not in printed and "0 of 4 runs are finished" in printed
    assert not list(tmp_path.iterdir())
