"""The scores against numbers worked out by hand; a whole run of the scoreboard, small."""
import json

import numpy as np
import pytest
import torch

import analyze
from analysis.tokens import TokenTable
from conftest import StateIdea
from engine.choices import ADVANTAGES, MITIGATIONS
from harness.record import read_columns
from research.probes import scoreboard
from research.probes.common import run_probe
from research.probes.decided import decided_table
from research.probes.methods import make_methods
from research.probes.scoreboard import scores_table


def by_hand(copies=1):
    """Two problems, an answer each: credits 0.4, 0, -0.2 and 0, 0.3; advantages 1 and -2."""
    def repeat(values):
        return np.concatenate([np.array(values)] * copies)

    answer = np.concatenate([np.array([0, 0, 0, 1, 1]) + 2 * n for n in range(copies)])
    return TokenTable({
        "problem": answer, "answer": answer, "count": np.ones(len(answer)),
        "squared credit": repeat([0.16, 0, 0.04, 0, 0.09]), "s": repeat([1, 0.5, 0.5, 1, 0.25]),
        "advantage": repeat([1, 1, 1, -2, -2.0]), "class": repeat([0, 1, 1, 0, 0])})


def test_shares_of_what_is_decided_and_of_the_gradient():
    """Filler: decided (0.16 + 0.09) / 0.29, gradient (1 + 2 + 0.5) / 4.5."""
    table = decided_table(by_hand(copies=8), "class")
    row = dict(zip(table.columns, table.rows[0]))
    assert row["class"] == "filler" and row["tokens"] == 24 and row["of all"] == 0.6
    assert row["decided"].value == pytest.approx(0.25 / 0.29)
    assert row["gradient"].value == pytest.approx(3.5 / 4.5)
    assert table.finding.startswith("The filler tokens decide 86% (95% interval ")
    assert "get 78% (" in table.finding


def test_the_index_of_a_method():
    """Weights 1 2 3 and 1 2: of 0.29 there are 0.16 at the bottom, 0.04 and 0.09 at the top. A
    method that is constant in an answer has none."""
    table = scores_table(by_hand(), {"rising": np.array([1.0, 2, 3, 1, 2]), "flat": np.ones(5)})
    (_, rising), flat = table.rows
    assert rising.value == pytest.approx((-0.16 + 0.04 + 0.09) / 0.29)
    assert rising.low < rising.value < rising.high and flat == ("flat", None)


@pytest.fixture(scope="module")
def board(tmp_path_factory, learner):
    folder = tmp_path_factory.mktemp("board")
    (folder / "task.json").write_text(json.dumps({"task": "examples.hackable"}))
    flags = "--questions 2 --answers 4 --continuations 4 --threads 1".split()
    flags += ["--config", str(folder / "task.json")]
    run_probe("scoreboard", scoreboard.__doc__, scoreboard.FLAGS, scoreboard.measure,
              [*flags, "--model", str(learner), "--out", str(folder / "one")])
    numbers = json.loads((folder / "one/numbers.json").read_text())
    return folder / "one", {table["name"]: table for table in numbers["tables"]}


def test_every_method_is_scored(board):
    _, tables = board
    methods = {*MITIGATIONS, *ADVANTAGES} - {"grpo", "dr_grpo"}
    assert {row["arm"] for row in tables["scores"]["rows"]} == methods
    kinds, classes = tables["kind"]["rows"], tables["class"]["rows"]
    assert sum(row["tokens"] for row in kinds) == sum(row["tokens"] for row in classes)


def test_the_batch_is_a_run_that_analysis_opens(board, capsys, undrawn):
    folder, _ = board
    task = json.loads((folder / "run/config.json").read_text())["task"]
    assert task == "examples.hackable"
    columns = read_columns(folder / "run", 1)
    shape = columns["token_id"].shape
    for name in ("true_credit", "true_credit_se", "decided"):
        assert columns[name].shape == shape
    analyze.main([str(folder / "run"), "--output_dir", str(folder.parent / "analysis")])
    assert '"credit"' in (folder.parent / "analysis/report.html").read_text()
    capsys.readouterr()


def test_a_method_has_the_numbers_alone_that_it_has_beside_others(monkeypatch, policy, rollouts):
    """Ideas of a user, too. `random` draws the same from a generator that others have drawn from.
    """
    ideas = {"none": MITIGATIONS["none"], "state_idea": StateIdea, "random": MITIGATIONS["random"]}
    monkeypatch.setattr("research.probes.methods.MITIGATIONS", ideas)
    monkeypatch.setattr("research.probes.methods.ADVANTAGES", {
        "answer_advantage": lambda rollouts: rollouts.reward[:, None]})
    frames = {name: method.frame(policy, rollouts)
              for name, method in make_methods(policy).items()}
    expected = rollouts.reward[:, None] * rollouts.mask
    torch.testing.assert_close(frames["answer_advantage"], expected)
    assert torch.equal(frames["random"], make_methods(policy)["random"].frame(policy, rollouts))
    assert (frames["none"][rollouts.mask] == 1).all() and "state_idea" in frames
