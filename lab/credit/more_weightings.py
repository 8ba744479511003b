"""More weightings that are functions of the batch alone, as those in mitigations.py."""
import numpy as np
import torch
from torch import Tensor

from lab.engine.methods import mitigation
from lab.engine.rollouts import Rollouts
from lab.engine.declared import NotNegative, Share

POSITIVE_WEIGHT = 0.1  # of negative_only: the paper's small number for what worked


@mitigation
def low_probability(rollouts: Rollouts, *, probability_share: Share = 0.2) -> Tensor:
    """The weight is share * p + 1 - share, where share is probability_share. Tokens of low
    probability have large gradients, and here they weigh less (Advantage Reweighting, arXiv
    2505.12929)."""
    return probability_share * rollouts.log_prob.exp() + 1 - probability_share


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
def random(rollouts: Rollouts) -> Tensor:
    """Random weights, from the exponential distribution with mean 1, whose standard deviation is 1,
    too. They belong to no method, so such a run shows the effect of uneven weights alone."""
    # numpy draws, with a seed from the batch's generator
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    noise = np.random.default_rng(seed).exponential(1.0, rollouts.mask.shape)
    return torch.tensor(noise, dtype=torch.float32, device=rollouts.mask.device)
