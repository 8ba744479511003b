"""The scores against numbers worked out by hand; a whole run of the scoreboard and of the length probe, small."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import analyze
from truth import __main__ as probes
from grpo import rloo
from engine.registry import MITIGATIONS
from engine.errors import UserError
from engine.credit_file import read_columns
from truth import length, scoreboard
from truth.common import gradients
from truth.planted import SMALL, planted_lab, sample_planted


class ByHand(scoreboard.Tokens):
    """Two questions, an answer each: credits 0.4, 0, -0.2 and 0, 0.3; advantages 1 and -2."""

    def __init__(self):
        self.answer = self.question = np.array([0, 0, 0, 1, 1])
        self.questions, self.decided, self.credit = 2, np.array([0.16, 0, 0.04, 0, 0.09]), np.array([0.4, 0, -0.2, 0, 0.3])
        self.again, self.decided_again = np.array([0.5, 0, -0.1, 0, 0.2]), np.array([0.1, 0, 0.1, 0, 0.1])
        self.size, self.advantage = np.array([1, 0.5, 0.5, 1, 0.25]), np.array([1, 1, 1, -2, -2.0])
        self.idle, self.codes = np.array([False, True, False, True, False]), {"class": np.array([0, 1, 1, 0, 0])}


by_hand = ByHand


def test_shares_of_what_is_decided_and_of_the_gradient():
    """Filler: decided (0.16 + 0.09) / 0.29, gradient (1 + 2 + 0.5) / 4.5, idle 2 of 3.5."""
    row = dict(zip(scoreboard.matters(by_hand(), "class").columns, scoreboard.matters(by_hand(), "class").rows[0]))
    assert row["class"] == "filler" and row["tokens"] == 3 and row["decided"] == pytest.approx(0.25 / 0.29) and row["gradient"] == pytest.approx(3.5 / 4.5)
    assert row["minus"] == pytest.approx(3.5 / 4.5 - 0.25 / 0.29) and row["idle"] == pytest.approx(2 / 3.5)
    left = np.array([2.5 / 2.5 - 1.0, 1 / 2 - 0.16 / 0.2])  # without the first question, and without the second
    reach = 12.7062 * np.sqrt(np.square(left - left.mean()).sum() / 2)
    assert row["95%  "] == pytest.approx((row["minus"] - reach, row["minus"] + reach), rel=1e-3)


def test_the_verdict_on_filler_is_in_words():
    finding = scoreboard.matters(by_hand(), "class").finding
    assert finding.startswith("Too few questions")  # an interval wider than everything
    tokens = by_hand()
    for name in ("answer", "question"):
        setattr(tokens, name, np.concatenate([getattr(tokens, name) + 2 * n for n in range(8)]))
    for name in ("decided", "credit", "size", "advantage", "idle"):
        setattr(tokens, name, np.concatenate([getattr(tokens, name)] * 8))
    tokens.codes, tokens.questions = {"class": np.tile(tokens.codes["class"], 8)}, 16
    finding = scoreboard.matters(tokens, "class").finding
    assert "Filler decides 86% (" in finding and "gets 78% (" in finding and "by -8 points" in finding and "At least 57%" in finding


def test_where_nothing_is_decided_nothing_is_said():
    tokens = by_hand()
    tokens.decided = np.zeros(5)
    assert "nothing to decide" in scoreboard.matters(tokens, "class").finding
    tokens = by_hand()
    tokens.advantage = np.zeros(5)
    assert "nothing to decide" in scoreboard.matters(tokens, "class").finding


def test_shares_that_differ_by_less_than_a_point_are_even(monkeypatch):
    monkeypatch.setattr(scoreboard, "difference_of_shares", lambda *_: scoreboard.Estimate(0.0, *span, 0.001))
    for span, word in (((-0.009, 0.009), "about even"), ((-0.009, 0.02), "too little")):
        assert scoreboard.matters(by_hand(), "class").rows[0][-1] == word


def test_the_order_of_weights_in_an_answer():
    """3 1 2 -> 1 -1 0 and 5 5 -> 0 0, whatever other answers have."""
    assert by_hand().order(np.array([3.0, 1, 2, 5, 5])).tolist() == [1, -1, 0, 0, 0]
    assert by_hand().order(np.array([0.0, 0, 9, 1, 2])).tolist() == [-0.5, -0.5, 1, -1, 1]
    single = by_hand()
    single.answer = np.array([0, 1, 1, 2, 3])
    assert single.order(np.array([7.0, 1, 2, 3, 4])).tolist() == [0, -1, 1, 0, 0]


def test_scores_of_an_arm():
    """Weights 3 1 2 and 1 2: all of 0.29 but 0.04 at the top. Aligned: sum of w A times credit over the sizes."""
    weight, signed = np.array([3.0, 1, 2, 1, 2]), np.array([3.0, 1, 2, -2, -4])
    found = scoreboard.score(by_hand(), weight, signed, np.array([1.0, 3, 2, 2, 1]))
    assert found["index"].value == pytest.approx((0.16 + 0.09) / 0.29) and found["placebo"].value == pytest.approx(-(0.16 + 0.09) / 0.29)
    assert found["top tenth"].value == pytest.approx((0.16 + 0.09) / 0.29) and found["varies"]
    assert found["aligned"].value == pytest.approx((1.2 - 0.4 - 1.2) / np.sqrt((9 + 1 + 4 + 4 + 16) * 0.29))
    assert found["idle"].value == pytest.approx((0.5 + 2) / (3 + 0.5 + 1 + 2 + 1))


def test_the_credit_measured_again_is_judged_by_the_other_half():
    tokens = by_hand()
    found = scoreboard.score(tokens, np.abs(tokens.again), tokens.again, None, tokens.decided_again)
    other = 2 * tokens.credit - tokens.again
    assert found["index"].value == pytest.approx((0.1 + 0 + 0.1) / 0.3)  # places 1, -1, 0 and -1, 1
    assert found["aligned"].value == pytest.approx((tokens.again @ other) / np.sqrt((tokens.again ** 2).sum() * 0.3))


def test_the_tenth_with_most_weight_is_of_each_answer():
    answer, size = np.repeat([0, 1, 2], [20, 5, 4]), np.concatenate([np.arange(20), [9, 1, 1, 1, 1], [2, 2, 2, 2]])
    found = scoreboard.top_tenth(answer, size)
    assert np.flatnonzero(found == 1).tolist() == [18, 19, 20] and found[25:].tolist() == [0.25] * 4 and not found[21:25].any()


def test_what_is_equal_has_no_place():
    found = scoreboard.score(by_hand(), np.ones(5), np.array([1.0, 1, 1, -2, -2]), None)
    assert found["index"].value == 0 and not found["varies"] and found["placebo"] is None
    assert found["top tenth"].value == pytest.approx((0.2 / 3 + 0.09 / 2) / 0.29)


def test_weights_that_know_nothing_score_as_chance_whatever_the_noise():
    """No token has credit; what is measured of it is noise that grows with the weight. A rank correlation would see a relation."""
    rng, values = np.random.default_rng(0), []
    for _ in range(200):
        tokens = by_hand()
        tokens.answer = tokens.question = np.repeat(np.arange(12), 30)
        tokens.questions, chance = 12, rng.uniform(0.01, 1, 360)
        quarters = rng.normal(size=(4, 360)) * chance
        tokens.decided = (quarters.sum(0) ** 2 - (quarters ** 2).sum(0)) / 12 + rng.binomial(1, 0.1, 360)  # and credit that knows nothing of the weight
        values.append(scoreboard.ratio_of_sums(tokens.by_question(tokens.decided * tokens.order(chance)), tokens.by_question(tokens.decided)))
    assert abs(np.mean([e.value for e in values])) < 0.02 and np.mean([e.p < 0.05 for e in values]) < 0.11


SMALLEST = ["--questions", "2", "--answers", "4", "--continuations", "4", "--batches", "4", "--batch_questions", "2", "--batch_answers", "2", "--oracle_k", "1",
            "--threads", "1", "--quick"]


@pytest.fixture(scope="module")
def board(tmp_path_factory, learner):
    folder = tmp_path_factory.mktemp("board")
    for name in ("one", "two"):
        probes.main(["scoreboard", "--model", str(learner), "--out", str(folder / name), *SMALLEST])
    return folder


def read(folder):
    numbers = json.loads((folder / "numbers.json").read_text())
    return numbers, {table["name"]: table for table in numbers["tables"]}


def test_every_arm_is_scored(board):
    numbers, tables = read(board / "one")
    assert {row["arm"] for row in tables["scores"]["rows"]} == {*MITIGATIONS, "rloo", "span", "gae", "vine", scoreboard.AGAIN}
    directions = {row["arm"]: row for row in tables["directions"]["rows"]}
    assert set(directions) == {*MITIGATIONS, "rloo", "span", "gae", "vine", scoreboard.TRUE}  # four batches may be too few for numbers
    assert sum(row["tokens"] for row in tables["kind"]["rows"]) == sum(row["tokens"] for row in tables["class"]["rows"])
    assert sum(row["gradient"] or 0 for row in tables["kind"]["rows"]) == pytest.approx(1) or tables["kind"]["rows"][0]["gradient"] is None


def test_the_same_seed_gives_the_same_numbers(board):
    one, two = (read(board / name)[0] for name in ("one", "two"))
    assert one["tables"] == two["tables"] and one["settings"]["seed"] == 0


def test_the_batch_is_a_run_that_analysis_opens(board, capsys):
    columns = read_columns(board / "one/run", 1)
    assert columns["true_credit"].shape == columns["true_credit_se"].shape == columns["token_id"].shape
    analyze.main([str(board / "one/run"), "--output_dir", str(board / "analysis")])
    assert '"true credit"' in (board / "analysis/report.html").read_text() and '"true credit se"' in (board / "one/report.html").read_text()
    capsys.readouterr()


def test_what_is_there_is_not_overwritten(board):
    with pytest.raises(UserError, match="exists already: name another with --out"):
        probes.main(["scoreboard", "--quick", "--out", str(board / "one")])


def test_a_probe_that_fails_leaves_nothing_in_the_way(tmp_path):
    with pytest.raises(UserError, match="there is no model folder"):
        probes.main(["scoreboard", "--model", "nowhere", "--out", str(tmp_path / "x"), "--quick"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv, message", [(["colour"], "invalid choice: 'colour'"), (["scoreboard", "--answers", "1"], "--answers 1 should be at least 2"),
                                           (["rank", "--continuation", "3"], "unrecognized arguments"), (["length", "--lengths", "4"], "two different numbers"),
                                           (["length", "--lengths", "8,x"], "two different numbers"), (["length", "--device", "cuda"], "made for the CPU")])
def test_wrong_commands_are_one_line(argv, message, tmp_path):
    with pytest.raises(UserError, match=message):
        probes.main([*argv, "--out", str(tmp_path / "x")])


def test_help_names_every_probe(capsys):
    probes.main([])
    out = capsys.readouterr().out
    assert all(f"probes.py {name}" in out for name in probes.PROBES)


def test_success_at_equal_tokens():
    """A step from 0.2 to 0.6 over 100 tokens, flat after: mean over 200 is (0.4 + 0.6) / 2."""
    curve = [(0, 0.2), (100, 0.6), (400, 0.6)]
    assert length.area(curve, 200) == pytest.approx(0.5, abs=1e-3)
    assert length.needed(curve) == np.inf and length.needed([(0, 0.2), (50, 0.79), (90, 0.8), (120, 0.7)]) == 90


def test_the_trend_is_points_for_a_doubling():
    """A lead of 0.1, 0.2, 0.3 at 8, 16, 32 tokens in both seeds, and of 0.3, 0.2, 0.1."""
    curves = {("grpo", size): [[(0, 0.5), (100, 0.5)]] * 2 for size in (8, 16, 32)}
    for arm in list(length.ARMS)[1:]:
        leads = (0.1, 0.2, 0.3) if arm == "exact" else (0.3, 0.2, 0.1)
        curves |= {(arm, size): [[(0, 0.5 + lead), (100, 0.5 + lead)]] * 2 for size, lead in zip((8, 16, 32), leads)}
    rows = {row[0]: row for row in length.trend(curves, [8, 16, 32]).rows}
    assert rows["exact"][1] == pytest.approx(0.1) and rows["critic"][1] == pytest.approx(-0.1) and len(rows) == 4


def test_parted_in_words():
    rows = {(8, "exact"): [0, 0, 0, 0, 0.031, 0, "none seen"], (16, "exact"): [0, 0, 0, 0, 0.2, 0, "ahead"], (32, "exact"): [0, 0, 0, 0, -0.2, 0, "behind"]}
    assert length.parted("exact", [8, 16, 32], rows) == "ahead at 16 and behind at 32 (+3, +20, -20 points)."
    assert length.parted("exact", [8], rows) == "no difference seen at any length (+3 points)."


def test_noise_is_variance_over_squared_mean():
    """Of the outcome's advantage against exact credit, by many batches, each estimated the plain way."""
    args = SimpleNamespace(batches=60, questions=4, answers=4, learning_rate=1e-3, continuations=1, segments=2)
    noise = length.noise_of(args, SMALL, 0, 8)
    lab = planted_lab(0, 8)
    found = [gradients(lab, batch, {"grpo": rloo(batch), "exact": batch.true_credit}) for batch in (sample_planted(lab, 1000 + n, 4, 4) for n in range(60))]
    mean = torch.stack([g["exact"] for g in found]).mean(0).square().sum()
    variance = {name: torch.stack([g[name] for g in found]).var(0).sum() for name in ("grpo", "exact")}
    assert noise["grpo"] / noise["exact"] == pytest.approx((variance["grpo"] / variance["exact"]).item(), rel=0.25)
    assert noise["exact"] == pytest.approx((variance["exact"] / (mean - variance["exact"] / 60)).item(), rel=0.4)


def test_every_arm_spends_the_same_tokens(tmp_path):
    probes.main(["length", "--quick", "--threads", "1", "--out", str(tmp_path / "x")])
    numbers, tables = read(tmp_path / "x")
    assert {row["arm"] for row in tables["area"]["rows"]} == set(length.ARMS) and len(tables["area"]["rows"]) == 10
    args = SimpleNamespace(steps=3, questions=2, answers=4, learning_rate=1e-3, continuations=1, segments=2)
    for arm in length.ARMS:
        curve = length.train_arm(args, SMALL, arm, 0, 8)
        spent = curve[-1][0]
        assert curve[-2][0] < 3 * 2 * 4 * 8 <= spent and curve[0][1] == pytest.approx(length.train_arm(args, SMALL, "grpo", 0, 8)[0][1])
    assert spent == 3 * 2 * 4 * 8  # exact credit costs no tokens
