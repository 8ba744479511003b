"""One learned exponent of the lengths, by hand."""
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from conftest import hand_made, make_mitigation


def lambda_batch():
    mask = torch.tensor([[True] * n + [False] * (4 - n) for n in (1, 3, 2, 4)])
    advantage = torch.tensor([1.0, -1.0, 2.0, 0.5])[:, None] * mask
    return hand_made(mask, group=torch.tensor([0, 0, 1, 1]), advantage=advantage,
                     log_prob=-torch.rand(4, 4))


def test_lambda_grpo_by_hand(policy):
    """Lengths 1 and 3, 2 and 4: z is -1 and 1 in both groups."""
    tokens, mitigation = lambda_batch(), make_mitigation(
        "lambda_grpo", {"lambda_init": 2.0, "lambda_lr": 0.1}, policy)
    low, high = math.exp((8 / 9) ** 2), math.exp((10 / 9) ** 2)
    weight = mitigation(tokens, policy)
    expected = torch.tensor([low, high, low, high]) * 2 / (low + high)
    torch.testing.assert_close(weight[:, 0], expected)
    assert make_mitigation("lambda_grpo", {"lambda_init": 0.0, "lambda_lr": 0.1},
                           policy)(tokens, policy).unique().tolist() == [1.0]
    # Adam's first step is the learning rate against the sign of the derivative of the surrogate
    def surrogate(lam):
        w = torch.tensor([math.exp((8 / 9) ** lam), math.exp((10 / 9) ** lam)])
        w = (2 * w / w.sum()).repeat(2)[:, None]
        return -(w * tokens.advantage * tokens.log_prob * tokens.mask).sum().item() / 10
    slope = (surrogate(2.01) - surrogate(1.99)) / 0.02
    assert mitigation.scalar.module["lambda"].item() == pytest.approx(
        2.0 - 0.1 * math.copysign(1, slope), abs=1e-4)


def test_lambda_stays_where_nothing_is_to_be_learned_and_follows_the_normalisation_of_the_loss(policy):
    tokens, mitigation = lambda_batch(), make_mitigation(
        "lambda_grpo", {"lambda_init": 1.0, "lambda_lr": 0.1}, policy)
    mitigation(tokens, policy)
    before = mitigation.scalar.module["lambda"].item()
    mitigation(dataclasses.replace(tokens, advantage=torch.zeros(4, 4)),
               policy)  # momentum alone would move it
    assert mitigation.scalar.module["lambda"].item() == before != 1.0
    slopes = []
    for norm in ("token", "sequence"):
        other = SimpleNamespace(settings=SimpleNamespace(loss_norm=norm, max_new_tokens=4),
                                model=policy.model)
        fresh = make_mitigation("lambda_grpo", {"lambda_init": 1.0, "lambda_lr": 0.1}, other)
        fresh(tokens, other)
        slopes.append(fresh.scalar.module["lambda"].grad.item())
    by_answer = [(tokens.advantage * tokens.log_prob * tokens.mask)[b].sum().item() / n / 4
                 for b, n in enumerate((1, 3, 2, 4))]

    def surrogate(lam):
        w = torch.tensor([math.exp((8 / 9) ** lam), math.exp((10 / 9) ** lam)])
        return -sum(w * a for w, a in zip((2 * w / w.sum()).tolist() * 2, by_answer))
    assert slopes[1] == pytest.approx((surrogate(1.01) - surrogate(0.99)) / 0.02, rel=1e-2)
    assert slopes[0] != slopes[1]


def test_lambda_grpo_in_a_group_of_equal_lengths_is_one(policy):
    tokens = dataclasses.replace(lambda_batch(), mask=torch.ones(4, 4, dtype=torch.bool))
    assert torch.equal(
        make_mitigation("lambda_grpo", {"lambda_init": 5.0, "lambda_lr": 0.1}, policy)(tokens, policy),
        torch.ones(4, 4))
