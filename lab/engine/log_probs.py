"""The log-probs of chosen tokens, by `Qwen2.log_probs` of qwen2_model.py, without the logits of the
whole batch at once where the vocabulary is large."""
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qwen2_model import Qwen2

LOGITS_AT_ONCE = 2 ** 27  # the most logits at a time
LOGITS_OF_FROZEN = 2 ** 24  # the most if the output matrix is frozen, in either type


def token_log_probs(model: Any, states: Tensor, ids: Tensor) -> Tensor:
    """The book's `log_probs` (n,) of n tokens. If the logits have more than LOGITS_AT_ONCE numbers,
    they are computed in chunks of tokens, and again in the backward pass."""
    if not model.output_matrix.requires_grad:  # --lora, or a model that is not trained
        log_prob: Tensor = LogProbsOfFrozen.apply(model, states, ids)
        return log_prob
    chunk = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    if len(states) <= chunk:
        return Qwen2.log_probs(model, states, ids)
    return torch.cat([checkpoint(Qwen2.log_probs, model, h, y, use_reentrant=False)
                      for h, y in zip(states.split(chunk), ids.split(chunk))])


class LogProbsOfFrozen(torch.autograd.Function):
    """The same for a matrix that is not trained. A token's log-prob depends on its own state alone,
    so the gradient at the states (n, D) is known in the forward pass, but for one factor a token.
    It is computed there, in chunks of tokens, and the logits (n, V) are not kept."""

    @staticmethod
    def forward(ctx: Any, model: Any, states: Tensor, ids: Tensor) -> Tensor:
        log_probs, gradients, chunk = [], list[Tensor](), max(
            1, LOGITS_OF_FROZEN // model.config.vocab_size)
        for h, y in zip(states.split(chunk), ids.split(chunk)):
            with torch.set_grad_enabled(ctx.needs_input_grad[1]):
                h = h.detach().requires_grad_(ctx.needs_input_grad[1])
                log_prob = Qwen2.log_probs(model, h, y)
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
