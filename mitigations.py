"""Ways to spread an answer's advantage over its tokens: one small function each, (B, T) weights.

    loss = - sum( weight * advantage * log_prob ) / N

A function with the decorator is a choice of `--mitigation`, its docstring is the help text.
"""
import torch

from grpo import Rollouts

MITIGATIONS = {}


def mitigation(function):
    MITIGATIONS[function.__name__] = function
    return function


@mitigation
def none(tokens: Rollouts) -> torch.Tensor:
    """every token of an answer weighs the same: plain GRPO"""
    return torch.ones_like(tokens.log_prob)


@torch.no_grad()
def token_weight(name: str, tokens: Rollouts) -> torch.Tensor:
    """The weights of the whole batch, without gradient, 0 beyond the mask."""
    weight = MITIGATIONS[name](tokens).masked_fill(~tokens.mask, 0.0)
    assert weight.shape == tokens.mask.shape and weight.isfinite().all() and (weight >= 0).all(), \
        f"the weights of {name} should be (B, T), finite and not negative"
    return weight
