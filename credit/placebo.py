"""Placebos: the same weights or advantages, permuted, so that only the choice of tokens is lost."""
import torch

from engine.rollouts import Rollouts


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
