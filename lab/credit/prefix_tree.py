"""The answers to one problem as a prefix tree (trie).

    the cat sat    reward 1      the (3 answers) - cat (2) - sat (1)
    the cat ran    reward 0                              \\ ran (1)
    the dog ran    reward 0                    \\ dog (1) - ran (1)

The value V of a path is the mean reward of the answers that begin with it: 1/3 after "the", 1/2
after "the cat", 1 after "the cat sat". Nothing is sampled.
"""
import torch

from lab.engine.methods import advantage
from lab.engine.rollouts import Rollouts
from grpo import group_mean, group_z_score, to_every_token
from lab.engine.declared import NotNegative


@advantage
def prefix_tree(rollouts: Rollouts, *, tree_scale: NotNegative = 1.0) -> torch.Tensor:
    """The advantage of grpo, plus tree_scale times the difference that the token makes: V after it
    minus V before it. V is the mean reward of the group's answers that begin in the same way
    (TEMPO, arXiv 2509.18314).

    The difference is nonzero only where answers branch. Both parts are in units of the group's
    standard deviation, as in the authors' code, where tree_scale is 1. With 0 this is grpo. The
    advantage is biased, because V after the token and V before it count the answer's own reward
    differently."""
    z = group_z_score(rollouts.reward, rollouts.group)
    after = [group_mean(z, node) for node in paths(rollouts).T]
    before = [group_mean(z, rollouts.group), *after[:-1]]
    step = torch.stack(after, 1) - torch.stack(before, 1)
    return to_every_token(z, rollouts) + tree_scale * step.to(z)


def paths(rollouts: Rollouts) -> torch.Tensor:
    """(B, T): the number of the tree's node at each token. An answer that has ended shares no node
    with answers that continue."""
    ids = torch.where(rollouts.written, rollouts.ids + 1, 0)  # 0 is the end
    columns, node = [], rollouts.group
    for column in ids.T:
        # a number for each pair of a node and the token that follows it
        edge = node * (ids.max() + 1) + column
        _, node = edge.unique(return_inverse=True)  # the same pairs, numbered from 0
        columns.append(node)
    return torch.stack(columns, 1)
