"""The net that learns which tokens tell the outcome."""
import dataclasses

import pytest
import torch

from conftest import hand_made, looking, make_mitigation, spoken


def test_learned_importance_waits_then_learns(policy):
    """Hidden states of which one direction tells the outcome, and stands at one token: that token
    comes to weigh more."""
    torch.manual_seed(0)
    D, mitigation = policy.model.config.hidden_size, make_mitigation(
        "learned_importance", {"importance_warmup": 300, "importance_lr": 3e-3}, policy)
    advantage = torch.tensor([1.0, -1.0] * 8)
    hidden = torch.randn(16, 4, D) * 0.3
    hidden[:, 2, :8] += 3 * advantage[:, None]
    hidden[:, 2, 8:16] += 3
    tokens = looking(
        hand_made(torch.ones(16, 4, dtype=torch.bool), advantage=advantage[:, None].expand(16, 4)),
        hidden=hidden)
    losses = []
    for step in range(1, 301):
        assert torch.equal(mitigation(dataclasses.replace(tokens, step=step), policy), torch.ones(
            16, 4))
        losses.append(mitigation.metrics["importance_loss"])
    weight = mitigation(dataclasses.replace(tokens, step=301), policy)
    assert losses[-1] < 0.1 * losses[0] and weight[:, 2].mean() > 1.5 * weight[:, [0, 1, 3]].mean()


def test_the_loss_of_the_importance_net_by_hand(policy):
    """Row by row without padding: the reading of the weighted mean state against the answer's
    advantage."""
    tokens, net = spoken(policy), make_mitigation("learned_importance", {}, policy)
    module, errors = net.net.module, []
    with torch.no_grad():
        for b, n in enumerate(tokens.length.tolist()):
            states = tokens.hidden[b, :n]
            importance = torch.nn.functional.softplus(
                module.outer(torch.nn.functional.silu(module.inner(states)))).flatten()
            mean = (importance[:, None] * states).sum(0) / importance.sum()
            errors.append(((mean @ module.read.weight[0] + module.read.bias[0] -
                            tokens.advantage[b, 0]) ** 2).item())
    assert net.loss(tokens).item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_learned_importance_takes_true_credit_where_it_is_known(policy):
    torch.manual_seed(0)
    hidden, credit = torch.randn(4, 3,
                                 policy.model.config.hidden_size), torch.tensor([[2.0, 0.1, 0.5]] * 4)
    tokens = looking(hand_made(torch.ones(4, 3, dtype=torch.bool), true_credit=-credit),
                     hidden=hidden)
    mitigation = make_mitigation("learned_importance",
                                 {"importance_warmup": 0, "importance_lr": 1e-2}, policy)
    for _ in range(200):
        weight = mitigation(tokens, policy)
    again = make_mitigation("learned_importance", {"importance_warmup": 0, "importance_lr": 1e-2},
                            policy)
    again.load_state_dict(mitigation.state_dict())  # also of the part that had no gradient
    torch.testing.assert_close(weight, credit, atol=0.1, rtol=0)
