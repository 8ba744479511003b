"""More weightings that are functions of the batch alone, as those in mitigations.py."""
import numpy as np
import torch
from torch import Tensor

from lab.engine.methods import mitigation
from lab.engine.rollouts import Rollouts
from lab.engine.declared import NotNegative, Positive, Share

POSITIVE_WEIGHT = 0.1  # of negative_only: the paper's small number for what worked


@mitigation
def negative_only(rollouts: Rollouts) -> Tensor:
    """The weight is 1 where the advantage is negative, and 0.1 elsewhere (after arXiv
    2506.01347): what failed is unlearned, and what worked is hardly reinforced.

    Compared with the paper and the authors' code (TianHongZXY/RLVR-Decomposed on GitHub, commit
    a5d4e7c1): there a wrong answer has the advantage -1 and a right one a small number, in every
    group. So groups without a right answer are trained on, too, which an advantage from the group
    leaves out."""
    return torch.where(rollouts.advantage < 0, 1.0, POSITIVE_WEIGHT)


@mitigation
def entropy_ratio(rollouts: Rollouts, *, entropy_beta: NotNegative = 1.0) -> Tensor:
    """The weight is max(0, 1 + entropy_beta * (entropy / mean entropy - 1)). The mean is over the
    tokens of the batch, so tokens of more than average entropy weigh more. The idea is from GTPO
    (arXiv 2508.04349)."""
    mean = rollouts.entropy[rollouts.mask].mean()
    relative = torch.where(mean > 0, rollouts.entropy / mean - 1, 0.0)
    return (1 + entropy_beta * relative).clamp(min=0)


@mitigation
def quadrants(rollouts: Rollouts, *, quadrant_low: Share = 0.5) -> Tensor:
    """Tokens whose entropy is the batch's mean or more weigh entropy / mean, at most 3. The others
    weigh quadrant_low in right answers and a quarter of it in wrong ones: low entropy only confirms
    what was right (after EAPO, arXiv 2604.11056, which reports that it outperforms baselines)."""
    relative = rollouts.entropy / rollouts.entropy[rollouts.mask].mean().clamp(min=1e-8)
    low = torch.where(rollouts.advantage > 0, quadrant_low, quadrant_low / 4)
    return torch.where(relative >= 1, relative.clamp(max=3), low)


@mitigation
def delta(rollouts: Rollouts, *, delta_low: Positive = 0.8, delta_high: Positive = 1.2) -> Tensor:
    """A token weighs more, from delta_low to delta_high, if its gradient at the last layer is
    nearer to the mean of its own side, right or wrong, than to that of the other side. As in the
    authors' code, a gradient is (1 - p) times the hidden state, so the token itself is not in it
    (DelTA, arXiv 2605.21467, which reports +3.3 and +2.6 points with 8B and 14B in mathematics).
    """
    gradient = (1 - rollouts.log_prob.exp())[..., None] * rollouts.hidden                # (B, T, D)
    shares = [(sign * rollouts.advantage).clamp(min=0) * rollouts.mask for sign in (1, -1)]
    first = margins(gradient, shares)
    spread = [margin[share > 0].std(correction=0).clamp(min=1e-4) if share.any() else 1.0
              for margin, share in zip(first, shares)]
    nearer = [share * (margin / s).sigmoid() for margin, share, s in zip(first, shares, spread)]
    weight = torch.full_like(rollouts.log_prob, delta_low)
    for margin, share, s in zip(margins(gradient, nearer), shares, spread):
        weight += (delta_high - delta_low) * (share > 0) * (margin / s).sigmoid()
    return weight


def margins(gradient: Tensor, shares: list[Tensor]) -> list[Tensor]:
    """(B, T) of each side: how much nearer a gradient is to this side's mean than to the other's,
    in squared distances. A side's mean counts each token with its share."""
    distance = []
    for share in shares:
        centre = torch.einsum("bt,btd->d", share, gradient) / share.sum().clamp(min=1e-8)
        distance.append((gradient - centre).square().sum(-1))
    return [distance[1] - distance[0], distance[0] - distance[1]]


@mitigation
def random(rollouts: Rollouts) -> Tensor:
    """Random weights, from the exponential distribution with mean 1, whose standard deviation is 1,
    too. They belong to no method, so such a run shows the effect of uneven weights alone."""
    # numpy draws, with a seed from the batch's generator
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    noise = np.random.default_rng(seed).exponential(1.0, rollouts.mask.shape)
    return torch.tensor(noise, dtype=torch.float32, device=rollouts.mask.device)
