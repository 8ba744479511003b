"""Weightings that learn: which tokens predict the outcome, by a network, and the exponent of the
lengths, by hand."""
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lab.credit import learned_importance
from small import hand_made, looking, make_weighting, spoken


def made(policy, warmup):
    return make_weighting("learned_importance", {"importance_warmup": warmup}, policy)


def test_it_weighs_after_the_warmup(policy):
    weighting, rollouts = made(policy, 2), spoken(policy)
    for step in (1, 2, 3):
        weight = weighting(dataclasses.replace(rollouts, step=step), policy)
        assert (weight == 1).all() == (step < 3)


def test_the_loss_by_hand(policy):
    """Row by row without padding: the reading of the weighted mean state against the answer's
    advantage."""
    rollouts, importance_net = spoken(policy), made(policy, 0)
    net, errors = importance_net.net.module, []
    with torch.no_grad():
        for b, n in enumerate(rollouts.length.tolist()):
            states = rollouts.hidden[b, :n]
            importance = F.softplus(net.outer(F.silu(net.inner(states)))).flatten()
            mean = (importance[:, None] * states).sum(0) / importance.sum()
            predicted = mean @ net.read.weight[0] + net.read.bias[0]
            errors.append((predicted - rollouts.advantage[b, 0]).square().item())
    loss = importance_net.loss(rollouts).item()
    assert loss == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_it_learns_and_a_net_that_is_loaded_goes_on_from_there(policy, monkeypatch):
    """Two kinds of state: the first tells the advantage, and weighs more in the end."""
    states = F.one_hot(torch.tensor([[0, 1]] * 4), policy.model.config.hidden_size).float()
    advantage = torch.tensor([1.0, -1, 1, -1])[:, None].expand(4, 2)
    states[:, 0] *= advantage[:, :1]
    rollouts = looking(hand_made(torch.ones(4, 2, dtype=torch.bool), advantage=advantage, step=9),
                       hidden=states)
    monkeypatch.setattr(learned_importance, "NET_RATE", 1e-2)  # fewer steps suffice
    weighting, again = made(policy, 0), made(policy, 0)
    for _ in range(200):
        weight = weighting(rollouts, policy)
    assert weighting.metrics["importance_loss"] < 0.1
    assert (weight[:, 0] > 2 * weight[:, 1]).all()
    again.load_state_dict(weighting.state_dict())
    torch.testing.assert_close(again(rollouts, policy), weighting(rollouts, policy))


LENGTHS = (1, 3, 2, 4)  # z is -1 and 1 in both groups


def batch():
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    advantage = torch.tensor([1.0, -1.0, 2.0, 0.5])[:, None] * mask
    return hand_made(mask, group=torch.tensor([0, 0, 1, 1]), advantage=advantage,
                     log_prob=-torch.rand(4, 4, generator=torch.Generator().manual_seed(0)))


def with_exponent(policy, start):
    """The weighting with its exponent moved from 0, where it begins, to `start`."""
    weighting = make_weighting("lambda_grpo", {"lambda_lr": 0.1}, policy)
    with torch.no_grad():
        weighting.scalar.module["lambda"] += start
    return weighting


def weights_by_hand(exponent):
    low, high = math.exp((8 / 9) ** exponent), math.exp((10 / 9) ** exponent)
    return torch.tensor([low, high, low, high]) * 2 / (low + high)


def test_the_weights_by_hand(policy):
    found = with_exponent(policy, 2.0)(batch(), policy)[:, 0]
    torch.testing.assert_close(found, weights_by_hand(2.0))
    assert with_exponent(policy, 0.0)(batch(), policy).unique().tolist() == [1.0]
    alike = dataclasses.replace(batch(), mask=torch.ones(4, 4, dtype=torch.bool))
    assert with_exponent(policy, 5.0)(alike, policy).unique().tolist() == [1.0]


@pytest.mark.parametrize("norm", ["token", "sequence"])
def test_lambda_descends_the_loss_through_the_weights(policy, norm):
    """Its gradient is the slope of the loss as --loss_norm divides it; Adam's first step is the
    learning rate against that sign. What is loaded goes on from there."""
    rollouts = batch()
    other = SimpleNamespace(settings=SimpleNamespace(loss_norm=norm, max_new_tokens=4),
                            model=policy.model)
    total = (rollouts.advantage * rollouts.log_prob * rollouts.mask).sum(1)  # of each answer
    divisor = torch.tensor(LENGTHS) * 4 if norm == "sequence" else sum(LENGTHS)

    def loss(exponent):
        return -(weights_by_hand(exponent) * total / divisor).sum().item()

    weighting, again = with_exponent(other, 1.0), with_exponent(other, 1.0)
    weighting(rollouts, other)
    scalar, slope = weighting.scalar.module["lambda"], (loss(1.01) - loss(0.99)) / 0.02
    assert scalar.grad.item() == pytest.approx(slope, rel=1e-2)
    assert scalar.item() == pytest.approx(1.0 - 0.1 * math.copysign(1, slope), abs=1e-4)
    again.load_state_dict({name: value.clone() for name, value in weighting.state_dict().items()})
    for one in (weighting, again):
        one(rollouts, other)
    assert again.scalar.module["lambda"].item() == scalar.item() != 1.0
    before = scalar.item()  # where nothing is to be learned momentum alone would move it
    weighting(dataclasses.replace(rollouts, advantage=torch.zeros(4, 4)), other)
    assert scalar.item() == before
