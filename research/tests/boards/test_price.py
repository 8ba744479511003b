"""The arms of the price: their weights by hand, and the exact gradient of one that has no bias."""
import pytest
import torch
from conftest import hand_made

from research.boards.price import (ARMS, choices_of, end_untrained, micro_batches_of_4,
                                        per_group)
from research.probes.enumerated import Batches, estimator, make_enumerated


def batch_of_lengths(*lengths, group, finished):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return hand_made(mask, group=torch.tensor(group), finished=torch.tensor(finished))


def test_the_weights_by_hand():
    rollouts = batch_of_lengths(2, 1, 3, 2, group=[0, 0, 1, 1], finished=[True, True, False, True])
    assert end_untrained(rollouts).tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 1]]
    # N = 8: in group 0, of 3 tokens, each has 8 / (2 * 3); in group 1, of 5, 8 / (2 * 5)
    assert per_group(rollouts)[:, 0].tolist() == pytest.approx([4 / 3, 4 / 3, .8, .8])
    assert micro_batches_of_4(rollouts)[:, 0].tolist() == [1, 1, 1, 1]  # one part: all of them


def test_the_sum_over_tokens_has_the_direction_of_the_true_gradient():
    task = make_enumerated(1, 3)
    batches = Batches.all(task, 3)
    factors = choices_of(task, batches)
    found = {name: estimator(task, batches, factor).against(task.gradient)["cosine"]
             for name, factor in factors.items()}
    assert found["mean, sum"] == pytest.approx(1, abs=1e-6)
    assert found["z, answer"] < 1 - 1e-4 > found["z, token, its end untrained"]


def test_each_arm_is_compared_with_an_arm():
    assert all(compared in ARMS or not compared for _, compared in ARMS.values())
