"""Is the advantage of another trainer, or one's own, right on average? Three functions, to copy.

    python -m lab exact examples/foreign_advantages.py:verl_grpo
    python -m lab exact examples/foreign_advantages.py:trl_grpo --at-least 0.9
    python -m lab exact examples/foreign_advantages.py:leave_one_out

`lab exact` sees by a function's parameters whose it is, and calls it as verl or TRL does
(lab/foreign.py). Any other function it gives rewards (B,), mask (B, T) and group (B,), by the names
of its parameters, and gets an advantage for each answer, (B,), or for each token, (B, T).

Put your own function in the place of one of these. The first two are z-scores of the group, so `lab
exact` calls them biased. The last one is right on average.
"""
import numpy as np
import torch
from torch import Tensor


def verl_grpo(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray,
              epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Like compute_grpo_outcome_advantage: advantages and returns, (B, T) each."""
    scores = token_level_rewards.sum(-1)
    for one in set(index):
        rows = torch.tensor(index == one)
        scores[rows] = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + epsilon)
    advantages = scores[:, None] * response_mask
    return advantages, advantages


def trl_grpo(rewards: Tensor, num_generations: int) -> Tensor:
    """scale_rewards="group": the standard deviation divides by n - 1."""
    grouped = rewards.view(-1, num_generations)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """The reward minus the mean of the group's other answers, or minus 0 if there are none."""
    found = torch.zeros_like(rewards)
    for one in group.unique():
        own = rewards[group == one]
        found[group == one] = own - (own.sum() - own) / max(len(own) - 1, 1)
    return found
