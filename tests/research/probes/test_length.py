"""Success and leads of the probe length by hand, and what every method spends."""
from types import SimpleNamespace

import pytest

from research.probes import length
from research.probes.length import METHODS, area, lead_over_grpo, trend_table

LENGTHS = [8, 16, 32]


def test_success_at_equal_tokens():
    """A step from 0.2 to 0.6 over 100 tokens, flat after: mean over 200 is (0.4 + 0.6) / 2."""
    assert area([(0, 0.2), (100, 0.6), (400, 0.6)], 200) == pytest.approx(0.5, abs=1e-3)


def test_leads_and_their_trend_by_hand():
    """A lead of 0.1, 0.2, 0.3 at 8, 16, 32 tokens and of 0.3, 0.2, 0.1, a little more in the
    second seed. Plain GRPO has spent 100 tokens, the others more, which does not count."""
    success = {"grpo": (0.5, 0.5, 0.5), "critic": (0.8, 0.7, 0.6), "exact": (0.6, 0.7, 0.8)}
    curves = {}
    for i, size in enumerate(LENGTHS):
        curves["grpo", size] = [[(0, 0.5), (100, 0.5)]] * 2
        for method in ("critic", "exact"):
            curves[method, size] = [[(0, s), (100, s), (200, 9.0)]
                                    for s in (success[method][i], success[method][i] + 0.001)]
    leads = {method: lead_over_grpo(curves, method, LENGTHS) for method in ("critic", "exact")}
    assert leads["exact"][0] == pytest.approx([0.1, 0.2, 0.3])
    table = trend_table(leads, LENGTHS)
    critic, exact = (dict(zip(table.columns, row)) for row in table.rows)
    assert exact["the lead"] == "grows" and exact["a doubling"] == pytest.approx(0.1)
    assert critic["a doubling"] == pytest.approx(-0.1) and critic["8"] == pytest.approx(0.3005)
    assert critic["95%, 8"][0] < 0.3005 < critic["95%, 8"][1]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_spends_the_same_tokens(method):
    args = SimpleNamespace(learning_rate=1e-3, continuations=1, segments=2, answers=4, steps=3,
                           questions=2)
    curve, of_grpo = (length.train(args, name, 0, 8) for name in (method, "grpo"))
    budget = 3 * 2 * 4 * 8
    assert curve[-2][0] < budget <= curve[-1][0]
    assert curve[0] == of_grpo[0]
    assert (curve[1][1] == of_grpo[1][1]) == (method == "grpo")  # the step is its own
    if method == "monte carlo":  # its continuations count
        assert curve[1][0] > 2 * 4 * 8
    else:
        assert curve[1][0] == 2 * 4 * 8 and curve[-1][0] == budget
