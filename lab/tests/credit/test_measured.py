"""Credit of single tokens, on a table of what other tokens are worth."""
import math
from types import SimpleNamespace

import pytest
import torch

from conftest import hand_made, make_weighting
from lab.credit.measured import measured
from lab.engine.errors import UserError


def test_oracle_by_hand(policy, monkeypatch):
    """Tokens of probability 1/2, but for one that is certain; other tokens are worth the table.
    Credit from the end: 0.5 (1 - 0.25), then 0.5 (0.625 - 0.25); and 0.5 (0 - 1), 0.5 (0.5 - 0.25).
    """
    worth, asked = {(): 0.25, (4,): 0.25, (4, 5): 1.0}, []

    def rewards(policy, rollouts, prefixes, k, progress, without):
        asked.extend(zip(prefixes, without))
        return torch.tensor([[worth[ids]] * k for _, ids in prefixes]), {"extra_tokens": 5}

    monkeypatch.setattr("lab.credit.measured.continuation_rewards", rewards)
    half = math.log(0.5)
    rollouts = hand_made([[True, True, False], [True, True, True]],
                         ids=torch.tensor([[4, 6, 0], [4, 5, 6]]),
                         log_prob=torch.tensor([[half, half, 0], [half, -1e-4, half]]),
                         scores={"reward": torch.tensor([1.0, 0.0])})
    weighting = make_weighting("oracle", {"oracle_k": 3}, policy)
    size = torch.tensor([[0.1875, 0.375, 0], [0.125, 0, 0.5]])
    torch.testing.assert_close(weighting(rollouts, policy), size)
    assert weighting.metrics == {"extra_tokens": 5}
    two_each = [((0, ()), 4), ((0, (4,)), 6), ((0, ()), 4), ((0, (4, 5)), 6)]  # 3 (1 - p), up
    assert asked == [place for place in two_each for _ in range(2)]
    signed = measured(policy)(rollouts, policy)
    torch.testing.assert_close(signed, size * torch.tensor([[1, 1, 0], [1, 0, -1]]))


def test_the_oracle_knows_credit_at_temperature_1_alone(policy):
    hot = SimpleNamespace(settings=SimpleNamespace(temperature=1.5))
    with pytest.raises(UserError, match="--temperature 1.5"):
        make_weighting("oracle", {}, hot)
