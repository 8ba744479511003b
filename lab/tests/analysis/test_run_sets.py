"""Which runs are comparable, which are one arm, and which arm is the baseline."""
import pytest
from logs import comparison_of, write_run

import lab.analysis.program as analyze
from lab.analysis.arms import SETTING, alike, comparable, setting_of
from lab.analysis.run_folders import read_run
from lab.engine.errors import UserError


def read(tmp_path, *configs):
    """A run of each, with a seed of its own."""
    return [read_run(write_run(tmp_path / f"r{seed}", 0.5, seed, **config))
            for seed, config in enumerate(configs)]


def folders(tmp_path, *configs):
    return [str(run["folder"]) for run in read(tmp_path, *configs)]


def test_arms_are_told_apart_by_what_differs(tmp_path):
    """Threads and the folder are nobody's concern. examples/dpo.py writes another loss, and the
    file of its pairs."""
    fast, discounted = {"learning_rate": 1e-3}, {"mitigation": "outcome_conditional"}
    comparison = comparison_of(folders(
        tmp_path, fast, fast, {"learning_rate": 5e-6},
        {**fast, **discounted, "think_discount": 0.5},
        {**fast, **discounted, "think_discount": 0.25},
        {**fast, "threads": 4, "out": "x"}, {"loss": "dpo"}, {"loss": "dpo", "pairs": "x"}), "none")
    usual, half, quarter = "learning_rate 0.001", "think_discount 0.5", "think_discount 0.25"
    assert {name: len(arm) for name, arm in comparison.arms.items()} == {
        f"none {usual}": 3, "none": 1, f"outcome_conditional {usual} {half}": 1,
        f"outcome_conditional {usual} {quarter}": 1, "none loss dpo": 1, "none loss dpo pairs x": 1}


def test_the_baseline_is_plain_grpo_or_the_one_that_is_named(tmp_path):
    runs = folders(tmp_path, {"mitigation": "random"}, {}, {"placebo": "advantages"})
    assert list(comparison_of(runs).arms) == ["none", "random", "none placebo advantages"]
    comparison = comparison_of(runs, "random")
    assert comparison.baseline == list(comparison.arms)[0] == "random"
    with pytest.raises(UserError, match="--baseline nobody is none of the arms: random, none"):
        analyze.main([*runs, "--baseline", "nobody"])
    two_plain = folders(tmp_path / "plain", {"loss_norm": "sequence"}, {"kl": 0.1})
    with pytest.raises(UserError, match="which arm is the baseline"):
        comparison_of(two_plain)


def test_each_set_of_comparable_runs_has_its_tables_and_the_same_arm_twice_counts_once(
        tmp_path, capsys):
    """As after the exercises, with runs/*. Evaluated runs come first, however few they are."""
    runs = [write_run(tmp_path / name, 0.5, seed) for name, seed in zip("abc", (0, 0, 1))]
    exercises = [write_run(tmp_path / f"e{seed}", 0.5, seed, steps=1) for seed in range(4)]
    for run in exercises:
        (run / "evaluations.jsonl").unlink()
    alone = write_run(tmp_path / "alone", 0.5, 7, steps=2)
    analyze.main([*map(str, runs), *map(str, exercises), str(alone)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "b has the settings and the seed of a, so it is left out." in printed
    assert "alone is left out, because no other run here has the same model" in printed
    assert printed.index("2 runs of") < printed.index("4 runs of")
    for page in ("report.html", "set_2/report.html"):
        assert (tmp_path / "comparison" / page).exists()
    comparison = comparison_of(runs)
    assert [run["folder"].name for run in comparison.runs] == ["a", "c"]


@pytest.mark.parametrize("name", [*SETTING, "data"])
def test_every_setting_that_matters_keeps_runs_apart(tmp_path, name):
    another = {"task": "examples.largest_last", "reward": "another", "model": "elsewhere",
               "data": "problems.jsonl"}.get(name, 5)
    runs = read(tmp_path, {}, {}, {name: another})
    assert len(alike(runs, setting_of)) == 2
    [chosen], [said] = comparable(runs)
    assert len(chosen) == 2 and said.startswith("r2 is left out")
    runs[1]["evaluations"][0]["answer"] = [1] * 50
    assert len(alike(runs[:2], setting_of)) == 2  # held-out problems are of another number
