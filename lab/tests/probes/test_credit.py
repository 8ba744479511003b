"""Measured credit against a world where the truth can be listed; its statistics by hand."""
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from small import hand_made
from lab.credit.measured import chain, probability_of_others
from lab.credit.measured import measured as measured_advantage
from lab.engine.errors import UserError
from lab.probes.credit import squared_credit, true_credit
from lab.tests.test_identities import credit_of, world_of


@pytest.fixture
def measured(monkeypatch):
    """A world, whose continuations are drawn from the list of its answers."""
    world = world_of(2, seed=4)

    @cache
    def chances(begun, other):
        fit = torch.tensor([tuple(answer.ids[:len(begun)]) == begun
                            and answer.ids[len(begun)] != other for answer in world.answers])
        return (world.chance * fit).detach()

    def drawn(policy, rollouts, prefixes, k, without):
        rewards = torch.zeros(len(prefixes))
        for row, ((_, begun), other) in enumerate(zip(prefixes, without)):
            chosen = chances(tuple(begun), other).multinomial(1, generator=rollouts.generator)
            rewards[row] = world.rollouts.reward[chosen]
        return rewards[:, None], {"extra_tokens": len(prefixes)}

    monkeypatch.setattr("lab.credit.measured.continuation_rewards", drawn)
    generator = torch.Generator().manual_seed(0)
    return world, world.policy, replace(world.rollouts, generator=generator)


def test_measured_credit_is_the_enumerated_one(measured):
    """Every token of every answer, with errors that say how far off it may be. Where all answers
    that go on with other tokens earn the same, it is not off at all."""
    world, policy, rollouts = measured
    exact, z = credit_of(world) * rollouts.mask, []
    for _ in range(4):
        credit = true_credit(policy, rollouts, 400)
        off = credit.value - exact
        z.append((off / credit.error)[off.abs() > 1e-6])
        assert off.abs().max() < 0.12
        assert (credit.parts.mean(0) - credit.value).abs().max() < 1e-6
    z = torch.cat(z)
    assert len(z) > 40 and z.abs().max() < 4.5 and 0.5 < z.square().mean() < 1.6


def test_the_advantage_measured_is_the_enumerated_credit_on_average(measured):
    """Every token is measured, with two answers each; a token that is too certain gets 0."""
    world, policy, rollouts = measured
    advantage = measured_advantage(policy, measured_k=2, measured_above=0.0)
    draws = []
    for seed in range(150):
        batch = replace(rollouts, generator=torch.Generator().manual_seed(seed))
        draws.append(advantage(batch, policy))
    assert advantage.metrics["extra_tokens"] > 0
    draws, mask = torch.stack(draws), rollouts.mask
    off = (draws.mean(0) - credit_of(world))[mask].abs()
    error = draws.std(0)[mask] / 150 ** 0.5
    assert (off < 4.5 * error + 1e-5).all() and error.max() < 0.05
    some = measured_advantage(policy, measured_k=2, measured_above=0.6)(batch, policy)
    undecided = probability_of_others(rollouts) > 0.6
    assert not some[~undecided].any() and some[undecided].any()


def test_measured_credit_is_that_of_temperature_1(measured):
    _, policy, rollouts = measured
    hot = replace(policy, settings=replace(policy.settings, temperature=0.7))
    for ask in (lambda: measured_advantage(hot), lambda: true_credit(hot, rollouts, 4)):
        with pytest.raises(UserError, match="--temperature 0.7: measured credit"):
            ask()


def test_the_chain_by_hand():
    """Three tokens of chance 0.5, 0.8 and 0.9, reward 1; others are worth 0.2, 0.4 and 0:
    V_2 = 0.9, V_1 = 0.8 * 0.9 + 0.2 * 0.4, V_0 = (V_1 + 0.2) / 2. Of the last deviation's variance
    0.25 there is 0.01 in V_2, and 0.64 of that in V_1."""
    def row(*values):
        return torch.tensor([values], dtype=torch.float64)

    batch = hand_made([[1, 1, 1, 0]])
    batch = replace(batch, mask=batch.mask.bool(), scores={"reward": torch.tensor([1.0])})
    others, variance = row(0.2, 0.4, 0.0, float("nan")), row(0.01, 0.04, 0.25, 0.0)
    value, spread = chain(batch, row(0.5, 0.2, 0.1, 0.0), others, variance)
    torch.testing.assert_close(value, row(0.3, 0.1, 0.1, 0.0))
    in_2 = 0.1 ** 2 * 0.25
    in_1 = 0.8 ** 2 * in_2 + 0.2 ** 2 * 0.04
    expected = row(0.5 ** 2 * (in_1 + 0.01), 0.2 ** 2 * (in_2 + 0.04), in_2, 0.0)
    torch.testing.assert_close(spread, expected)


def test_parts_are_independent_estimates(measured):
    """The product of two parts is no larger than the squared credit; the square of one is."""
    world, policy, rollouts = measured
    products, squares = [], []
    for seed in range(60):
        batch = replace(rollouts, generator=torch.Generator().manual_seed(seed))
        first, second, *_ = true_credit(policy, batch, 4).parts[:, rollouts.mask]
        products.append((first * second).mean().item())
        squares.append((first * first).mean().item())
    true = credit_of(world)[rollouts.mask].square().mean().item()
    error = np.std(products) / 60 ** 0.5
    assert abs(np.mean(products) - true) < 4 * error
    assert np.mean(squares) > true + 4 * error


def test_the_squared_credit_is_a_product_of_different_parts():
    """Of 1, 2, 3 and 4: 1*2, 1*3, 1*4, 2*3, 2*4 and 3*4 are 35 in all, of six. A square of one
    estimate would add its noise, which is largest where the model was unsure."""
    assert squared_credit(torch.tensor([1.0, 2, 3, 4])).item() == pytest.approx(35 / 6)
