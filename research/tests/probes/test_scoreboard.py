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
from research.probes.decided import decided_table, sums_of
from research.probes.methods import make_methods
from research.probes.scoreboard import answers_table, scores_table, sums_of_methods
from research.publish.recompute import check_decided


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
    tokens = by_hand()
    table = scores_table(tokens, {"rising": tokens.rank_in_answer(np.array([1.0, 2, 3, 1, 2])),
                                  "flat": np.zeros(5)})
    (_, rising, top), flat = table.rows
    assert rising.value == pytest.approx((-0.16 + 0.04 + 0.09) / 0.29)
    assert rising.low < rising.value < rising.high and flat == ("flat", None, None)
    assert top.value == pytest.approx((0.04 + 0.09) / 0.29)  # the last token of each answer


def test_what_a_critic_could_explain_and_the_sum_of_squared_credits():
    """Three problems of four tokens, half of them with R = 1. V is 0.75 or 0.25, so it explains
    half. Squared credits are three quarters of the variance."""
    sums = {"tokens": [4] * 3, "R": [2] * 3, "R R": [2] * 3, "V": [2] * 3, "R V": [1.5] * 3,
            "squared credit": [0.75] * 3, "variance": [1.0] * 3}
    (_, explained), (_, added_up) = answers_table(sums).rows
    assert explained.value == pytest.approx(0.5) and added_up.value == pytest.approx(0.75)


def test_the_tables_follow_from_the_sums_that_are_kept():
    """Computed by the second implementation, from the sums over problems alone."""
    tokens = by_hand(copies=8)
    tokens = tokens.having({"kind": tokens["class"], "section": tokens["class"]})
    ranks = {"rising": tokens.rank_in_answer(np.array([1.0, 2, 3, 1, 2] * 8))}
    sums = {"tokens": [2, 3], "R": [1, 2], "R R": [1, 2], "V": [1, 2], "R V": [0.5, 1.4],
            "squared credit": [0.2, 0.09], "variance": [0.3, 0.1]}
    sums = {name: of_two * 8 for name, of_two in sums.items()}
    tables = [decided_table(tokens, partition) for partition in ("kind", "section", "class")]
    tables += [scores_table(tokens, ranks), answers_table(sums)]
    values = {**sums_of(tokens, "kind"), "section": sums_of(tokens, "section"),
              "class": sums_of(tokens, "class"), "methods": sums_of_methods(tokens, ranks)}
    checks = list(check_decided({"tables": [table.to_json() for table in tables],
                                 "values": {**values, "answers": sums}}))
    assert len(checks) == 3 * 2 * 2 + 2 + 2 and all(check.agrees for check in checks)


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
