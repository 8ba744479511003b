"""Estimates that several probes need, and no table of a run."""
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lab.analysis.statistics import Estimate, Floats, jackknife


def jackknife_of_log(statistic: Callable[[NDArray[np.bool_]], float],
                     problem: ArrayLike) -> Estimate:
    """The estimate of a positive statistic, such as a ratio of sizes. Its interval is computed for
    its logarithm, so all of it is above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = jackknife(lambda kept: float(np.log(statistic(kept))), problem)
        value, low, high = np.exp([found.value, *found.interval]).tolist()
    return Estimate(value, low, high)


def t_values(n: Floats, total: Floats, square: Floats) -> Floats:
    """The t-values mean / (population std / sqrt n), from sums of numbers and of their squares; 0
    where there is no spread."""
    mean, square = total / n, square / n
    variance = square - mean ** 2
    has_spread = variance > 1e-14 * square  # less is rounding
    return np.where(has_spread, mean / np.sqrt(np.where(has_spread, variance, 1) / n), 0)
