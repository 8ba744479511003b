"""The answers to one problem as a prefix tree (trie).

    the cat sat    reward 1      the (3 answers) - cat (2) - sat (1)
    the cat ran    reward 0                              \\ ran (1)
    the dog ran    reward 0                    \\ dog (1) - ran (1)

The value V of a path is the mean reward of the answers that begin with it: 1/3 after "the", 1/2
after "the cat", 1 after "the cat sat". Here are two ways to use the tree; neither samples anything.
"""
import torch

from engine.choices import advantage, mitigation
from engine.rollouts import Rollouts
from grpo import group_mean, group_z_score, to_every_token
from harness.flags import NotNegative


@advantage
def prefix_tree(rollouts: Rollouts, *, tree_scale: NotNegative = 1.0) -> torch.Tensor:
    """grpo's advantage plus V(after the token) - V(before it), where V is the mean reward of the
    group's answers that share the prefix (TEMPO, 2509.18314).

    The difference is nonzero only where answers branch. Both parts are in units of the group's
    standard deviation, as in the authors' code, where the scale is 1. With scale 0 it is grpo."""
    z = group_z_score(rollouts.reward, rollouts.group)
    after = [group_mean(z, node) for node in paths(rollouts).T]
    before = [group_mean(z, rollouts.group), *after[:-1]]
    step = torch.stack(after, 1) - torch.stack(before, 1)
    return to_every_token(z, rollouts) + tree_scale * step.float()


@mitigation
def shared_prefix(rollouts: Rollouts) -> torch.Tensor:
    """1 / the number of the group's answers that share the prefix up to and including this token.

    This is the lambda-GRPO of Sullivan (2509.21154; there weights are not rescaled, which is
    --rescale none), not that of 2510.06870, which is about lengths."""
    return torch.stack([1 / torch.bincount(node)[node] for node in paths(rollouts).T], 1)


def paths(rollouts: Rollouts) -> torch.Tensor:
    """(B, T): the number of the tree's node at each token. An answer that has ended shares no node
    with answers that continue."""
    ids = torch.where(rollouts.mask, rollouts.ids + 1, 0)
    columns, node = [], rollouts.group
    for column in ids.T:
        edge = node * (ids.max() + 1) + column
        node = edge.unique(return_inverse=True)[1]
        columns.append(node)
    return torch.stack(columns, 1)
