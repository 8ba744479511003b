"""The weights of a batch as the loss takes them.

What a mitigation returned is checked, shuffled for a placebo, and rescaled. A placebo has the same
weights or advantages, permuted, so that only the choice of tokens is lost.
"""
import torch

from engine.rollouts import Rollouts
from grpo import rescaling
from harness.own_code import call_method, joined, metrics_of, refuse_tokens

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
    refuse_tokens(weight < 0, tokens.mask, f"{whose} is negative", hint=SIGNED)
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


def shuffled_weight(weight: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """The weights permuted over the batch's tokens."""
    mask = rollouts.mask
    order = torch.randperm(int(mask.sum()), generator=rollouts.generator).to(mask.device)
    return torch.zeros_like(weight).masked_scatter(mask, weight[mask][order])


def shuffled_advantage(rollouts: Rollouts, whole_answers: bool) -> torch.Tensor:
    """Advantages permuted over the group's answers; over its tokens, where those of an answer may
    differ."""
    result = torch.zeros_like(rollouts.advantage)
    for group in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == group).nonzero().squeeze(1)
        advantage, mask = rollouts.advantage[rows], rollouts.mask[rows]
        count = len(rows) if whole_answers else int(mask.sum())
        order = torch.randperm(count, generator=rollouts.generator).to(rows.device)
        if whole_answers:
            result[rows] = advantage[order, :1] * mask
        else:
            shuffled = advantage[mask][order]
            result[rows] = torch.zeros_like(advantage).masked_scatter(mask, shuffled)
    return result
