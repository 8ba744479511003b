"""Which differences compare.py calls real: arms, pairing, words, and what it refuses to average."""

import json

import numpy as np
import pytest
from conftest import ROOT, credit_columns, evaluation, write_log
from tokenizers import Tokenizer

import analyze
from analysis import arms as arms_file
from analysis import compare, differences as differences_file
from analysis.differences import MEASURES, PRIMARY
from analysis.runs import read_run
from analysis.statistics import Estimate, paired_difference
from engine.errors import UserError

ITEMS = 200


def write_run(folder, success, seed=0, steps=10, rng=None, **config):
    """A finished run: its success at the end on the same 200 problems, drawn; the same start for
    all."""
    rng = rng or np.random.default_rng(seed)
    start = (np.arange(ITEMS) % 4 == 0).astype(int).tolist()
    end = (rng.random(ITEMS) < success).astype(int).tolist()
    lines = [
        line
        for mode in ("sampled", "greedy")
        for line in (evaluation(0, start, mode), evaluation(steps, end, mode))
    ]
    metrics = [
        {
            "step": i,
            "success": success * i / steps,
            "entropy": 0.5,
            "gradient_norm": 0.1 * i,
            "length": 9.0,
        }
        for i in range(1, steps + 1)
    ]
    return write_log(
        folder,
        {1: credit_columns([3, 4], [0, 0])},
        {"seed": seed, "steps": steps, **config},
        metrics,
        lines,
    )


def make(tmp_path, arms, seeds=5, spread=0.02, rng=None):
    """arms: name -> (success, settings)"""
    rng, folders = rng or np.random.default_rng(7), []
    for name, (success, config) in arms.items():
        for seed in range(seeds):
            folders.append(
                str(
                    write_run(
                        tmp_path / f"{name}-s{seed}",
                        float(np.clip(success + rng.normal(0, spread), 0, 1)),
                        seed,
                        rng=rng,
                        **config,
                    )
                )
            )
    return folders


def comparison_of(folders, baseline=None):
    return arms_file.Comparison([read_run(folder) for folder in folders], baseline)


def rows_of(comparison, measure="final success, sampled"):
    return {
        row["arm"]: row
        for row in differences_file.differences(comparison, measure).to_json()["rows"]
    }


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
    finding = differences_file.differences(comparison, "final success, sampled").finding
    assert "Better than none: entropy_ratio." in finding and "Worse than none: random." in finding
    assert (
        "No difference seen: equal_gradient (could have seen about "
        f"{100 * rows['equal_gradient']['could see']:.0f} points)."
        in finding
    )


def test_pairs_are_of_the_same_seed_and_the_same_problem(tmp_path):
    """A seed that is good for both arms makes no difference; only seeds that both arms have count."""
    folders = make(tmp_path, {"base": (0.5, {}), "other": (0.5, {"mitigation": "random"})}, seeds=3)
    comparison = comparison_of(folders[:3] + folders[4:])  # the other arm has no seed 0
    seeds, e = differences_file.difference(comparison, "random", "none", "final success, sampled")
    runs = {
        (run["config"]["mitigation"], run["config"]["seed"]): np.array(
            run["evaluations"][1]["answer"], float
        )
        for arm in comparison.arms.values()
        for run in arm
    }
    expected = np.stack([runs["random", seed] - runs["none", seed] for seed in (1, 2)])
    assert seeds == [1, 2] and e == paired_difference(expected)
    assert differences_file.difference(comparison, "none", "random", "final success, sampled")[
        0
    ] == [1, 2]


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
    assert (
        "One seed is one seed"
        in differences_file.differences(comparison, "final success, sampled").finding
    )


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
    """100 experiments of four arms without a difference, three seeds each: no arm is called
    better or worse in at least 90."""
    wrong = 0
    for i in range(100):
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
        comparison = arms_file.Comparison(
            [run for arm in ends.values() for run in arm.values()], None
        )
        wrong += any(row["verdict"] in ("better", "worse") for row in rows_of(comparison).values())
    assert wrong <= 10


