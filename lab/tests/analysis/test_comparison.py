"""Which runs are a pair, what is tested, and what is said of a gain: by hand."""
import numpy as np
import pytest

from conftest import credit_columns, write_log
from known_runs import recorded
from lab.analysis.comparison import (AT_EQUAL_TIME, AT_EQUAL_TOKENS, AT_THE_END, IN_TRAINING,
                                     NOT_SEEN, Gain, about_cost, called, deciding,
                                     doubt_about_training, gain_over, gain_table, gains)
from lab.analysis.run_folders import Run, share_seen_before
from lab.analysis.statistics import Estimate, mean_over, paired_difference


def run_of(*success, evaluations=()):
    """A run with this success at its steps. `evaluations`: mode, step, answers."""
    lines = [{"mode": mode, "step": step, "answer": answers}
             for mode, step, answers in evaluations]
    return recorded([{"success": share} for share in success], lines, {"steps": 2})


def arm_of(*means):
    return {seed: run_of(mean, mean) for seed, mean in enumerate(means)}


def test_a_run_without_steps_or_known_success_is_no_pair_and_of_two_lengths_the_first_steps_are():
    plain = {0: run_of(0.1, 0.3), 1: run_of(0.1, 0.3), 2: run_of()}
    found = gain_over({0: run_of(0.4, 0.6), 2: run_of()}, plain)
    assert found.seeds == (0,) and found.estimate.value == pytest.approx(0.3)
    assert found.verdict == "one seed: no verdict"
    assert gain_over({1: run_of(0.4)}, plain).estimate.value == pytest.approx(0.3)
    known, unknown = arm_of(0.5, 0.6), arm_of(None, None)
    assert gain_over(known, unknown).verdict == "nothing to compare"
    assert not gain_over(unknown, unknown).pairs


def paid_arm(tokens, extra=None, seconds=(1.0,) * 5, **config):
    """Runs of five seeds that differ by up to 4 points; the tokens and seconds of each step."""
    runs = {seed: run_of(0.2 + seed / 100, 0.4, 0.9) for seed in range(5)}
    for run, of_run in zip(runs.values(), seconds):
        for line in run.metrics:
            line |= {"tokens": tokens, "extra_tokens": extra, "processor_seconds": of_run,
                     "seconds": 1.0}
        run.config |= config
    return runs


def test_the_cost_of_a_step_decides_by_which_measure_an_arm_is_judged():
    """At equal steps nothing differs. For three steps' tokens an arm whose step costs three has its
    first: 0.2 and a seed's points, against a mean of 0.5 and a third of them."""
    plain, thrice = paid_arm(10), paid_arm(10, 20, (3.0, 3.1, 3.0, 2.9, 3.0))
    found = {one: gain_over(thrice, plain, one)
             for one in (IN_TRAINING, AT_EQUAL_TOKENS, AT_EQUAL_TIME)}
    assert [gain.cost.value for gain in found.values()] == pytest.approx([1, 3, 3], abs=0.01)
    assert found[AT_EQUAL_TOKENS].estimate.value == pytest.approx(0.22 - (1.5 + 0.02) / 3)
    assert found[IN_TRAINING].estimate.value == 0 and found[IN_TRAINING].verdict == NOT_SEEN
    assert deciding(thrice, plain) == AT_EQUAL_TIME and deciding(plain, thrice) == IN_TRAINING
    rows = gain_table({"plain": plain, "dear": thrice}).to_json()["rows"]
    assert [(row["compared at"], row["verdict"]) for row in rows] == [
        ("equal steps", ""), ("equal tokens", ""), ("equal time", "behind")]
    busy = paid_arm(10, 20, (1.0, 9.0) * 3)  # its time is not known
    assert deciding(busy, plain) == AT_EQUAL_TOKENS
    assert "because a step was measured to cost" in " ".join(about_cost(busy, plain))
    on_gpu = paid_arm(10, None, (3.0,) * 5, device="cuda")  # by the clock
    assert deciding(on_gpu, plain) == IN_TRAINING
    assert deciding({0: thrice[0]}, {0: plain[0]}) == AT_EQUAL_TOKENS
    assert deciding(arm_of(0.5, 0.6), arm_of(0.5, 0.6)) == IN_TRAINING  # nothing is on record


