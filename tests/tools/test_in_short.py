"""What is said at last of a token that was followed, by hand."""
import math

import pytest

from engine.tokens import KINDS
from tools import follow
from tools.helpers.credit_of_token import CreditOfToken
from tools.helpers.in_short import in_short


def answer(push=1.0, p=0.5, p_after=0.4, advantage=2.0, weight=1.0, dropped=None):
    """An answer whose second token is followed."""
    values = {"push": [9.0, push], "log-prob": [0.0, math.log(p)],
              "advantage": [9.0, advantage], "weight": [9.0, weight]}
    if p_after:
        values["change"] = [9.0, math.log(p_after / p)]
    return {"values": values, "account": {"dropped": dropped}, "texts": ["x", " -"],
            "kind": [0, KINDS.index("operator")]}


def credit(value, k=1000):
    return CreditOfToken(before=0.0, after=value, interval=(value - 0.196, value + 0.196), k=k)


@pytest.mark.parametrize("push, value, said", [
    (1.0, 0.3, "raised the expected reward: the whole 95% interval of its credit is above 0 "
               "(+0.104 to +0.496). So the push up was deserved."),
    (-1.0, 0.3, "So the push down was not deserved."),
    (-1.0, -0.3, "lowered the expected reward: the whole 95% interval of its credit is below 0 "
                 "(-0.496 to -0.104). So the push down was deserved."),
    (1.0, -0.3, "So the push up was not deserved."),
    (0.004, 0.3, "So a push up would have been deserved."),
    (0.0, -0.3, "So a push down would have been deserved."),
    (1.0, 0.1, "The 95% interval of its credit includes 0 (-0.096 to +0.296), so it is open "
               "whether the push up was deserved. With --credit 4000 the interval would be half as "
               "wide."),
    (-1.0, 0.1, "so it is open whether the push down was deserved."),
    (0.0, 0.1, "so it is open whether it deserved a push.")])
def test_whether_the_push_was_deserved(push, value, said):
    assert said in in_short(answer(push), 1, credit(value))


@pytest.mark.parametrize("known, said", [
    ({}, "was pushed up (+1.00), but in the step its probability fell from 0.5 to 0.4. The"),
    ({"p_after": 0.6}, "was pushed up (+1.00), and in the step its probability rose from 0.5 to "),
    ({"push": -1.0}, "was pushed down (-1.00), and in the step its probability fell from 0.5 to "),
    ({"push": -1.0, "p_after": 0.6}, "was pushed down (-1.00), but in the step its probability "),
    ({"push": 0.004}, "was hardly pushed (+0.004), and in the step its probability fell"),
    ({"push": 0.004, "p_after": 0.5}, "was hardly pushed (+0.004), and the step left its "
                                      "probability at 0.5."),
    ({"advantage": 0.0, "push": 0.0}, "was not pushed, because its advantage is 0, and in the "),
    ({"weight": 0.0, "push": 0.0}, "was not pushed, because its weight is 0, and in the "),
    ({"p_after": None}, "was pushed up (+1.00). How its probability then changed was not "
                        "measured. The"),
    ({"dropped": "cut off"}, "was not pushed, because the step left its answer out. The")])
def test_the_push_and_what_became_of_it(known, said):
    text = in_short(answer(**known), 1, credit(0.3))
    assert text.startswith(f"In short: the operator ' -' {said}")


def test_no_more_continuations_are_advised_than_the_flag_takes():
    said = in_short(answer(), 1, credit(0.1, k=250_000))
    assert said.endswith("With --credit 1000000 the interval would be half as wide.")
    assert in_short(answer(), 1, credit(0.1, k=250_001)).endswith("push up was deserved.")


def test_follow_begins_with_it(recorded, capsys):
    """The credit is told where it was measured."""
    argv = [str(recorded), "--step", "1", "--answer", "0", "--token", "0"]
    for flags, is_measured in ((["--credit", "10"], True), ([], False)):
        follow.main([*argv, *flags])
        _, first, *_ = capsys.readouterr().out.split("\n\n")
        assert first.startswith("In short: the ")
        assert ("credit" in first or "expected reward" in first) == is_measured
