"""The scores against numbers worked out by hand; a whole run of the scoreboard, small."""
import importlib
import json

import numpy as np
import pytest
import torch

import analyze
import grpo
from conftest import StateIdea, hand_made
from analysis.statistics import Estimate, ratio_of_sums
from harness.credit_file import read_columns
from engine.errors import UserError
from research import __main__ as overview
from research.probes import scoreboard, where_decided
from research.probes.arm_scores import AGAIN, score, scores_table, top_tenth
from research.probes.arms import Arms, choices, make_arms
from research.probes.common import run_probe
from research.probes.measured_tokens import MeasuredTokens, Truth, mean_product
from research.probes.where_decided import decided_table


def by_hand(copies=1):
    """Two problems, an answer each: credits 0.4, 0, -0.2 and 0, 0.3; advantages 1 and -2."""
    def repeat(values):
        return np.concatenate([np.array(values)] * copies)

    answer = np.concatenate([np.array([0, 0, 0, 1, 1]) + 2 * n for n in range(copies)])
    return MeasuredTokens(
        questions=2 * copies, question=answer, answer=answer,
        ids=repeat([0] * 5), before=repeat([0.0] * 5),
        truth=Truth(credit=repeat([0.4, 0, -0.2, 0, 0.3]),
                    decided=repeat([0.16, 0, 0.04, 0, 0.09])),
        first_half=repeat([0.5, 0, -0.1, 0, 0.2]),
        second_half=Truth(credit=repeat([0.3, 0, -0.3, 0, 0.4]),
                          decided=repeat([0.1, 0, 0.1, 0, 0.1])),
        size=repeat([1, 0.5, 0.5, 1, 0.25]), advantage=repeat([1, 1, 1, -2, -2.0]),
        idle=repeat([False, True, False, True, False]), codes={"class": repeat([0, 1, 1, 0, 0])})


def test_shares_of_what_is_decided_and_of_the_gradient():
    """Filler: decided (0.16 + 0.09) / 0.29, gradient (1 + 2 + 0.5) / 4.5, idle 2 of 3.5."""
    table = decided_table(by_hand(), "class")
    row = dict(zip(table.columns, table.rows[0]))
    assert row["class"] == "filler" and row["tokens"] == 3
    assert row["decided"] == pytest.approx(0.25 / 0.29)
    assert row["gradient"] == pytest.approx(3.5 / 4.5)
    assert row["minus"] == pytest.approx(3.5 / 4.5 - 0.25 / 0.29)
    assert row["idle"] == pytest.approx(2 / 3.5)
    left = np.array([2.5 / 2.5 - 1.0, 1 / 2 - 0.16 / 0.2])  # without one problem, and the other
    reach = 12.7062 * np.sqrt(np.square(left - left.mean()).sum() / 2)
    assert row["95%  "] == pytest.approx((row["minus"] - reach, row["minus"] + reach), rel=1e-3)


def test_the_verdict_on_filler_is_in_words():
    few = decided_table(by_hand(), "class").finding
    assert few.startswith("Too few problems")  # an interval wider than everything
    finding = decided_table(by_hand(copies=8), "class").finding
    assert "Filler decides 86% (" in finding and "gets 78% (" in finding
    assert "-8 points" in finding and "At least 57%" in finding


def test_where_nothing_is_decided_nothing_is_said():
    tokens = by_hand()
    tokens.truth.decided = np.zeros(5)
    assert "nothing is decided" in decided_table(tokens, "class").finding
    tokens = by_hand()
    tokens.advantage = np.zeros(5)
    assert "nothing is decided" in decided_table(tokens, "class").finding


@pytest.mark.parametrize("low, high, word", [
    (-0.009, 0.009, "about even"), (-0.009, 0.02, "too little")])
def test_shares_that_differ_by_less_than_a_point_are_even(monkeypatch, low, high, word):
    difference = Estimate(0.0, low, high, 0.001)
    monkeypatch.setattr(where_decided, "difference_of_shares", lambda *_: difference)
    assert decided_table(by_hand(), "class").rows[0][-1] == word


def test_the_order_of_weights_in_an_answer():
    """3 1 2 -> 1 -1 0 and 5 5 -> 0 0, whatever other answers have."""
    tokens = by_hand()
    assert tokens.place(np.array([3.0, 1, 2, 5, 5])).tolist() == [1, -1, 0, 0, 0]
    assert tokens.place(np.array([0.0, 0, 9, 1, 2])).tolist() == [-0.5, -0.5, 1, -1, 1]
    tokens.answer = np.array([0, 1, 1, 2, 3])
    assert tokens.place(np.array([7.0, 1, 2, 3, 4])).tolist() == [0, -1, 1, 0, 0]


