"""The estimates of probes: numbers by hand."""
import numpy as np
import pytest

from lab.analysis.statistics import jackknife
from lab.probes.estimates import jackknife_of_log, t_values


def test_t_values_by_hand():
    """1 and 3: mean 2, population std 1, over sqrt 2. Three of 5 have no spread, nor have ten of
    0.1, by whose rounded sums the variance is 5e-18; 0 has neither spread nor size."""
    ten = [10, 0.9999999999999999, 0.10000000000000003]
    n, total, square = np.array([[2, 4, 10], [3, 15, 75], ten, [2, 0, 0]]).T
    assert t_values(n, total, square) == pytest.approx([2 * 2 ** 0.5, 0, 0, 0])


def test_the_interval_of_a_ratio_is_that_of_its_logarithm():
    """A ratio that is 8 and, without one of three problems, 4, 8 or 16: a jackknife of its
    logarithm to the base 2, which is 3, 2, 3 and 4."""
    without = {0: 2.0, 1: 3.0, 2: 4.0}

    def logarithm(kept):
        return 3.0 if kept.all() else without[int(np.flatnonzero(~kept)[0])]

    plain = jackknife(logarithm, np.arange(3))
    ratio_of_sizes = jackknife_of_log(lambda kept: 2 ** logarithm(kept), np.arange(3))
    assert ratio_of_sizes.value == pytest.approx(8)
    assert ratio_of_sizes.interval == pytest.approx((2 ** plain.low, 2 ** plain.high))
    assert plain.low < 0 < ratio_of_sizes.low
