"""The statistics that numpy lacks: how certain a number is when tokens are not independent.

Tokens of an answer share one advantage, and the advantages of a group sum to zero. So the group is
the unit that varies independently, not the token. Across runs it is the seed. Nothing more is
assumed.
"""
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]
FEWEST = 6  # nothing is said about a number that comes from fewer groups
SEEN = 0.8  # an experiment is said to see an effect if so many such experiments would find it


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; what is not known of it is nan."""
    value: float
    low: float = np.nan      # 95% interval
    high: float = np.nan
    p: float = np.nan        # two-sided; tested is that there is no effect
    visible: float = np.nan  # the effect that 80 of 100 such experiments would see

    @property
    def interval(self) -> Interval:
        return self.low, self.high


@lru_cache(maxsize=32)  # a table has 1.6 MB
def student(df: float) -> tuple[Floats, Floats]:
    """Student's t as a table: t = sqrt(df) tan(angle), the angle has density cos(angle)^(df - 1).
    Beyond 10,000 degrees of freedom it is the normal distribution."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    density = np.cos(angle).clip(0) ** (min(df, 10_000) - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return angle, below / below[-1]


def student_quantile(probability: float, df: float) -> float:
    angle, below = student(df)
    return float(np.sqrt(min(df, 10_000)) * np.tan(np.interp(probability, below, angle)))


def two_sided_p(t: float, df: float) -> float:
    """The two-sided p-value of t. It is never 0: beyond the end of the table of `student` the
    distribution goes on."""
    angle, below = student(df)
    angle_of_t = np.arctan(-abs(t) / np.sqrt(min(df, 10_000)))
    p = 2 * np.interp(angle_of_t, angle, below)
    return float(np.clip(p, np.finfo(float).tiny, 1.0))


def estimate(value: float, error: float, df: float, tests: int = 1) -> Estimate:
    """The estimate of a value with this standard error, which has df degrees of freedom."""
    if not np.isfinite(value) or not np.isfinite(error) or df < 1:
        return Estimate(value)
    reach = student_quantile(0.975, df) * error
    p = two_sided_p(value / error, df) if error > 0 else float(value == 0)
    return Estimate(value, value - reach, value + reach, p, detectable(df, tests) * error)


def power(effect: float, df: float, tests: int = 1) -> float:
    """How often a true effect of this size, in standard errors, is found by a two-sided t-test,
    with its sign, if 5% is the level of all `tests` together.

    The experiment knows neither the effect nor its standard error exactly. Its t is a normal number
    around the effect, divided by an estimated standard error, whose square has the chi-squared
    distribution with df degrees of freedom over df. So the share of experiments whose normal number
    is beyond the limit is averaged over that distribution (t is noncentral).
    """
    limit = student_quantile(1 - 0.025 / tests, df)
    chance, share = 0.0, 0.0
    for estimated_error, probability in estimated_errors(df):
        share += probability
        chance += probability * math.erfc((limit * estimated_error - effect) / math.sqrt(2)) / 2
    return chance / share


@cache
def estimated_errors(df: float) -> list[tuple[float, float]]:
    """The standard errors that experiments estimate, the true one being 1, and how probable each of
    them is (not normalised)."""
    widest = 6 / math.sqrt(2 * df)  # six of their standard deviations, to each side
    values = np.linspace(max(1e-6, 1 - widest), 1 + widest, 400)
    log_density = (df - 1) * np.log(values) - df * values ** 2 / 2
    probabilities = np.exp(log_density - log_density.max())
    return list(zip(values.tolist(), probabilities.tolist()))


@cache
def detectable(df: float, tests: int = 1) -> float:
    """The size of an effect, in standard errors, that is found in 80 of 100 experiments."""
    low, high = 0.0, 1e4
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, df, tests) < SEEN else (low, middle)
    return high


def ratio(logarithm: float, error: float, groups: int) -> Estimate:
    """The estimate of a ratio whose logarithm and standard error are known. `groups` counts the
    groups that carry it: those whose advantages are all 0 say nothing."""
    if groups < FEWEST or not np.isfinite(logarithm):
        return Estimate(float(np.exp(logarithm)))
    found = estimate(logarithm, error * np.sqrt(groups / (groups - 1)), groups - 1)
    low, high = np.exp(found.interval).tolist()
    return Estimate(float(np.exp(logarithm)), low, high, found.p)