def test_what_is_excluded_is_the_end_of_the_interval_and_more_if_many_are_tested():
    """Five gains with a mean of 1 point: t with 4 degrees of freedom is 2.776, and for five
    comparisons, 0.5% beyond, 4.604."""
    points = np.array([0, 1, 2, 0, 2]) / 100
    gain = Gain(tuple(range(5)), mean_over(points), 0.2)
    error = points.std(ddof=1) / 5 ** 0.5
    assert gain.excluded_above() == pytest.approx(0.01 + 2.776 * error, abs=1e-5)
    assert gain.excluded_above(5) == pytest.approx(0.01 + 4.604 * error, abs=1e-5)
    assert Gain(tuple(range(5)), mean_over(points - 0.1), 0.2).excluded_above() == 0
    assert np.isnan(Gain((0, 1), mean_over(points[:2]), 0.2).excluded_above())
    arms = {"plain": arm_of(*5 * [0.3]), "a": arm_of(*0.3 + points), "b": arm_of(*0.3 + points)}
    table, limit = gain_table(arms), 100 * gain.excluded_above(2)
    assert table.rows[0][-1] == f"{NOT_SEEN}, above {100 * gain.excluded_above():+.1f} excluded"
    assert table.notes == [f"For all 2 arms together, gains above {limit:+.1f} are excluded (95%)"]


def test_how_dear_a_step_may_be_is_told_of_a_gain():
    plain, mine = ({seed: run_of(0.2, first + seed * spread, 0.9) for seed in range(4)}
                   for first, spread in ((0.3, 0.01), (0.8, 0.02)))
    for arms, count in (((mine, plain), 1), ((plain, mine), 0)):
        found = [*about_cost(*arms)]
        assert len(found) == count and all("gains as long as a step costs" in x for x in found)


def test_at_the_end_counts_the_sampled_evaluation_after_the_last_step():
    """The others would give differences of 0 and of 1."""
    plain = run_of(evaluations=[("sampled", 0, [1, 1, 1, 1]), ("greedy", 2, [0, 0, 0, 0]),
                                ("sampled", 2, [1, 0, 0, 0])])
    mine = run_of(evaluations=[("sampled", 0, [1, 1, 1, 1]), ("sampled", 2, [1, 1, 1, 0]),
                               ("greedy", 2, [1, 1, 1, 1])])
    found = gain_over({0: mine}, {0: plain}, AT_THE_END)
    assert found.estimate.value == pytest.approx(2 / 4)
    assert not gain_over({0: mine}, {0: run_of()}, AT_THE_END).pairs
    assert not gain_over({0: run_of()}, {0: plain}, AT_THE_END).pairs


def ends_of(*rows):
    """An arm whose runs end with these answers."""
    return {seed: run_of(evaluations=[("sampled", 2, row)]) for seed, row in enumerate(rows)}


ZEROS = ends_of(*3 * [[0, 0, 0, 0]])


def test_a_gain_at_the_end_is_students_t_over_the_pairs_or_over_the_problems_of_one():
    """The pairs have means of 1/2, 1/2 and 3/4."""
    mine = ends_of([1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 1])
    assert gain_over(mine, ZEROS, AT_THE_END).estimate == mean_over([0.5, 0.5, 0.75])
    one = gain_over({0: mine[0]}, ZEROS, AT_THE_END)
    assert one.estimate == paired_difference([1, 1, 0, 0])


def test_means_that_agree_by_luck_are_no_proof_where_answers_differ():
    """In both pairs one problem is gained and another lost, so the mean is 0; or nothing is."""
    by_luck = gain_over(ends_of([1, 0, 0, 0], [0, 0, 1, 0]),
                        ends_of([0, 1, 0, 0], [0, 0, 0, 1]), AT_THE_END)
    assert by_luck.estimate.value == 0 and np.isnan([*by_luck.estimate.interval, by_luck.p]).all()
    same = gain_over(ZEROS, ZEROS, AT_THE_END)
    assert same.estimate.interval == (0, 0) and same.p == 1


