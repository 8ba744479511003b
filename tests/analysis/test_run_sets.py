"""Which runs are comparable, which are one arm, and which arm is the baseline."""

import json

import pytest
from logs import comparison_of, write_run

import analyze
from analysis.arms import SETTING, Comparison, alike, arm_of, setting_of, what_differs
from analysis.runs import read_run
from analysis.tally import describe
from engine.errors import UserError


def read(tmp_path, *configs):
    """A run of each, with a seed of its own."""
    return [read_run(write_run(tmp_path / f"r{seed}", 0.5, seed, **config))
            for seed, config in enumerate(configs)]


def folders(tmp_path, *configs):
    return [str(run["folder"]) for run in read(tmp_path, *configs)]


def test_arms_are_told_apart_by_what_differs(tmp_path):
    """critic_lr has no effect without gae; threads and the folder are nobody's concern."""
    fast, discounted = {"learning_rate": 1e-3}, {"mitigation": "outcome_conditional"}
    comparison = comparison_of(folders(
        tmp_path, fast, fast, {"learning_rate": 1e-4},
        {**fast, **discounted, "think_discount": 0.5},
        {**fast, **discounted, "think_discount": 0.25},
        {**fast, "critic_lr": 9.0, "threads": 4, "out": "x"}), "none")
    assert {name: len(arm) for name, arm in comparison.arms.items()} == {
        "none": 3, "none learning_rate 0.0001": 1, "outcome_conditional think_discount 0.5": 1,
        "outcome_conditional think_discount 0.25": 1}
    assert comparison.usual == {"learning_rate": 1e-3}


@pytest.mark.parametrize("name, values", [("temperature", (1, 1.0)), ("forgotten", (1, "1"))])
def test_what_reads_alike_is_one_arm(tmp_path, name, values):
    """Also a setting of an older version, of which nobody knows the type any more."""
    runs = read(tmp_path, *({name: value} for value in values))
    assert len(alike(runs, setting_of)) == 1
    [arm] = Comparison(runs, None).arms.values()
    assert len(arm) == 2


def test_the_baseline_is_plain_grpo_with_the_settings_that_most_runs_have(tmp_path):
    runs = folders(tmp_path, {"learning_rate": 1e-3}, {"learning_rate": 1e-4},
                   {"mitigation": "random", "learning_rate": 1e-3})
    assert comparison_of(runs).baseline == "none"
    for name in (runs[2], "random", "r2"):
        comparison = comparison_of(runs, name)
        assert comparison.baseline == list(comparison.arms)[0] == "random"
    of_two = [runs[0], *folders(tmp_path / "usual", {})]
    assert comparison_of(of_two).usual == {"learning_rate": 5e-6}  # of as many the default
    with pytest.raises(UserError, match="--baseline nobody is neither"):
        analyze.main([*runs, "--baseline", "nobody"])


def test_where_two_arms_are_plain_grpo_the_baseline_has_to_be_named(tmp_path):
    with pytest.raises(UserError, match="which arm is the baseline"):
        comparison_of(folders(tmp_path, {"loss_norm": "sequence"}, {"kl": 0.1}))


def test_the_same_arm_and_seed_twice_is_an_error(tmp_path):
    runs = [write_run(tmp_path / name, 0.5) for name in ("a", "b")]
    with pytest.raises(UserError, match="a and .*b are the same arm and seed"):
        comparison_of(runs)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name, value", [("model", "elsewhere"), ("answers", 4)])
def test_what_is_not_comparable_is_said_and_not_averaged(tmp_path, capsys, name, value):
    runs = folders(tmp_path, {}, {}, {"mitigation": "random", name: value})
    analyze.main([*runs, "--output_dir", str(tmp_path / "out"), "--json"])
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("Not comparable", f"{name} ", str(value), "(r0, r1)", "(r2)"):
        assert words in printed
    tables = json.loads((tmp_path / "out/analysis.json").read_text())
    arms = {table["name"]: [row["arm"] for row in table["rows"]] for table in tables}
    assert (arms["arms 1"], arms["arms 2"]) == (["none"], ["random"])
    assert not any(table.startswith("final success") for table in arms)
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"learning_curves_1.png", "learning_curves_2.png"}


@pytest.mark.parametrize("name", [*SETTING, "data"])
def test_every_setting_that_matters_keeps_runs_apart(tmp_path, name):
    another = {"task": "tools.descending", "reward": "another", "model": "elsewhere",
               "data": "problems.jsonl"}.get(name, 5)
    runs = read(tmp_path, {}, {name: another})
    assert len(alike(runs, setting_of)) == 2


def test_other_held_out_problems_are_another_set(tmp_path):
    a, b = (write_run(tmp_path / name, 0.5) for name in "ab")
    lines = [json.loads(line) for line in (b / "evaluations.jsonl").read_text().splitlines()]
    for line in lines:
        line["answer"] = line["answer"][:50]
        line["success"] = sum(line["answer"]) / 50
    (b / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = alike([read_run(a), read_run(b)], setting_of)
    assert len(parts) == 2 and "held-out problems 50 (b)" in what_differs(parts)


def test_a_run_at_another_temperature_says_whose_numbers_are_on_record():
    config = {"mitigation": "none", "steps": 0, "model": "models/tiny"}
    usual, sharp = ({"folder": "runs/x", "config": {**config, **more}, "metrics": []}
                    for more in ({}, {"temperature": 0.7}))
    assert "sampled at temperature 0.7" in describe(sharp, None)
    assert "temperature" not in describe(usual, None)


def test_a_run_older_than_a_flag_had_its_default(tmp_path):
    """Of the task and of the advantage; with another value the two are not alike. A run without a
    reward on record is of another kind."""
    gae = {"advantage": "gae"}
    old, new, other, signed, unknown = read(
        tmp_path, gae, {**gae, "reward_form": "graded", "gae_lambda": 1.0},
        {**gae, "gae_lambda": 0.5}, {**gae, "reward_form": "signed"}, {**gae, "reward": "x"})
    assert len(alike([old, new], setting_of)) == len(alike([old, new], arm_of)) == 1
    assert len(alike([old, other], arm_of)) == len(alike([old, signed], setting_of)) == 2
    assert len(alike([old, unknown], setting_of)) == 2
