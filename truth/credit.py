"""The credit of a token: what the answer is worth with it, minus what it was worth before.

    A_t = V(prefix and y_t) - V(prefix),   V(prefix) = E[reward | prefix]

Estimated from the end. Let p be the probability of y_t, and O_t the mean reward of answers that
have the same prefix, some other token in its place, and go on as the policy likes:

    V_t = p V_{t+1} + (1 - p) O_t,   V_T = R,   A_t = V_{t+1} - V_t = (1 - p) (V_{t+1} - O_t)

Only O_t is sampled. This is the difference of two Monte Carlo values with the part they share
computed instead of drawn: a token that is nearly certain needs hardly an answer, and where every
O_t is a mean of independent answers A_t is unbiased.
"""
import math
from dataclasses import dataclass

import torch

from credit.monte_carlo import continuation_rewards
from engine.errors import UserError
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
    if lab.settings.temperature != 1:
        raise UserError(f"--temperature {lab.settings.temperature}: the chance of leaving a token "
                        "is that of temperature 1")
    other_chance = (-torch.expm1(rollouts.log_prob.double()) * rollouts.mask).cpu()
    places = (other_chance > CERTAIN).nonzero().tolist()
    counts = [4 * math.ceil(k * other_chance[b, t].item() / 4) for b, t in places]
    rewards, spent = deviations(lab, rollouts, places, counts, progress)
    others, variance = mean_rewards(rollouts, places, rewards)
    chains = [chain(rollouts, other_chance, quarter, variance) for quarter in others]
    device = rollouts.mask.device
    quarters, before, spread = (torch.stack(parts).to(device) for parts in zip(*chains))
    return Credit(quarters.mean(0).float(), spread[0].sqrt().float(), before.mean(0).float(),
                  quarters.float(), spent)


def deviations(lab: Lab, rollouts: Rollouts, places: list, counts: list[int],
               progress=lambda share: None) -> tuple[list[torch.Tensor], int]:
    """Rewards of answers that have another token at each place (b, t) and go on from there."""
    if not counts:
        return [], 0
    ids, groups = rollouts.ids.tolist(), rollouts.group.tolist()
    prefixes, own_tokens = [], []
    for (b, t), count in zip(places, counts):
        prefixes += [(groups[b], tuple(ids[b][:t]))] * count
        own_tokens += [ids[b][t]] * count
    rewards, spent = continuation_rewards(lab, rollouts, prefixes, 1, progress, own_tokens)
    return list(rewards[:, 0].double().cpu().split(counts)), spent


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


def chain(rollouts: Rollouts, other_chance: torch.Tensor, others: torch.Tensor,
          variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, T) each: credit, value before each token, and the variance of the credit.

    From the end, where the value is the reward. All is linear in `others`, whose variance is given;
    where `others` is NaN the credit is 0.
    """
    mask, worth = rollouts.mask.cpu(), rollouts.reward.double().cpu()
    credit = torch.zeros(mask.shape, dtype=torch.float64)
    before, spread = torch.zeros_like(credit), torch.zeros_like(credit)
    uncertain = torch.zeros_like(worth)  # variance of `worth`
    for t in range(mask.shape[1] - 1, -1, -1):
        q = other_chance[:, t] * ~others[:, t].isnan()
        credit[:, t] = q * (worth - others[:, t].nan_to_num(0.0))
        spread[:, t] = q.square() * (uncertain + variance[:, t])
        uncertain = (1 - q).square() * uncertain + q.square() * variance[:, t]
        worth = worth - credit[:, t]
        before[:, t] = worth
    return credit, before, spread