def test_the_example_of_the_docstring():
    """Credits 0, 0.5, -0.1, 0 and weights 1, 3, 0.5, 0.5."""
    tokens = by_hand()
    tokens.questions, tokens.answer = 1, np.zeros(4, int)
    place = tokens.place(np.array([1, 3, 0.5, 0.5]))
    decided = np.array([0, 0.25, 0.01, 0]) / 0.26
    assert decided.round(2).tolist() == [0, 0.96, 0.04, 0]
    assert decided @ place == pytest.approx(0.96 - 0.04 * 0.67, abs=0.005)


def test_scores_of_an_arm():
    """Weights 3 1 2 and 1 2: all of 0.29 but 0.04 at the top; the placebo turns the order round.

    Aligned: the sum of w A times credit over the sizes.
    """
    weight, signed = np.array([3.0, 1, 2, 1, 2]), np.array([3.0, 1, 2, -2, -4])
    scores = score(by_hand(), weight, signed, shuffled=np.array([1.0, 3, 2, 2, 1]))
    assert scores.index.value == pytest.approx((0.16 + 0.09) / 0.29) and scores.varies
    assert scores.placebo.value == pytest.approx(-(0.16 + 0.09) / 0.29)
    assert scores.top_tenth.value == pytest.approx((0.16 + 0.09) / 0.29)
    product, squares = 1.2 - 0.4 - 1.2, 9 + 1 + 4 + 4 + 16
    assert scores.aligned.value == pytest.approx(product / np.sqrt(squares * 0.29))
    assert scores.idle.value == pytest.approx((0.5 + 2) / (3 + 0.5 + 1 + 2 + 1))


def test_the_credit_measured_again_is_judged_by_the_other_half():
    tokens = by_hand()
    again, other = tokens.first_half, tokens.second_half
    scores = score(tokens, np.abs(again), again, truth=other)
    assert scores.index.value == pytest.approx((0.1 + 0 + 0.1) / 0.3)  # places 1, -1, 0 and -1, 1
    expected = (again @ other.credit) / np.sqrt((again ** 2).sum() * 0.3)
    assert scores.aligned.value == pytest.approx(expected)


def test_squares_are_products_of_different_quarters():
    """1 2 3 4: the twelve products of two different ones add up to 100 - 30."""
    assert mean_product(np.array([[1.0], [2], [3], [4]])).item() == pytest.approx(70 / 12)


def test_the_tenth_with_most_weight_is_of_each_answer():
    answer = np.repeat([0, 1, 2], [20, 5, 4])
    size = np.concatenate([np.arange(20), [9, 1, 1, 1, 1], [2, 2, 2, 2]])
    inside = top_tenth(answer, size)
    assert np.flatnonzero(inside == 1).tolist() == [18, 19, 20]
    assert inside[25:].tolist() == [0.25] * 4 and not inside[21:25].any()


def test_what_is_equal_has_no_place():
    scores = score(by_hand(), np.ones(5), np.array([1.0, 1, 1, -2, -2]))
    assert scores.index.value == 0 and not scores.varies and scores.placebo is None
    assert scores.top_tenth.value == pytest.approx((0.2 / 3 + 0.09 / 2) / 0.29)


def test_a_table_of_constant_arms_says_so():
    constant = score(by_hand(), np.ones(5), np.array([1.0, 1, 1, -2, -2]))
    table = scores_table({"oracle": constant, AGAIN: constant})
    assert [row[-1] for row in table.rows] == ["constant"] * 2
    assert table.finding.startswith("No weight differs within answers")


def test_weights_that_know_nothing_score_as_chance_whatever_the_noise():
    """No token has credit that depends on the weight; what is measured is noise that grows with it.

    A rank correlation would see a relation.
    """
    rng, indices = np.random.default_rng(0), []
    for _ in range(200):
        tokens = by_hand()
        tokens.answer = tokens.question = np.repeat(np.arange(12), 30)
        tokens.questions, chance = 12, rng.uniform(0.01, 1, 360)
        quarters = rng.normal(size=(4, 360)) * chance
        decided = mean_product(quarters) + rng.binomial(1, 0.1, 360)
        by = tokens.by_question
        indices.append(ratio_of_sums(by(decided * tokens.place(chance)), by(decided)))
    assert abs(np.mean([index.value for index in indices])) < 0.02
    assert np.mean([index.p < 0.05 for index in indices]) < 0.11


SMALLEST = ["--questions", "2", "--answers", "4", "--continuations", "4", "--batches", "4",
            "--batch_questions", "2", "--batch_answers", "2", "--oracle_k", "1", "--threads", "1",
            "--quick"]


def run(*argv):
    run_probe("scoreboard", scoreboard.__doc__, scoreboard.FLAGS, scoreboard.measure, list(argv))


