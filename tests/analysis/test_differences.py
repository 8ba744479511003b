"""Which differences between arms are called real: pairing, correction, verdicts."""

import json

import numpy as np
import pytest
from conftest import evaluation
from logs import comparison_of, make, rows_of, write_run

from analysis import differences as differences_file
from analysis.arms import Comparison
from analysis.differences import MEASURES, PRIMARY, area, difference, differences, evaluated
from analysis.statistics import Estimate, paired_difference


def test_better_worse_and_no_difference_seen(tmp_path):
    arms = {
        "base": (0.5, {}),
        "good": (0.8, {"mitigation": "entropy_ratio"}),
        "bad": (0.2, {"mitigation": "random"}),
        "same": (0.5, {"mitigation": "equal_gradient"}),
    }
    comparison = comparison_of(make(tmp_path, arms))
    rows = rows_of(comparison)
    assert comparison.baseline == "none"
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "entropy_ratio": "better",
        "random": "worse",
        "equal_gradient": "no difference seen",
    }
    for row in rows.values():
        low, high = row["95%"]
        assert (
            row["seeds"] == 5
            and low < row["difference"] < high
            and (row["verdict"] == "no difference seen") == (low < 0 < high)
        )
    finding = differences(comparison, "final success, sampled").finding
    assert "Better than none: entropy_ratio." in finding and "Worse than none: random." in finding
    assert (
        "No difference seen: equal_gradient (could have seen about "
        f"{100 * rows['equal_gradient']['could see']:.0f} points)." in finding
    )


def test_pairs_are_of_the_same_seed_and_the_same_problem(tmp_path):
    """A seed that is good for both arms makes no difference; only seeds of both arms count."""
    folders = make(tmp_path, {"base": (0.5, {}), "other": (0.5, {"mitigation": "random"})}, seeds=3)
    comparison = comparison_of(folders[:3] + folders[4:])  # the other arm has no seed 0
    seeds, e = difference(comparison, "random", "none", "final success, sampled")
    runs = {
        (run["config"]["mitigation"], run["config"]["seed"]): np.array(
            run["evaluations"][2]["answer"], float
        )
        for arm in comparison.arms.values()
        for run in arm
    }
    expected = np.stack([runs["random", seed] - runs["none", seed] for seed in (1, 2)])
    assert seeds == [1, 2] and e == paired_difference(expected)
    assert difference(comparison, "none", "random", "final success, sampled")[0] == [1, 2]


def test_an_evaluation_before_the_end_is_not_the_final_one(tmp_path):
    folders = make(tmp_path, {"base": (0.5, {}), "arm": (0.9, {"mitigation": "random"})}, seeds=2)
    path = tmp_path / "arm-s1/evaluations.jsonl"
    path.write_text(path.read_text().replace('"step": 10', '"step": 5'))
    comparison = comparison_of(folders)
    assert {measure: rows_of(comparison, measure)["random"]["seeds"] for measure in MEASURES} == {
        "final success, sampled": 1,
        "final success, greedy": 1,
        "area under the held-out curve, sampled": 1,
        "mean success in training batches": 2,
    }


def test_one_seed_is_one_seed(tmp_path):
    comparison = comparison_of(
        make(tmp_path, {"base": (0.1, {}), "good": (0.9, {"mitigation": "random"})}, seeds=1)
    )
    row = rows_of(comparison)["random"]
    assert (
        row["verdict"] == "one seed: no verdict"
        and row["could see"] is None
        and row["95%"][0] > 0.5
    )
    assert "One seed is one seed" in differences(comparison, "final success, sampled").finding


def test_holm_over_the_arms(tmp_path, monkeypatch):
    """p = 0.03 alone would be seen; of three arms it is not."""
    arms = {
        "base": (0.5, {}),
        **{f"arm{i}": (0.5, {"mitigation": "random", "placebo_std": float(i)}) for i in (1, 2, 3)},
    }
    comparison = comparison_of(make(tmp_path, arms, seeds=2))
    found = {
        "random placebo_std 1.0": 0.03,
        "random placebo_std 2.0": 0.001,
        "random placebo_std 3.0": 0.9,
    }
    monkeypatch.setattr(
        differences_file,
        "difference",
        lambda c, one, other, measure, tests: ([0, 1], Estimate(0.1, 0.01, 0.19, found[one], 0.1)),
    )
    rows = rows_of(comparison)
    assert [rows[name]["Holm p"] for name in found] == pytest.approx([0.06, 0.003, 0.9])
    assert [rows[name]["verdict"] for name in found] == [
        "no difference seen",
        "better",
        "no difference seen",
    ]


