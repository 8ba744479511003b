"""The net that learns which tokens tell the outcome."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from conftest import hand_made, looking, make_weighting, spoken


def made(policy, warmup):
    flags = {"importance_warmup": warmup, "importance_lr": 1e-2}
    return make_weighting("learned_importance", flags, policy)


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


def test_it_takes_true_credit_where_it_is_known(policy):
    torch.manual_seed(0)
    hidden = torch.randn(4, 3, policy.model.config.hidden_size)
    credit = torch.tensor([[2.0, 0.1, 0.5]] * 4)
    rollouts = looking(hand_made(torch.ones(4, 3, dtype=torch.bool), true_credit=-credit),
                       hidden=hidden)
    weighting, again = made(policy, 0), made(policy, 0)
    for _ in range(200):
        weight = weighting(rollouts, policy)
    again.load_state_dict(weighting.state_dict())  # also of the part that had no gradient
    torch.testing.assert_close(weight, credit, atol=0.1, rtol=0)
