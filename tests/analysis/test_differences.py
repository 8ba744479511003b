"""Which differences between arms are called real: pairing, correction, verdicts."""

import json

import numpy as np
import pytest
from conftest import evaluation
from logs import comparison_of, make, rows_of, write_run

from analysis import compare
from analysis.arms import Comparison
from analysis.compare import PRIMARY, SPEED, area, curve_of, difference, differences
from analysis.statistics import Estimate, paired_difference

SHUFFLED = {"base": (0.5, {}), "arm": (0.8, {"mitigation": "entropy_ratio"}),
            "placebo": (0.5, {"mitigation": "entropy_ratio", "placebo": "weights"})}
AGAINST_PLACEBO = "entropy_ratio - entropy_ratio placebo weights"


def test_better_worse_and_no_difference_seen(tmp_path):
    arms = {"base": (0.5, {}), "good": (0.8, {"mitigation": "entropy_ratio"}),
            "bad": (0.2, {"mitigation": "random"}), "same": (0.5, {"mitigation": "equal_gradient"})}
    comparison = comparison_of(make(tmp_path, arms))
    rows = rows_of(comparison)
    assert comparison.baseline == "none"
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "entropy_ratio": "better", "random": "worse", "equal_gradient": "no difference seen"}
    for row in rows.values():
        low, high = row["95%"]
        assert row["seeds"] == 5 and low < row["difference"] < high
        assert (row["verdict"] == "no difference seen") == (low < 0 < high)
    assert 0 < rows["equal_gradient"]["could see"] < 0.2
    assert "exploratory" in differences(comparison, SPEED).notes[-1]


def test_pairs_are_of_the_same_seed_and_the_same_problem(tmp_path):
    """A seed that is good for both arms makes no difference; only seeds of both arms count."""
    folders = make(tmp_path, {"base": (0.5, {}), "other": (0.5, {"mitigation": "random"})}, seeds=3)
    comparison = comparison_of(folders[:3] + folders[4:])  # the other arm has no seed 0
    found = difference(comparison, "random", "none", PRIMARY)
    answers = {(name, run["config"]["seed"]): np.array(run["evaluations"][2]["answer"], float)
               for name, arm in comparison.arms.items() for run in arm}
    expected = np.stack([answers["random", seed] - answers["none", seed] for seed in (1, 2)])
    assert found == ([1, 2], paired_difference(expected))


def test_holm_over_the_arms(tmp_path, monkeypatch):
    """p = 0.03 alone would be seen; of three arms it is not."""
    arms = {f"arm{i}": (0.5, {"mitigation": "random", "placebo_std": i}) for i in (1.0, 2.0, 3.0)}
    comparison = comparison_of(make(tmp_path, {"base": (0.5, {}), **arms}, seeds=2))
    p = dict(zip(comparison.others(), (0.03, 0.001, 0.9)))
    monkeypatch.setattr(
        compare, "difference",
        lambda c, one, other, measure, tests: ([0, 1], Estimate(0.1, 0.01, 0.19, p[one], 0.1)))
    rows = rows_of(comparison).values()
    assert [row["Holm p"] for row in rows] == pytest.approx([0.06, 0.003, 0.9])
    assert [row["verdict"] for row in rows] == ["no difference seen", "better",
                                                "no difference seen"]


def test_an_arm_and_its_own_placebo(tmp_path, monkeypatch):
    """Corrected apart: p = 0.03 in all three rows is 0.06 over two arms, 0.03 over one placebo."""
    comparison = comparison_of(make(tmp_path, SHUFFLED, seeds=2))
    monkeypatch.setattr(compare, "difference",
                        lambda *_: ([0, 1], Estimate(0.1, 0.01, 0.19, 0.03, 0.1)))
    found = {arm: row["Holm p"] for arm, row in rows_of(comparison).items()}
    assert found == pytest.approx({"entropy_ratio": 0.06, "entropy_ratio placebo weights": 0.06,
                                   AGAINST_PLACEBO: 0.03})


def test_a_true_null_between_arms_is_called_null():
    """50 experiments of four arms without a difference, three seeds each: no arm is called
    better or worse in at least 45."""
    wrong = 0
    for i in range(50):
        rng, runs = np.random.default_rng(i), []
        for arm in ("none", "a", "b", "c"):
            for seed in range(3):
                answers = rng.random(100) < 0.5 + rng.normal(0, 0.05)
                config = {"steps": 1, "seed": seed, "mitigation": arm, "model": "m",
                          "advantage": "grpo"}
                runs.append({"folder": f"{arm}{seed}", "metrics": [{"step": 1}], "config": config,
                             "evaluations": [evaluation(1, answers.astype(int).tolist())]})
        verdicts = {row["verdict"] for row in rows_of(Comparison(runs, None)).values()}
        wrong += bool(verdicts & {"better", "worse"})
    assert wrong <= 5


def test_the_area_is_that_of_straight_lines():
    """Steps 0, 10, 40: (0 + 1) / 2 * 10 + (1 + 1) / 2 * 30 = 35, over 40 steps 0.875; then wrong
    again: 20 / 40."""
    lines = [evaluation(40, [1, 0]), evaluation(0, [0, 0]), evaluation(10, [1, 1])]
    run = {"config": {"steps": 40}, "evaluations": lines}
    assert area(curve_of(run, [0, 10, 40]), [0, 10, 40]).tolist() == [0.875, 0.5]
    assert area(curve_of(run, [0, 40]), [0, 40]).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("baseline", ("none", "random"))
def test_areas_are_over_the_steps_at_which_both_were_evaluated(tmp_path, baseline):
    """The same curve, evaluated once more in one arm: no difference."""
    runs = []
    for name, steps in (("none", (0, 10)), ("random", (0, 5, 10))):
        for seed in range(2):
            run = write_run(tmp_path / f"{name}{seed}", 0.5, seed, mitigation=name)
            answers = {0: [0, 0], 5: [1, 1], 10: [1, seed]}
            lines = [evaluation(step, answers[step]) for step in steps]
            (run / "evaluations.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
            runs.append(run)
    [row] = rows_of(comparison_of(runs, baseline), SPEED).values()
    assert row["difference"] == 0.0
