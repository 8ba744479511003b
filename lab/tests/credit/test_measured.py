"""Credit of single tokens, on a table of what other tokens are worth."""
import math
from types import SimpleNamespace

import pytest
import torch

from small import hand_made, make_weighting, spoken
from lab.credit.measured import measured
from lab.credit.monte_carlo import continuation_rewards
from lab.engine.errors import UserError


def test_oracle_by_hand(policy, monkeypatch):
    """Tokens of probability 1/2, but for one that is certain; other tokens are worth the table.
    Credit from the end: 0.5 (1 - 0.25), then 0.5 (0.625 - 0.25); and 0.5 (0 - 1), 0.5 (0.5 - 0.25).
    """
    worth, asked = {(): 0.25, (4,): 0.25, (4, 5): 1.0}, []

    def rewards(policy, rollouts, prefixes, k, without):
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


def test_a_continuation_begins_with_its_prefix_and_without_the_excluded_token(policy, monkeypatch):
    """The reward is here the token after the prefix, and then the length of the answer. A prefix
    that has reached the limit is not continued."""
    rollouts = spoken(policy)
    limit, asked = policy.settings.max_new_tokens, []

    def rewards(prefixes, without, reward):
        def reward_of(self, problem, ids):
            asked.append(ids)
            return float(reward(ids))

        monkeypatch.setattr(type(policy), "reward_of", reward_of)
        rollouts.generator = torch.Generator().manual_seed(1)
        found, price = continuation_rewards(policy, rollouts, prefixes, 30, without=without)
        return found, price["extra_answers"]

    tokens, _ = rewards([(0, ())], None, lambda ids: ids[0])
    often = int(tokens[0].mode().values)
    tokens, sampled = rewards([(0, ())] * 2, [-1, often], lambda ids: ids[0])
    assert (tokens[0] == often).any() and not (tokens[1] == often).any() and sampled == 60
    asked.clear()
    begun = tuple(rollouts.ids[0, 1:2].tolist()) * limit
    prefixes = [(0, begun[:limit - left]) for left in (2, 1, 0)]
    lengths, sampled = rewards(prefixes, None, len)
    assert lengths[0].max() == limit and {*lengths[1:].flatten().tolist()} == {limit}
    assert sampled == 60 and all(ids[:limit - 2] == begun[:limit - 2] for ids in asked)
