"""The notes' experiments from runs made by hand."""
import numpy as np
import pytest
from conftest import credit_columns, write_log

from engine.tokens import ANSWER
from harness.parser import with_defaults
from harness.settings import read_flags
from harness.settings import make_settings
from research.__main__ import main
from research.earlier.notes_experiments import (
    EXPERIMENTS, FLAGS, experiment_table, fifths_table, gradient_shares, plan)


def run_of(folder, gain, seed):
    """Five steps, success 0.3 and more with the seed; " 1" and "hm" of a tokenizer say what is
    reasoning and what filler."""
    metrics = [{"success": 0.3 + seed / 1000 + gain, "gradient_norm": norm}
               for norm in (None, 0.1, 0.2, 0.3, 0.4)]
    return {"folder": folder, "metrics": metrics, "steps": [1],
            "evaluations": [],
            "config": {"mitigation": "none", "git_commit": None, "versions": {}}}


@pytest.fixture
def folder(tmp_path, policy):
    """A step of an answer of three tokens: filler, reasoning, reasoning in the answer. s of p = 1/2
    among two is sqrt(1/2), for all three; A 1, w 3 1 1, log p -1 -2 -4."""
    ids = [policy.tokenizer.encode(text).ids[-1] for text in (" hit", " 3", " 5")]
    columns = credit_columns([3], [0], token_id=ids, weight=[3, 1, 1], section=[0, 0, ANSWER],
                             log_prob=[-1, -2, -4], collision=[0.5] * 3)
    return write_log(tmp_path / "run", {1: columns})


def test_shares_and_the_notes_ratio_by_hand(folder):
    """s = sqrt(1 - 2 p + 1/2), clamped to at most sqrt 2 (1 - p)."""
    p = np.exp([-1.0, -2, -4])
    s = np.sqrt(np.clip(1.5 - 2 * p, (1 - p) ** 2, 2 * (1 - p) ** 2))
    given = np.array([3, 1, 1]) * s
    assert gradient_shares(run_of(folder, 0.0, 0)) == pytest.approx(
        [given[0] / given.sum(), given[1:].sum() / given.sum(), given[2] / given.sum(),
         3 * 1 / ((2 + 4) / 2)])


def test_what_the_tables_say(folder):
    """Gains of 2 points on three seeds, half a point to either side in turns."""
    arms = {"none": {seed: run_of(folder, 0.0, seed) for seed in (0, 1, 2)},
            "think 1.0": {seed: run_of(folder, 0.0, seed) for seed in (0, 1, 2)},
            "ahead": {seed: run_of(folder, 0.02 + 0.005 * (seed - 1), seed) for seed in (0, 1, 2)},
            "few": {seed: run_of(folder, 0.02, seed) for seed in (0, 1)}}
    table = experiment_table(arms, {"ahead": 0.01})
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert rows["none"]["success"] == pytest.approx(0.301) and rows["none"]["norm"] == (
        pytest.approx(0.2))
    assert rows["ahead"]["gain"].value == pytest.approx(0.02) and rows["ahead"]["predicted"] == 0.01
    reach = 4.3027 * 0.005 / np.sqrt(3)  # t of 2 degrees of freedom
    assert rows["ahead"]["gain"].interval == pytest.approx((0.02 - reach, 0.02 + reach), abs=1e-5)
    assert rows["few"]["verdict"] == "too few seeds" and rows["few"]["pairs"] == 2
    assert rows["think 1.0"]["gain"].value == 0
    assert "think 1.0: the same numbers as none" in table.finding
    assert "few: +2.0 points, too few seeds." in table.finding
    assert fifths_table(arms).rows[0][1:] == pytest.approx([0.301] * 5)


def test_every_arm_has_flags_that_are_taken(tmp_path):
    for number, arms in EXPERIMENTS.items():
        args = with_defaults({"experiment": number, "seeds": 2, "runs": str(tmp_path),
                              "flags": "--max_new_tokens 96"}, FLAGS)
        experiment, [(_, keys)] = plan(args)
        planned = [experiment.plan_run(*key) for key in keys]
        assert [run.arm for run in planned] == ["none", *arms] * 2
        for run in planned:
            assert make_settings(read_flags(run.flags)).max_new_tokens == 96


def test_runs_are_made_and_reported(tmp_path, learner, monkeypatch, capsys, undrawn):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EXPERIMENTS, "1", {"think 1.0": EXPERIMENTS["1"]["think 1.0"]})
    main(["notes", "--seeds", "1", "--steps", "1", "--model", str(learner), "--processes", "1",
          "--flags", "--max_new_tokens 8"])
    assert "think 1.0: the same numbers as none" in capsys.readouterr().out
    assert (tmp_path / "results/notes-1/numbers.json").exists()
