"""Is the advantage of another trainer right on average? A function of each of five, to copy.

    python -m lab exact examples/foreign_advantages.py:verl_grpo
    python -m lab exact examples/foreign_advantages.py:trl_grpo --at-least 0.9

`lab exact` sees by a function's parameters whose it is, and calls it as that trainer does; those of
OpenRLHF and slime, too (lab/foreign.py). Any other function it gives rewards (B,), mask (B, T) and
group (B,), by the names of its parameters, and gets an advantage for each answer, (B,), or for each
token, (B, T).

Put your own function in the place of one of these. They are written after those of the trainers,
and import nothing of them. The first two are z-scores of the group, so `lab exact` calls them
biased. The others are right on average.
"""
from types import SimpleNamespace
from typing import Any

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


class NemoLeaveOneOut:
    """Like GRPOAdvantageEstimator without normalize_rewards. Prompts are rows of token ids."""

    def compute_advantage(self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor,
                          **others: Any) -> Tensor:
        baseline = torch.zeros_like(rewards)
        for row, prompt in enumerate(prompt_ids):
            same = (prompt_ids == prompt).all(1)
            baseline[row] = rewards[row]  # an answer alone gives no gradient
            if same.sum() > 1:
                baseline[row] = (rewards[same].sum() - rewards[row]) / (same.sum() - 1)
        return (rewards - baseline)[:, None].expand(mask.shape)


def prime_rl_mean(inputs: Any) -> SimpleNamespace:
    """The reward minus the mean of the group, which is (G - 1) / G times as long as the truth."""
    rewards = [rollout["reward"] for rollout in inputs.rollouts]
    mean = sum(rewards) / len(rewards)
    return SimpleNamespace(advantages=[reward - mean for reward in rewards])


class BenchTurnLeaveOneOut:
    """Like TurnLOO of AgentCreditBench: the return minus the mean return of the others that reach
    the turn, or the return alone if there is no other."""

    def estimate(self, context: Any) -> tuple[tuple[float, ...], ...]:
        found = []
        for one in context.trajectories:
            credits = []
            for turn in range(len(one.steps)):
                others = [other.total_return for other in context.trajectories
                          if other is not one and len(other.steps) > turn]
                baseline = sum(others) / len(others) if others else 0.0
                credits.append(one.total_return - baseline)
            found.append(tuple(credits))
        return tuple(found)
