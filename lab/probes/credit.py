"""The credit of a token, as lab/credit/measured.py estimates it, with its standard error, and from
independent parts of the continuations. Here every token is measured whose probability is not nearly
1, by more continuations the smaller its probability is.
"""
import math
from dataclasses import dataclass

import torch

from lab.credit.measured import chain, probability_of_others, deviations, refuse_other_temperatures
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts

PARTS = 4  # of the continuations of a token


@dataclass
class MeasuredCredit:
    value: torch.Tensor   # (B, T) credit
    error: torch.Tensor   # (B, T) its standard error
    parts: torch.Tensor   # (PARTS, B, T) from a part of the continuations each; mean: `value`
    spent: int            # tokens generated


@torch.no_grad()
def true_credit(policy: Policy, rollouts: Rollouts, k: int, certain: float = 1e-4
                ) -> MeasuredCredit:
    """Credit of each token, from about k (1 - p) answers that go on with another token: at least
    one for each part. A token with 1 - p of `certain` or less has credit 0, because it is at most
    (1 - p) times the range of the rewards."""
    refuse_other_temperatures(policy)
    other_probability = probability_of_others(rollouts)
    positions = (other_probability > certain).nonzero().tolist()
    counts = []  # of continuations at each position, as many for each part
    for b, t in positions:
        of_each_part = math.ceil(k * other_probability[b, t].item() / PARTS)
        counts.append(PARTS * of_each_part)
    rewards, spent = deviations(policy, rollouts, positions, counts)

    # the mean reward of each part of the continuations; NaN at tokens that are not measured
    others = torch.full((PARTS, *rollouts.mask.shape), math.nan, dtype=torch.float64)
    variance = torch.zeros_like(others[0])
    every_reward = torch.cat([rollouts.reward.double().cpu(), *rewards])
    ends = torch.stack([every_reward.min(), every_reward.max()])
    for (b, t), reward in zip(positions, rewards):
        others[:, b, t] = reward.view(-1, PARTS).mean(0)
        variance[b, t] = variance_of_rewards(reward, ends)

    chains = [chain(rollouts, other_probability, part, variance) for part in others]
    device = rollouts.mask.device
    values, spread = (torch.stack(of_parts).to(device) for of_parts in zip(*chains))
    return MeasuredCredit(values.mean(0).float(), spread[0].sqrt().float(), values,
                          spent.get("extra_tokens", 0))


def variance_of_rewards(reward: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The variance of the mean of some rewards. A mean of few equal rewards is not certain: half an
    answer is added at each end of the rewards' range."""
    values = torch.cat([reward, ends])
    share = torch.tensor([*[1.0] * len(reward), 0.5, 0.5], dtype=torch.float64) / (len(reward) + 1)
    mean = (values * share).sum()
    return ((values - mean).square() * share).sum() / len(reward)


def squared_credit(parts: torch.Tensor) -> torch.Tensor:
    """(B, T) from the credit of each part (parts, B, T): the mean of the products of two different
    parts. These are independent, so it is unbiased, but a square would add its own variance."""
    pairs = len(parts) * (len(parts) - 1)
    return (parts.sum(0) ** 2 - (parts ** 2).sum(0)) / pairs
