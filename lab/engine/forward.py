"""The training forward pass of a run beyond the book: grpo.py's `states_before`, on any device, and
the log-probs of a large vocabulary without the logits of the whole batch at once."""
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo import states_before
from lab.engine.model import Decoder, Qwen2, linear, tensors_on
from lab.engine.rollouts import Rollouts

LOGITS_AT_ONCE = 2 ** 27  # the most logits at a time
LOGITS_OF_FROZEN = 2 ** 24  # the most if the output matrix is frozen, in either type


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor,
                       temperature: float = 1.0) -> Tensor:
    """(rows, T): the log-probs of these rows' tokens, with gradient; 0 outside the mask."""
    mask, states = rollouts.mask[rows], states_of(model.model, rollouts, rows)
    if temperature != 1:
        states = states / temperature  # so the logits, which are linear in them, are divided too
    found = token_log_probs(states, model.output_matrix, rollouts.ids[rows][mask])
    return found.new_zeros(mask.shape).masked_scatter(mask, found)


def states_of(decoder: Decoder, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """The states that predict the tokens of the mask. What an environment wrote is read, too, but
    nobody asks for its own log-prob."""
    written = replace(rollouts, mask=rollouts.written)
    with tensors_on(rollouts.ids.device):
        states = states_before(decoder, written, rows)
    return states[rollouts.mask[rows][written.mask[rows]]]


@torch.no_grad()
def frozen_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor, micro_batch: int) -> Tensor:
    """(B, T): the log-probs of these rows' tokens, without gradient; 0 in other rows."""
    log_prob = torch.zeros_like(rollouts.log_prob)
    for part in micro_batches(rollouts, rows, micro_batch):
        log_prob[part] = response_log_probs(model, rollouts, part)
    return log_prob


def micro_batches(rollouts: Rollouts, rows: Tensor, size: int) -> list[Tensor]:
    """Cut the rows into parts of `size` that fit into memory, with the answers to a problem side by
    side. The part with most tokens comes first, because the others then fit into the memory that it
    has taken."""
    length = rollouts.written.sum(1)
    lengths = [len(prompt) for prompt in rollouts.prompt_ids]

    def count_tokens(part: Tensor) -> int:
        groups: set[int] = set(rollouts.group[part].tolist())
        return sum(lengths[group] for group in groups) + int(length[part].sum())

    return sorted(rows.split(size), key=count_tokens, reverse=True) if len(rows) else []


def token_log_probs(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """log softmax(W h)_y of n tokens: (n, D), (V, D), (n,) -> (n,). If the logits have more than
    LOGITS_AT_ONCE numbers, they are computed in chunks of tokens, and again in the backward pass.
    """
    if not matrix.requires_grad:  # --lora, or a model that is not trained
        log_prob: Tensor = LogProbsOfFrozen.apply(hidden, matrix, targets)
        return log_prob
    matrix, chunk = matrix.to(hidden.dtype), max(1, LOGITS_AT_ONCE // len(matrix))
    if len(hidden) <= chunk:
        return chosen_log_softmax(hidden, matrix, targets)
    return torch.cat([checkpoint(chosen_log_softmax, h, matrix, y, use_reentrant=False)
                      for h, y in zip(hidden.split(chunk), targets.split(chunk))])


def chosen_log_softmax(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    log_p = linear(hidden, matrix).log_softmax(-1, dtype=torch.float32)
    return log_p.gather(1, targets[:, None])[:, 0]


class LogProbsOfFrozen(torch.autograd.Function):
    """The same for a matrix that is not trained.

    The gradient at a hidden state is g W^T (onehot(y) - p), a number times a vector that is known
    in the forward pass. So this vector (n, D) is computed there and saved, in chunks of
    tokens, and p (n, V) is neither saved nor computed again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
        cast, log_probs, directions = matrix.to(hidden.dtype), [], []
        chunk = max(1, LOGITS_OF_FROZEN // len(matrix))
        for h, y in zip(hidden.split(chunk), targets.split(chunk)):
            log_prob, p = token_distribution(h, cast, y)
            log_probs.append(log_prob)
            if ctx.needs_input_grad[0]:
                at_logits = p.neg_().to(h.dtype)
                rows = torch.arange(len(y), device=y.device)
                at_logits[rows, y] = (1 - log_prob.exp()).to(h.dtype)
                directions.append(linear(at_logits, cast.T))
                del at_logits  # before the next chunk takes memory
            del p
        if directions:
            ctx.save_for_backward(torch.cat(directions))
        return torch.cat(log_probs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [direction] = ctx.saved_tensors
        return (gradient[:, None] * direction).to(direction.dtype), None, None


def token_distribution(hidden: Tensor, matrix: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the targets (n,), and p of the whole vocabulary (n, V)."""
    logits = linear(hidden, matrix).float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    log_prob = (logits.gather(1, targets[:, None]) - normaliser).squeeze(1)
    return log_prob, logits.sub_(normaliser).exp_()
