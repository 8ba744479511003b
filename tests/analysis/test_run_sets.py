"""Which runs are comparable, which are one arm, and which arm is the baseline."""

import json

import pytest
from logs import comparison_of, write_run

import analyze
from analysis.arms import SETTING, alike, arm_of, setting_of, what_differs
from analysis.runs import read_run
from analysis.tally import describe
from engine.errors import UserError


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


@pytest.mark.usefixtures("undrawn")
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
    lines = [json.loads(line) for line in (b / "evaluations.jsonl").read_text().splitlines()]
    for line in lines:
        line["answer"] = line["answer"][:50]
        line["success"] = sum(line["answer"]) / 50
    (b / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = alike([read_run(a), read_run(b)], setting_of)
    assert len(parts) == 2 and "held-out problems 50 (b)" in what_differs(parts)


def test_an_older_run_without_a_reward_on_record_is_of_another_kind(tmp_path):
    a, b = (
        read_run(write_run(tmp_path / name, 0.5, reward=reward))
        for name, reward in (("a", "x"), ("b", None))
    )
    assert len(alike([a, b], setting_of)) == 2


@pytest.mark.parametrize("name", [name for name in SETTING if name not in ("data", "model")])
def test_every_setting_that_matters_keeps_runs_apart(tmp_path, name):
    another = {"task": "tools.descending", "reward": "another"}.get(name, 5)
    a = read_run(write_run(tmp_path / "a", 0.5))
    b = read_run(write_run(tmp_path / "b", 0.5, **{name: another}))
    assert len(alike([a, b], setting_of)) == 2


def test_a_run_at_another_temperature_says_whose_numbers_are_on_record():
    config = {"mitigation": "none", "steps": 0, "model": "models/tiny"}
    usual, sharp = ({"folder": "runs/x", "config": {**config, **more}, "metrics": []}
                    for more in ({}, {"temperature": 0.7}))
    assert "sampled at temperature 0.7" in describe(sharp, None)
    assert "temperature" not in describe(usual, None)


def test_a_run_older_than_a_flag_had_its_default(tmp_path):
    """Of the task and of the advantage; with another value the two are not alike."""
    old = read_run(write_run(tmp_path / "old", 0.5, advantage="gae"))
    flags = {"reward_form": "graded", "gae_lambda": 1.0}
    new = read_run(write_run(tmp_path / "new", 0.5, 1, advantage="gae", **flags))
    assert len(alike([old, new], setting_of)) == len(alike([old, new], arm_of)) == 1
    other = read_run(write_run(tmp_path / "other", 0.5, 2, advantage="gae", gae_lambda=0.5))
    assert len(alike([old, other], arm_of)) == 2
    other = read_run(write_run(tmp_path / "signed", 0.5, 3, reward_form="signed"))
    assert len(alike([old, other], setting_of)) == 2
