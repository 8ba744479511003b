"""Success, leads and noise of the probe length by hand, and what every arm spends."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.statistics import Estimate
from engine.errors import UserError
from grpo import rloo
from research.probes import length
from research.probes.common import gradients, run_probe
from research.probes.length_tables import (
    area, power, tokens_table, tokens_until_enough, trend_table, where_ahead)
from research.probes.planted import SMALL, planted_lab, sample_planted

LENGTHS = [8, 16, 32]


def run(folder, *more):
    argv = ["--quick", "--threads", "1", "--out", str(folder), *more]
    run_probe("length", length.__doc__, length.FLAGS, length.measure, argv)
    tables = json.loads((folder / "numbers.json").read_text())["tables"]
    return {table["name"]: table for table in tables}


def test_success_at_equal_tokens():
    """A step from 0.2 to 0.6 over 100 tokens, flat after: mean over 200 is (0.4 + 0.6) / 2."""
    curve = [(0, 0.2), (100, 0.6), (400, 0.6)]
    assert area(curve, 200) == pytest.approx(0.5, abs=1e-3)
    assert tokens_until_enough(curve) == np.inf
    assert tokens_until_enough([(0, 0.2), (50, 0.79), (90, 0.8), (120, 0.7)]) == 90


def constant_curves(success_of_arm):
    """Two seeds an arm and length, the same success from start to end: {arm: one a length}."""
    return {(arm, size): [[(0, success), (100, success)]] * 2
            for arm, of_lengths in success_of_arm.items()
            for size, success in zip(LENGTHS, of_lengths)}


def test_the_trend_is_points_for_a_doubling():
    """A lead of 0.1, 0.2, 0.3 at 8, 16, 32 tokens in both seeds, and of 0.3, 0.2, 0.1."""
    curves = constant_curves({"grpo": (0.5, 0.5, 0.5), "critic": (0.8, 0.7, 0.6),
                              "exact": (0.6, 0.7, 0.8)})
    rows = {row[0]: row for row in trend_table(curves, LENGTHS).rows}
    assert set(rows) == {"critic", "exact"}
    assert rows["exact"][1] == pytest.approx(0.1)
    assert rows["critic"][1] == pytest.approx(-0.1)


def test_where_an_arm_is_ahead_in_words():
    values, words = (0.031, 0.2, -0.2), ("none seen", "ahead", "behind")
    differences, of_lengths = {}, {}
    for size, value, word in zip(LENGTHS, values, words):
        differences["exact", size] = Estimate(value, value, value, 0.5)
        of_lengths["exact", size] = word
    text = where_ahead("exact", LENGTHS, differences, of_lengths)
    assert text == "exact: ahead at 16 and behind at 32 (+3, +20, -20 points of success)."
    text = where_ahead("exact", [8], differences, of_lengths)
    assert text == "exact: no clear difference from grpo at any length (+3 points of success)."


def test_tokens_until_enough_are_counted_in_answers():
    """Exact credit needs 40 tokens in one seed and 80 in the other, plain GRPO twice that at length
    8 and more than it has at 16."""
    enough = {"exact": (40, 80), ("grpo", 8): (80, 160), ("grpo", 16): (np.inf, np.inf)}
    curves = {}
    for size in (8, 16):
        for arm in ("grpo", "exact"):
            of_seeds = enough.get(arm) or enough[arm, size]
            curves[arm, size] = [[(0, 0.2), (200, 0.2)] if tokens == np.inf else
                                 [(0, 0.2), (tokens, 0.9), (200, 0.9)] for tokens in of_seeds]
    table = tokens_table(curves, [8, 16], 25)
    assert table.rows == [("8", 15, 7.5, 2), ("16", "more", 3.75, None)]
    assert table.finding.splitlines() == [
        "Answers of 8 tokens: grpo needs the tokens of 15 answers, exact the tokens of 8 answers.",
        "Answers of 16 tokens: grpo needs more than the budget, exact the tokens of 4 answers."]


def test_the_power_of_a_law_and_of_what_is_undefined():
    assert power(LENGTHS, [3 * size ** 1.5 for size in LENGTHS]) == pytest.approx(1.5)
    assert np.isnan(power(LENGTHS, [1.0, np.nan, 2.0]))


def some_args(**more):
    return SimpleNamespace(learning_rate=1e-3, continuations=1, segments=2, answers=4, **more)


def test_noise_is_variance_over_squared_mean():
    """Of the outcome's advantage against exact credit, by many batches, each estimated the plain
    way."""
    noise = length.gradient_noise(some_args(batches=60, questions=4), SMALL, 0, 8)
    lab = planted_lab(0, 8)
    of_batches = []
    for n in range(60):
        batch = sample_planted(lab, 1000 + n, 4, 4)
        coefficients = {"grpo": rloo(batch), "exact": batch.true_credit}
        of_batches.append(gradients(lab, batch, coefficients))
    grpo, exact = (torch.stack([g[name] for g in of_batches]) for name in ("grpo", "exact"))
    of_grpo, of_exact = grpo.var(0).sum().item(), exact.var(0).sum().item()
    mean_square = exact.mean(0).square().sum().item() - of_exact / 60
    assert noise["grpo"] / noise["exact"] == pytest.approx(of_grpo / of_exact, rel=0.25)
    assert noise["exact"] == pytest.approx(of_exact / mean_square, rel=0.4)


@pytest.mark.parametrize("arm", length.ARMS)
def test_every_arm_spends_the_same_tokens(arm):
    args = some_args(steps=3, questions=2)
    curve, of_grpo = (length.train_arm(args, SMALL, name, 0, 8) for name in (arm, "grpo"))
    budget = 3 * 2 * 4 * 8
    assert curve[-2][0] < budget <= curve[-1][0]
    assert curve[0] == of_grpo[0]
    if arm == "monte carlo":  # its continuations count
        assert curve[1][0] > 2 * 4 * 8
    else:
        assert curve[1][0] == 2 * 4 * 8 and curve[-1][0] == budget


def test_a_quick_run_has_every_arm_at_every_length(tmp_path, capsys):
    tables = run(tmp_path / "x")
    rows = tables["area"]["rows"]
    assert [row["arm"] for row in rows] == [*length.ARMS] * 2
    assert list(tables) == ["area", "trend", "tokens", "noise"]
    assert {path.name for path in (tmp_path / "x").glob("*.png")} == {"curves.png", "scaling.png"}


@pytest.mark.parametrize("flags, message", [
    (["--lengths", "4"], "two different numbers"), (["--lengths", "8,x"], "two different numbers"),
    (["--device", "cuda"], "made for the CPU")])
def test_wrong_flags_are_one_line(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "x", *flags)
