"""The weights of a batch, and the number that rescales them (w and c in grpo.py).

What a weighting returned is checked, and shuffled for a placebo. A placebo has the same weights or
advantages, permuted, so that only the choice of tokens is lost.
"""
import torch

from engine.rollouts import Rollouts
from grpo import rescaling
from harness.own_code import checked_credit, joined, metrics_of, place_of, refuse_tokens

SIGNED = " (credit with a sign is an advantage: see docs/weightings.md)"


@torch.no_grad()
def token_weight(chosen, name: str, rollouts: Rollouts, policy=None, rescale_to: str = "mean",
                 placebo: str = "none") -> tuple[torch.Tensor, float, dict]:
    """`weight` (B, T): checked, without gradient, 0 beyond the mask, shuffled for a placebo. Then
    `rescale`, one number for the batch, and what there is to tell about them."""
    if not rollouts.mask.any():  # every answer was dropped
        nothing = {"weight_factor": 1.0, "weight_max": 0.0, "weight_note": None}
        return torch.zeros_like(rollouts.log_prob), 1.0, nothing
    whose, note = f"the weighting {name}", None
    weight = checked_credit(chosen, whose, rollouts, policy)
    refuse_tokens(weight < 0, rollouts.mask, f"{place_of(chosen)}{whose} is negative", hint=SIGNED)
    if not weight.any():
        weight, note = rollouts.mask.float(), "all weights were 0: every token gets 1"
    if placebo == "weights":
        weight = shuffled_weight(weight, rollouts)
    rescale = rescaling(weight, rollouts, rescale_to)
    if not (weight * rescale).isfinite().all():
        rescale, note = 1.0, "not rescaled: next to no weight lies on tokens with an advantage"
    about = {"weight_factor": rescale, "weight_max": (weight * rescale).max().item(),
             "weight_note": note}
    return weight, rescale, joined(metrics_of(chosen, whose), about)


def rescaled_weight(*arguments, **options) -> tuple[torch.Tensor, dict]:
    """weight * rescale (B, T), which is the column `weight` on record, and the metrics."""
    weight, rescale, metrics = token_weight(*arguments, **options)
    return weight * rescale, metrics


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
