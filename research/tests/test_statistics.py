"""The statistics of the experiments and probes, by hand."""
import math

import numpy as np
import pytest

from analysis.statistics import mean_over, student_quantile, two_sided_p
from research.statistics import average_ranks, jackknife, rank_correlation, ratio_of_sums, welch


def test_the_jackknife_of_a_mean_is_its_interval():
    found, again = mean_over([1.0, 2.0, 3.0]), jackknife(2.0, np.array([2.5, 2.0, 1.5]))
    assert (again.low, again.p) == pytest.approx((found.low, found.p))
    assert np.isnan(jackknife(1.0, np.array([1.0])).low)


def test_a_ratio_of_sums_by_hand():
    """(1 + 3) / (2 + 4); without one 3 / 4, without the other 1 / 2; error |3/4 - 1/2| / 2."""
    found = ratio_of_sums(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert found.value == pytest.approx(4 / 6)
    assert found.high - found.value == pytest.approx(12.7062 * 0.125, rel=1e-4)


def test_ranks_and_their_correlation_by_hand():
    values, y = np.array([5.0, 1, 5, 2]), np.array([0.0, 2, 1, 3])
    assert average_ranks(values).tolist() == [2.5, 0, 2.5, 1]
    expected = np.corrcoef([2.5, 0, 2.5, 1], y)[0, 1]
    assert rank_correlation(values, y) == pytest.approx(expected)
    assert rank_correlation(np.array([1, 2, 30]), np.array([2, 4, 5])) == pytest.approx(1)
    assert np.isnan(rank_correlation(np.ones(3), np.array([1, 2, 3])))


def test_welch_by_hand():
    """Means 3 and 5, errors^2 1/3 of 1 and 1/2 of 2; the degrees of freedom are Satterthwaite's."""
    found = welch([2.0, 3.0, 4.0], [4.0, 6.0])
    error, freedom = math.sqrt(1 / 3 + 1), (4 / 3) ** 2 / ((1 / 3) ** 2 / 2 + 1)
    assert found.value == -2
    assert found.low == pytest.approx(-2 - student_quantile(0.975, freedom) * error)
    assert found.p == pytest.approx(two_sided_p(2 / error, freedom))
    assert math.isnan(welch([1.0], [2.0, 3.0]).p) and math.isnan(welch([1, 1], [2, 2]).p)
