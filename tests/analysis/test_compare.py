"""Several runs: their tables by hand, and which differences between arms are called real."""

import json

import numpy as np
import pytest
from conftest import credit_columns, cut, evaluation, write_lines
from logs import comparison_of, ids_of, make, rows_in, rows_of, write_run

import analyze
from analysis import compare
from analysis.compare import MEASURES, PRIMARY, SPEED, area, curve_of, difference, differences
from analysis.statistics import Estimate, paired_difference
from engine.errors import UserError


def test_a_run_still_going_is_shown_and_not_compared(tmp_path):
    runs = make(tmp_path, {"base": (0.5, {}), "arm": (0.9, {"mitigation": "random"})}, seeds=2)
    cut(tmp_path / "arm-s1/metrics.jsonl", 4)
    comparison = comparison_of(runs)
    assert rows_of(comparison)["random"]["seeds"] == 1
    assert rows_in(compare.arms_table(comparison))[1]["seeds"] == "1 (1 still going)"
    assert [row["runs"] for row in rows_in(compare.stability(comparison))] == [2, 1]
    cut(tmp_path / "arm-s0/metrics.jsonl", 4)  # none is finished: what there is
    assert [row["runs"] for row in rows_in(compare.stability(comparison_of(runs)))] == [2, 2]


def test_an_arm_is_what_its_runs_solved_at_the_end(tmp_path):
    """And not what they solved at the start; the interval is Student's t over seeds."""
    comparison = comparison_of([write_run(tmp_path / f"a{seed}", 0.5, seed) for seed in range(2)])
    ends = [run["evaluations"][-1]["success"] for run in comparison.shown("none")]
    [row] = rows_in(compare.arms_table(comparison))
    assert row["sampled"] == row["greedy"] == pytest.approx(sum(ends) / 2)
    low, high = row["95% over seeds"]
    reach = 12.706 * abs(ends[0] - ends[1]) / 2
    assert (low, high) == pytest.approx((sum(ends) / 2 - reach, sum(ends) / 2 + reach), rel=1e-3)
    assert compare.over_seeds([0.0, 0.0, 0.0]) == (0.0, None)
    assert compare.over_seeds([0.4]) == (0.4, None) and compare.over_seeds([])[1] is None


def test_stability_by_hand(tmp_path):
    """30 steps, norms 0.1 .. 3: first ten 0.55, last ten 2.55; entropy falls from 3 to 0.1."""
    run = write_run(tmp_path / "a", 0.5, steps=30)
    lines = [{"step": i, "success": 0.9 if 5 < i < 11 else 0.2, "entropy": 3.1 - 0.1 * i,
              "gradient_norm": 0.1 * i, "seconds": i} for i in range(1, 31)]
    write_lines(run / "metrics.jsonl", lines)
    [row] = rows_in(compare.stability(comparison_of([run])))
    assert row == {"arm": "none", "runs": 1} | {name: pytest.approx(value) for name, value in {
        "norm first": 0.55, "last": 2.55, "peak": 3 / 1.55, "entropy": 2.55, "to": 0.55,
        "best": 0.9, "end": 0.2, "seconds": 15.5}.items()}


def test_shares_of_an_arm(tmp_path):
    """Four numbers " 7" of p = 1/4 and weight 3, then six words " and" of p = 1/2 and weight 1.
    With sum p^2 = p^2 their s is 1 - p, so their sizes are 2.25 and 0.5."""
    run, p = write_run(tmp_path / "a", 0.5), np.repeat([0.25, 0.5], (4, 6))
    np.savez(run / "credit/step_000001.npz", **credit_columns(
        [10], [0], token_id=np.repeat([ids_of(" 7")[0], ids_of(" and")[0]], (4, 6)),
        log_prob=np.log(p), collision=p ** 2, weight=[3] * 4 + [1] * 6, kind=[2] * 4 + [0] * 6))
    [share] = rows_in(compare.shares_table(comparison_of([run])))
    assert (share["number"], share["word"]) == pytest.approx((9 / 12, 3 / 12), rel=1e-5)


