"""The scores against numbers worked out by hand; a whole run of the scoreboard, small."""
import json

import numpy as np
import pytest
import torch

import analyze
import grpo
from conftest import StateIdea, hand_made
from harness.credit_reading import read_columns
from research.probes import scoreboard
from research.probes.common import run_probe
from research.probes.credit import Credit, MeasuredTokens, mean_product
from research.probes.methods import choices, make_methods
from research.probes.scoreboard import (
    AGAIN, ceiling_table, decided_table, index, scores_table)


def by_hand(copies=1):
    """Two problems, an answer each: credits 0.4, 0, -0.2 and 0, 0.3; advantages 1 and -2."""
    def repeat(values):
        return np.concatenate([np.array(values)] * copies)

    answer = np.concatenate([np.array([0, 0, 0, 1, 1]) + 2 * n for n in range(copies)])
    return MeasuredTokens(
        questions=2 * copies, question=answer, answer=answer,
        decided=repeat([0.16, 0, 0.04, 0, 0.09]), first_half=repeat([0.5, 0, -0.1, 0, 0.2]),
        decided_by_second=repeat([0.1, 0, 0.1, 0, 0.1]), size=repeat([1, 0.5, 0.5, 1, 0.25]),
        advantage=repeat([1, 1, 1, -2, -2.0]), codes={"class": repeat([0, 1, 1, 0, 0])})


def test_shares_of_what_is_decided_and_of_the_gradient():
    """Filler: decided (0.16 + 0.09) / 0.29, gradient (1 + 2 + 0.5) / 4.5."""
    table = decided_table(by_hand(copies=8), "class")
    row = dict(zip(table.columns, table.rows[0]))
    assert row["class"] == "filler" and row["tokens"] == 24 and row["of all"] == 0.6
    assert row["decided"] == pytest.approx(0.25 / 0.29)
    assert row["gradient"] == pytest.approx(3.5 / 4.5)
    assert "The filler tokens decide 86% (" in table.finding and "get 78% (" in table.finding


def test_the_order_of_weights_in_an_answer():
    """3 1 2 -> 1 -1 0 and 5 5 -> 0 0, whatever other answers have."""
    tokens = by_hand()
    assert tokens.place(np.array([3.0, 1, 2, 5, 5])).tolist() == [1, -1, 0, 0, 0]
    assert tokens.place(np.array([0.0, 0, 9, 1, 2])).tolist() == [-0.5, -0.5, 1, -1, 1]
    tokens.answer = np.array([0, 1, 1, 2, 3])
    assert tokens.place(np.array([7.0, 1, 2, 3, 4])).tolist() == [0, -1, 1, 0, 0]


def test_the_index_of_a_method():
    """Weights 1 2 3 and 1 2: of 0.29 there are 0.16 at the bottom, 0.04 and 0.09 at the top."""
    tokens = by_hand()
    found = index(tokens, np.array([1.0, 2, 3, 1, 2]), tokens.decided)
    assert found.value == pytest.approx((-0.16 + 0.04 + 0.09) / 0.29)


def test_methods_that_are_constant_in_an_answer_say_so():
    tokens = by_hand()
    constant = index(tokens, np.ones(5), tokens.decided)
    table = scores_table({"oracle": constant, AGAIN: constant})
    assert [(row[1], row[-1]) for row in table.rows] == [(0, "constant")] * 2
    assert table.finding.startswith("No weight differs within answers")


def test_what_a_critic_can_explain_whatever_the_noise_in_the_values():
    """Two problems, answers of two tokens: V is 1/2, then the reward, so half of the variance is
    known. Noise that is the same for both rewards changes nothing; padding does not count."""
    mask = torch.tensor([[True, True, False]] * 8)
    reward = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    before = torch.stack([torch.full((8,), 0.5), reward, torch.full((8,), 9.0)], 1)
    batch = hand_made(mask, group=torch.arange(8) // 4, scores={"reward": reward})
    for noise in (0.0, 5.0):
        shaken = before + noise * torch.tensor([1.0, 1, -1, -1] * 2)[:, None]
        table = ceiling_table(batch, Credit(None, None, None, shaken, 0))
        [(_, explained, interval)] = table.rows
        assert explained == pytest.approx(0.5)
        assert interval == pytest.approx((0.5, 0.5))


def test_what_is_decided_is_a_product_of_different_quarters():
    """Of 1, 2, 3 and 4: 1*2, 1*3, 1*4, 2*3, 2*4 and 3*4 are 35 in all, of six. A square of one
    estimate would add its noise, which is largest where the model was unsure."""
    assert mean_product(np.array([1.0, 2, 3, 4])) == pytest.approx(35 / 6)


@pytest.fixture(scope="module")
def board(tmp_path_factory, learner):
    folder = tmp_path_factory.mktemp("board")
    flags = "--questions 2 --answers 4 --continuations 4 --threads 1 --quick".split()
    run_probe("scoreboard", scoreboard.__doc__, scoreboard.FLAGS, scoreboard.measure,
              [*flags, "--model", str(learner), "--out", str(folder / "one")])
    numbers = json.loads((folder / "one/numbers.json").read_text())
    return folder / "one", {table["name"]: table for table in numbers["tables"]}


def test_every_method_is_scored(board):
    _, tables = board
    methods = {*choices()[0], *choices()[1]} - {"grpo", "dr_grpo"}
    assert {row["arm"] for row in tables["scores"]["rows"]} == {*methods, AGAIN}
    kinds, classes = tables["kind"]["rows"], tables["class"]["rows"]
    assert sum(row["tokens"] for row in kinds) == sum(row["tokens"] for row in classes)


def test_the_batch_is_a_run_that_analysis_opens(board, capsys, undrawn):
    folder, _ = board
    columns = read_columns(folder / "run", 1)
    shape = columns["token_id"].shape
    for name in ("true_credit", "true_credit_se", "decided"):
        assert columns[name].shape == shape
    analyze.main([str(folder / "run"), "--output_dir", str(folder.parent / "analysis")])
    assert '"true credit"' in (folder.parent / "analysis/report.html").read_text()
    capsys.readouterr()


def test_any_idea_is_a_method(monkeypatch, policy, rollouts):
    ideas = ({"none": choices()[0]["none"], "state_idea": StateIdea},
             {"rloo": grpo.rloo, "answer_advantage": lambda rollouts: rollouts.reward[:, None]})
    monkeypatch.setattr("research.probes.methods.choices", lambda: ideas)
    coefficients = {name: method.product(policy, rollouts)
                    for name, method in make_methods(policy).items()}
    assert set(coefficients) == {*ideas[0], *ideas[1]}
    expected = rollouts.reward[:, None] * rollouts.mask
    torch.testing.assert_close(coefficients["answer_advantage"], expected)
