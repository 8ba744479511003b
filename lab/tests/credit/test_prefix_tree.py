"""The answers of a group as a tree: values of beginnings."""
import torch

from small import hand_made
from lab.credit.prefix_tree import prefix_tree
from grpo import grpo

THE, CAT, DOG, SAT, RAN = range(5, 10)
IDS = torch.tensor([[THE, CAT, SAT], [THE, CAT, RAN], [THE, DOG, RAN], [THE, CAT, 0]])
GROUP = torch.tensor([0, 0, 0, 1])  # the last one answers another problem, in two words
MASK = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, True, False]])
REWARD = torch.tensor([1.0, 0.0, 0.0, 1.0])


def tree(ids=IDS, mask=MASK, group=GROUP, reward=REWARD):
    return hand_made(mask, ids=ids, group=group, scores={"reward": reward})


def test_the_values_of_the_tree_by_hand():
    """V is 1/3 before and behind "the", 1/2 behind "the cat", 0 behind "the dog", then the reward;
    all of it over the standard deviation sqrt(2) / 3, beside grpo's +2/3, -1/3, -1/3."""
    std = 2 ** 0.5 / 3 + 1e-4
    step = torch.tensor([[0, 1 / 6, 1 / 2], [0, 1 / 6, -1 / 2], [0, -1 / 3, 0]]) / std
    whole = torch.tensor([[2 / 3], [-1 / 3], [-1 / 3]]) / std
    batch = tree()
    torch.testing.assert_close(prefix_tree(batch)[:3], whole + step)
    torch.testing.assert_close(prefix_tree(batch, tree_scale=2.0)[:3], whole + 2 * step)
    assert not prefix_tree(batch)[3].any()                     # one answer, nothing to compare


def test_where_nobody_parts_the_difference_is_exactly_0():
    """Three answers that are the same until the last token, rewards that do not add up evenly."""
    ids = torch.tensor([[THE] * 30 + [last] for last in (CAT, DOG, DOG)])
    batch = tree(ids, torch.ones(3, 31, dtype=torch.bool), torch.zeros(3, dtype=torch.long),
                 torch.tensor([1.1, 0.1, 0.06]))
    beside = prefix_tree(batch) - grpo(batch)
    assert not beside[:, :30].any() and beside[:, 30].all()
