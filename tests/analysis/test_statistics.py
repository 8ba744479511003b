"""The statistics written by hand, against published tables, enumeration, plain loops, and
repeated draws with a known truth."""

import itertools

import numpy as np
import pytest

from analysis.statistics import (
    Estimate,
    average_ranks,
    detectable,
    estimate,
    holm,
    jackknife,
    mean_over,
    paired_difference,
    permutation_p,
    poisson_draws,
    rank_correlation,
    ratio,
    ratio_of_sums,
    shuffle_within,
    student_quantile,
    two_sided_p,
    verdicts,
)


@pytest.mark.parametrize(
    "df, probability, expected",
    [  # any printed table of Student's t
        (1, 0.975, 12.706),
        (2, 0.975, 4.303),
        (4, 0.975, 2.776),
        (9, 0.975, 2.262),
        (30, 0.975, 2.042),
        (4, 0.95, 2.132),
        (4, 0.8, 0.941),
        (10**9, 0.975, 1.960),
        (10**9, 0.8, 0.842),
    ],
)
def test_student_quantiles_are_those_of_the_table(df, probability, expected):
    assert student_quantile(probability, df) == pytest.approx(expected, abs=6e-4)
    assert two_sided_p(expected, df) == pytest.approx(2 * (1 - probability), abs=2e-4)


def test_an_interval_excludes_zero_exactly_when_p_is_below_5_percent():
    for value in (2.7, 2.85):
        e = estimate(value, 1.0, 4)
        assert (e.low > 0) == (e.p < 0.05) == (value == 2.85)


def test_holm_by_hand():
    """Sorted 0.005 0.01 0.03 0.04, times 4 3 2 1: 0.02 0.03 0.06 0.04, and never below the one
    before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_permutation_p_counts_the_observed_order_as_one_of_them():
    null = np.arange(1, 100)  # 99 shuffles
    assert permutation_p(200, null) == pytest.approx(2 / 100)
    assert permutation_p(0, null) == pytest.approx(2 / 100)
    assert permutation_p(98, null) == pytest.approx(2 * 3 / 100)
    assert permutation_p(50, null) == 1.0


def test_shuffling_stays_in_the_group_and_every_order_is_as_likely():
    values, group = np.array([1.0, 10, 2, 20, 3]), np.array([0, 1, 0, 1, 0])
    drawn = shuffle_within(values, group, 6000, np.random.default_rng(0))
    assert (np.sort(drawn[:, group == 0]) == [1, 2, 3]).all() and (
        np.sort(drawn[:, group == 1]) == [10, 20]
    ).all()
    for order in itertools.permutations([1, 2, 3]):
        assert abs((drawn[:, [0, 2, 4]] == order).all(1).mean() - 1 / 6) < 0.02


def test_poisson_draws_count_each_group_once_on_average():
    drawn = poisson_draws(np.random.default_rng(0), 4000, 5)
    assert drawn.mean() == pytest.approx(1, abs=0.02) and drawn.var() == pytest.approx(1, abs=0.04)


def test_the_bootstrap_of_a_ratio_has_the_error_of_the_delta_method():
    """Ratio of two means over 400 groups; the delta method's error of its logarithm from numpy's
    covariance."""
    rng = np.random.default_rng(1)
    groups = np.stack(
        [
            rng.gamma(3, 1, 400),
            rng.integers(5, 15, 400),
            rng.gamma(2, 1, 400),
            rng.integers(5, 15, 400),
        ],
        axis=1,
    )
    total = groups.sum(0)
    value = total[0] / total[1] / (total[2] / total[3])
    d = poisson_draws(rng, 2000, 400) @ groups
    found = ratio(value, d[:, 0] / d[:, 1] / (d[:, 2] / d[:, 3]), 400)
    slope = np.array([1, -1, 1, -1]) * [1, 1, -1, -1] / total
    error = np.sqrt(400 * slope @ np.cov(groups.T) @ slope)
    assert np.log(found.high / found.value) == pytest.approx(1.966 * error, rel=0.08)
    assert found.value == value and found.low < value < found.high


def test_a_ratio_that_was_seen_in_too_few_groups_has_no_interval():
    draws = np.array([np.nan, 2.0, np.nan, 2.0])
    assert (
        np.isnan(ratio(2.0, draws, 30).low)
        and np.isnan(ratio(2.0, np.ones(4), 5).low)
        and np.isnan(ratio(np.nan, np.ones(4), 9).p)
    )


@pytest.mark.parametrize("seeds, tests", [(3, 1), (5, 1), (5, 4)])
def test_what_could_be_seen_is_seen_in_80_of_100(seeds, tests):
    """Experiments with a true effect of that size, judged by Student's t at 5% over these tests."""
    rng = np.random.default_rng(5)
    effect = detectable(seeds - 1, tests) / seeds**0.5
    x = rng.normal(effect, 1, (20_000, seeds))
    t = x.mean(1) / (x.std(1, ddof=1) / seeds**0.5)
    assert (t > student_quantile(1 - 0.025 / tests, seeds - 1)).mean() == pytest.approx(
        0.8, abs=0.015
    )


