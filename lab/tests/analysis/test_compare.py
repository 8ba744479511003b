"""Several runs: their tables by hand, and which gains are called real."""
from dataclasses import replace

import numpy as np
import pytest
from conftest import credit_columns, cut, refusal, write_lines, write_log
from logs import comparison_of, ids_of, make, rows_in, rows_of, write_run

import lab.analysis.program as analyze
from lab.analysis import compare, gains
from lab.analysis.arms import finished
from lab.analysis.page import anchor
from lab.analysis.compare import doubt_about_training, primary_metric
from lab.analysis.gains import AT_THE_END, IN_TRAINING, MEASURES, gain_over
from lab.analysis.run_folders import read_run, share_seen_before
from lab.analysis.statistics import Estimate, mean_over


def test_a_run_still_going_is_passed_over(tmp_path, capsys):
    folders = make(tmp_path, {"base": (0.5, {})}, seeds=2)
    cut(tmp_path / "base-s1/metrics.jsonl", 4)
    assert finished(list(map(read_run, folders))) == [read_run(folders[0])]
    assert ("base-s1 is left out, because it is not finished: it has made 4 of 10 steps.\n"
            in capsys.readouterr().err)
    assert "none of these runs is finished" in refusal(finished, [read_run(folders[1])])


def test_stability_by_hand(tmp_path):
    """30 norms 0.1, 0.2, ... 2.9 and 6, of which the median is 1.55: first ten 0.55, last ten 2.85.
    The step before these was skipped, so it has none."""
    run = write_run(tmp_path / "a", 0.5, steps=31)
    norms = [None, *(0.1 * i for i in range(1, 30)), 6.0]
    write_lines(run / "metrics.jsonl", [{"step": step, "gradient_norm": norm, "seconds": step}
                                        for step, norm in enumerate(norms, 1)])
    [row] = rows_in(compare.stability(comparison_of([run])))
    assert row == {"arm": "none", "runs": 1} | {name: pytest.approx(value) for name, value in {
        "first": 0.55, "last": 2.85, "peak": 6 / 1.55, "seconds": 16}.items()}


def test_shares_of_an_arm(tmp_path):
    """Four numbers " 7" of p = 1/4 and weight 3, then six words " and" of p = 1/2 and weight 1.
    With sum p^2 = p^2 their s is 1 - p, so their sizes are 2.25 and 0.5."""
    run, p = write_run(tmp_path / "a", 0.5), np.repeat([0.25, 0.5], (4, 6))
    np.savez(run / "credit/step_000001.npz", **credit_columns(
        [10], [0], token_id=np.repeat([ids_of(" 7")[0], ids_of(" and")[0]], (4, 6)),
        log_prob=np.log(p), collision=p ** 2, weight=[3] * 4 + [1] * 6, kind=[2] * 4 + [0] * 6,
        section=[1] * 4 + [2] * 6))
    [share] = rows_in(compare.shares_of_arms(comparison_of([run])))
    assert (share["number"], share["word"]) == pytest.approx((9 / 12, 3 / 12), rel=1e-5)
    assert (share["think"], share["answer"]) == pytest.approx((9 / 12, 3 / 12), rel=1e-5)


def test_many_runs_on_one_page(tmp_path, capsys):
    arms = {"base": (0.5, {}),
            "arm": (0.9, {"mitigation": "outcome_conditional", "think_discount": 0.25}),
            "placebo": (0.5, {"mitigation": "outcome_conditional", "placebo": "weights"})}
    runs = make(tmp_path, arms, seeds=2)
    (tmp_path / "notes").mkdir()
    analyze.main([*runs, str(tmp_path / "notes")])
    out = capsys.readouterr()
    assert f"passed over: {tmp_path / 'notes'}" in out.err
    assert max(len(line) for line in out.out.splitlines() if str(tmp_path) not in line) <= 100
    page = (tmp_path / "comparison/report.html").read_text()
    places = [page.index(f"<section id={anchor(name)} ") for name in (
        "arms", *MEASURES, "stability", "credit by class")]
    assert places == sorted(places)
    assert page.index("Success in training: each arm") < page.index("<details")
    assert page.count("<figure") == 1


