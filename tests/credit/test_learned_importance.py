"""The net that learns which tokens tell the outcome."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from conftest import hand_made, looking, make_weighting, spoken


def made(policy, warmup, rate=1e-2):
    flags = {"importance_warmup": warmup, "importance_lr": rate}
    return make_weighting("learned_importance", flags, policy)


def test_it_waits_then_learns(policy):
    """Hidden states of which one direction tells the outcome, and stands at one token: that token
    comes to weigh more."""
    torch.manual_seed(0)
    weighting, advantage = made(policy, 120), torch.tensor([1.0, -1.0] * 8)
    hidden = torch.randn(16, 4, policy.model.config.hidden_size) * 0.3
    hidden[:, 2, :8] += 3 * advantage[:, None]
    hidden[:, 2, 8:16] += 3
    rollouts = looking(hand_made(torch.ones(16, 4, dtype=torch.bool),
                                 advantage=advantage[:, None].expand(16, 4)), hidden=hidden)
    losses = []
    for step in range(1, 121):
        weight = weighting(dataclasses.replace(rollouts, step=step), policy)
        assert (weight == 1).all()
        losses.append(weighting.metrics["importance_loss"])
    weight = weighting(dataclasses.replace(rollouts, step=121), policy)
    assert losses[-1] < 0.1 * losses[0] and weight[:, 2].mean() > 1.5 * weight[:, [0, 1, 3]].mean()


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
