"""Tries and their verdicts, read from answers."""
import pytest

from research.experiments.tries import how_solved, target_of, tries_of

SPOKEN = (" first take 7 + 5 = 12 and 12 + 3 = 15 no. last 5 * 3 = 15, 15 + 7 = 22 yes!</think>\n"
          "<answer> ( 5 * 3 ) + 7</answer><|im_end|>")


def test_a_try_is_a_chain_with_its_last_result_and_a_verdict():
    tries = tries_of(SPOKEN)
    assert [attempt.result for attempt in tries] == [15, 22]
    assert [SPOKEN[slice(*attempt.verdict)] for attempt in tries] == [" no.", " yes!"]


@pytest.mark.parametrize("text, results", [
    (" hmm. first 9 * 4 = 36, 36 - 9 = 27 exactly.</think>", [27]),
    (" the goal is 24. first 13 - 9 = 4 so 4 / 2 = 2 too small. enough.</think>", [2]),
    (" first 3 * 5 = 15 + 7 = 22 not 24. then second 7 - 5 = 2", [22, 2]),  # cut off
    (" <answer> 7 + 5 = 12</answer>", []), (" stop here.</think> 7 + 5 = 12.", []), ("", [])])
def test_what_counts_as_a_try(text, results):
    assert [attempt.result for attempt in tries_of(text)] == results


@pytest.mark.parametrize("target, how", [(15, "first try"), (22, "later try"),
                                         (12, "another expression"), (7, "another expression")])
def test_which_try_reached_the_target(target, how):
    """12 is the result of a step, and of no try."""
    assert how_solved(SPOKEN, target) == how


def test_the_target_stands_in_the_prompt():
    assert target_of("<|im_start|>user\n 3 5 7 make 22<|im_end|>") == 22
    assert target_of("Reach 45 with the numbers 3, 5, 7.") == 45
    assert target_of("sort 3 5 7") is None
