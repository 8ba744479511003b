"""The statistics of the experiments and probes, by hand."""
import numpy as np
import pytest

from analysis.statistics import mean_over
from research.statistics import average_ranks, jackknife, ratio_of_sums


def test_the_jackknife_of_a_mean_is_its_interval():
    found, again = mean_over([1.0, 2.0, 3.0]), jackknife(2.0, np.array([2.5, 2.0, 1.5]))
    assert (again.low, again.p) == pytest.approx((found.low, found.p))
    assert np.isnan(jackknife(1.0, np.array([1.0])).low)


def test_a_ratio_of_sums_by_hand():
    """(1 + 3) / (2 + 4); without one 3 / 4, without the other 1 / 2; error |3/4 - 1/2| / 2."""
    found = ratio_of_sums(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert found.value == pytest.approx(4 / 6)
    assert found.high - found.value == pytest.approx(12.7062 * 0.125, rel=1e-4)


def test_equal_values_share_their_mean_rank():
    assert average_ranks(np.array([5.0, 1, 5, 2])).tolist() == [2.5, 0, 2.5, 1]
