"""The gains of ten methods that were predicted before their runs (lab/results/predicted.json), and
the sentences about how far off the predictions were."""
import json

import numpy as np
import pytest
from conftest import ROOT

STORED = json.loads((ROOT / "lab/results/predicted.json").read_text("utf-8"))
PREDICTED = STORED["predicted"]


def gains():
    """{arm: (seeds,)}, in points of mean success over all answers."""
    success = {}
    for name, (answers, _, right) in STORED["values"]["runs"].items():
        arm, _, seed = name.rpartition("-s")
        counts = [int(count) for count in right.split()]
        success.setdefault(arm, {})[seed] = 100 * np.mean(counts) / answers
    plain = success.pop("none")
    assert all(of_arm.keys() == plain.keys() for of_arm in success.values())
    return {arm: np.array([of_arm[seed] - plain[seed] for seed in plain])
            for arm, of_arm in success.items()}


def test_predictions_follow_from_the_measurement():
    assert PREDICTED == pytest.approx(
        {arm: STORED["slope"] * STORED["measured"][arm]["adam"] for arm in PREDICTED}, abs=0.051)
    known = STORED["known"]
    x = np.array([STORED["measured"][arm]["adam"] for arm in known])
    y = np.array([*known.values()])
    assert x @ y / (x @ x) == pytest.approx(STORED["slope"], abs=0.05)
    assert gains().keys() == PREDICTED.keys()


def test_the_log_says_how_far_off_the_predictions_were():
    seen = np.array([gains()[arm].mean() for arm in PREDICTED])
    predicted = np.array([*PREDICTED.values()])
    off, of_zero = np.abs(predicted - seen).mean(), np.abs(seen).mean()
    ranks = [values.argsort().argsort() for values in (predicted, seen)]
    log = " ".join((ROOT / "lab/LOG.md").read_text("utf-8").split())
    assert f"off by {off:.1f} points, and *always 0* by {of_zero:.1f}" in log
    assert f"rank correlation is {np.corrcoef(*ranks)[0, 1]:.2f}. **Learned**" in log