def test_the_area_is_that_of_straight_lines():
    """Steps 0, 10, 40: (0 + 1) / 2 * 10 + (1 + 1) / 2 * 30 = 35, over 40 steps 0.875; then wrong
    again: 20 / 40."""
    run = {
        "config": {"steps": 40},
        "evaluations": [evaluation(40, [1, 0]), evaluation(0, [0, 0]), evaluation(10, [1, 1])],
    }
    assert differences_file.area(run, [0, 10, 40], "sampled").tolist() == [
        0.875,
        0.5,
    ] and differences_file.area(run, [0, 40], "sampled").tolist() == [0.5, 0.0]
    assert (
        differences_file.evaluated(run, "sampled") == [0, 10, 40]
        and differences_file.evaluated({**run, "config": {"steps": 50}}, "sampled") == []
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


def test_arms_are_told_apart_by_what_differs(tmp_path):
    runs = [
        write_run(tmp_path / f"r{i}", 0.5, i, **config)
        for i, config in enumerate(
            [
                {"learning_rate": 1e-3},
                {"learning_rate": 1e-3},
                {"learning_rate": 1e-4},
                {"mitigation": "outcome_conditional", "think_discount": 0.5, "learning_rate": 1e-3},
                {
                    "mitigation": "outcome_conditional",
                    "think_discount": 0.25,
                    "learning_rate": 1e-3,
                },
                {"critic_lr": 9.0, "threads": 4, "out": "x", "learning_rate": 1e-3},
            ]
        )
    ]
    comparison = comparison_of(runs, "none")
    assert {name: len(arm) for name, arm in comparison.arms.items()} == {
        "none": 3,
        "none learning_rate 0.0001": 1,
        "outcome_conditional think_discount 0.5": 1,
        "outcome_conditional think_discount 0.25": 1,
    }  # critic_lr has no effect without gae
    assert comparison.usual == {"learning_rate": 1e-3}


def test_1_and_1_0_are_the_same_setting(tmp_path):
    runs = [
        write_run(tmp_path / f"r{seed}", 0.5, seed, max_grad_norm=value)
        for seed, value in enumerate((1, 1.0))
    ]
    assert len(comparison_of(runs).arms) == 1


def test_the_baseline_can_be_named_and_has_to_be_when_it_is_not_clear(tmp_path):
    runs = [
        str(write_run(tmp_path / f"r{i}", 0.5, **config))
        for i, config in enumerate(
            [
                {"learning_rate": 1e-3},
                {"learning_rate": 1e-4},
                {"mitigation": "random", "learning_rate": 1e-3},
            ]
        )
    ]
    with pytest.raises(UserError, match="which arm is the baseline"):
        comparison_of(
            [
                str(write_run(tmp_path / f"q{i}", 0.5, **config))
                for i, config in enumerate(
                    [{"advantage": "grpo", "loss_norm": "sequence"}, {"kl": 0.1}]
                )
            ]
        )
    assert comparison_of(runs).baseline == "none"  # the learning rate that most runs have
    assert (
        comparison_of(runs, runs[2]).baseline == comparison_of(runs, "random").baseline == "random"
    )
    assert list(comparison_of(runs, "random").arms)[0] == "random"
    with pytest.raises(UserError, match="--baseline nobody is neither"):
        analyze.main([*runs, "--baseline", "nobody"])


def test_the_same_arm_and_seed_twice_is_an_error(tmp_path):
    runs = [write_run(tmp_path / name, 0.5) for name in ("a", "b")]
    with pytest.raises(UserError, match="a and .*b are the same arm and seed"):
        comparison_of(runs)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "elsewhere"},
        {"steps": 20},
        {"reward": "something else"},
        {"data": "problems.jsonl"},
        {"answers": 4},
    ],
)
def test_what_is_not_comparable_is_said_and_not_averaged(tmp_path, capsys, other):
    runs = [str(write_run(tmp_path / f"a{seed}", 0.5, seed)) for seed in range(2)] + [
        str(write_run(tmp_path / "b0", 0.9, 0, **{"mitigation": "random", **other}))
    ]
    analyze.main([*runs, "--output_dir", str(tmp_path / "out"), "--json"])
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Not comparable" in printed
        and f"{next(iter(other))} " in printed
        and str(next(iter(other.values()))) in printed
        and "(a0, a1)" in printed
        and "(b0)" in printed
    )
    tables = {
        table["name"]: table["rows"]
        for table in json.loads((tmp_path / "out/analysis.json").read_text())
    }
    assert [row["arm"] for row in tables["arms 1"]] == ["none"] and [
        row["arm"] for row in tables["arms 2"]
    ] == ["random"]
    assert not any(name.startswith("final success") for name in tables)


