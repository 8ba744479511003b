"""The learned exponent of the lengths, by hand."""
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from small import hand_made, make_weighting

LENGTHS = (1, 3, 2, 4)  # z is -1 and 1 in both groups


def batch():
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    advantage = torch.tensor([1.0, -1.0, 2.0, 0.5])[:, None] * mask
    return hand_made(mask, group=torch.tensor([0, 0, 1, 1]), advantage=advantage,
                     log_prob=-torch.rand(4, 4, generator=torch.Generator().manual_seed(0)))


def made(policy, start):
    """The weighting with its exponent moved from 0, where it begins, to `start`."""
    weighting = make_weighting("lambda_grpo", {"lambda_lr": 0.1}, policy)
    with torch.no_grad():
        weighting.scalar.module["lambda"] += start
    return weighting


def weights_by_hand(exponent):
    low, high = math.exp((8 / 9) ** exponent), math.exp((10 / 9) ** exponent)
    return torch.tensor([low, high, low, high]) * 2 / (low + high)


def test_the_weights_by_hand(policy):
    torch.testing.assert_close(made(policy, 2.0)(batch(), policy)[:, 0], weights_by_hand(2.0))
    assert made(policy, 0.0)(batch(), policy).unique().tolist() == [1.0]
    alike = dataclasses.replace(batch(), mask=torch.ones(4, 4, dtype=torch.bool))
    assert made(policy, 5.0)(alike, policy).unique().tolist() == [1.0]


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

    weighting, again = made(other, 1.0), made(other, 1.0)
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
