"""Sparsity by hand and by enumeration, and which runs it can be measured on."""
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import credit_columns, write_log

from engine.errors import UserError
from research.probes import rank, sparsity
from research.probes.common import run_probe

NAN = pytest.approx(math.nan, nan_ok=True)


@pytest.mark.parametrize("right, G, R", [
    (0, 4, 2), (1, 4, 2), (2, 5, 2), (3, 6, 3), (5, 5, 4), (2, 6, 6)])
def test_the_chance_of_equal_answers_by_drawing_all_groups(right, G, R):
    answers = [1] * right + [0] * (G - right)
    are_equal = [len(set(group)) == 1 for group in itertools.combinations(answers, R)]
    assert sparsity.chance_of_equal(right, G, R) == pytest.approx(np.mean(are_equal))


@pytest.mark.parametrize("p, G, R", [(0.3, 6, 2), (0.3, 6, 4), (0.8, 5, 5)])
def test_the_chance_of_equal_answers_is_estimated_without_bias(p, G, R):
    expected = 0.0
    for k in range(G + 1):
        likely = math.comb(G, k) * p ** k * (1 - p) ** (G - k)
        expected += likely * sparsity.chance_of_equal(k, G, R)
    assert expected == pytest.approx(p ** R + (1 - p) ** R)
    assert sparsity.chance_of_equal(1, G, G + 1) == NAN


def test_hoyer_by_hand():
    assert sparsity.hoyer(torch.tensor([0.0, 0.0, -2.0, 0.0])) == pytest.approx(1)
    assert sparsity.hoyer(torch.full((9,), -0.5)) == pytest.approx(0)
    two = (math.sqrt(2) - 7 / 5) / (math.sqrt(2) - 1)
    assert sparsity.hoyer(torch.tensor([3.0, -4.0])) == pytest.approx(two)
    gaussian = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert sparsity.hoyer(gaussian) == pytest.approx(1 - math.sqrt(2 / math.pi), abs=0.01)


def three_groups():
    """Two answers each, of one and two tokens: the first group has advantages, the second none,
    the third in a second token only."""
    return credit_columns([1, 2] * 3, [0, 0, 1, 1, 2, 2],
                          advantage=[1, -1, -1, 0, 0, 0, 0, 0, 1],
                          collision=[0.5] * 3 + [1] * 3 + [0.75] * 3,
                          reward_answer=[1, 0, 1, 1, 0, 0])


def test_a_steps_sparsity_by_hand():
    measures = sparsity.step_measures(three_groups())
    assert measures["success"] == 0.5
    assert measures[sparsity.WITHOUT] == pytest.approx(1 / 3)
    assert measures["expected, R = 2"] == pytest.approx(2 / 3)
    assert measures["expected, R = 4"] == NAN
    assert measures[sparsity.SATURATION] == pytest.approx((0.5 + 0 + 0.25) / 3)


def test_thirds_by_hand():
    """Variances 2 and 2, two values each: 2 degrees of freedom."""
    first, last, change = sparsity.thirds(np.array([0.0, 2.0, 50.0, 50.0, 7.0, 9.0]))
    assert (first, last, change.value) == (1, 8, 7)
    assert change.high - 7 == pytest.approx(4.302653 * math.sqrt(2), rel=1e-4)
    _, _, of_two_steps = sparsity.thirds(np.array([1.0, 2.0]))
    assert not np.isfinite(of_two_steps.low)


@pytest.mark.parametrize("low, high, sign, expected", [
    (0.1, 0.2, 1, "sparser"), (0.1, 0.2, -1, "less sparse"), (-0.2, -0.1, 1, "less sparse"),
    (-0.2, -0.1, -1, "sparser"), (-0.1, 0.1, -1, "no change seen"),
    (math.nan, math.nan, 1, "too few")])
def test_what_counts_as_sparser(low, high, sign, expected):
    assert sparsity.verdict(SimpleNamespace(low=low, high=high), sign) == expected


def test_which_checkpoints_are_compared(tmp_path, learner):
    run = write_log(tmp_path / "run", {}, config={"model": str(learner)})
    for step in (10, 20, 30, 40):
        (run / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    (run / "checkpoints/step_000030_kept").mkdir()
    chosen = sparsity.checkpoints(run)
    assert list(chosen) == [0, 20, 40] and chosen[0] == learner
    bare = write_log(tmp_path / "bare", {}, config={"model": "nowhere"})
    assert sparsity.checkpoints(bare) == {}


def test_a_run_that_is_none_is_refused_before_anything_is_measured(tmp_path):
    def measure(run):
        argv = ["--quick", "--run", str(run), "--out", str(tmp_path / "out")]
        run_probe("rank", rank.__doc__, rank.FLAGS, rank.measure, argv)

    with pytest.raises(UserError, match="is not a run folder"):
        measure(tmp_path / "none")
    with pytest.raises(UserError, match="fewer than two credit files"):
        measure(write_log(tmp_path / "run", {1: three_groups()}))
    steps = {1: three_groups(), 2: three_groups()}
    with pytest.raises(UserError, match="has no checkpoints"):
        measure(write_log(tmp_path / "bare", steps, config={"model": "nowhere"}))
    assert not (tmp_path / "out").exists()


def test_over_the_steps_of_a_run(tmp_path):
    run = write_log(tmp_path / "run", {step: three_groups() for step in (1, 2, 5)})
    steps, series = sparsity.series_of(run)
    assert steps == [1, 2, 5]
    assert series["success"].tolist() == [0.5] * 3
    assert "expected, R = 4" not in series
    rows = sparsity.steps_table(series).rows
    assert [row[0] for row in rows] == ["success", sparsity.WITHOUT, "expected, R = 2",
                                        sparsity.SATURATION]
