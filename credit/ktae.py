"""KTAE (2505.16826): association of token ids with right answers, by a group's contingency tables.

                          right    wrong
    answers with it         a        b        "7" in 3 of 4 right answers and 1 of 4 wrong ones:
    answers without it      c        d        a, b, c, d = 3, 1, 1, 3

The value of an id is tanh((F + I) / 4 * E), between -1 and 1:

    F   exp(-2 p), p of Fisher's exact test of the table; 0 where p is 1
    I   the information gain: bits of right or wrong known from whether it occurs
    E   asin(sqrt(a / (a + c))) - asin(sqrt(b / (b + d))), the effect size, which gives the sign

Formulas and factors as in the authors' code, without its optional term for how often an id occurs.
"""
import math

import torch

from engine.choices import advantage
from engine.rollouts import Rollouts
from grpo import centred, group_z_score, to_every_token
from harness.flags import NotNegative


@advantage
def ktae(rollouts: Rollouts, *, ktae_scale: NotNegative = 1.0) -> torch.Tensor:
    """grpo's advantage plus the association of the token's id with right answers of the group
    (2505.16826).

    Right are answers with more than the group's mean reward. The same id has the same value
    wherever it stands; what all answers have is worth 0. Scale 0 is grpo. """
    credit = to_every_token(group_z_score(rollouts.reward, rollouts.group), rollouts)
    right = centred(rollouts.reward, rollouts.group) > 0
    for group in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == group).nonzero().squeeze(1)
        if 0 < right[rows].sum() < len(rows):
            credit[rows] += ktae_scale * values(rollouts, rows, right[rows])
    return credit


def values(rollouts: Rollouts, rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(rows, T): the value of each token of a group's answers, 0 beyond the mask."""
    mask = rollouts.mask[rows]
    ids, place = rollouts.ids[rows].unique(return_inverse=True)
    tokens = torch.zeros(len(rows), len(ids), dtype=torch.float64, device=mask.device)
    occurs = tokens.scatter_add(1, place, mask.double()) > 0  # (rows, ids)
    a, b = occurs[right].sum(0).double(), occurs[~right].sum(0).double()
    return value_of_table(a, b, int(right.sum()), int((~right).sum())).float()[place] * mask


def value_of_table(a: torch.Tensor, b: torch.Tensor, right: int, wrong: int) -> torch.Tensor:
    """(ids,): a of `right` right answers and b of `wrong` wrong ones have the id."""
    p = fisher(a, b, right, wrong)
    sure = torch.where(p < 1 - 1e-9, torch.exp(-2 * p), 0.0)
    effect = (a / right).sqrt().asin() - (b / wrong).sqrt().asin()
    return torch.tanh((sure + information(a, b, right, wrong)) / 4 * effect)


def fisher(a: torch.Tensor, b: torch.Tensor, right: int, wrong: int) -> torch.Tensor:
    """(ids,): p of Fisher's exact test, two-sided: the probability of the tables with the same
    margins that are no more likely than this one."""
    k = torch.arange(right + 1, dtype=a.dtype, device=a.device)[:, None]  # (right + 1, 1)

    def chance(k):
        ways = log_choices(right, k) + log_choices(wrong, a + b - k)
        return (ways - log_choices(right + wrong, a + b)).exp()

    every = chance(k)
    return torch.where(every <= chance(a) * (1 + 1e-9), every, 0.0).sum(0).clamp(max=1)


def log_choices(n: int, k: torch.Tensor) -> torch.Tensor:
    """log of n choose k; minus infinity where k is not from 0 to n."""
    n = torch.full_like(k, n)
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def information(a: torch.Tensor, b: torch.Tensor, right: int, wrong: int) -> torch.Tensor:
    """(ids,): the information gain, in bits, about right or wrong."""
    n, having = right + wrong, a + b
    with_it = bits(a / having.clamp(min=1))
    without_it = bits((right - a) / (n - having).clamp(min=1))
    before = bits(torch.tensor(right / n, dtype=a.dtype, device=a.device))
    return before - having / n * with_it - (n - having) / n * without_it


def bits(p: torch.Tensor) -> torch.Tensor:
    """The binary entropy of p."""
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)
