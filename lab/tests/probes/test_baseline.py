"""The best baseline by hand and by a grid, and squares of gradients."""
import numpy as np
import pytest
import torch
from small import gradients, spoken

from lab.engine.forward import response_log_probs
from lab.probes.baseline import (BATCH_MEAN, BEST, BY_LENGTH, MEAN, NONE, bandit, baselines,
                                 best_baseline, squares)


def test_the_best_baseline_by_hand_and_by_a_grid():
    """|g|^2 = 1, 3 and R = 0, 1: b* = 3/4, where the noise is (9/16 + 3/16) / 2 = 3/8; the mean,
    1/2, adds (1/4)^2 * 2 = 1/8, a third of it."""
    reward, square, chance = np.array([0.0, 1.0]), np.array([1.0, 3.0]), np.array([0.5, 0.5])
    assert best_baseline(reward, square, chance) == pytest.approx((0.75, 0.5, 1 / 3))
    noise = [(chance * (reward - b) ** 2 * square).sum() for b in np.linspace(-1, 2, 301)]
    assert np.linspace(-1, 2, 301)[np.argmin(noise)] == pytest.approx(0.75)


def test_of_two_answers_the_best_baseline_is_the_chance_of_the_other():
    """|g|^2 is 2 (1 - p)^2 and 2 p^2: the mean is best at p = 1/2 alone."""
    for p in (0.2, 0.5):
        b, mean, cost = bandit([np.log(p / (1 - p)), 0.0], [1.0, 0.0])
        assert (b, mean) == pytest.approx((1 - p, p))
        assert (cost < 1e-9) == (p == 0.5)


def test_estimators_by_hand():
    """From the other answers. Rewards 0 1 1 have lengths 1 1 2 and |g|^2 1 2 3; and 0 0 3."""
    reward = np.array([[0.0, 1, 1], [0, 0, 3]])
    square, length = np.array([[1.0, 2, 3]] * 2), np.array([[1.0, 1, 2]] * 2)
    found = baselines(reward, square, length)
    assert found[NONE][0].tolist() == [0] * 3
    assert found[MEAN][0].tolist() == pytest.approx([1, 0.5, 0.5])
    assert found[BY_LENGTH][0].tolist() == pytest.approx([1, 2 / 3, 0.5])
    assert found[BEST][0].tolist() == pytest.approx([1, 3 / 4, 2 / 3])
    assert found[BATCH_MEAN].tolist() == [[1.0] * 3, [pytest.approx(2 / 3)] * 3]


def test_squares_are_those_of_one_backward_pass_each(policy):
    rollouts = spoken(policy)
    found = squares(policy, rollouts)
    for b in (0, 3):
        policy.model.zero_grad()
        response_log_probs(policy.model, rollouts, torch.tensor([b])).sum().backward()
        assert found[b] == pytest.approx(gradients(policy.model).double().square().sum().item(),
                                         rel=1e-4)
    tripled = squares(policy, rollouts, 3 * rollouts.mask.float())
    assert tripled == pytest.approx(9 * found, rel=1e-4)
    policy.model.zero_grad(set_to_none=True)