def test_better_worse_and_no_difference_seen(tmp_path):
    arms = {"base": (0.5, {}), "good": (0.8, {"mitigation": "entropy_ratio"}),
            "bad": (0.2, {"mitigation": "random"}), "same": (0.5, {"mitigation": "equal_gradient"})}
    comparison = comparison_of(make(tmp_path, arms))
    for measure in MEASURES:
        found = rows_of(comparison, measure)
        assert {name: row["verdict"] for name, row in found.items()} == {
            "entropy_ratio": "better", "random": "worse", "equal_gradient": "no difference seen"}
        for row in found.values():
            value, low, high = row["gain"].values()
            assert row["pairs"] == 5 and low < value < high
            assert (row["verdict"] == "no difference seen") == (low < 0 < high)
        assert 0 < found["equal_gradient"]["could see"] < 0.2


def two_arms(tmp_path, of_none, of_random, **config):
    """Of each a run a seed, with this success at its two steps; all end with the same answers."""
    folders = []
    for name, arm in (("none", of_none), ("random", of_random)):
        for seed, curve in enumerate(arm):
            run = write_run(tmp_path / f"{name}{seed}", 0.5, seed, steps=2, mitigation=name,
                            **config)
            write_lines(run / "metrics.jsonl", [
                {"step": step, "success": share} for step, share in enumerate(curve, 1)])
            folders.append(run)
    return folders


def test_success_in_training_by_hand(tmp_path):
    """Means of both steps 0.3, 0.5 and 0.4, 0.5: differences +0.1 and 0, so their mean is 0.05 and
    its standard error 0.05; t with one degree of freedom is 12.706, and p = 1/2."""
    folders = two_arms(tmp_path, [[0.2, 0.4], [0.5, 0.5]], [[0.3, 0.5], [0.6, 0.4]])
    comparison = comparison_of(folders)
    [row] = rows_of(comparison).values()
    value, low, high = row["gain"].values()
    assert value == pytest.approx(0.05)
    assert row["p"] == pytest.approx(0.5, abs=1e-3)
    assert (low, high) == pytest.approx((0.05 - 0.6353, 0.05 + 0.6353), abs=1e-4)
    assert row["verdict"] == "no difference seen"
    [gain] = gains.gains({"random": (comparison.arms["random"], comparison.arms["none"])}).values()
    assert gain.sentence == ("no difference seen; the interval leaves room for a gain of up to "
                             "68.5 points or a loss of up to 58.5")
    arms = rows_in(compare.arms_overview(comparison))
    assert [row["training"] for row in arms] == pytest.approx([0.4, 0.45])
    for row in arms:
        runs = comparison.arms[row["arm"]].values()
        ends = [run["evaluations"][-1]["success"] for run in runs]
        assert row["sampled"] == row["greedy"] == pytest.approx(sum(ends) / 2)


@pytest.mark.parametrize("config, why", [
    ({}, ""), ({"pairs": "x.jsonl"}, "not sampled from the policy"),
    ({"dynamic_sampling": 4}, "has chosen the answers on record by their rewards")])
def test_where_training_says_little_the_evaluation_is_the_primary_metric(tmp_path, config, why):
    folders = two_arms(tmp_path, [[0.2, 0.4]] * 2, [[0.3, 0.5]] * 2, **config)
    comparison = comparison_of(folders)
    primary, doubt = primary_metric(comparison)
    assert primary == (AT_THE_END if why else IN_TRAINING) and why in doubt
    (_, *tables), *_ = compare.chapters_of(comparison).values()
    assert [table.name for table in tables][0] == primary
    last_note = tables[1].notes[-1]
    assert last_note.startswith("This is not the primary metric") == bool(why) and why in last_note


