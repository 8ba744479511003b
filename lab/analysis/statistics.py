"""The statistics that numpy lacks: how certain a number is when tokens are not independent.

Tokens of an answer share one advantage, and the advantages of a group sum to zero. So the group is
the unit that varies independently, not the token. Across runs it is the seed. Student's t also
takes the values of these units for normal. Where they are skewed, its intervals are too sure of
themselves (docs/reference/your_own_idea.md).
"""
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]
SAME = 1e-12  # success that differs by less differs by rounding alone


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; what is not known of it is nan."""
    value: float
    low: float = np.nan      # 95% interval
    high: float = np.nan
    p: float = np.nan        # two-sided; tested is that there is no effect

    @property
    def interval(self) -> Interval:
        return self.low, self.high


@lru_cache(maxsize=32)  # a table has 1.6 MB
def student(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Student's distribution as a table: t = sqrt(freedom) tan(angle), where the angle has the
    density cos(angle)^(freedom - 1); and the share of the distribution that lies below it."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    density = np.cos(angle).clip(0) ** (min(freedom, 10_000) - 1)  # beyond, it is the normal one
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return angle, below / below[-1]


def percentile(freedom: float, share: float = 0.975) -> float:
    angle, below = student(freedom)
    return float(np.sqrt(min(freedom, 10_000)) * np.tan(np.interp(share, below, angle)))


def two_sided_p(t: float, df: float) -> float:
    """The two-sided p-value of t. It is never 0: beyond the end of the table of `student` the
    distribution goes on."""
    angle, below = student(df)
    angle_of_t = np.arctan(-abs(t) / np.sqrt(min(df, 10_000)))
    p = 2 * np.interp(angle_of_t, angle, below)
    return float(np.clip(p, np.finfo(float).tiny, 1.0))


def estimate(value: float, error: float, df: float) -> Estimate:
    """The estimate of a value with this standard error, which has df degrees of freedom."""
    if not np.isfinite(value) or not np.isfinite(error) or df < 1:
        return Estimate(value)
    reach = percentile(df) * error
    p = two_sided_p(value / error, df) if error > 0 else float(value == 0)
    return Estimate(value, value - reach, value + reach, p)


def mean_over(values: Collection[float | None]) -> Estimate:
    """The mean over seeds or problems, by Student's t; undefined values are left out."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    mean = float(known.mean()) if len(known) else np.nan
    if len(known) < 2:
        return Estimate(mean)
    return estimate(mean, float(known.std(ddof=1) / np.sqrt(len(known))), len(known) - 1)


def mean_over_pairs(pairs: list[Floats]) -> Estimate:
    """The mean over pairs of runs, by Student's t. Where all pairs have the same mean difference,
    which is luck in short runs, their spread says nothing of other seeds: there is no interval and
    no p. Runs that are the same to the bit differ by 0 in every pair, and this is known."""
    differences = [float(pair.mean()) for pair in pairs]
    is_known = all((abs(pair) < SAME).all() for pair in pairs)
    if np.ptp(differences) < SAME and not is_known:
        return Estimate(differences[0])
    return mean_over(differences)


def jackknife(statistic: Callable[[NDArray[np.bool_]], float], problem: ArrayLike,
              log: bool = False) -> Estimate:
    """The estimate of a statistic. Its standard error is computed from the values that the
    statistic has if one problem after the other is left out.

    `problem` (rows,) says which problem a row belongs to; `statistic(kept)` is the number that
    follows from the rows that the mask `kept` keeps. With `log` the interval is computed for its
    logarithm, so that that of a ratio of sizes lies above 0.
    """
    problem = np.asarray(problem)
    if not len(problem):  # such as tokens that have a gradient
        return Estimate(np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.array(statistic(np.ones(len(problem), bool)))
        without = np.array([statistic(problem != number) for number in np.unique(problem)])
        if log:
            value, without = np.log(value), np.log(without)
        n = len(without)
        error = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    x = estimate(float(value), float(error), n - 1)
    return Estimate(*np.exp([x.value, x.low, x.high]).tolist()) if log else x


def over_problems(problem: np.ndarray, columns: Sequence[np.ndarray],
                  statistic: Callable[..., float], log: bool = False) -> Estimate:
    """A statistic of the sums of some columns (n,) over the tokens; its interval from the values
    that it has without each problem, because problems vary independently and tokens do not. A
    problem without tokens does not count as one, whatever its number."""
    _, problem = np.unique(problem, return_inverse=True)
    of_problem = np.stack([np.bincount(problem, column) for column in columns])
    problems = np.arange(of_problem.shape[1])
    return jackknife(lambda kept: float(statistic(*of_problem[:, kept].sum(1))), problems, log)


def within(found: Estimate, least: float, most: float) -> Estimate:
    """The estimate with its interval cut at the ends of what is possible, such as 0 and 1 for a
    share. The truth lies between them, so the interval holds it as often as before the cut. The
    value stays: an estimate may lie beyond them by chance, and then the interval reaches to it."""
    low, high = np.clip(found.interval, least, most).tolist()
    return replace(found, low=min(low, found.value), high=max(high, found.value))


def holm(p: list[float]) -> list[float]:
    """Holm's adjusted p-values: if no effect is real, at most 5% of experiments have one below
    0.05. An undefined p stays undefined, and does not count as a test."""
    values = np.asarray(p, float)
    count = int(np.isfinite(values).sum())
    known = np.argsort(values)[:count]  # undefined ones come last
    adjusted = np.full(len(p), np.nan)
    scaled = (count - np.arange(count)) * values[known]
    adjusted[known] = np.maximum.accumulate(scaled).clip(max=1)
    return adjusted.tolist()


def paired_difference(differences: ArrayLike) -> Estimate:
    """The mean of the differences between two evaluations, one for each held-out problem, with an
    interval over other problems. If all differences are equal, the change of one answer is taken
    for the standard error."""
    differences = np.asarray(differences, float)
    value, problems = float(differences.mean()), len(differences)
    if problems == 1:
        return Estimate(value)
    error = differences.std(ddof=1) / math.sqrt(problems)
    return estimate(value, max(float(error), 1 / problems), problems - 1)