def test_a_true_null_between_arms_is_called_null(tmp_path):
    """50 experiments of four arms without a difference, three seeds each: no arm is called
    better or worse in at least 45."""
    wrong = 0
    for i in range(50):
        rng = np.random.default_rng(i)
        ends = {
            arm: {
                seed: {
                    "folder": f"{arm}{seed}",
                    "metrics": [{"step": 1}],
                    "config": {
                        "steps": 1,
                        "seed": seed,
                        "mitigation": arm,
                        "model": "m",
                        "advantage": "grpo",
                    },
                    "evaluations": [
                        evaluation(1, (rng.random(100) < 0.5 + shift).astype(int).tolist())
                    ],
                }
                for seed in range(3)
                for shift in [rng.normal(0, 0.05)]
            }
            for arm in ("none", "a", "b", "c")
        }
        comparison = Comparison([run for arm in ends.values() for run in arm.values()], None)
        wrong += any(row["verdict"] in ("better", "worse") for row in rows_of(comparison).values())
    assert wrong <= 5


def test_the_area_is_that_of_straight_lines():
    """Steps 0, 10, 40: (0 + 1) / 2 * 10 + (1 + 1) / 2 * 30 = 35, over 40 steps 0.875; then wrong
    again: 20 / 40."""
    run = {
        "config": {"steps": 40},
        "evaluations": [evaluation(40, [1, 0]), evaluation(0, [0, 0]), evaluation(10, [1, 1])],
    }
    assert area(run, [0, 10, 40], "sampled").tolist() == [0.875, 0.5] and area(
        run, [0, 40], "sampled"
    ).tolist() == [0.5, 0.0]
    assert (
        evaluated(run, "sampled") == [0, 10, 40]
        and evaluated({**run, "config": {"steps": 50}}, "sampled") == []
    )


def test_areas_are_over_the_steps_at_which_both_were_evaluated(tmp_path):
    """The same curve, evaluated once more in one arm: no difference."""
    runs = []
    for name, steps in (("none", (0, 10)), ("random", (0, 5, 10))):
        for seed in range(2):
            run = write_run(tmp_path / f"{name}{seed}", 0.5, seed, mitigation=name)
            answers = {0: [0, 0], 5: [1, 1], 10: [1, seed]}
            (run / "evaluations.jsonl").write_text(
                "".join(json.dumps(evaluation(step, answers[step])) + "\n" for step in steps)
            )
            runs.append(run)
    for baseline in ("none", "random"):
        rows = rows_of(comparison_of(runs, baseline), "area under the held-out curve, sampled")
        assert [row["difference"] for row in rows.values()] == [0.0]


def test_an_arm_and_its_own_placebo(tmp_path):
    arms = {
        "base": (0.5, {}),
        "arm": (0.8, {"mitigation": "entropy_ratio"}),
        "placebo": (0.5, {"mitigation": "entropy_ratio", "placebo": "weights"}),
    }
    rows = rows_of(comparison_of(make(tmp_path, arms)))
    assert list(rows) == [
        "entropy_ratio",
        "entropy_ratio placebo weights",
        "entropy_ratio - entropy_ratio placebo weights",
    ]
    assert (
        rows["entropy_ratio - entropy_ratio placebo weights"]["verdict"] == "better"
        and rows["entropy_ratio - entropy_ratio placebo weights"]["Holm p"] < 0.05
    )


def test_arms_and_placebos_are_corrected_apart(tmp_path, monkeypatch):
    """p = 0.03 in all three rows: over two arms 0.06, over one placebo 0.03."""
    arms = {
        "base": (0.5, {}),
        "arm": (0.8, {"mitigation": "entropy_ratio"}),
        "placebo": (0.5, {"mitigation": "entropy_ratio", "placebo": "weights"}),
    }
    comparison = comparison_of(make(tmp_path, arms, seeds=2))
    monkeypatch.setattr(
        differences_file, "difference", lambda *_: ([0, 1], Estimate(0.1, 0.01, 0.19, 0.03, 0.1))
    )
    assert [row["Holm p"] for row in rows_of(comparison).values()] == pytest.approx(
        [0.06, 0.06, 0.03]
    )


def test_one_measure_decides_and_the_others_are_exploratory(tmp_path):
    comparison = comparison_of(
        make(tmp_path, {"base": (0.5, {}), "good": (0.8, {"mitigation": "random"})}, seeds=3)
    )
    findings = {measure: differences(comparison, measure).finding for measure in MEASURES}
    assert [
        measure for measure, finding in findings.items() if not finding.startswith("Exploratory")
    ] == [PRIMARY]


def test_training_success_that_happens_to_agree_is_no_proof(tmp_path):
    """Equal success in every batch of both seeds: 10 steps of 8 x 8 answers, so the chance is that
    of 640 answers a run, binomial with one success and one failure added."""
    config = {"questions": 8, "answers": 8}
    arms = {"base": (0.5, config), "arm": (0.6, {"mitigation": "random", **config})}
    comparison = comparison_of(make(tmp_path, arms, seeds=2, spread=0))
    row = rows_of(comparison, "mean success in training batches")["random"]
    low, high = row["95%"]
    shares = [(0.55 * end * 640 + 1) / 642 for end in (0.5, 0.6)]
    chance = sum(2 * share * (1 - share) / 642 for share in shares) / 2**2
    assert row["difference"] == pytest.approx(0.055) and row["Holm p"] > 0
    assert (high - low) / 2 == pytest.approx(1.96 * chance**0.5, rel=1e-3)