def test_a_gain_of_too_few_pairs_has_no_verdict_and_is_no_test(tmp_path):
    """Of two arms one has a single pair: the p of the other is not multiplied by two."""
    folders = make(tmp_path, {"base": (0.5, {}), "other": (0.5, {"mitigation": "random"}),
                              "few": (0.5, {"mitigation": "equal_gradient"})}, seeds=3)
    comparison = comparison_of(folders[:-2])
    alone = gain_over(comparison.arms["random"], comparison.arms["none"])
    found = rows_of(comparison)
    assert found["equal_gradient"]["verdict"] == "one seed: no verdict"
    assert found["equal_gradient"]["p"] is None and found["random"]["p"] == pytest.approx(alone.p)
    nothing = gain_over(comparison.arms["random"], {})
    assert nothing.verdict == "nothing to compare" and np.isnan(nothing.estimate.value)


def test_problems_that_are_asked_again_are_counted(tmp_path):
    """Prompts of steps 1 to 3: 5 and 6; 6 and 7; 5 and 5, so three of six came before."""
    steps = {step: credit_columns([2, 2], [0, 1], prompt_ids=[first, 9, second, 9])
             for step, (first, second) in enumerate([(5, 6), (6, 7), (5, 5)], 1)}
    run = read_run(write_log(tmp_path / "run", steps))
    assert share_seen_before(run) == pytest.approx(3 / 6)
    primary, doubt = primary_metric(comparison_of([tmp_path / "run"]))
    assert primary == AT_THE_END and doubt.startswith("50% of the problems")
    without_record = {**run, "steps": []}  # its problems are not known, but they were the same
    assert doubt_about_training([without_record, run]).startswith("50% of the problems")
    assert doubt_about_training([without_record]) == ""
    game = {step: credit_columns([2, 2], [0, 1], prompt_ids=[5, 9, 5, 9]) for step in (1, 2)}
    assert share_seen_before(read_run(write_log(tmp_path / "game", game))) == 0


def test_pairs_are_of_the_same_seed_and_the_same_problem(tmp_path):
    """A seed that is good for both arms makes no difference; only seeds of both arms count."""
    folders = make(tmp_path, {"base": (0.5, {}), "other": (0.5, {"mitigation": "random"})}, seeds=3)
    comparison = comparison_of(folders[:3] + folders[4:])  # the other arm has no seed 0
    found = gain_over(comparison.arms["random"], comparison.arms["none"], AT_THE_END)
    answers = {(name, seed): np.array(run["evaluations"][2]["answer"], float)
               for name, arm in comparison.arms.items() for seed, run in arm.items()}
    expected = np.stack([answers["random", seed] - answers["none", seed] for seed in (1, 2)])
    assert found.seeds == (1, 2) and found.estimate == mean_over(expected.mean(1))


def test_holm_over_the_arms_and_apart_over_their_placebos(tmp_path, monkeypatch):
    """p = 0.03 alone would be seen; of three arms it is not."""
    mine, placebo = "entropy_ratio", "entropy_ratio placebo weights"
    comparison = comparison_of(make(tmp_path, {
        "base": (0.5, {}), "arm": (0.8, {"mitigation": mine}),
        "other": (0.5, {"loss_norm": "sequence"}),
        "placebo": (0.5, {"mitigation": mine, "placebo": "weights"})}, seeds=2))
    p = {(mine, "none"): 0.03, ("none loss_norm sequence", "none"): 0.001, (placebo, "none"): 0.9,
         (mine, placebo): 0.03}
    names = {id(arm): name for name, arm in comparison.arms.items()}
    monkeypatch.setattr(gains, "mean_over", lambda pairs, tests: Estimate(0.1, 0.01, 0.19))
    alone = gains.gain_over

    def gain_with_p(one, other, *rest):
        return replace(alone(one, other, *rest), p=p[names[id(one)], names[id(other)]])

    monkeypatch.setattr(gains, "gain_over", gain_with_p)
    found = rows_of(comparison)
    assert {name: row["p"] for name, row in found.items()} == pytest.approx(
        {mine: 0.06, "none loss_norm sequence": 0.003, placebo: 0.9, f"{mine} - {placebo}": 0.03})
    assert [name for name, row in found.items() if row["verdict"] == "better"] == [
        "none loss_norm sequence", f"{mine} - {placebo}"]
