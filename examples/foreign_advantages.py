"""Is the advantage of another trainer right on average? Adapters to copy, one for each of three.

    python -m lab exact examples/foreign_advantages.py:of_trl
    python -m lab exact examples/foreign_advantages.py:of_verl
    python -m lab exact examples/foreign_advantages.py:of_agent_credit_bench

`lab exact` calls f(rewards (B,), mask (B, T), group (B,)), which returns the advantage of each
answer, (B,), or of each token, (B, T). The mask is True at the tokens of the policy. An answer of
several turns has holes in its mask, where the environment has written.

Put your own function in the place of the one that an adapter calls. The three here are written
after those of the trainers, and import nothing of them. Two are z-scores of the group, so `lab
exact` calls them biased. The third subtracts the mean of the other answers that reach the turn, and
is right on average.
"""
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# ------------------------------------------------------------------- TRL


def of_trl(rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """GRPOTrainer has groups of equal sizes, one behind the other. Here sizes may differ, so it is
    asked about one group after the other."""
    found = [trl_advantages(rewards[group == one], int((group == one).sum()))
             for one in group.unique()]
    return torch.cat(found)


def trl_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """scale_rewards="group": the standard deviation divides by n - 1."""
    grouped = rewards.view(-1, num_generations)
    mean = grouped.mean(1).repeat_interleave(num_generations)
    std = grouped.std(1).repeat_interleave(num_generations)
    return (rewards - mean) / (std + 1e-4)


# ------------------------------------------------------------------- verl


def of_verl(rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """verl gives the reward at the last token, and groups as an array of texts."""
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    token_level_rewards = torch.zeros(mask.shape).scatter(1, last[:, None], rewards[:, None])
    index = np.array([f"problem {one}" for one in group.tolist()], dtype=object)
    advantages, _ = verl_advantages(token_level_rewards, mask.float(), index)
    return advantages


def verl_advantages(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray,
                    epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Like compute_grpo_outcome_advantage: advantages and returns, (B, T) each."""
    scores = token_level_rewards.sum(-1)
    for one in set(index):
        rows = torch.tensor(index == one)
        scores[rows] = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + epsilon)
    advantages = scores[:, None] * response_mask
    return advantages, advantages


# ------------------------------------------------------------------- AgentCreditBench


@dataclass(frozen=True)
class Trajectory:
    """What an estimator of AgentCreditBench reads of an answer: its return, and its turns."""
    total_return: float
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Context:
    trajectories: tuple[Trajectory, ...]
    mdp: None = None     # an estimator that asks for true values finds none here
    policy: None = None


def of_agent_credit_bench(rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """An estimator sees the trajectories of one problem, and returns a number for each turn."""
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turn = begins.cumsum(1) - 1                                                   # (B, T)
    advantages = torch.zeros(mask.shape)
    for one in group.unique():
        rows = (group == one).nonzero()[:, 0].tolist()
        context = Context(tuple(
            Trajectory(float(rewards[row]), tuple(range(int(begins[row].sum())))) for row in rows))
        for row, of_turns in zip(rows, estimate(context)):
            advantages[row] = torch.tensor(of_turns)[turn[row].clamp(min=0)] * mask[row]
    return advantages


def estimate(context: Context) -> tuple[tuple[float, ...], ...]:
    """Like turn_loo: the return minus the mean return of the others that reach the turn, or the
    return alone if there is no other."""
    found = []
    for one in context.trajectories:
        credits = []
        for turn in range(len(one.steps)):
            others = [other.total_return for other in context.trajectories
                      if other is not one and len(other.steps) > turn]
            credits.append(one.total_return - (sum(others) / len(others) if others else 0.0))
        found.append(tuple(credits))
    return tuple(found)
