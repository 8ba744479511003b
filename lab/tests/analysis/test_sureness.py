"""Less able or less sure: two gains side by side, by hand."""
import pytest

from lab.analysis.sureness import Sureness, last_entropy, sureness, sureness_table
from lab.analysis.gains import Gain
from lab.analysis.statistics import Estimate


def run_of(sampled, greedy, entropy=0.5):
    """A run of two steps that solved so many of ten held-out problems at the end."""
    ends = []
    for mode, right in (("sampled", sampled), ("greedy", greedy)):
        if right is not None:
            ends.append({"mode": mode, "step": 2, "answer": [1] * right + [0] * (10 - right)})
    return {"metrics": [{"entropy": entropy}] * 2, "evaluations": ends, "config": {"steps": 2}}


def arm_of(*ends, entropy=0.5):
    return {seed: run_of(*end, entropy) for seed, end in enumerate(ends)}


def test_the_two_gains_are_compared_seed_by_seed():
    """Sampled -0.4, -0.3, -0.4, -0.4, greedy 0, 0.1, 0, 0: they differ by -0.4 with every seed,
    although each of them varies."""
    plain = arm_of((6, 5), (6, 5), (7, 5), (6, 5), entropy=0.3)
    mine = arm_of((2, 5), (3, 6), (3, 5), (2, 5), entropy=0.7)
    found = sureness(mine, plain)
    assert found.sampled.estimate.value == pytest.approx(-1.5 / 4)
    assert found.greedy.estimate.value == pytest.approx(0.1 / 4)
    assert found.difference.interval == pytest.approx((-0.4, -0.4))
    assert (found.entropy, found.other_entropy) == pytest.approx((0.7, 0.3))
    said = found.sentence("my_idea", "plain GRPO")
    assert said.startswith("Less able or less sure? my_idea is less sure, not seen to be less ab")
    assert "likeliest token" in said
    assert "Sampled minus greedy is -40.0 (-40.0 to -40.0)." in said
    assert said.endswith("last 10 steps is 0.700, and that of plain GRPO 0.300.")
    table = sureness_table({"none": plain, "mine": mine, "new": arm_of((2, None))}, "none")
    assert [row[0] for row in table.rows] == ["mine"]


def test_the_entropy_is_that_of_the_last_ten_steps():
    assert last_entropy({"metrics": [{"entropy": 1.0}] * 5 + [{"entropy": 0.2}] * 10}) == (
        pytest.approx(0.2))


def test_nothing_is_said_without_greedy_answers_or_with_one_pair():
    plain = arm_of((6, 5), (6, 5))
    assert sureness(arm_of((2, None), (2, None)), plain) is None
    assert sureness(arm_of((2, 5)), plain) is None
    assert sureness_table({"none": plain}, "none") is None


UP, DOWN, OPEN = Estimate(0.1, p=0.02), Estimate(-0.1, p=0.02), Estimate(0.1, p=0.3)
HARDLY = Estimate(0.1, p=0.03)  # twice as much is not below 0.05
PAIRS = (1, 2, 3, 4)


@pytest.mark.parametrize("greedy, difference, words", [
    (OPEN, OPEN, "not seen to differ in either"),
    (OPEN, DOWN, "less sure, not seen to be less able"),
    (OPEN, UP, "more sure, not seen to be more able"),
    (DOWN, OPEN, "less able, not seen to be less sure"), (DOWN, DOWN, "less able, and less sure"),
    (DOWN, UP, "less able, but more sure"), (UP, DOWN, "more able, but less sure"),
    (OPEN, HARDLY, "not seen to differ in either"), (HARDLY, OPEN, "not seen to differ in either"),
    (UP, HARDLY, "more able, and more sure")])
def test_the_words_for_each_case(greedy, difference, words):
    """By Holm's correction for two tests: the smaller p counts twice."""
    none = Gain((), Estimate(0.0))
    found = Sureness(none, Gain(PAIRS, greedy), difference, 0.1, 0.1)
    assert found.words == words
    few = Sureness(none, Gain(PAIRS[:3], greedy), difference, 0.1, 0.1)
    assert few.words == "not known: too few pairs"
    assert few.sentence("my_idea", "x").startswith("Less able or less sure? From 3 pairs that is "
                                                   "not known: on held-out problems at the end my")
