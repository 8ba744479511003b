"""Six weightings of later papers: functions of the batch alone, as those in mitigations.py."""
import math

import torch
from torch import Tensor

from lab.engine.methods import mitigation
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import THINK, WORD
from lab.harness.flags import Count
from mitigations import Positive, Share

TAIL_DAMPING = 0.9  # of taco: the most that is taken off a weight. All runs here had this number
POSITIVE_WEIGHT = 0.1  # of negative_only: the paper's small number for what worked
COVARIANCE_BAND = 1.0, 5.0  # of covariance: as in the authors' code, PRIME-RL on GitHub


@mitigation
def low_probability(rollouts: Rollouts, *, probability_share: Share = 0.2) -> Tensor:
    """The weight is share * p + 1 - share, where share is probability_share. Tokens of low
    probability have large gradients, and here they weigh less (Advantage Reweighting, arXiv
    2505.12929)."""
    return probability_share * rollouts.log_prob.exp() + 1 - probability_share


@mitigation
def taco(rollouts: Rollouts, *, tail_strictness: Positive = 0.01) -> Tensor:
    """Tokens that are far less probable than is usual at their position are reinforced less
    (arXiv 2607.07976).
    With r = -log p - entropy + log(tail_strictness), the weight is 1 - 0.9 (1 - exp(-r)) where both
    r and the advantage are positive. Elsewhere it is 1."""
    risk = -rollouts.log_prob - rollouts.entropy + math.log(tail_strictness)
    damped = (risk > 0) & (rollouts.advantage > 0)
    return torch.where(damped, 1 + TAIL_DAMPING * torch.expm1(-risk), 1.0)


@mitigation
def planning(rollouts: Rollouts, *, planning_boost: Share = 0.2) -> Tensor:
    """Words of the think section get the weight 1 + planning_boost * sign(advantage), and all other
    tokens get 1. Words count as planning here: with them an attempt begins, goes on or ends.

    It follows HICRA (arXiv 2509.03646, known here from reimplementations). There planning tokens
    get the advantage A + boost * |A|, and they are phrases from a list made for mathematics, such
    as "let's try". Here they are all words.
    """
    plans = (rollouts.kind == WORD) & (rollouts.section == THINK)
    return 1 + planning_boost * rollouts.advantage.sign() * plans


@mitigation
def future_attention(rollouts: Rollouts, *, future_window: Count = 4) -> Tensor:
    """The weight is the attention that a token receives from tokens more than future_window
    positions later, divided by the mean of this attention over the answer's tokens.

    The idea is from arXiv 2510.13554, known here from summaries. There the attention is that of
    long-range heads, and only tokens at its peaks get more weight. Here it is the mean over all
    heads of the last layer. A token that no other token follows at such a distance gets 1.
    """
    position = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    is_far = position[:, None] - position > future_window  # (T, T) token i is far after token j
    far_tokens = (is_far * rollouts.mask[:, :, None]).sum(1)  # (B, T) how many are far after j
    received = (rollouts.attention * is_far).sum(1) / far_tokens.clamp(min=1)
    count = (far_tokens > 0).sum(1, keepdim=True)
    mean = received.sum(1, keepdim=True) / count.clamp(min=1)
    return torch.where((far_tokens > 0) & (mean > 0), received / mean, 1.0)


@mitigation
def covariance(rollouts: Rollouts, *, covariance_share: Share = 0.0002) -> Tensor:
    """A few tokens, drawn at random, get 0, and all others get 1. Only tokens at which log p and
    advantage are both high, or both low, can be drawn, because such tokens lower the policy's
    entropy fastest (Clip-Cov, arXiv 2505.22617).

    More exactly, a token can be drawn if (log p - mean log p) * (advantage - mean advantage) lies
    between 1 and 5. Both means are over the batch. covariance_share of the batch's tokens are
    drawn, but at least one.
    """
    low, high = COVARIANCE_BAND
    mean_log_prob = rollouts.log_prob[rollouts.mask].mean()
    mean_advantage = rollouts.advantage[rollouts.mask].mean()
    product = (rollouts.log_prob - mean_log_prob) * (rollouts.advantage - mean_advantage)
    is_candidate = (product > low) & (product < high) & rollouts.mask
    candidates = is_candidate.flatten().nonzero().squeeze(1)  # indices in the flattened batch
    count = max(1, int(covariance_share * rollouts.mask.sum()))
    order = torch.randperm(len(candidates), generator=rollouts.generator).to(candidates.device)
    drawn = candidates[order[:count]]
    weight = torch.ones(rollouts.mask.numel(), device=rollouts.mask.device)
    weight[drawn] = 0
    return weight.view_as(rollouts.log_prob)


@mitigation
def negative_only(rollouts: Rollouts) -> Tensor:
    """The weight is 1 where the advantage is negative, and 0.1 elsewhere (after arXiv
    2506.01347): what failed is unlearned, and what worked is hardly reinforced.

    Compared with the paper and the authors' code (TianHongZXY/RLVR-Decomposed on GitHub, commit
    a5d4e7c1): there a wrong answer has the advantage -1 and a right one a small number, in every
    group. So groups without a right answer are trained on, too, which an advantage from the group
    leaves out."""
    return torch.where(rollouts.advantage < 0, 1.0, POSITIVE_WEIGHT)
