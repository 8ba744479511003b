"""Regression with errors clustered by group, against numpy and a plain loop."""

import numpy as np
import pytest

from analysis.regression import Regression
from analysis.statistics import student_quantile


def made(groups=30, size=7, seed=0):
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), size)
    x = np.stack(
        [np.ones(len(group)), rng.normal(size=len(group)), rng.integers(0, 2, len(group))], axis=1
    ).astype(float)
    y = x @ [1.0, 2.0, -0.5] + rng.normal(size=groups)[group] + rng.normal(size=len(group))
    return x, y, group


def test_clustered_regression_against_numpy_and_a_plain_loop():
    """Coefficients from lstsq; errors by definition: sum of u_g u_g', u_g = X_g' residuals."""
    x, y, group = made()
    regression = Regression(["constant", "slope", "class"])
    for part in np.split(
        np.arange(len(y)), [35, 70, 140]
    ):  # whole groups, a few at a time, as steps come
        regression.add(x[part], y[part], group[part])
    b = np.linalg.lstsq(x, y, rcond=None)[0]
    meat = np.zeros((3, 3))
    for g in range(30):
        u = x[group == g].T @ (y - x @ b)[group == g]
        meat += np.outer(u, u)
    bread = np.linalg.inv(x.T @ x)
    error = np.sqrt(30 / 29 * (209 / 207) * np.diag(bread @ meat @ bread))
    for i, e in enumerate(regression.estimates().values()):
        assert e.value == pytest.approx(b[i], rel=1e-9)
        assert (e.high - e.value) / student_quantile(0.975, 29) == pytest.approx(error[i], rel=1e-9)


def test_clustered_errors_by_hand():
    """Six groups, y = 0 2 and 4 6 by turns, a constant alone: mean 3, residual sums -4 and 4;
    bread 1/12, so the variance is 6/5 * 11/11 * 96/144 = 0.8."""
    regression = Regression(["constant"])
    regression.add(np.ones((12, 1)), np.array([0.0, 2, 4, 6] * 3), np.repeat(np.arange(6), 2))
    e = regression.estimates()["constant"]
    assert e.value == 3 and (e.high - e.value) / student_quantile(0.975, 5) == pytest.approx(
        0.8**0.5
    )


def test_a_term_seen_in_few_groups_or_only_in_the_last_digits_says_nothing():
    x, y, group = made()
    rare = (group < 4).astype(float)
    regression = Regression(["constant", "slope", "class", "rare"])
    regression.add(np.column_stack([x, rare]), y, group)
    assert np.isnan(regression.estimates()["rare"].p) and np.isfinite(
        regression.estimates()["slope"].p
    )
    regression = Regression(["constant", "slope", "class"])
    regression.add(x, np.full(len(y), 0.7), group)  # y is the constant alone
    assert regression.estimates()["slope"].p == regression.estimates()["class"].p == 1.0


def test_a_term_that_others_add_up_to_is_left_out():
    x, y, group = made()
    regression = Regression(["constant", "slope", "class", "the rest", "never"])
    regression.add(np.column_stack([x, 1 - x[:, 2], np.zeros(len(y))]), y, group)
    assert list(regression.estimates()) == ["constant", "slope", "class"]


def test_errors_that_ignore_the_groups_would_be_too_small():
    """A null class that is constant within groups: with clustered errors it is called null in at
    least 90 of 100 draws."""
    missed = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        group = np.repeat(np.arange(40), 20)
        label = rng.integers(0, 2, 40)[group]
        y = rng.normal(size=40)[group] + rng.normal(size=800)
        regression = Regression(["constant", "class"])
        regression.add(np.column_stack([np.ones(800), label]), y, group)
        missed += regression.estimates()["class"].p < 0.05
    assert missed <= 10
