"""A GRPO loss as python -m lab.formula takes one: clipped, and every token counts the same."""
from typing import Any

import torch
from torch import Tensor


def loss(logits: Tensor, batch: Any) -> Tensor:
    """logits (B, L, V) with a gradient; the batch is described by lab/formula/__main__.py."""
    log_p = logits.log_softmax(-1)[:, :-1].gather(2, batch.ids[:, 1:, None]).squeeze(2)
    old, mask = batch.old_log_prob[:, 1:], batch.mask[:, 1:]  # (B, L - 1): token 0 is not predicted
    advantage = torch.zeros_like(batch.reward)
    for number in batch.group.unique():
        rows = batch.group == number
        reward = batch.reward[rows]
        advantage[rows] = (reward - reward.mean()) / (reward.std() + 1e-4)
    ratio = (log_p - old).exp()
    clipped = ratio.clamp(0.8, 1.28)
    objective = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    total: Tensor = -(objective * mask).sum() / mask.sum()
    return total
