"""Sparsity by hand, and which runs it can be measured on."""
import json
import math

import numpy as np
import pytest
import torch
from conftest import credit_columns, write_log

from engine.errors import UserError
from research import __main__ as overview
from research.probes import sparsity
from research.probes.sparsity import HOYER, SATURATION, WITHOUT


def test_hoyer_by_hand():
    assert sparsity.hoyer(torch.tensor([0.0, 0.0, -2.0, 0.0])) == pytest.approx(1)
    assert sparsity.hoyer(torch.full((9,), -0.5)) == pytest.approx(0)
    two = (math.sqrt(2) - 7 / 5) / (math.sqrt(2) - 1)
    assert sparsity.hoyer(torch.tensor([3.0, -4.0])) == pytest.approx(two)


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
    assert measures[WITHOUT] == pytest.approx(1 / 3)
    assert measures[SATURATION] == pytest.approx((0.5 + 0 + 0.25) / 3)


def test_thirds_by_hand():
    """Variances 2 and 2, two values each: 2 degrees of freedom."""
    first, last, change = sparsity.thirds(np.array([0.0, 2.0, 50.0, 50.0, 7.0, 9.0]))
    assert (first, last, change.value) == (1, 8, 7)
    assert change.high - 7 == pytest.approx(4.302653 * math.sqrt(2), rel=1e-4)
    _, _, of_two_steps = sparsity.thirds(np.array([1.0, 2.0]))
    assert not np.isfinite(of_two_steps.low)


def test_what_counts_as_sparser():
    """Tokens leave less open, so they become sparser; Hoyer's sparsity falls in both batches."""
    series = {"success": np.array([0.1] * 9), SATURATION: np.linspace(0.5, 0.1, 9)}
    hoyers = {0: np.array([[0.5, 0.2], [0.6, 0.2]]), 40: np.array([[0.4, 0.2], [0.5, 0.2]])}
    rows = {row[0]: row[1:] for row in sparsity.changes_table(series, hoyers).rows}
    assert rows[SATURATION][-1] == "sparser" and rows["success"][-1] == "-"
    assert rows[HOYER][:3] == pytest.approx((0.55, 0.45, -0.1))
    assert rows[HOYER][-1] == "less sparse"


def measure(tmp_path, run):
    overview.main(["sparsity", "--quick", "--threads", "1", "--run", str(run),
                   "--out", str(tmp_path / "out")])


def test_a_run_that_is_none_is_refused_before_anything_is_measured(tmp_path, learner):
    two_steps = {1: three_groups(), 2: three_groups()}
    runs = {"is not a run folder": tmp_path / "none",
            "fewer than two credit files": write_log(tmp_path / "run", {1: three_groups()},
                                                     config={"model": str(learner)}),
            "has no checkpoints": write_log(tmp_path / "bare", two_steps,
                                            config={"model": "nowhere"})}
    for words, run in runs.items():
        with pytest.raises(UserError, match=words):
            measure(tmp_path, run)
    assert not (tmp_path / "out").exists()


def test_a_quick_run_on_a_run_whose_model_is_the_only_checkpoint(tmp_path, learner, capsys):
    steps = {step: three_groups() for step in (1, 2, 5)}
    measure(tmp_path, write_log(tmp_path / "run", steps, config={"model": str(learner)}))
    table, = json.loads((tmp_path / "out/numbers.json").read_text())["tables"]
    rows = {row[""]: row for row in table["rows"]}
    assert rows["success"]["first"] == 0.5 and rows[WITHOUT]["change"] == 0
    assert 0 < rows[HOYER]["first"] == rows[HOYER]["last"] < 1
    assert rows[HOYER]["it is"] == "too few"
