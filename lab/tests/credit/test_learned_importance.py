"""The network that learns which tokens predict the outcome."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from small import hand_made, looking, make_weighting, spoken
from lab.credit import learned_importance


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
