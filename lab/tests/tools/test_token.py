"""A token: its credit, by hand from given rewards and in a run against other samples; and what is
said of it in short."""
import math
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import refusal

from lab.analysis.run_folders import Run, read_credit
from lab.engine.tokens import KINDS, load_tokenizer
from runs import edit_config
from lab.tools import follow
from lab.tools.follow import CreditOfToken, credit_interval, in_short, measure_credit

STEP = 1


@pytest.fixture(scope="module")
def batch(recorded):
    return read_credit(recorded, STEP, load_tokenizer(recorded))


def uncertain_token(batch):
    """(answer, index) of the token with the largest entropy that is not the first of its answer."""
    entropy = (batch.entropy * batch.mask).clone()
    entropy[:, 0] = 0
    return divmod(int(entropy.argmax()), entropy.shape[1])


def test_it_is_the_difference_of_two_means(recorded, batch, monkeypatch):
    """Rewards 0 0 1 1 before the token and 1 1 1 0 after it. With 0 and 1.1, the highest reward on
    record, they have the means 3.1 / 6 and 4.1 / 6."""
    asked = []

    def given(policy, rollouts, prefixes, k, progress):
        asked.extend(prefixes)
        return torch.tensor([[0.0, 0, 1, 1], [1.0, 1, 1, 0]]), {}

    monkeypatch.setattr(follow, "continuation_rewards", given)
    b, t = uncertain_token(batch)
    found = measure_credit(Run(recorded), STEP, b, t, 4)
    ids, problem = batch.ids[b].tolist(), int(batch.group[b])
    assert asked == [(problem, tuple(ids[:t])), (problem, tuple(ids[:t + 1]))]
    assert (found.before, found.after) == (0.5, 0.75)
    highest = batch.reward.max().item()
    one, two = np.array([0, 0, 1, 1, 0, highest]), np.array([1, 1, 1, 0, 0, highest])
    middle, half = two.mean() - one.mean(), 1.96 * ((one.var() + two.var()) / 6) ** 0.5
    assert found.interval == pytest.approx((middle - half, middle + half), rel=1e-6)


def test_in_words():
    said = CreditOfToken(before=0.25, after=0.75, interval=(0.304, 0.696), k=1000).in_words()
    assert said == ("V after - V before = 0.7500 - 0.2500 = +0.500 (95% interval +0.304 to +0.696)."
                    " Each V is the mean reward of 1,000 continuations by the model that sampled "
                    "the answer")


@pytest.mark.parametrize("k, values, before, after", [
    (10, [0, 1], [0.999, 0.001], [0.9, 0.1]), (10, [0, 0.06, 1.1], [0.5, 0.5, 0], [0.4, 0.5, 0.1]),
    (40, [-1, 0, 3], [0.3, 0.69, 0.01], [0.3, 0.69, 0.01])])
def test_the_interval_holds_the_credit_as_often_as_it_says(k, values, before, after):
    """In 93% at least of 4,000 experiments, and no interval is without width. Rewards are equal, or
    rare, or have three values. The highest is not on record."""
    values = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([before, after], dtype=torch.float64)
    truth = (values @ p[1] - values @ p[0]).item()
    drawn = torch.multinomial(p.repeat_interleave(4000, 0), k, True, generator=generator)
    held = 0
    for one, two in zip(values[drawn[:4000]], values[drawn[4000:]]):
        low, high = credit_interval(one, two, False, torch.zeros(1))
        assert high - low > 0
        held += low <= truth <= high
    assert held / 4000 > 0.93


def test_after_the_last_token_only_v_before_has_an_error():
    """0 0 1 1 with two rewards of 0 and two of 2, the lowest and the highest that were seen, have
    the mean 3/4 and the variance 11/16."""
    before, after = torch.tensor([0.0, 0, 1, 1]).double(), torch.ones(4).double()
    unknown = [float("nan"), float("inf")]
    found = credit_interval(before, after, True, torch.tensor([0.1, 2.0, *unknown]))
    half = 1.96 * (11 / 16 / 8) ** 0.5
    assert found == pytest.approx((0.25 - half, 0.25 + half))


def test_after_the_last_token_v_is_the_reward(recorded, batch, capsys):
    b = int((batch.finished & (batch.reward > 0)).nonzero()[0])
    last = int(batch.length[b]) - 1
    argv = [str(recorded), "--step", str(STEP), "--answer", str(b), "--token", str(last)]
    follow.main([*argv, "--credit", "10"])
    printed = capsys.readouterr().out
    [after] = re.findall(r"^credit +V after - V before = ([\d.]+) - ", printed, re.M)
    assert float(after) == pytest.approx(batch.reward[b].item(), abs=1e-4)


def test_what_it_cannot_measure(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "run")
    edit_config(folder, min_number=2)
    said = refusal(follow.main, [str(folder), "--step", "1", "--answer", "0", "--token", "0",
                                 "--credit", "10"])
    assert "are not those that its settings make now" in said


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
    (0.004, 0.3, "So a push up would have been deserved."),
    (0.0, -0.3, "So a push down would have been deserved."),
    (1.0, 0.1, "The 95% interval of its credit includes 0 (-0.096 to +0.296), so it is open "
               "whether the push up was deserved. With --credit 4000 the interval would be half as "
               "wide."),
    (0.0, 0.1, "so it is open whether it deserved a push.")])
def test_whether_the_push_was_deserved(push, value, said):
    assert said in in_short(answer(push), 1, credit(value))


@pytest.mark.parametrize("known, said", [
    ({}, "was pushed up (+1.00), but in the step its probability fell from 0.5 to 0.4. The"),
    ({"p_after": 0.6}, "was pushed up (+1.00), and in the step its probability rose from 0.5 to "),
    ({"push": -1.0, "p_after": 0.6}, "was pushed down (-1.00), but in the step its probability "),
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
