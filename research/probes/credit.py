"""The credit of a token: what the answer is worth with it, minus what it was worth before.

    A_t = V(prefix and y_t) - V(prefix),   V(prefix) = E[reward | prefix]

The estimator is that of credit/measured.py, which trains with it. Here every token is measured
that is not nearly certain, by more answers the less certain it is, and each credit has an error.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from analysis.notes import class_codes
from analysis.statistics import Estimate, jackknife
from credit.measured import chain, probability_of_others, deviations, refuse_other_temperatures
from engine.policy import Policy
from engine.rollouts import Rollouts
from grpo import gradient_size

CERTAIN = 1e-4  # where 1 - p is less, credit counts as 0: it is at most (1 - p) * range of rewards


@dataclass
class Credit:
    value: torch.Tensor      # (B, T) credit
    error: torch.Tensor      # (B, T) its standard error
    quarters: torch.Tensor   # (4, B, T) from a quarter of the continuations each; mean: `value`
    spent: int               # tokens generated


@torch.no_grad()
def true_credit(policy: Policy, rollouts: Rollouts, k: int,
                progress: Callable[[float], None] = lambda share: None,
                certain: float = CERTAIN) -> Credit:
    """Measure each token by about k (1 - p) answers that leave it for another one, at least 4."""
    refuse_other_temperatures(policy)
    other_chance = probability_of_others(rollouts)
    places = (other_chance > certain).nonzero().tolist()
    counts = [4 * math.ceil(k * other_chance[b, t].item() / 4) for b, t in places]
    rewards, spent = deviations(policy, rollouts, places, counts, progress)
    # of each quarter of the continuations; NaN at tokens that are not measured
    others = torch.full((4, *rollouts.mask.shape), math.nan, dtype=torch.float64)
    variance = torch.zeros_like(others[0])
    every_reward = torch.cat([rollouts.reward.double().cpu(), *rewards])
    ends = torch.stack([every_reward.min(), every_reward.max()])
    for (b, t), reward in zip(places, rewards):
        others[:, b, t] = reward.view(-1, 4).mean(0)
        variance[b, t] = variance_of_mean(reward, ends)
    chains = [chain(rollouts, other_chance, quarter, variance) for quarter in others]
    device = rollouts.mask.device
    quarters, spread = (torch.stack(parts).to(device) for parts in zip(*chains))
    return Credit(quarters.mean(0).float(), spread[0].sqrt().float(), quarters.float(),
                  spent.get("extra_tokens", 0))


def variance_of_mean(reward: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A mean of few equal rewards is not certain: half an answer is added at each end."""
    values = torch.cat([reward, ends])
    share = torch.tensor([*[1.0] * len(reward), 0.5, 0.5], dtype=torch.float64) / (len(reward) + 1)
    mean = (values * share).sum()
    return ((values - mean).square() * share).sum() / len(reward)


@dataclass
class MeasuredTokens:
    """All tokens of a batch end to end, (n,) each, with the credit that was measured of each."""
    questions: int
    question: np.ndarray
    answer: np.ndarray
    advantage: np.ndarray     # plain GRPO's
    size: np.ndarray          # of its log-prob's gradient at the logits
    decided: np.ndarray       # squared credit, a product of independent estimates: may be below 0
    codes: dict[str, np.ndarray]  # which kind, section and class it belongs to
    count: np.ndarray | float = 1.0  # how often it counts: a listed answer by its probability

    def by_question(self, values: np.ndarray) -> np.ndarray:
        """Sums over the tokens of each problem."""
        return np.bincount(self.question, values, self.questions)

    def place(self, size: np.ndarray) -> np.ndarray:
        """Each token's place in its answer by size, -1 (least) to 1; equal ones share theirs."""
        place = np.zeros(len(size))
        for answer in np.unique(self.answer):
            inside = self.answer == answer
            if inside.sum() > 1:
                _, which, count = np.unique(size[inside], return_inverse=True, return_counts=True)
                rank = np.cumsum(count) - (count + 1) / 2  # from 0; equal sizes share their mean
                place[inside] = 2 * rank[which] / (inside.sum() - 1) - 1
        return place


def measured_tokens(policy: Policy, rollouts: Rollouts, credit: Credit) -> MeasuredTokens:
    mask = rollouts.mask
    row = mask.nonzero(as_tuple=True)[0]
    quarters = np.stack([flat_tokens(quarter, mask) for quarter in credit.quarters])
    return MeasuredTokens(
        questions=len(rollouts.prompt_ids),
        question=rollouts.group[row].cpu().numpy(),
        answer=row.cpu().numpy(),
        advantage=flat_tokens(rollouts.advantage, mask),
        size=flat_tokens(gradient_size(rollouts.log_prob, rollouts.collision), mask),
        decided=mean_product(quarters),
        codes={"kind": flat_tokens(rollouts.kind, mask).astype(int),
               "section": flat_tokens(rollouts.section, mask).astype(int),
               "class": class_codes(policy.tokenizer, rollouts.ids[mask].cpu().numpy())})


def flat_tokens(frame: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """(B, T) -> (n,)"""
    return frame[mask].detach().double().cpu().numpy()


def mean_product(quarters):
    """The mean of the products of two different quarters, of which there are 12."""
    return (quarters.sum(0) ** 2 - (quarters ** 2).sum(0)) / 12


def ratio_of_sums(above: np.ndarray, below: np.ndarray) -> Estimate:
    """Sum over sum, from a pair of numbers a problem; the error by the jackknife, from what it
    becomes without each of them."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return jackknife(above.sum() / below.sum(), (above.sum() - above) / (below.sum() - below))