def arms(rng, effect, seeds=5, items=300, between=0.03):
    """0/1 answers of two arms on the same items, with a spread between seeds."""
    difficulty = rng.beta(2, 1, items)
    runs = [
        np.clip(difficulty + shift + rng.normal(0, between, (seeds, 1)), 0, 1)
        for shift in (effect, 0.0)
    ]
    mine, base = (rng.random((seeds, items)) < p for p in runs)
    return mine.astype(float) - base


def test_a_true_null_is_called_null_and_a_planted_difference_is_seen():
    false = sum(
        paired_difference(arms(np.random.default_rng(seed), 0.0)).p < 0.05 for seed in range(100)
    )
    seen = sum(
        paired_difference(arms(np.random.default_rng(seed), 0.15)).p < 0.05 for seed in range(100)
    )
    assert false <= 10 and seen >= 90


def test_the_paired_error_by_hand():
    """Two seeds, four items. Seed means 0.5 and 0.25: variance 1/32, over two seeds 1/64. Item
    means 1 0.5 0 0: variance 11/48, over four items 11/192. Interaction: squares sum to 0.375,
    over 1 * 3 and 8 answers 1/64, so 8/192 is left for the items. Student's t with 1 and 3
    degrees of freedom: 12.706 and 3.182."""
    e = paired_difference(np.array([[1.0, 1, 0, 0], [1, 0, 0, 0]]), draws=200_000)
    assert e.value == 0.375
    assert e.high - e.value == pytest.approx((12.706**2 / 64 + 3.182**2 / 24) ** 0.5, rel=0.02)


def test_p_of_a_paired_difference_is_the_level_at_which_its_interval_reaches_zero():
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.05, 0.2):
        e = paired_difference(arms(rng, shift))
        assert (e.p < 0.05) == (e.low > 0 or e.high < 0)


def test_one_seed_speaks_of_items_alone_and_one_number_of_nothing():
    d = np.array([[1.0, 1, 0, 0, 1, 0, -1, 0]])
    e = paired_difference(d, draws=100_000)
    assert (e.high - e.value) / student_quantile(0.975, 7) == pytest.approx(
        np.sqrt(d.var(ddof=1) / 8), rel=0.02
    )
    assert np.isnan(paired_difference(np.array([[0.3]])).low)


def test_a_mean_over_questions_by_hand():
    """1, 2, 3 and one that is undefined: mean 2, error 1 / sqrt(3), Student's t of two degrees of
    freedom."""
    found = mean_over([1.0, 2.0, np.nan, 3.0])
    assert found.value == 2 and found.high - 2 == pytest.approx(4.302653 / np.sqrt(3), rel=1e-4)
    assert (
        np.isnan(mean_over([1.0]).low)
        and mean_over([1.0]).value == 1
        and np.isnan(mean_over([np.nan]).value)
    )


def test_the_jackknife_of_a_mean_is_the_usual_error():
    values = np.array([1.0, 4.0, 6.0, 9.0])
    left = (values.sum() - values) / 3
    found, usual = jackknife(values.mean(), left), mean_over(values)
    assert found.low == pytest.approx(usual.low) and found.p == pytest.approx(usual.p)
    assert np.isnan(jackknife(1.0, np.array([1.0])).low)


