"""The gain of an arm whose learning rate is chosen on the seeds that it is measured on, with an
interval that covers this choice.

Each arm of a task is trained with every seed at every rate. The seeds are cut in two halves, and
each half takes the rate that was best for the arm on the other half (cross-fitting). So no seed has
a part in the choice of its own rate, and luck with a rate does not look like a gain.

How uncertain is that? The seeds are drawn again many times, each half from its own seeds, and the
rates are chosen anew each time (a bootstrap). All arms of a task get the same draws, so gains are
paired by seed. The standard deviation over the draws is the standard error. Interval and p-value
follow from it by Student's t with seeds - 2 degrees of freedom, because each half has its own mean.
A half of n seeds is drawn from n - 1 times, with which the variance of a mean is unbiased.

The interval does not cover that a rate which was not tried may be better than those that were.
"""
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analysis.statistics import Estimate, Floats, estimate, quotient

RESAMPLES = 2000
FEWEST_SEEDS = 4  # two in each half


@dataclass(frozen=True)
class ArmsOfTask:
    """The success (arms, rates, seeds) of all arms of one task."""
    names: list[str]
    success: Floats

    @property
    def seeds(self) -> int:
        return self.success.shape[2]

    @cached_property
    def halves(self) -> tuple[Floats, Floats]:
        """Two parts (arms, rates, n) of the seeds."""
        middle = self.seeds // 2
        return self.success[:, :, :middle], self.success[:, :, middle:]

    @cached_property
    def chosen(self) -> np.ndarray:
        """(arms, 2): which rate each half takes, the best one of the other half."""
        first, second = self.halves
        return np.stack([second.mean(2).argmax(1), first.mean(2).argmax(1)], 1)

    @cached_property
    def at_chosen_rate(self) -> Floats:
        """(arms, seeds)"""
        arms = np.arange(len(self.names))
        parts = []
        for half, rate in zip(self.halves, self.chosen.T):
            parts.append(half[arms, rate])
        return np.concatenate(parts, 1)

    @cached_property
    def resampled(self) -> Floats:
        """(draws, arms): the mean success, with the rates chosen anew in each draw."""
        rng = np.random.default_rng(0)
        first, second = (means_of_draws(half, rng) for half in self.halves)
        middle = self.seeds // 2
        of_first = at_best_rate_of(second, first)
        of_second = at_best_rate_of(first, second)
        return (middle * of_first + (self.seeds - middle) * of_second) / self.seeds

    def best_rate(self, name: str) -> int:
        """Which rate is best over all seeds."""
        return int(self.success[self.names.index(name)].mean(1).argmax())

    def mean(self, name: str) -> float:
        return float(self.at_chosen_rate[self.names.index(name)].mean())

    def difference(self, one: str, two: str) -> Estimate:
        """The mean success of one arm minus that of another."""
        error = float(self.draws_of(one, two).std(ddof=1))
        return estimate(self.mean(one) - self.mean(two), error, self.seeds - 2)

    def share(self, one: str, whole: str, base: str) -> Estimate | None:
        """One arm's gain over the base, divided by that of another. There is none if the other's
        gain is not beyond chance."""
        gain, of_whole = self.mean(one) - self.mean(base), self.mean(whole) - self.mean(base)
        covariance = np.cov(self.draws_of(one, base), self.draws_of(whole, base))
        return quotient(gain, of_whole, covariance, self.seeds - 2)

    def draws_of(self, one: str, two: str) -> Floats:
        """(draws,): the difference of two arms."""
        return self.resampled[:, self.names.index(one)] - self.resampled[:, self.names.index(two)]


def means_of_draws(half: Floats, rng: np.random.Generator) -> Floats:
    """(draws, arms, rates): the means of n seeds (arms, rates, n) that were drawn n - 1 times."""
    n = half.shape[2]
    times = rng.multinomial(n - 1, np.full(n, 1 / n), size=RESAMPLES)  # (draws, n): of each seed
    return np.einsum("dn,arn->dar", times / (n - 1), half)


def at_best_rate_of(other: Floats, mine: Floats) -> Floats:
    """(draws, arms): one half's means (draws, arms, rates) at the rate that is best in the
    other."""
    best = other.argmax(2)[..., None]
    return np.take_along_axis(mine, best, 2)[..., 0]
