"""The statistics that only probes ask for; what they share with the lab is in
analysis/statistics.py."""
import numpy as np

from analysis.statistics import Estimate, estimate


def jackknife(value: float, left: np.ndarray) -> Estimate:
    """A number, and what it becomes without each of the problems (or seeds) it was made from."""
    n = len(left)
    error = np.sqrt((n - 1) / n * np.square(left - np.mean(left)).sum()) if n > 1 else np.nan
    return estimate(float(value), float(error), n - 1)


def ratio_of_sums(above: np.ndarray, below: np.ndarray) -> Estimate:
    """Sum over sum, from a pair of numbers a problem."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return jackknife(above.sum() / below.sum(), (above.sum() - above) / (below.sum() - below))


def average_ranks(values: np.ndarray) -> np.ndarray:
    """0, 1, ... from the smallest; equal values share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]