@pytest.fixture(scope="module")
def board(tmp_path_factory, learner):
    folder = tmp_path_factory.mktemp("board")
    for name in ("one", "two"):
        run("--model", str(learner), "--out", str(folder / name), *SMALLEST)
    return folder


def read(folder):
    numbers = json.loads((folder / "numbers.json").read_text())
    return numbers, {table["name"]: table for table in numbers["tables"]}


def test_every_arm_is_scored(board):
    _, tables = read(board / "one")
    arms = {*choices()[0], *choices()[1]} - {"grpo", "dr_grpo"}
    assert {row["arm"] for row in tables["scores"]["rows"]} == {*arms, AGAIN}
    directions = {row["arm"] for row in tables["directions"]["rows"]}
    assert directions == {*arms, scoreboard.TRUE}  # four batches may be too few for numbers
    kinds, classes = tables["kind"]["rows"], tables["class"]["rows"]
    assert sum(row["tokens"] for row in kinds) == sum(row["tokens"] for row in classes)
    if kinds[0]["gradient"] is not None:
        assert sum(row["gradient"] for row in kinds) == pytest.approx(1)


def test_the_same_seed_gives_the_same_numbers(board):
    one, two = (read(board / name)[0] for name in ("one", "two"))
    assert one["tables"] == two["tables"] and one["settings"]["seed"] == 0


def test_the_batch_is_a_run_that_analysis_opens(board, capsys):
    columns = read_columns(board / "one/run", 1)
    shape = columns["token_id"].shape
    assert columns["true_credit"].shape == columns["true_credit_se"].shape == shape
    assert columns["decided"].shape == shape
    analyze.main([str(board / "one/run"), "--output_dir", str(board / "analysis")])
    assert '"true credit"' in (board / "analysis/report.html").read_text()
    assert '"true credit se"' in (board / "one/report.html").read_text()
    capsys.readouterr()


class StateAdvantage:
    def __init__(self, lab):
        self.metrics = {}

    def __call__(self, rollouts, lab):
        return 2 * grpo.rloo(rollouts)


def test_any_idea_is_an_arm(monkeypatch, lab, rollouts):
    ideas = ({"none": choices()[0]["none"], "state_idea": StateIdea},
             {"rloo": grpo.rloo, "state_advantage": StateAdvantage,
              "answer_advantage": lambda rollouts: rollouts.reward[:, None]})
    monkeypatch.setattr("research.probes.arms.choices", lambda: ideas)
    coefficients = make_arms(lab, oracle_k=1).coefficients(lab, rollouts)
    assert set(coefficients) == {*ideas[0], *ideas[1]}
    torch.testing.assert_close(coefficients["state_advantage"], 2 * coefficients["rloo"])
    expected = rollouts.reward[:, None] * rollouts.mask / 6
    torch.testing.assert_close(coefficients["answer_advantage"], expected)


@pytest.mark.parametrize("credit, message", [
    (torch.ones(3), "should return a tensor"), (1.0, "should return a tensor"),
    (torch.full((2, 3), float("nan")), "idea is not finite at 4 of 4 tokens")])
def test_a_wrong_advantage_is_one_line(credit, message):
    arms = Arms({}, {"idea": lambda rollouts, lab: credit})
    with pytest.raises(UserError, match=message):
        arms.credits(None, hand_made([[True, True, False], [True, True, False]]))


def test_what_is_there_is_not_overwritten(board):
    with pytest.raises(UserError, match="exists already: name another with --out"):
        run("--quick", "--out", str(board / "one"))


def test_a_probe_that_fails_leaves_nothing_in_the_way(tmp_path):
    with pytest.raises(UserError, match="there is no model folder"):
        run("--model", "nowhere", "--out", str(tmp_path / "x"), "--quick")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv, message", [
    (["--answers", "1"], "--answers 1 should be at least 2"),
    (["--continuation", "3"], "unknown argument --continuation, did you mean --continuations"),
    (["--seed", "-1"], "--seed -1 should be at least 0")])
def test_wrong_commands_are_one_line(argv, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(*argv, "--out", str(tmp_path / "x"))


def test_the_overview_names_every_probe(capsys):
    overview.main([])
    out = capsys.readouterr().out
    for name in ("exact", "scoreboard", "noise", "phase1", "rank", "baseline", "length"):
        assert f"python -m research {name} " in out and importlib.util.find_spec(f"research.probes.{name}")
    with pytest.raises(UserError, match="there is no probe or experiment scorebord"):
        overview.main(["scorebord"])


def test_help_shows_the_docstring(capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    assert stopped.value.code == 0
    assert "Order the tokens of each answer by weight" in capsys.readouterr().out