def test_a_single_pair_is_no_test():
    """Its p, over problems, is not told, and the p of the other arm is not multiplied by two."""
    mine = ends_of([1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0])
    found = gains({"three": (mine, ZEROS), "single": ({0: mine[0]}, ZEROS)}, AT_THE_END)
    assert found["three"].p == gain_over(mine, ZEROS, AT_THE_END).p
    assert np.isnan(found["single"].p) and found["single"].verdict == "one seed: no verdict"


def test_pairs_that_agree_by_luck_are_no_proof():
    """Two short runs, each better by one answer of four. If they are the same to the bit, this is
    known, and no difference is seen."""
    by_luck = gain_over(arm_of(0.5, 0.75), arm_of(0.25, 0.5))
    assert by_luck.estimate.value == 0.25 and np.isnan(by_luck.p)
    assert np.isnan(by_luck.estimate.interval).all()
    assert by_luck.verdict == NOT_SEEN
    same = gain_over(arm_of(0.5, 0.75), arm_of(0.5, 0.75))
    assert same.p == 1 and same.estimate.interval == (0, 0)
    rounded = gain_over(arm_of(0.1 + 0.2, 0.6), arm_of(0, 0.3))  # 0.30000000000000004 and 0.3
    assert np.isnan(rounded.p)


def test_holm_is_over_all_gains_of_a_family(monkeypatch):
    """p = 0.03 alone would be seen; of three gains it is not."""
    p = {0.1: 0.03, 0.2: 0.001, 0.3: 0.9}
    monkeypatch.setattr("lab.analysis.statistics.mean_over", lambda pairs: Estimate(
        pairs[0], p=p[round(pairs[0], 1)]))
    plain = arm_of(0, 0.5)
    family = {name: ({0: run_of(name, name), 1: run_of(name + 0.51, name + 0.51)}, plain)
              for name in p}
    found = gains(family)
    assert [gain.p for gain in found.values()] == pytest.approx([0.06, 0.003, 0.9])
    assert [gain.verdict for gain in found.values()] == [NOT_SEEN, "ahead once", NOT_SEEN]


def test_problems_that_are_asked_again_are_counted(tmp_path):
    """Prompts of steps 1 to 3: 5 and 6; 6 and 7; 5 and 5, so three of six came before."""
    steps = {step: credit_columns([2, 2], [0, 1], prompt_ids=[first, 9, second, 9])
             for step, (first, second) in enumerate([(5, 6), (6, 7), (5, 5)], 1)}
    run = Run(write_log(tmp_path / "run", steps))
    assert share_seen_before(run) == pytest.approx(3 / 6)
    without_record = recorded(config=run.config)  # its problems are not known, but the same
    assert doubt_about_training([without_record, run]).startswith("50% of the problems")
    assert doubt_about_training([without_record]) == ""
    game = {step: credit_columns([2, 2], [0, 1], prompt_ids=[5, 9, 5, 9]) for step in (1, 2)}
    assert share_seen_before(Run(write_log(tmp_path / "game", game))) == 0
    for config, why in (({"pairs": "x.jsonl"}, "not sampled from the policy"),
                        ({"dynamic_sampling": 4}, "has chosen the answers on record")):
        assert why in doubt_about_training([recorded(config=config)])


def test_the_one_rule_for_ahead_and_behind():
    """Ahead takes two looks, behind one. A difference is seen below 0.05, not at it."""
    better, worse = Gain((1, 2), Estimate(0.1), 0.0499), Gain((1, 2), Estimate(-0.1), 0.01)
    unseen = Gain((1, 2), Estimate(0.1), 0.05)
    assert called(better) == "ahead once" and called(better, better) == "ahead"
    assert called(better, unseen) == "ahead once, then no difference seen"
    assert called(better, worse) == "ahead once, then behind"
    assert called(worse) == "behind" == called(worse, better)
    assert called(unseen) == NOT_SEEN == called(unseen, better)
    assert called(Gain((1,), Estimate(0.1))) == "one seed: no verdict"
