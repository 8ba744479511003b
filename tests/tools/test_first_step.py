"""The first step before it is made: what groups share by numbers worked out by hand, and the sign
of success for a reward that pays for being right, and for one that pays for being wrong."""
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import refusal

from countdown_task import Problem
from tools import preflight
from tools.helpers.first_step import FirstStep, measure_first_step


def test_signal_and_noise_by_hand():
    """Gradients (2, 1), (2, -1), (2, 1), (1, 0): the products of different groups are 3, 5, 2, 3,
    2, 2, so the squared signal is 17/6. |g|^2 is 4 on average, so one group has the noise 4 - 17/6.
    """
    gradients = np.array([[2.0, 1], [2, -1], [2, 1], [1, 0]])
    products = gradients @ gradients.T
    found = FirstStep(products, products, -products)
    assert found.signal().value == pytest.approx(17 / 6)
    assert found.groups_worth() == pytest.approx(7 / 17)
    assert 0 <= found.fewest_groups_worth() < found.groups_worth()
    assert found.raises_success().value == pytest.approx(-17 / 6)
    assert FirstStep(-products, products, products).groups_worth() == np.inf


def test_a_reward_for_being_right_raises_success_and_the_opposite_lowers_it(policy, monkeypatch):
    """The two gradients of a group are the same, or one is minus the other. The model stays as it
    is."""
    s = replace(policy.settings, questions=2, answers=6)
    problems = [Problem((2, 3, 4), 9), Problem((3, 4, 5), 12), Problem((1, 2, 5), 8)]
    usual = type(policy.task).score

    def by_length(task, problem, text):
        return usual(task, problem, text) | {"answer": float(len(text) % 2), "reward": sign * (
            len(text) % 2)}

    monkeypatch.setattr(type(policy.task), "score", by_length)
    before = [parameter.clone() for parameter in policy.model.parameters()]
    for sign in (1.0, -1.0):
        found = measure_first_step(policy, s, problems)
        assert found.reward.shape == (3, 3) and found.reward.any()
        np.testing.assert_allclose(found.both, sign * found.reward, rtol=1e-4, atol=1e-7)
    assert all(map(torch.equal, before, policy.model.parameters()))


def test_too_few_groups_are_refused(tmp_path):
    assert "at least 8" in refusal(preflight.main, ["--gradients", "3", "--out", str(tmp_path)])