def mean_over(values: Collection[float | None], tests: int = 1) -> Estimate:
    """The mean over seeds or problems, by Student's t; undefined values are left out."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    mean = float(known.mean()) if len(known) else np.nan
    if len(known) < 2:
        return Estimate(mean)
    return estimate(mean, float(known.std(ddof=1) / np.sqrt(len(known))), len(known) - 1, tests)


def jackknife(statistic: Callable[[NDArray[np.bool_]], float], problem: ArrayLike) -> Estimate:
    """The estimate of a statistic. Its standard error is computed from the values that the
    statistic has if one problem after the other is left out.

    `problem` (rows,) says which problem a row belongs to; `statistic(kept)` is the number that
    follows from the rows that the mask `kept` keeps.
    """
    problem = np.asarray(problem)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(np.ones(len(problem), bool)))
        without = np.array([statistic(problem != number) for number in np.unique(problem)])
        n = len(without)
        error = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    return estimate(value, float(error), n - 1)


def within(found: Estimate, least: float, most: float) -> Estimate:
    """The estimate with its interval cut at the ends of what is possible, such as 0 and 1 for a
    share. The truth lies between them, so the interval holds it as often as before the cut. The
    value stays: an estimate may lie beyond them by chance."""
    low, high = np.clip(found.interval, least, most).tolist()
    return replace(found, low=low, high=high)


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


def paired_difference(differences: ArrayLike, tests: int = 1) -> Estimate:
    """The mean of differences (seeds, items), with an interval over other seeds and other items. A
    difference is between two arms, at the same seed and the same held-out item. With one seed the
    interval is over other items alone.

    The error has two parts: the variance of the mean over seeds, and that of the mean over items.
    Each has its own degrees of freedom. The randomness of single answers is in both, so it is
    subtracted from the second.

    A few seeds may agree by luck, which would make the first part too small. So it is at least what
    the randomness of single answers gives. If all answers agree, the change of one answer is taken
    for this randomness. `tests` is how many arms are tested together, which decides how small an
    effect can be seen.
    """
    differences = np.asarray(differences, float)
    seeds, items = differences.shape
    value = float(differences.mean())
    if items == 1:
        return Estimate(value)
    by_seed, by_item = differences.mean(1), differences.mean(0)
    one_answer = 1 / differences.size ** 2
    if seeds == 1:
        error = max(variance_of_mean(by_item), one_answer) ** 0.5
        return estimate(value, error, items - 1, tests)
    freedom = (seeds - 1) * (items - 1)
    rest = differences - by_seed[:, None] - by_item + value
    of_answers = max((rest ** 2).sum() / freedom / (seeds * items), one_answer)
    of_seeds = variance_of_mean(by_seed)
    of_items = max(variance_of_mean(by_item) - of_answers, 0.0)

    def reach(level: float) -> float:
        t_seeds = student_quantile(1 - level / 2, seeds - 1)
        t_items = student_quantile(1 - level / 2, items - 1)
        t_answers = student_quantile(1 - level / 2, freedom)
        among_seeds = max(t_seeds ** 2 * of_seeds, t_answers ** 2 * of_answers)
        return float(np.sqrt(among_seeds + t_items ** 2 * of_items))

    error = reach(0.05 / tests) / student_quantile(1 - 0.025 / tests, seeds - 1)
    p = level_that_reaches(abs(value), reach)
    visible = float(error * detectable(seeds - 1, tests))
    return Estimate(value, value - reach(0.05), value + reach(0.05), p, visible)


def variance_of_mean(values: Floats) -> float:
    return float(values.var(ddof=1)) / len(values)


def level_that_reaches(distance: float, reach: Callable[[float], float]) -> float:
    """The p-value: the level at which an interval reaches exactly this distance. It is never 0."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if reach(middle) > distance else (low, middle)
    return high


def verdicts(ratios: list[Estimate]) -> list[str]:
    """A word for each row of a table of ratios, after Holm's correction: if no ratio differs from 1
    in truth, 95 of 100 tables see no difference in any row."""
    found = []
    for one, p in zip(ratios, holm([one.p for one in ratios])):
        if not np.isfinite(p):
            found.append("too few")
        elif p >= 0.05:
            found.append("none seen")
        else:
            found.append("more" if one.value > 1 else "less")
    return found
