"""Weightings and an advantage that are functions of a batch, as those of the book, and no part of
it: some ask for the attention between tokens, or for hidden states."""
import numpy as np
import torch
from torch import Tensor

from countdown_task import ANSWER, TAG, THINK
from grpo import centred, to_every_token
from lab.engine.declared import NotNegative, Positive, Share
from lab.engine.methods import advantage, mitigation
from lab.engine.rollouts import Rollouts

POSITIVE_WEIGHT = 0.1  # of negative_only: the paper's small number for what worked


@mitigation
def inverse_logprob_as_published(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """The weight is epsilon / (|log p| + epsilon)^2, and it is never rescaled. It has the gradient
    that inverse_logprob would have if the gradient also flowed through the weight.

    The reason is that this weight is the derivative of log p / (|log p| + epsilon) with respect to
    log p.
    """
    return epsilon / (rollouts.log_prob.abs() + epsilon).square()


@mitigation
def attention_credit(rollouts: Rollouts, *, credit_scale: NotNegative = 2.0) -> Tensor:
    """The weight is 0.5 + credit_scale * a, where a is the attention that the answer section pays
    to the token, divided by the mean of this attention over all tokens of the answer.

    The attention is that of the last layer. It is averaged over heads, and over those tokens of the
    answer section that come after the token. The weight is clamped to [0.1, 0.5 + 3 credit_scale].
    Answers without an answer section get the mean weight of the others.
    """
    in_section = ((rollouts.section == ANSWER) & rollouts.mask).float()
    # (B, T): how many tokens of the section come after token t
    later = in_section.sum(1, keepdim=True) - in_section.cumsum(1)
    received = torch.einsum("bi,bij->bj", in_section, rollouts.attention) / later.clamp(min=1)
    mean = received.sum(1, keepdim=True) / rollouts.length[:, None].clamp(min=1)
    relative = torch.where(mean > 0, received / mean, 0.0)
    weight = (0.5 + credit_scale * relative).clamp(0.1, 0.5 + 3 * credit_scale)
    has_section = in_section.any(1)[:, None]
    if not has_section.any():
        return torch.ones_like(weight)
    mean_weight = weight[has_section & rollouts.mask].mean()
    return torch.where(has_section, weight, mean_weight)


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


@advantage
def span(rollouts: Rollouts) -> Tensor:
    """Each part of the reward, minus the group's mean of this part, is paid at tokens of its own:
    the format at tags, the reasoning (a process reward) in the think section, and the answer in the
    answer section.

    A part is paid whether or not the reward pays it: the reasoning also with --reasoning_weight 0,
    and the format also with --reward_form right. The run prints a line about
    this.

    This advantage is biased, because think tokens get nothing for the answer that they lead to.
    Tokens that belong to no part get 0.
    """
    spans = {"format": rollouts.kind == TAG, "reasoning": rollouts.section == THINK,
             "answer": rollouts.section == ANSWER}
    result = torch.zeros_like(rollouts.log_prob)
    for part, where in spans.items():
        value = centred(rollouts.scores[part], rollouts.group)
        result += to_every_token(value, rollouts) * where
    return result
