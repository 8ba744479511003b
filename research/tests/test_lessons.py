"""The curves of the pictures that explain: points worked out by hand."""
import math

import pytest

from research.experiments.lessons import ALTERNATIVES, gradient_sizes, z_scores


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
