"""Which runs are a pair, what is tested, and what is said of a gain: by hand."""
import numpy as np
import pytest

from lab.analysis.gains import (AT_THE_END, NOT_SEEN, Gain, called, gain_over, gains, room_left)
from lab.analysis.statistics import Estimate, detectable, mean_over, paired_difference


def run_of(*success, evaluations=()):
    """A run with this success at its steps. `evaluations`: mode, step, answers."""
    lines = [{"mode": mode, "step": step, "answer": answers}
             for mode, step, answers in evaluations]
    return {"metrics": [{"success": share} for share in success], "evaluations": lines,
            "config": {"steps": 2}}


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
    mine = run_of(evaluations=[("sampled", 2, [1, 1, 1, 0]), ("sampled", 0, [1, 1, 1, 1]),
                               ("greedy", 2, [1, 1, 1, 1])])
    found = gain_over({0: mine}, {0: plain}, AT_THE_END)
    assert found.estimate.value == pytest.approx(2 / 4)
    assert not gain_over({0: mine}, {0: run_of()}, AT_THE_END).pairs
    assert not gain_over({0: run_of()}, {0: plain}, AT_THE_END).pairs


def test_what_could_be_seen_is_worse_the_more_is_tested():
    """Differences 0.1, 0.2 and 0.3 have a standard error of 0.1 / sqrt 3."""
    plain, mine = arm_of(0, 0, 0), arm_of(0.1, 0.2, 0.3)
    found = gains({name: (mine, plain) for name in ("one", "two")})
    [alone] = gains({"one": (mine, plain)}).values()
    error = 0.1 / 3 ** 0.5
    assert found["one"].could_see == pytest.approx(detectable(2, 2) * error)
    assert alone.could_see == pytest.approx(detectable(2) * error)
    assert found["one"].p == pytest.approx(2 * alone.p)


def ends_of(*rows):
    """An arm whose runs end with these answers."""
    return {seed: run_of(evaluations=[("sampled", 2, row)]) for seed, row in enumerate(rows)}


ZEROS = ends_of(*3 * [[0, 0, 0, 0]])


def test_a_gain_at_the_end_is_students_t_over_the_pairs_or_over_the_problems_of_one():
    """The pairs have means of 1/2, 1/2 and 3/4."""
    mine = ends_of([1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 1])
    of_two = gains({name: (mine, ZEROS) for name in ("one", "two")}, AT_THE_END)["one"]
    assert of_two.estimate == mean_over([0.5, 0.5, 0.75], tests=2)
    assert of_two.could_see > 1.05 * gain_over(mine, ZEROS, AT_THE_END).could_see
    one = gain_over({0: mine[0]}, ZEROS, AT_THE_END)
    assert one.estimate == paired_difference([1, 1, 0, 0]) and one.could_see is None


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
    assert by_luck.verdict == NOT_SEEN and "no interval" in by_luck.sentence
    same = gain_over(arm_of(0.5, 0.75), arm_of(0.5, 0.75))
    assert same.p == 1 and same.estimate.interval == (0, 0)
    rounded = gain_over(arm_of(0.1 + 0.2, 0.6), arm_of(0, 0.3))  # 0.30000000000000004 and 0.3
    assert np.isnan(rounded.p)


def test_the_words_of_a_gain():
    up, down = Estimate(0.1, 0.01, 0.19, visible=0.2), Estimate(-0.1, -0.19, -0.01)
    assert Gain((1, 2, 3), up, 0.0499).verdict == "better"
    assert Gain((1, 2, 3), down, 0.0499).verdict == "worse"
    assert Gain((1, 2, 3), up, 0.05).verdict == NOT_SEEN  # below it, not at it
    assert Gain((1, 2, 3), up).could_see == 0.2 and Gain((1, 2), up).could_see is None
    assert room_left(Estimate(0.1, 0.0, 0.2)).endswith("room for a gain of up to 20.0 points")
    assert room_left(Estimate(-0.1, -0.2, 0.0)).endswith("room for a loss of up to 20.0 points")


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
