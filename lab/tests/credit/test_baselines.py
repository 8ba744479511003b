"""Baselines, by hand."""
import pytest
import torch
from small import hand_made

from lab.credit.baselines import batch_mean, maxrl, opo


def batch(lengths, reward, group):
    mask = torch.tensor([[t < n for t in range(max(lengths))] for n in lengths])
    return hand_made(mask, group=torch.tensor(group), scores={"reward": torch.tensor(reward)})


def test_opo_counts_each_answer_with_its_length():
    """Rewards 1 and 0, lengths 3 and 1: the baseline is 3 / 4. Equal rewards give exactly 0."""
    rollouts = batch([3, 1, 2, 7], [1.0, 0.0, 0.3, 0.3], group=[0, 0, 1, 1])
    assert opo(rollouts)[:, 0].tolist() == [0.25, -0.75, 0.0, 0.0]
    assert opo(rollouts)[1, 1:].tolist() == [0.0] * 6  # beyond the answer


def test_maxrl_says_once_that_rewards_are_not_0_and_1(capsys):
    scores = {"reward": torch.tensor([1.0, 0.0, 0.25])}
    for step, count in ((1, 1), (2, 0)):
        maxrl(hand_made([[True]] * 3, scores=scores, step=step))
        assert capsys.readouterr().out.count("Some are others, such as 0.25, ") == count
    maxrl(hand_made([[True]] * 3, scores={"reward": torch.tensor([1.0, 0.0, 1.0])}))
    assert capsys.readouterr().out == ""


def test_maxrl_divides_by_the_mean_and_gives_an_unsolved_group_nothing():
    rollouts = batch([1] * 6, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], group=[0, 0, 0, 0, 1, 1])
    assert maxrl(rollouts)[:, 0].tolist() == pytest.approx([3, -1, -1, -1, 0, 0])


def test_the_mean_of_a_batch_is_that_of_all_groups():
    """Rewards of 1 0 3 0 3 have the mean 7 / 5. Of equal ones nothing is left."""
    group = [0, 1, 0, 1, 1]
    found = batch_mean(batch([1] * 5, [1.0, 0.0, 3.0, 0.0, 3.0], group))[:, 0].tolist()
    assert found == pytest.approx([-0.4, -1.4, 1.6, -1.4, 1.6])
    assert not batch_mean(batch([1] * 5, [0.06] * 5, group)).any()
