"""Rank correlations by hand, and why nothing is decided by them."""
import numpy as np
import pytest
import torch

from conftest import hand_made
from test_scoreboard import by_hand
from research.probes.agreement import agreement_table, spearman
from research.probes.arm_scores import AGAIN

MASK = [[True, True, True], [True, True, False]]


def test_ranks_and_signs_by_hand():
    """Credits 0.4 0 -0.2 and 0 0.3. Weights 3 1 2 and 1 2 rank their sizes as they are; times the
    advantages 1 and -2 they are 3 1 2 and -2 -4, with correlations 0.5 and -1, and of the three
    tokens with credit the first alone has the right sign."""
    weight = torch.tensor([[3.0, 1, 2], [1, 2, 9]])
    advantage = torch.tensor([[1.0, 1, 1], [-2, -2, -2]])
    batch = hand_made(MASK, advantage=advantage)
    table = agreement_table(by_hand(), batch, {"w": weight}, {"A": -weight * advantage})
    by_arm = {row[0]: row for row in table.rows}
    assert by_arm["w"][1] == pytest.approx(1) and by_arm["w"][3] == pytest.approx(-0.25)
    assert by_arm["w"][5] == pytest.approx(1 / 3)
    assert by_arm["A"][1] == pytest.approx(1) and by_arm["A"][3] == pytest.approx(0.25)
    assert by_arm["A"][5] == pytest.approx(2 / 3)
    assert by_arm[AGAIN][3] == pytest.approx(1) and by_arm[AGAIN][5] == pytest.approx(1)


def test_an_arm_that_is_constant_has_no_rank_correlation():
    assert np.isnan(spearman(by_hand(), np.ones(5), by_hand().truth.credit).value)


def test_a_true_null_looks_real_to_a_rank_correlation():
    """No token's credit depends on the weight; what is measured is noise that grows with it. The
    scores of the board see nothing there (test_scoreboard.py)."""
    rng, correlations = np.random.default_rng(0), []
    for _ in range(30):
        tokens = by_hand()
        tokens.answer = tokens.question = np.repeat(np.arange(12), 30)
        tokens.questions, chance = 12, rng.uniform(0.01, 1, 360)
        measured = rng.normal(size=360) * chance
        correlations.append(spearman(tokens, chance, np.abs(measured)))
    assert np.mean([correlation.p < 0.05 for correlation in correlations]) > 0.9
