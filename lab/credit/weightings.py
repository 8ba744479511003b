"""Weightings and an advantage that are functions of a batch, as those of the book, and no part of
it: some ask for the attention between tokens, or for hidden states."""
import numpy as np
import torch
from torch import Tensor

from countdown_task import ANSWER, TAG, THINK
from grpo import centred, to_every_token
from lab.engine.declared import NotNegative, Positive
from lab.engine.methods import advantage, mitigation
from lab.engine.rollouts import Rollouts

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
