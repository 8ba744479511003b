"""The statistics written by hand, against published tables and numbers worked out by hand; shares
and their intervals over problems."""
import numpy as np
import pytest

from lab.analysis.statistics import (Estimate, estimate, holm, jackknife, mean_over, over_problems,
                                     paired_difference, percentile, two_sided_p, within)
from lab.analysis.token_table import TokenTable
from properties import draw, given


@pytest.mark.parametrize("df, probability, expected", [  # any printed table of Student's t
    (1, 0.975, 12.706), (2, 0.975, 4.303), (9, 0.975, 2.262), (30, 0.975, 2.042), (4, 0.95, 2.132),
    (4, 0.8, 0.941), (10 ** 9, 0.975, 1.960), (10 ** 9, 0.8, 0.842)])
def test_student_quantiles_are_those_of_the_table(df, probability, expected):
    assert two_sided_p(expected, df) == pytest.approx(2 * (1 - probability), abs=2e-4)
    if probability == 0.975:
        assert percentile(df) == pytest.approx(expected, abs=6e-4)


def test_a_p_is_never_0():
    """Nor where the density of the table is too small for a float, as for 1,500 problems."""
    assert two_sided_p(60.0, 1499) > 0 and two_sided_p(1e300, 3) > 0
    assert two_sided_p(0.0, 3) == pytest.approx(1)


def test_an_estimate_without_an_error_or_without_freedom():
    """A value that was the same each time has an interval without width, and is 0 or is not."""
    assert estimate(0.5, 0.0, 3) == Estimate(0.5, 0.5, 0.5, 0.0)
    assert estimate(0.0, 0.0, 3) == Estimate(0.0, 0.0, 0.0, 1.0)
    assert np.isnan([estimate(0.5, 0.0, 0).low, estimate(0.5, np.nan, 3).low]).all()
    assert np.isnan([estimate(np.nan, 0.1, 3).low, estimate(np.inf, 0.1, 3).low]).all()


@given(draw.lists(draw.one_of(draw.floats(0, 1), draw.sampled_from([0.001, 0.02, 0.02, np.nan]))))
def test_holm_rejects_what_its_steps_reject(p):
    """In steps: the smallest p of m is rejected where m times it is at most the level, then the
    next of m - 1, until one is not. What is undefined is no test."""
    adjusted = holm(p)
    assert np.isnan(adjusted).tolist() == np.isnan(p).tolist()
    known = [(one, found) for one, found in zip(p, adjusted) if not np.isnan(one)]
    assert all(one <= found <= 1 for one, found in known)
    for level in {0.05, *(min(2 * one, 0.999) for one, _ in known)}:
        left = sorted(one for one, _ in known)
        while left and len(left) * left[0] <= level:
            left.pop(0)
        assert sorted(one for one, found in known if found > level) == left


def test_means_by_hand():
    """1, 2, 3 and one that is undefined: mean 2, error 1 / sqrt(3), Student's t of two degrees of
    freedom."""
    found = mean_over([1.0, 2.0, np.nan, 3.0])
    assert found.value == 2 and found.high - 2 == pytest.approx(4.302653 / np.sqrt(3), rel=1e-4)
    assert np.isnan(mean_over([1.0]).low) and np.isnan(mean_over([np.nan]).value)


def test_a_jackknife_by_hand():
    """A mean over rows, of three problems with the sums 3 of two rows, 3 and 6: the mean is 3, and
    without each problem 4.5, 3 and 2. Their mean is 19/6 and their squares around it sum to 19/6,
    of which two thirds are the square of the error."""
    values, problem = np.array([1.0, 2, 3, 6]), np.array([7, 7, 8, 9])
    found = jackknife(lambda kept: values[kept].mean(), problem)
    error = (2 / 3 * 19 / 6) ** 0.5
    assert found.value == 3 and found.high - 3 == pytest.approx(4.302653 * error, rel=1e-4)


def test_an_interval_is_cut_at_what_is_possible():
    assert within(Estimate(1.02, -0.5, 1.5, p=0.1), 0, 1) == Estimate(1.02, 0.0, 1.02, p=0.1)
    assert within(Estimate(-0.05, -0.5, 0.5), 0, 1).interval == (-0.05, 0.5)
    assert within(Estimate(0.5, 0.25, 0.75), 0, 1).interval == (0.25, 0.75)


def test_a_difference_over_problems_by_hand():
    """Differences 1 1 0 0 1 0 -1 0: mean 1/4, squares around it 3.5, over 7 and 8. Of one problem
    nothing is said."""
    found = paired_difference([1.0, 1, 0, 0, 1, 0, -1, 0])
    reach = 2.3646 * (3.5 / 7 / 8) ** 0.5
    assert found.value == 0.25
    assert found.high - 0.25 == 0.25 - found.low == pytest.approx(reach, rel=1e-4)
    assert found.p == pytest.approx(two_sided_p(1.0, 7))
    assert paired_difference([0.5]).value == 0.5 and np.isnan(paired_difference([0.5]).low)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_where_all_answers_agree_the_mean_is_known_to_one_answer(value):
    """Always 0 and always 1: an interval, and a p that is not 0."""
    found, reach = paired_difference([value] * 60), percentile(59) / 60
    assert (found.high - value, value - found.low) == pytest.approx((reach, reach), rel=1e-6)
    assert 0 < found.p <= 1 and (found.p > 0.99) == (value == 0)


def test_a_share_and_its_jackknife():
    """Sums 1, 2, 3 of 2, 2, 6 by problem: 6 / 10; without one of them 5/8, 4/8, 3/4. From three
    problems the interval reaches beyond 0 and 1, where it is cut."""
    problem = np.array([0, 0, 1, 2])
    part, whole = np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])
    uncut = over_problems(problem, [part, whole], lambda part, whole: part / whole)
    left = np.array([5 / 8, 4 / 8, 3 / 4])
    assert uncut.value == pytest.approx(0.6)
    error = np.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert (uncut.high - uncut.low) / 2 == pytest.approx(4.303 * error, rel=1e-3)  # t of 2
    assert uncut.low < 0 and uncut.high > 1
    assert cut_share(problem, part, whole).interval == (0, 1)


def cut_share(problem, part, whole):
    return TokenTable({"problem": problem}).share(part / whole, whole)


def test_problems_without_tokens_make_no_interval_narrower():
    """The same three problems, numbered among others of which no token is left: as many degrees of
    freedom, wherever the others stand."""
    part, whole = np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])
    alone = cut_share(np.array([0, 0, 1, 2]), part, whole)
    for problem in ([5, 5, 9, 14], [0, 0, 1, 14]):
        assert cut_share(np.array(problem), part, whole) == alone
    none = np.array([])
    assert np.isnan(cut_share(none, none, none).value)  # as of a run that never had a gradient
