"""The training forward pass of a run beyond the book: grpo.py's `log_probs`, on any device, without
the logits of the whole batch at once where the vocabulary is large."""
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import grpo
from lab.engine.model import Decoder, Qwen2, tensors_on
from lab.engine.rollouts import Rollouts

LOGITS_AT_ONCE = 2 ** 27  # the most logits at a time
LOGITS_OF_FROZEN = 2 ** 24  # the most if the output matrix is frozen, in either type


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor,
                       temperature: float = 1.0) -> Tensor:
    """grpo.py's `log_probs` (rows, T). What an environment wrote is read, too, but nobody asks for
    its own log-prob, which stays 0."""
    drawn = rollouts.mask[rows][rollouts.written[rows]]

    def of_states(model: Any, states: Tensor, ids: Tensor) -> Tensor:
        states = states[drawn]
        if temperature != 1:
            states = states / temperature  # so the logits, linear in them, are divided too
        found = token_log_probs(model, states, ids[drawn])
        return found.new_zeros(drawn.shape).masked_scatter(drawn, found)

    with tensors_on(rollouts.ids.device):
        written = replace(rollouts, mask=rollouts.written)
        return grpo.log_probs(model, written, rows, of_states)


def states_of(decoder: Decoder, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """The states that predict the tokens of the mask."""
    written = replace(rollouts, mask=rollouts.written)
    with tensors_on(rollouts.ids.device):
        states = grpo.states_before(decoder, written, rows)
    return states[rollouts.mask[rows][written.mask[rows]]]


@torch.no_grad()
def frozen_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor, micro_batch: int,
                     temperature: float = 1.0) -> Tensor:
    """(B, T): the log-probs of these rows' tokens, without gradient; 0 in other rows."""
    log_prob = torch.zeros_like(rollouts.log_prob)
    for part in micro_batches(rollouts, rows, micro_batch):
        log_prob[part] = response_log_probs(model, rollouts, part, temperature)
    return log_prob


def micro_batches(rollouts: Rollouts, rows: Tensor, size: int) -> list[Tensor]:
    """Cut the rows into parts of `size` that fit into memory, with the answers to a problem side by
    side."""
    return longest_first(rollouts, rows.split(size)) if len(rows) else []


def longest_first(rollouts: Rollouts, parts: Sequence[Tensor]) -> list[Tensor]:
    """The part with most tokens comes first, because the others then fit into the memory that it
    has taken."""
    length = rollouts.written.sum(1)
    lengths = [len(prompt) for prompt in rollouts.prompt_ids]

    def count_tokens(part: Tensor) -> int:
        groups: set[int] = set(rollouts.group[part].tolist())
        return sum(lengths[group] for group in groups) + int(length[part].sum())

    return sorted(parts, key=count_tokens, reverse=True)


def token_log_probs(model: Qwen2, states: Tensor, ids: Tensor) -> Tensor:
    """grpo.py's `chosen_log_probs` (n,) of n tokens. If the logits have more than LOGITS_AT_ONCE
    numbers, they are computed in chunks of tokens, and again in the backward pass."""
    if not model.output_matrix.requires_grad:  # --lora, or a model that is not trained
        log_prob: Tensor = LogProbsOfFrozen.apply(model, states, ids)
        return log_prob
    chunk = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    if len(states) <= chunk:
        return grpo.chosen_log_probs(model, states, ids)
    return torch.cat([checkpoint(grpo.chosen_log_probs, model, h, y, use_reentrant=False)
                      for h, y in zip(states.split(chunk), ids.split(chunk))])


class LogProbsOfFrozen(torch.autograd.Function):
    """The same for a matrix that is not trained. A token's log-prob depends on its own state alone,
    so the gradient at the states (n, D) is known in the forward pass, but for one factor a token.
    It is computed there, in chunks of tokens, and the logits (n, V) are not kept."""

    @staticmethod
    def forward(ctx: Any, model: Qwen2, states: Tensor, ids: Tensor) -> Tensor:
        log_probs, gradients, chunk = [], list[Tensor](), max(
            1, LOGITS_OF_FROZEN // model.config.vocab_size)
        for h, y in zip(states.split(chunk), ids.split(chunk)):
            with torch.set_grad_enabled(ctx.needs_input_grad[1]):
                h = h.detach().requires_grad_(ctx.needs_input_grad[1])
                log_prob = grpo.chosen_log_probs(model, h, y)
                log_probs.append(log_prob.detach())
                if log_prob.requires_grad:
                    gradients += torch.autograd.grad(log_prob.sum(), h)
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(log_probs)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[None, Tensor, None]:
        [gradient] = ctx.saved_tensors
        return None, (factor[:, None] * gradient).to(gradient.dtype), None
