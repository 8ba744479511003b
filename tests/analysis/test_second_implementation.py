"""analysis/statistics.py against plain_statistics.py, which was written apart from it."""
import numpy as np
import plain_statistics as plain
import pytest

from analysis.statistics import (jackknife, mean_over, paired_difference, quotient,
                                 student_quantile, two_sided_p, within)

SEEDS = range(6)


def numbers(seed, *shape):
    """Skewed numbers, as differences of success are."""
    rng = np.random.default_rng(seed)
    return rng.normal(0.02, 0.05, shape) + rng.exponential(0.03, shape) * (seed % 2)


@pytest.mark.parametrize("df", [1, 2, 3, 7.5, 23, 400])
def test_students_t(df):
    assert student_quantile(0.975, df) == pytest.approx(plain.quantile(df), rel=1e-4)
    for t in (0.1, 1.0, 2.5, 6.0):
        assert two_sided_p(t, df) == pytest.approx(plain.two_sided_p(t, df), rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mean_over_pairs(seed):
    values = numbers(seed, 3 + seed)
    found = mean_over(values)
    assert (found.value, found.low, found.high) == pytest.approx(plain.t_interval(values), rel=1e-4)
    assert found.p == pytest.approx(plain.t_test(values), rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_difference_over_seeds_and_problems(seed):
    rng = np.random.default_rng(seed)
    differences = rng.choice([-1.0, 0, 0, 1], (2 + seed, 40))
    found = paired_difference(differences)
    assert (found.value, found.low, found.high) == pytest.approx(
        plain.two_way(differences.tolist()), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_jackknife_of_a_ratio(seed):
    above, below = numbers(seed, 12), 1 + numbers(seed + 50, 12)

    def ratio(kept):
        return float(above[kept].sum() / below[kept].sum())

    def without(i):
        return ratio(np.arange(12) != (-1 if i is None else i))

    found = within(jackknife(ratio, np.arange(12)), 0, 1)
    assert (found.value, found.low, found.high) == pytest.approx(
        plain.cut(plain.jackknife(12, without), 0, 1), rel=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_quotient_of_two_means(seed):
    one, two = numbers(seed, 20), 0.3 + numbers(seed + 50, 20)
    covariance = np.cov(one, two) / 20
    found = quotient(one.mean(), two.mean(), covariance, 19)
    expected = plain.fieller(one.mean(), two.mean(), plain.variance(one) / 20,
                             plain.variance(two) / 20, plain.covariance(one, two) / 20, 19)
    assert (found.value, found.low, found.high) == pytest.approx(expected, rel=1e-4)