def test_other_held_out_problems_are_another_set(tmp_path):
    a, b = (write_run(tmp_path / name, 0.5) for name in "ab")
    lines = [
        {**json.loads(line), "answer": json.loads(line)["answer"][:50]}
        for line in (b / "evaluations.jsonl").read_text().splitlines()
    ]
    (b / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = arms_file.alike([read_run(a), read_run(b)], arms_file.setting_of)
    assert len(parts) == 2 and "held-out problems 50 (b)" in arms_file.what_differs(parts)


def test_one_measure_decides_and_the_others_are_exploratory(tmp_path):
    comparison = comparison_of(
        make(tmp_path, {"base": (0.5, {}), "good": (0.8, {"mitigation": "random"})}, seeds=3)
    )
    findings = {
        measure: differences_file.differences(comparison, measure).finding for measure in MEASURES
    }
    assert [
        measure for measure, finding in findings.items() if not finding.startswith("Exploratory")
    ] == [PRIMARY]


def test_an_older_run_without_a_reward_on_record_is_of_another_kind(tmp_path):
    a, b = (
        read_run(write_run(tmp_path / name, 0.5, reward=reward))
        for name, reward in (("a", "x"), ("b", None))
    )
    assert len(arms_file.alike([a, b], arms_file.setting_of)) == 2


def test_a_run_still_going_is_shown_and_not_compared(tmp_path, capsys):
    runs = make(tmp_path, {"base": (0.5, {}), "arm": (0.9, {"mitigation": "random"})}, seeds=2)
    config = tmp_path / "arm-s1/metrics.jsonl"
    config.write_text("".join(config.read_text().splitlines(True)[:4]))
    comparison = comparison_of(runs)
    assert rows_of(comparison)["random"]["seeds"] == 1
    assert compare.arms_table(comparison).to_json()["rows"][1]["seeds"] == "0 (1 still going)"
    assert [row["runs"] for row in compare.stability(comparison).to_json()["rows"]] == [2, 1]
    path = tmp_path / "arm-s0/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[:4]))
    assert [row["runs"] for row in compare.stability(comparison_of(runs)).to_json()["rows"]] == [
        2,
        2,
    ]  # none is finished: what there is


def test_stability_by_hand(tmp_path):
    """Norms 0.1 .. 1.0: first and last ten are all, mean 0.55, population std 0.2872, peak 1 /
    0.55; success 0.05 .. 0.5 of 0.5."""
    row = compare.stability(comparison_of([write_run(tmp_path / "a", 0.5)])).to_json()["rows"][0]
    assert (row["norm first"], row["spread"], row["peak"]) == pytest.approx(
        (0.55, 0.28723 / 0.55, 1 / 0.55), rel=1e-4
    )
    assert (row["best"], row["end"]) == pytest.approx((0.4, 0.4))


def test_first_and_last_steps_are_not_the_same(tmp_path):
    """30 steps, norms 0.1 .. 3: first ten 0.55, last ten 2.55; entropy falls from 3 to 0.1."""
    run = write_run(tmp_path / "a", 0.5, steps=30)
    lines = [
        {
            "step": i,
            "success": 0.9 if 5 < i < 11 else 0.2,
            "entropy": 3.1 - 0.1 * i,
            "gradient_norm": 0.1 * i,
        }
        for i in range(1, 31)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = compare.stability(comparison_of([run])).to_json()["rows"][0]
    assert (
        row["norm first"],
        row["last"],
        row["entropy"],
        row["to"],
        row["best"],
        row["end"],
    ) == pytest.approx((0.55, 2.55, 2.55, 0.55, 0.9, 0.2))
    assert row["peak"] == pytest.approx(3.0 / 1.55)


def test_means_over_seeds_have_students_interval():
    """0.1 0.2 0.6: mean 0.3, sample std 0.2646, over sqrt 3 0.1528, times 4.303."""
    mean, (low, high) = compare.over_seeds([0.1, 0.2, 0.6])
    assert (mean, high - mean, mean - low) == pytest.approx(
        (0.3, 4.303 * 0.15275, 4.303 * 0.15275), rel=1e-3
    )
    assert (
        compare.over_seeds([0.0, 0.0, 0.0]) == (0.0, None)
        and compare.over_seeds([0.4]) == (0.4, None)
        and compare.over_seeds([]) == (None, None)
    )


def test_ratios_over_seeds(tmp_path):
    """Ten tokens: two early, of weight 3, two late, of weight 1; filler in the even places, with
    twice the advantage of the rest."""
    words = Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json"))
    ids = [words.encode(" and").ids[0], words.encode(" 7").ids[0]] * 5
    for seed in range(2):
        run = write_run(tmp_path / f"a{seed}", 0.5, seed)
        columns = credit_columns(
            [10], [0], token_id=ids, weight=[3, 3, 1, 1, 1, 1, 1, 1, 1, 1], advantage=[2, 1] * 5
        )
        np.savez(run / "credit/step_000001.npz", **columns)
    row = compare.credit_by_class(
        comparison_of([tmp_path / "a0", tmp_path / "a1"]), lambda text: None
    )[1].to_json()["rows"][0]
    assert (
        row["filler/reasoning"] == pytest.approx(2.0)
        and row["early/late"] == pytest.approx(3.0)
        and row["runs"] == 2
    )


@pytest.mark.parametrize(
    "name", [name for name in arms_file.SETTING if name not in ("data", "model")]
)
def test_every_setting_that_matters_keeps_runs_apart(tmp_path, name):
    a, b = (
        read_run(
            write_run(
                tmp_path / value,
                0.5,
                **({name: 5 if name != "numbers" else "4"} if value == "b" else {}),
            )
        )
        for value in "ab"
    )
    assert len(arms_file.alike([a, b], arms_file.setting_of)) == 2


def test_credit_by_class_is_of_the_weighted_gradient(tmp_path):
    """Two kinds, three tokens to one, the weight of the one three times as large: half of the
    gradient each."""
    run = write_run(tmp_path / "a", 0.5)
    np.savez(
        run / "credit/step_000001.npz",
        **credit_columns([4], [0], weight=[1, 1, 1, 3], kind=[0, 0, 0, 2]),
    )
    row = compare.credit_by_class(comparison_of([run]), lambda text: None)[0].to_json()["rows"][0]
    assert row["word"] == pytest.approx(0.5) and row["number"] == pytest.approx(0.5)


def test_many_runs_on_one_page(tmp_path, capsys):
    arms = {
        "base": (0.5, {}),
        "arm": (0.9, {"mitigation": "outcome_conditional", "think_discount": 0.25}),
        "placebo": (0.5, {"mitigation": "outcome_conditional", "placebo": "weights"}),
    }
    runs = make(tmp_path, arms, seeds=2)
    (tmp_path / "notes").mkdir()
    analyze.main([*runs, str(tmp_path / "notes"), "--json"])
    out = capsys.readouterr()
    assert "passed over: " in out.err and "notes is not a run folder" in out.err
    assert max(len(line) for line in out.out.splitlines() if str(tmp_path) not in line) <= 100
    folder = tmp_path / "comparison"
    assert sorted(p.name for p in folder.iterdir()) == [
        "analysis.json",
        "credit_by_class.png",
        "differences.png",
        "gradient_norm.png",
        "learning_curves.png",
        "report.html",
    ]
    assert [t["name"] for t in json.loads((folder / "analysis.json").read_text())] == [
        "arms",
        "runs",
        *MEASURES,
        "stability",
        "credit by class",
        "credit over seeds",
    ]
    with pytest.raises(UserError, match="give one run only"):
        analyze.main([*runs, "--steps", "1"])
    with pytest.raises(UserError, match="does not exist"):
        analyze.main([*runs, str(tmp_path / "typo")])