def test_many_runs_on_one_page(tmp_path, capsys):
    arms = {"base": (0.5, {}),
            "arm": (0.9, {"mitigation": "outcome_conditional", "think_discount": 0.25}),
            "placebo": (0.5, {"mitigation": "outcome_conditional", "placebo": "weights"})}
    runs = make(tmp_path, arms, seeds=2)
    (tmp_path / "notes").mkdir()
    analyze.main([*runs, str(tmp_path / "notes"), "--json"])
    out = capsys.readouterr()
    assert "passed over: " in out.err and "notes is not a run folder" in out.err
    assert max(len(line) for line in out.out.splitlines() if str(tmp_path) not in line) <= 100
    assert len(out.out.splitlines()) <= 40 and "of an earlier experiment" not in out.out
    folder = tmp_path / "comparison"
    assert sorted(path.name for path in folder.iterdir()) == [
        "analysis.json", "learning_curves.png", "report.html"]
    tables = [table["name"] for table in json.loads((folder / "analysis.json").read_text())]
    assert tables == ["arms", *MEASURES, "stability", "credit by class"]
    page = (folder / "report.html").read_text()
    places = [page.index(text) for text in ("The arms", "each arm minus none", "<details",
                                            "Learning speed", "Stability and cost", "Share of")]
    assert places == sorted(places) and page.count("<figure") == 1
    for flags in (["--steps", "1"], ["--csv"]):
        with pytest.raises(UserError, match=f"{flags[0]} .* one run: give one run only"):
            analyze.main([*runs, *flags])


def test_better_worse_and_no_difference_seen(tmp_path):
    arms = {"base": (0.5, {}), "good": (0.8, {"mitigation": "entropy_ratio"}),
            "bad": (0.2, {"mitigation": "random"}), "same": (0.5, {"mitigation": "equal_gradient"})}
    comparison = comparison_of(make(tmp_path, arms))
    found = rows_of(comparison)
    assert {name: row["verdict"] for name, row in found.items()} == {
        "entropy_ratio": "better", "random": "worse", "equal_gradient": "no difference seen"}
    for row in found.values():
        low, high = row["95%"]
        assert row["seeds"] == 5 and low < row["difference"] < high
        assert (row["verdict"] == "no difference seen") == (low < 0 < high)
    assert 0 < found["equal_gradient"]["could see"] < 0.2
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


def test_holm_over_the_arms_and_apart_over_their_placebos(tmp_path, monkeypatch):
    """p = 0.03 alone would be seen; of three arms it is not."""
    mine, placebo = "entropy_ratio", "entropy_ratio placebo weights"
    comparison = comparison_of(make(tmp_path, {
        "base": (0.5, {}), "arm": (0.8, {"mitigation": mine}), "other": (0.5, {"loss": "dpo"}),
        "placebo": (0.5, {"mitigation": mine, "placebo": "weights"})}, seeds=2))
    p = {(mine, "none"): 0.03, ("none loss dpo", "none"): 0.001, (placebo, "none"): 0.9,
         (mine, placebo): 0.03}
    monkeypatch.setattr(
        compare, "difference",
        lambda c, one, other, *_: ([0, 1], Estimate(0.1, 0.01, 0.19, p[one, other], 0.1)))
    found = rows_of(comparison)
    assert {name: row["Holm p"] for name, row in found.items()} == pytest.approx(
        {mine: 0.06, "none loss dpo": 0.003, placebo: 0.9, f"{mine} - {placebo}": 0.03})
    assert [name for name, row in found.items() if row["verdict"] == "better"] == [
        "none loss dpo", f"{mine} - {placebo}"]


def test_the_area_is_that_of_straight_lines():
    """Steps 0, 10, 40: (0 + 1) / 2 * 10 + (1 + 1) / 2 * 30 = 35, over 40 steps 0.875; then wrong
    again: 20 / 40."""
    lines = [evaluation(40, [1, 0]), evaluation(0, [0, 0]), evaluation(10, [1, 1])]
    run = {"config": {"steps": 40}, "evaluations": lines}
    for at, expected in (([0, 10, 40], [0.875, 0.5]), ([0, 40], [0.5, 0.0])):
        assert area(curve_of(run, at), at).tolist() == expected


@pytest.mark.parametrize("baseline", ("none", "random"))
def test_areas_are_over_the_steps_at_which_both_were_evaluated(tmp_path, baseline):
    """The same curve, evaluated once more in one arm: no difference."""
    runs = []
    for name, steps in (("none", (0, 10)), ("random", (0, 5, 10))):
        for seed in range(2):
            run = write_run(tmp_path / f"{name}{seed}", 0.5, seed, mitigation=name)
            answers = {0: [0, 0], 5: [1, 1], 10: [1, seed]}
            write_lines(run / "evaluations.jsonl",
                        [evaluation(step, answers[step]) for step in steps])
            runs.append(run)
    [row] = rows_of(comparison_of(runs, baseline), SPEED).values()
    assert row["difference"] == 0.0
