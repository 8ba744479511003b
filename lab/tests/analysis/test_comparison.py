"""Which runs are a pair, what is tested, and what is said of a gain: by hand."""
import numpy as np
import pytest

from conftest import credit_columns, write_log
from known_runs import recorded
from lab.analysis.comparison import (AT_THE_END, NOT_SEEN, Gain, called, doubt_about_training,
                                     gain_over, gains, room_left)
from lab.analysis.run_folders import Run, share_seen_before
from lab.analysis.statistics import Estimate, mean_over, paired_difference


def run_of(*success, evaluations=()):
    """A run with this success at its steps. `evaluations`: mode, step, answers."""
    lines = [{"mode": mode, "step": step, "answer": answers}
             for mode, step, answers in evaluations]
    return recorded([{"success": share} for share in success], lines, {"steps": 2})


def arm_of(*means):
    return {seed: run_of(mean, mean) for seed, mean in enumerate(means)}


def test_runs_of_another_length_are_no_pair():
    plain = {0: run_of(0.1, 0.3), 1: run_of(0.1, 0.3), 2: run_of()}
    mine = {0: run_of(0.4, 0.6), 1: run_of(0.4), 2: run_of()}
    found = gain_over(mine, plain)
    assert found.seeds == (0,) and found.estimate.value == pytest.approx(0.3)
    assert found.verdict == "one seed: no verdict"


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


def test_runs_whose_success_is_not_known_are_no_pair():
    known, unknown = arm_of(0.5, 0.6), arm_of(None, None)
    assert gain_over(known, unknown).verdict == "nothing to compare"
    assert not gain_over(unknown, unknown).pairs


def test_pairs_that_agree_by_luck_are_no_proof():
    """Two short runs, each better by one answer of four. If they are the same to the bit, this is
    known, and no difference is seen."""
    by_luck = gain_over(arm_of(0.5, 0.75), arm_of(0.25, 0.5))
    assert by_luck.estimate.value == 0.25 and np.isnan(by_luck.p)
    assert np.isnan(by_luck.estimate.interval).all()
    assert by_luck.verdict == NOT_SEEN and "no interval" in room_left(by_luck.estimate)
    same = gain_over(arm_of(0.5, 0.75), arm_of(0.5, 0.75))
    assert same.p == 1 and same.estimate.interval == (0, 0)
    rounded = gain_over(arm_of(0.1 + 0.2, 0.6), arm_of(0, 0.3))  # 0.30000000000000004 and 0.3
    assert np.isnan(rounded.p)


def test_the_words_of_a_gain():
    up, down = Estimate(0.1, 0.01, 0.19), Estimate(-0.1, -0.19, -0.01)
    assert Gain((1, 2, 3), up, 0.0499).verdict == "better"
    assert Gain((1, 2, 3), down, 0.0499).verdict == "worse"
    assert Gain((1, 2, 3), up, 0.05).verdict == NOT_SEEN  # below it, not at it
    assert room_left(Estimate(0.1, 0.0, 0.2)).endswith("room for a gain of up to 20.0 points")
    assert room_left(Estimate(-0.1, -0.2, 0.0)).endswith("room for a loss of up to 20.0 points")


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
    assert [gain.verdict for gain in found.values()] == [NOT_SEEN, "better", NOT_SEEN]


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
    """Ahead takes two looks, behind one."""
    better, worse = Gain((1, 2), Estimate(0.1), 0.01), Gain((1, 2), Estimate(-0.1), 0.01)
    unseen = Gain((1, 2), Estimate(0.1), 0.06)
    assert called(better) == "better once, second look to come"
    assert called(better, better) == "ahead"
    assert called(better, unseen) == "better once, then no difference seen"
    assert called(better, worse) == "better once, then worse"
    assert called(worse) == "behind" == called(worse, better)
    assert called(unseen) == NOT_SEEN == called(unseen, better)
    assert called(Gain((1,), Estimate(0.1))) == "one seed: no verdict"
