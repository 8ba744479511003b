"""Other ways to bound an update on a batch that is used more than once (--clip_kind).

With --epochs above 1 the old samples are trained on again, each with the ratio of new to old
probability, r = exp(log_prob - old). `grpo.policy_loss` bounds it as PPO does. The losses that are
made here have its arguments and take its place. Each of them has the gradient of plain GRPO where
every ratio is 1, so the first pass over a batch is the same with all of them.

    objective of a token, A its advantage and w its weight (c w m of grpo.py)

    dual    max(PPO's, 3 w A) where A < 0: a token that is pushed down and has become far likelier
            is bounded, too (1912.09729)
    gspo    PPO's, with one ratio for the whole answer: exp(mean of log_prob - old) (2507.18071)
    cispo   w A clip(r) log_prob, where clip(r) is a number: no token's gradient becomes 0, only its
            size is bounded (2506.13585)
    sapo    w A 4 / tau sigmoid(tau (r - 1)), with tau 1 where A > 0 and 1.05 where A < 0: a soft
            gate instead of a bound (2511.20347)
    gmpo    PPO's, with one ratio for the whole answer: the geometric mean of the clipped ratios of
            its tokens (2507.20673)
    dppo    w A r, without the tokens whose probability has moved by more than 0.15 in the direction
            that A pushes it (after a public implementation)

gspo, gmpo and sapo are their papers' methods with --loss_norm sequence, because the papers count
every answer the same; gspo and gmpo also need one weight and one advantage in an answer.
"""
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from lab.engine.methods import CLIP_KINDS

DUAL_BOUND = 3.0            # of verl
TAU_UP, TAU_DOWN = 1.0, 1.05
MOST_MOVED = 0.15
# log_prob, advantage, weight, mask, N, old log-prob, (low, high) -> the loss
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor | None, tuple[float, float]], Tensor]


def clip_kind(objective: Callable[..., Tensor]) -> Loss:
    """Make a choice of --clip_kind of an objective: the loss that has it, with the arguments of
    `grpo.policy_loss`."""
    @wraps(objective)
    def loss(log_prob: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor, total: float,
             old: Tensor | None = None, clip: tuple[float, float] = (0.2, 0.28)) -> Tensor:
        if old is None:
            old = log_prob.detach()
        # beyond the mask both are 0
        values = objective((log_prob - old) * mask, weight * advantage, mask, clip, log_prob)
        return -(values * mask).sum() / total

    CLIP_KINDS[objective.__name__] = loss
    return loss


def bounded(ratio: Tensor, signed: Tensor, clip: tuple[float, float]) -> Tensor:
    """PPO's objective, where `signed` is w A."""
    return torch.minimum(ratio * signed, ratio.clamp(1 - clip[0], 1 + clip[1]) * signed)


def mean_over_answer(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1): the mean over an answer's tokens."""
    length = mask.sum(1, keepdim=True).clamp(min=1)
    return (values * mask).sum(1, keepdim=True) / length


@clip_kind
def dual(log_ratio: Tensor, signed: Tensor, mask: Tensor, clip: tuple[float, float],
         log_prob: Tensor) -> Tensor:
    usual = bounded(log_ratio.exp(), signed, clip)
    return torch.where(signed < 0, torch.maximum(usual, DUAL_BOUND * signed), usual)


@clip_kind
def gspo(log_ratio: Tensor, signed: Tensor, mask: Tensor, clip: tuple[float, float],
         log_prob: Tensor) -> Tensor:
    # The value is the answer's ratio, the gradient that of the token alone: the sum over the
    # answer's tokens then has the gradient of the mean.
    of_answer = mean_over_answer(log_ratio, mask).detach()
    return bounded((of_answer + log_ratio - log_ratio.detach()).exp(), signed, clip)


@clip_kind
def cispo(log_ratio: Tensor, signed: Tensor, mask: Tensor, clip: tuple[float, float],
          log_prob: Tensor) -> Tensor:
    return log_ratio.exp().clamp(1 - clip[0], 1 + clip[1]).detach() * signed * log_prob


@clip_kind
def sapo(log_ratio: Tensor, signed: Tensor, mask: Tensor, clip: tuple[float, float],
         log_prob: Tensor) -> Tensor:
    tau = torch.where(signed > 0, TAU_UP, TAU_DOWN)
    return signed * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))


@clip_kind
def gmpo(log_ratio: Tensor, signed: Tensor, mask: Tensor, clip: tuple[float, float],
         log_prob: Tensor) -> Tensor:
    low, high = torch.tensor(1 - clip[0]).log(), torch.tensor(1 + clip[1]).log()
    # bounded on the side to which the advantage pushes, as in PPO
    clipped = torch.where(signed > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    of_answer = mean_over_answer(clipped, mask).detach()
    return (of_answer + clipped - clipped.detach()).exp() * signed


@clip_kind
def dppo(log_ratio: Tensor, signed: Tensor, mask: Tensor, clip: tuple[float, float],
         log_prob: Tensor) -> Tensor:
    moved = (log_prob.exp() - (log_prob - log_ratio).exp()).detach()
    is_free = moved * signed.sign() <= MOST_MOVED
    return log_ratio.exp() * signed * is_free
