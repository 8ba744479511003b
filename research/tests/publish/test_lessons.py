"""The curves of the pictures that explain: points worked out by hand."""
import math
from dataclasses import fields

import numpy as np
import pytest

from harness.settings import Settings
from research.publish import lessons_of_runs
from research.publish.lessons import (ALTERNATIVES, CLIP, clipped_losses, gradient_sizes,
                                          z_scores)
from research.publish.pictures import shown_of
from research.publish.results import Results


def test_the_gradients_size_by_hand():
    """At p = 0.5: sqrt(1 - 2 p + sum p^2), with the rest at one, at three, and at very many."""
    curves = gradient_sizes()
    near = min(range(len(curves["p"])), key=lambda i: abs(curves["p"][i] - 0.5))
    p = curves["p"][near]
    expected = [math.sqrt(2) * (1 - p), math.sqrt(4 / 3) * (1 - p), 1 - p]
    assert [curves[name][near] for name in ALTERNATIVES] == pytest.approx(expected, abs=2e-4)
    assert all(curves[name][-1] == 0 for name in ALTERNATIVES)  # p = 1


def test_the_z_score_by_hand():
    """With 12 of 16 right +0.577 and -1.732, less a little by epsilon."""
    curves = z_scores()
    place = curves["share"].index(0.75)
    assert curves["right"][place] == pytest.approx(0.577, abs=1e-3)
    assert curves["wrong"][place] == pytest.approx(-1.732, abs=1e-3)


@pytest.mark.parametrize("ratio, positive, negative", [
    (0.7, (-0.7, -0.7), (0.8, 0)), (1.0, (-1, -1), (1, 1)), (1.3, (-1.28, 0), (1.3, 1.3))])
def test_the_clip_by_hand(ratio, positive, negative):
    """The loss and its derivative by log p: -r A, or where the clip holds its bound and 0."""
    curves = clipped_losses()
    place = curves["ratio"].index(ratio)
    for name, expected in (("positive", positive), ("negative", negative)):
        found = [curves[f"{name}: {what}"][place] for what in ("loss", "derivative")]
        assert found == pytest.approx(expected, abs=1e-4)


def test_the_bounds_of_the_picture_are_those_of_the_flags():
    usual = {field.name: field.default for field in fields(Settings)}
    assert (usual["clip_low"], usual["clip_high"]) == CLIP


@pytest.mark.parametrize("arm", lessons_of_runs.SHOWN_ARMS)
def test_the_dots_of_an_arm_have_the_mean_that_the_leaderboard_says(arm):
    gain = {f"{row['arm']} {row['rate']}": row["gain"]["value"]
            for row in shown_of(Results(), "board", "board")["rows"]}
    pairs = lessons_of_runs.differences_by_seed(shown_of(Results(), "board", "values"), arm)
    assert len(pairs) == 12 and pairs.mean() == pytest.approx(gain[arm], abs=1e-6)


def test_the_curves_of_a_run_are_those_that_it_printed():
    """48 steps, and the evaluations before, in the middle and at the end, by the page's numbers."""
    by_step, held_out = lessons_of_runs.curves_of(
        row["line"] for row in shown_of(Results(), "real_run", "transcript")["rows"])
    assert [step for step, _, _ in by_step] == list(range(1, 49))
    assert by_step[1] == [2, 14.1, 0.493]  # "skipped" in a step's line is no obstacle:
    assert by_step[-1] == [48, 100.0, 0.009]
    assert held_out == [[0, 26.4, 21.3, 32.2], [24, 71.6, 65.7, 76.8], [48, 82.8, 77.6, 87.0]]


def test_the_weights_of_the_recorded_tokens_have_mean_1_and_those_of_plain_grpo_are_1():
    curves = lessons_of_runs.weights_by_probability()
    tokens = np.array(curves["tokens"])
    assert curves["none: weight"] == [1.0] * lessons_of_runs.BINS
    for name in lessons_of_runs.SHOWN_WEIGHTINGS:
        mean = (tokens * curves[f"{name}: weight"]).sum() / tokens.sum()
        assert mean == pytest.approx(1, abs=1e-3), name
    unsure, sure = curves["none: gradient"][0], curves["none: gradient"][-1]
    assert unsure > 1 > 0.05 > sure  # s is near 0 where the model was sure
