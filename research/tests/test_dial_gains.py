"""Gains at chosen learning rates: by hand, and by simulations whose truth is known."""
import numpy as np
import pytest

from analysis.statistics import quotient, student_quantile
from research.dial import gains
from research.dial.gains import ArmsOfTask


def test_a_half_takes_the_rate_that_is_best_on_the_other_half():
    """Seeds 1 and 2 are best at the first rate, 3 and 4 at the second: so they change them."""
    arms = ArmsOfTask(["one", "two"], np.array([[[8.0, 6, 1, 3], [5, 7, 9, 4]],
                                                [[1.0, 1, 1, 1], [2, 2, 2, 4]]]))
    assert arms.chosen.tolist() == [[1, 0], [1, 1]]
    assert arms.at_chosen_rate.tolist() == [[5, 7, 1, 3], [2, 2, 2, 4]]
    assert arms.mean("one") == 4 and arms.best_rate("one") == 1
    assert arms.difference("one", "two").value == pytest.approx(1.5)


def test_rates_are_chosen_anew_in_each_draw():
    """Against a loop over draws, arms and halves. Five seeds: the halves have two and three."""
    rng = np.random.default_rng(3)
    success = rng.normal(size=(2, 3, 5))
    arms = ArmsOfTask(["one", "two"], success)
    again = np.random.default_rng(0)
    times = [again.multinomial(n - 1, [1 / n] * n, size=gains.RESAMPLES) for n in (2, 3)]
    parts = [slice(0, 2), slice(2, 5)]
    choices = set()
    for draw in range(50):
        for arm in range(2):
            means = []
            for part, counts in zip(parts, times):
                drawn = np.repeat(success[arm, :, part], counts[draw], axis=1)
                means.append(drawn.mean(1))
            of_halves = [means[0][means[1].argmax()], means[1][means[0].argmax()]]
            expected = (2 * of_halves[0] + 3 * of_halves[1]) / 5
            assert arms.resampled[draw, arm] == pytest.approx(expected)
            choices.add((means[1].argmax(), means[0].argmax()))
    assert len(choices) > 3


def test_with_one_rate_it_is_the_mean_with_its_standard_error():
    """Nothing is chosen. Each half of 20 seeds has its own mean, so 38 degrees of freedom."""
    rng = np.random.default_rng(4)
    success = rng.normal(size=(2, 1, 40)) + rng.normal(size=40)
    difference = success[0, 0] - success[1, 0]
    found = ArmsOfTask(["one", "two"], success).difference("one", "two")
    of_halves = [half.var(ddof=1) / 20 for half in (difference[:20], difference[20:])]
    reach = student_quantile(0.975, 38) * (sum(of_halves) / 4) ** 0.5
    assert found.value == pytest.approx(difference.mean())
    assert found.high - found.value == pytest.approx(reach, rel=0.05)


def test_what_all_arms_share_by_seed_is_no_uncertainty():
    """The second arm is always 1 better: the same seeds are drawn for both, in all draws."""
    plain = np.random.default_rng(5).normal(size=(1, 2, 8))
    arms = ArmsOfTask(["plain", "true", "half"], np.concatenate([plain, plain + 1, plain + 0.5]))
    assert arms.difference("true", "plain").interval == pytest.approx((1, 1))
    assert arms.share("half", "true", "plain").interval == pytest.approx((0.5, 0.5))
    assert arms.share("half", "plain", "true") is None  # a loss is no whole


NEARLY_EQUAL = [[0.70, 0.800, 0.803], [0.75, 0.860, 0.863]]
ONE_IS_BEST = [[0.70, 0.80, 0.70], [0.72, 0.86, 0.77]]
NO_GAIN = [[0.70, 0.800, 0.803], [0.70, 0.800, 0.803]]


@pytest.mark.parametrize("truth, gain", [(NEARLY_EQUAL, 0.06), (ONE_IS_BEST, 0.06), (NO_GAIN, 0)])
def test_intervals_hold_a_known_truth(truth, gain):
    """Of 300 experiments with skewed noise at least 92 in 100, and no bias."""
    rng = np.random.default_rng(6)
    values, inside = [], 0
    for _ in range(300):
        noise = 0.02 * rng.exponential(size=48) + 0.04 * rng.exponential(size=(2, 3, 48))
        arms = ArmsOfTask(["plain", "mine"], np.array(truth)[..., None] - noise)
        found = arms.difference("mine", "plain")
        inside += found.low <= gain <= found.high
        values.append(found.value)
    assert inside >= 0.92 * 300
    assert np.mean(values) == pytest.approx(gain, abs=0.003)


def test_a_quotient_and_its_interval_by_hand():
    """t is 4.303: the interval ends where 3 - 6 x is t standard errors, and at nothing else."""
    covariance = np.array([[0.25, 0.1], [0.1, 0.16]])
    found = quotient(3.0, 6.0, covariance, 2)
    assert found.value == 0.5 and found.low < 0.5 < found.high
    for x in found.interval:
        error = (0.25 - 2 * x * 0.1 + x ** 2 * 0.16) ** 0.5
        assert abs(3 - 6 * x) == pytest.approx(4.3027 * error, rel=1e-3)
    assert quotient(3.0, 1.7, covariance, 2) is None   # 1.7 is 4.25 standard errors above 0
    assert quotient(3.0, -6.0, covariance, 2) is None
