"""The credit of a token: what the answer is worth with it, minus what it was worth before.

    A_t = V(prefix and y_t) - V(prefix),   V(prefix) = E[reward | prefix]

The estimator is that of credit/measured.py, which trains with it. Here every token is measured
that is not nearly certain, by more answers the less certain it is, and each credit has an error.
"""
import math
from dataclasses import dataclass

import torch

from credit.measured import chain, chance_of_others, deviations, refuse_other_temperatures
from engine.lab import Lab
from engine.rollouts import Rollouts

CERTAIN = 1e-4  # where 1 - p is less, credit counts as 0: it is at most (1 - p) * range of rewards


@dataclass
class Credit:
    value: torch.Tensor      # (B, T) credit
    error: torch.Tensor      # (B, T) its standard error
    before: torch.Tensor     # (B, T) V before the token
    quarters: torch.Tensor   # (4, B, T) from a quarter of the continuations each; mean: `value`
    spent: int               # tokens generated


@torch.no_grad()
def true_credit(lab: Lab, rollouts: Rollouts, k: int, progress=lambda share: None) -> Credit:
    """Measure each token by about k (1 - p) answers that leave it for another one, at least 4."""
    refuse_other_temperatures(lab)
    other_chance = chance_of_others(rollouts)
    places = (other_chance > CERTAIN).nonzero().tolist()
    counts = [4 * math.ceil(k * other_chance[b, t].item() / 4) for b, t in places]
    rewards, spent = deviations(lab, rollouts, places, counts, progress)
    others, variance = mean_rewards(rollouts, places, rewards)
    chains = [chain(rollouts, other_chance, quarter, variance) for quarter in others]
    device = rollouts.mask.device
    quarters, before, spread = (torch.stack(parts).to(device) for parts in zip(*chains))
    return Credit(quarters.mean(0).float(), spread[0].sqrt().float(), before.mean(0).float(),
                  quarters.float(), spent)


def mean_rewards(rollouts: Rollouts, places: list,
                 rewards: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """O (4, B, T) by quarters of the continuations, NaN elsewhere, and the variance of its mean."""
    shape = rollouts.mask.shape
    others = torch.full((4, *shape), float("nan"), dtype=torch.float64)
    variance = torch.zeros(shape, dtype=torch.float64)
    every_reward = torch.cat([rollouts.reward.double().cpu(), *rewards])
    lowest, highest = every_reward.min().item(), every_reward.max().item()
    for (b, t), reward in zip(places, rewards):
        others[:, b, t] = reward.view(-1, 4).mean(0)
        variance[b, t] = variance_of_mean(reward, lowest, highest)
    return others, variance


def variance_of_mean(reward: torch.Tensor, lowest: float, highest: float) -> float:
    """A mean of few equal rewards is not certain: half an answer is added at each end."""
    values = torch.cat([reward, torch.tensor([lowest, highest], dtype=torch.float64)])
    share = torch.tensor([*[1.0] * len(reward), 0.5, 0.5], dtype=torch.float64) / (len(reward) + 1)
    mean = (values * share).sum()
    return ((values - mean).square() * share).sum().item() / len(reward)
