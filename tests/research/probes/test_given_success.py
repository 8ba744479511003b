"""Bayes' rule and the bounds of entropy, on numbers worked out by hand and on the small world."""
import math

import pytest
import torch

from research.probes import given_success
from research.probes.given_success import Forks, bounds_table, copies_table, forks_of
from research.probes.world import END, ONE, OPENING, make_world


def forks(chance, after):
    chance, after = torch.tensor([chance]).double(), torch.tensor([after]).double()
    return Forks(chance, after, (chance * after).sum(1))


def ratios(of):
    return [row[3] for row in bounds_table(of).rows]


def test_bounds_by_hand():
    """A fair token that decides all tells all of its entropy, log 2; E[A^2] is 1/4."""
    log2 = math.log(2)
    assert ratios(forks([0.5, 0.5], [1.0, 0.0])) == pytest.approx([1, 0.5 / log2, 0.5 / log2, 1])


def test_success_alone_is_not_bounded_by_entropy():
    """Of a token of p = 0.01 that alone is right, KL(given success, policy) is log 100."""
    entropy = -0.01 * math.log(0.01) - 0.99 * math.log(0.99)
    told, *_, by_success = ratios(forks([0.01, 0.99], [1.0, 0.0]))
    assert told == pytest.approx(1) and by_success == pytest.approx(math.log(100) / entropy)


def test_what_a_token_tells_is_its_entropy_minus_that_given_the_reward():
    chance, after = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.9, 0.4, 0.1])
    V = (chance * after).sum()

    def entropy(p):
        return -(p * p.log()).sum()

    given = V * entropy(chance * after / V) + (1 - V) * entropy(chance * (1 - after) / (1 - V))
    told = (entropy(chance) - given) / entropy(chance)
    assert ratios(forks([0.2, 0.3, 0.5], [0.9, 0.4, 0.1]))[0] == pytest.approx(told.item(), abs=1e-6)


def test_a_bound_that_does_not_hold_is_told():
    """V before the token is not the mean of V after it: no such policy can be."""
    wrong = Forks(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 1.0]]), torch.tensor([0.1]))
    assert bounds_table(wrong).finding.startswith("A bound that is a theorem does not hold: what")


def test_forks_are_the_prefixes_that_leave_the_reward_open():
    """Of two tokens: only the start and "<answer>" do. After the tag, "1" alone is right."""
    world = make_world(seed=3, length=2)
    of = forks_of(world)
    assert len(of.before) == 2 and of.before[0] == pytest.approx(world.J, abs=1e-6)
    assert sorted(of.after[1].tolist()) == [0, 0, 1] and of.after[1, ONE] == 1
    torch.testing.assert_close(of.chance.sum(1), torch.ones(2).double())
    torch.testing.assert_close((of.chance * of.after).sum(1), of.before)
    assert of.after[0, END] == 0 and of.after[0, OPENING] == of.before[1]


def test_a_copy_that_is_taught_long_enough_follows_bayes_rule(monkeypatch):
    monkeypatch.setattr(given_success, "STEPS", (1, 60))
    table = copies_table(make_world(seed=3, length=2))
    first, last = table.rows
    assert last[1] > 0.98 and last[2] > 0.8 and last[2] > 5 * first[2]
    assert f"After 60 steps on all right answers a copy has a cosine of {last[1]:.3f}" in (
        table.finding)