def test_a_ratio_of_sums_by_hand():
    """(1 + 3) / (2 + 4); without one 3 / 4, without the other 1 / 2; error |3/4 - 1/2| / 2."""
    found = ratio_of_sums(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert found.value == pytest.approx(4 / 6) and found.high - found.value == pytest.approx(
        12.7062 * 0.125, rel=1e-4
    )


def test_ranks_and_their_correlation_by_hand():
    assert average_ranks(np.array([5.0, 1.0, 5.0, 2.0])).tolist() == [2.5, 0, 2.5, 1]
    assert rank_correlation(np.array([1, 2, 30]), np.array([2, 4, 5])) == pytest.approx(
        1
    ) and rank_correlation(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1)
    assert rank_correlation(np.array([1, 2, 3]), np.array([1, 3, 2])) == pytest.approx(0.5)
    x, y = average_ranks(np.array([5.0, 1, 5, 2])), np.array([0.0, 2, 1, 3])
    assert rank_correlation(np.array([5.0, 1, 5, 2]), y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert np.isnan(rank_correlation(np.ones(3), np.array([1, 2, 3])))


def test_holm_decides_what_a_table_says():
    found = [
        Estimate(1.1, 1.01, 1.2, 0.03),
        Estimate(0.8, 0.7, 0.9, 0.001),
        Estimate(np.nan, np.nan, np.nan, np.nan),
        Estimate(1.0, 0.9, 1.1, 0.9),
    ]
    assert verdicts(found) == ["none seen", "less", "too few", "none seen"]


def test_seeds_that_happen_to_agree_are_no_proof():
    """Two seeds, 100 problems, in each 6 gained and 4 lost, and not the same ones: +2.0% twice."""
    differences = np.zeros((2, 100))
    differences[0, :6], differences[0, 6:10] = 1, -1
    differences[1, 50:56], differences[1, 56:60] = 1, -1
    assert differences.mean(1).tolist() == [0.02, 0.02]
    e = paired_difference(differences)
    rest = differences - differences.mean(0)
    chance = (rest**2).sum() / 99 / 200
    assert e.high - e.value == pytest.approx(student_quantile(0.975, 99) * chance**0.5)
    assert e.low < 0 < e.high and e.p > 0.05


@pytest.mark.parametrize("seeds, items", [(1, 60), (2, 60), (2, 1500), (5, 200)])
def test_where_all_answers_agree_the_mean_is_known_to_one_answer(seeds, items):
    """Always 0 and always 1: an interval, and a p that is not 0."""
    freedom = (seeds - 1) * (items - 1) if seeds > 1 else items - 1
    reach = student_quantile(0.975, freedom) / (seeds * items)
    for value in (0.0, 1.0):
        e = paired_difference(np.full((seeds, items), value))
        assert (e.high - e.value, e.value - e.low) == pytest.approx((reach, reach), rel=1e-6)
        assert 0 < e.p <= 1 and (e.p > 0.99) == (value == 0)


def test_the_chance_of_values_that_do_not_show_it_is_given():
    """Means over training: one number a seed. Without the chance equal numbers say nothing."""
    equal = np.full((3, 1), 0.01)
    assert np.isnan(paired_difference(equal).low)
    e = paired_difference(equal, chance=0.01**2)
    assert e.high - e.value == pytest.approx(1.96 * 0.01, rel=1e-3)
    assert e.p == pytest.approx(0.317, abs=1e-3)


def test_where_seeds_differ_by_more_than_chance_nothing_is_added():
    """The interval is the one that Student's t makes of the seeds and the items."""
    differences = arms(np.random.default_rng(3), 0.1, seeds=4, between=0.2)
    e = paired_difference(differences)
    assert e == paired_difference(differences, chance=0.9)  # the items show the chance themselves
    of_seeds = differences.mean(1).var(ddof=1) / 4
    assert e.high - e.value >= 0.97 * student_quantile(0.975, 3) * of_seeds**0.5


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_false_positives_among_seeds_that_differ_by_chance_alone(seeds):
    """600 experiments, 60 problems of which nearly all are solved: never more than 5%, and no
    interval of width 0. Without the floor it is 10% for two seeds."""
    false = 0
    for seed in range(600):
        rng = np.random.default_rng(seed)
        mine, base = rng.random((2, seeds, 60)) < 0.99
        e = paired_difference(mine.astype(float) - base, draws=400)
        assert e.high > e.low
        false += e.p < 0.05
    assert false <= 30
