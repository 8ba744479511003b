"""Gains at equal cost, by hand."""
import numpy as np
import pytest

from lab.analysis.cost import (at_equal_time, at_factor, break_even, difference_for, gain_for,
                               is_known, ratio_of, success_for)
from lab.analysis.statistics import mean_over

MINE, THEIRS = np.array([0.2, 0.6, 0.9, 1.0]), np.array([0.2, 0.3, 0.4, 0.5])
PAIRS = [(MINE, THEIRS + seed / 100) for seed in range(4)]  # theirs gain up to 3 points


def test_each_step_counts_by_what_it_cost_and_the_last_by_what_the_budget_covers():
    """1 x 0 + 0.5 x 1, over 1.5; and 2 x 0.5 + 1 x 0.8, over 3. And 3 x 0.2 + 1 x 0.6 over 4, for
    the four steps of theirs."""
    assert success_for(np.array([0.0, 1.0]), 1.0, 1.5) == pytest.approx(1 / 3)
    assert success_for(np.array([0.5, 0.8]), np.array([2.0, 2.0]), 3) == pytest.approx(1.8 / 3)
    dear_first = np.array([3.0, 1.0, 1.0, 1.0])
    assert difference_for((MINE, THEIRS), (dear_first, 1.0)) == pytest.approx(0.3 - 0.35)


def test_the_dearer_run_is_cut_where_the_cheaper_one_ends():
    """At four times the cost only the first of my steps is paid for by their four, whose mean is
    0.35. Of runs of two lengths the longer one is cut at the end of the shorter one."""
    assert difference_for((MINE, THEIRS), (np.full(4, 4.0), 1.0)) == pytest.approx(0.2 - 0.35)
    assert difference_for((MINE, THEIRS), (1.0, 1.0)) == pytest.approx(0.675 - 0.35)
    assert difference_for((MINE, THEIRS[:2]), (1.0, 1.0)) == pytest.approx(0.4 - 0.25)
    assert difference_for((MINE[:2], THEIRS), (2.0, 1.0)) == pytest.approx(0.4 - 0.35)
    assert difference_for((MINE[:2], THEIRS[:3]), (2.0, 1.0)) == pytest.approx(1 / 3 - 0.3)


def test_a_gain_and_the_ratio_of_the_costs_are_over_the_pairs():
    costs = [(4.0, 1.0), (4.0, 1.0), (4.0, 1.0), (2.0, 2.0)]
    of_pairs = mean_over([-0.15, -0.16, -0.17, 0.675 - 0.38])
    assert gain_for(PAIRS, costs).interval == pytest.approx(of_pairs.interval)
    assert ratio_of(costs).value == pytest.approx(4 ** 0.75)  # the mean of the logarithms
    assert at_factor(PAIRS, 4) == gain_for(PAIRS, [(1.0, 0.25)] * 4)  # no unit matters


def test_how_dear_a_step_may_be():
    """Four of their steps have a mean of 0.365 over the pairs. For f times the cost mine have
    0.6 - 0.1 f while it is 2 to 4: f 0.2 + (4 - f) 0.6 over 4. So f is 2.35."""
    most = break_even(PAIRS)
    assert most.value == pytest.approx(2.35, abs=0.002)
    assert 2.1 < most.low < most.value < most.high < 2.6
    level = [(np.full(4, 0.5), THEIRS)] * 2, [(THEIRS, MINE)] * 2
    assert [break_even(pairs).value for pairs in level] == [32, 0]


def test_seconds_that_are_not_quite_known_widen_the_interval():
    """The ratio is 4 in the mean of logarithms; a step that costs less gains more."""
    sure, certain = at_equal_time(PAIRS, [(4.0, 1.0)] * 4), at_factor(PAIRS, 4)
    assert sure == certain
    seconds = [(x, 1.0) for x in (3.9, 16 / 3.9, 3.9, 16 / 3.9)]
    unsure, low = at_equal_time(PAIRS, seconds), at_factor(PAIRS, ratio_of(seconds).low)
    assert unsure.value == pytest.approx(sure.value) and is_known(ratio_of(seconds))
    assert unsure.high == low.high > sure.high and unsure.p == low.p > sure.p
    busy = [(x, 1.0) for x in (2.0, 8.0, 2.0, 8.0)]
    assert not is_known(ratio_of(busy)) and at_equal_time(PAIRS, busy).p == 1  # a gain or a loss
    assert not is_known(ratio_of(seconds[:1]))  # one pair has no interval
