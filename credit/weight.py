"""The weights of a batch as the loss takes them.

What a mitigation returned is checked, shuffled for a placebo, and rescaled.
"""
import torch

from credit.placebo import shuffled_weight
from engine.rollouts import Rollouts
from grpo import rescaling
from harness.own_code import call_method, joined, metrics_of, place_of, refuse_tokens

SIGNED = " (credit with a sign is an advantage: see docs/weightings.md)"


@torch.no_grad()
def token_weight(chosen, name: str, tokens: Rollouts, policy=None, rescale: str = "mean",
                 placebo: str = "none") -> tuple[torch.Tensor, dict]:
    """The weights of a batch as the loss takes them: checked, without gradient, 0 beyond the mask,
    shuffled for a placebo, rescaled. Also what there is to tell about them."""
    if not tokens.mask.any():  # every answer was dropped
        nothing = {"weight_factor": 1.0, "weight_max": 0.0, "weight_note": None}
        return torch.zeros_like(tokens.log_prob), nothing
    whose, note = f"the mitigation {name}", None
    weight = call_method(chosen, whose, tokens, policy)
    refuse_tokens(weight < 0, tokens.mask, f"{place_of(chosen)}{whose} is negative", hint=SIGNED)
    if not weight.any():
        weight, note = tokens.mask.float(), "all weights were 0: every token gets 1"
    if placebo == "weights":
        weight = shuffled_weight(weight, tokens)
    factor = rescaling(weight, tokens, rescale)
    if not (weight * factor).isfinite().all():
        factor, note = 1.0, "not rescaled: next to no weight lies on tokens with an advantage"
    weight = weight * factor
    about = {"weight_factor": factor, "weight_max": weight.max().item(), "weight_note": note}
    return weight, joined(metrics_of(chosen, whose), about)

