"""Pointers, on tables of what tokens are worth; their regression by hand."""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import research.pointers as pointers
from conftest import ROOT, hand_made, looking, make_weighting
from research.probes.common import sample_batch
from research.pointers import Regression, as_weight, decided_at_some, decided_everywhere
from runs import program


def half_and_half(mask, **known):
    """Every token has the probability 1/2."""
    mask = torch.tensor(mask)
    return hand_made(mask, log_prob=torch.full(mask.shape, math.log(0.5)), **known)


def test_what_a_place_decides_is_estimated_without_bias(policy, monkeypatch):
    """The mean over all outcomes of two answers with the token and two without is (V - O)^2."""
    V, O = 0.75, 0.25
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)
    chance = torch.cat([torch.where(outcomes[:, :2] == 1, V, 1 - V),
                        torch.where(outcomes[:, 2:] == 1, O, 1 - O)], 1).prod(1)
    own, behind, first, second = outcomes.T
    rollouts = half_and_half([[True]] * 16, scores={"reward": own})

    def goes_on(policy, rollouts, prefixes, k):
        rows = [group for group, ids in prefixes]
        return behind[rows][:, None], {"extra_tokens": 3}

    def leaves(policy, rollouts, places, counts):
        return [torch.stack([first[b], second[b]]) for b, t in places], {"extra_tokens": 4}

    monkeypatch.setattr(pointers, "continuation_rewards", goes_on)
    monkeypatch.setattr(pointers, "deviations", leaves)
    rollouts = rollouts.__class__(**{**vars(rollouts), "group": torch.arange(16)})
    places, decided, spent = decided_at_some(rollouts, policy, 16)
    assert spent == {"extra_tokens": 7} and places[:, 1].tolist() == [0] * 16
    mean = (chance[places[:, 0]] * decided).sum().item()
    assert mean == pytest.approx(0.25 * (V - O) ** 2)
    assert len(decided_at_some(rollouts, policy, 5)[0]) == 5


def test_sure_places_are_not_measured(policy):
    sure = hand_made([[True, True]], log_prob=torch.full((1, 2), -1e-3))
    places, decided, spent = decided_at_some(sure, policy, 8)
    assert len(places) == len(decided) == 0 and spent == {}


def test_what_all_places_decide_by_hand(policy, monkeypatch):
    """One token, other tokens are worth 0 by one half of the answers, 1/2 by the other."""
    monkeypatch.setattr(pointers, "deviations", lambda *_: (
        [torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64)], {"extra_tokens": 9}))
    rollouts = half_and_half([[True]], scores={"reward": torch.tensor([1.0])})
    decided, spent = decided_everywhere(rollouts, policy, 8)
    assert decided.tolist() == [[pytest.approx(0.25 * 1.0 * 0.5)]] and spent == {"extra_tokens": 9}
    weighting = make_weighting("measured_pointer", {}, policy)
    assert weighting(rollouts, policy).tolist() == [[pytest.approx(1.1)]]
    assert weighting.metrics == {"extra_tokens": 9}


def test_the_weight_is_the_root_with_a_floor():
    mask = torch.tensor([[True, True, False]])
    weight = as_weight(torch.tensor([[0.04, 0.0, 9.0]]), mask)
    torch.testing.assert_close(weight[0, :2], torch.tensor([2.1, 0.1]))
    assert as_weight(torch.zeros(1, 3), mask).tolist() == [[1.0, 1.0, 1.0]]


def test_the_regression_is_ridge_regression_that_forgets(monkeypatch):
    """By numpy: older rows count KEPT times, the constant is not penalised."""
    monkeypatch.setattr(pointers, "RIDGE", 2.0)
    generator = torch.Generator().manual_seed(0)
    hidden, target = torch.randn(30, 4, generator=generator), torch.rand(30, generator=generator)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=4), device="cpu")
    regression = Regression(SimpleNamespace(model=model))
    regression.learn(hidden[:20], target[:20])
    regression.learn(hidden[20:], target[20:])
    again = Regression(SimpleNamespace(model=model))
    again.load_state_dict(regression.state_dict())

    x = hidden.numpy() * 2 / np.linalg.norm(hidden, axis=1, keepdims=True)  # of length sqrt(4)
    x = np.hstack([x, np.ones((30, 1))]).astype(float)
    weight = np.where(np.arange(30) < 20, pointers.KEPT, 1.0)[:, None]
    slope = np.linalg.solve(x.T @ (weight * x) + np.diag([2.0] * 4 + [0.0]),
                            x.T @ (weight[:, 0] * target.numpy()))
    np.testing.assert_allclose(again.predict(hidden), np.maximum(x @ slope, 0), atol=1e-5)


def test_a_pointer_learns_where_and_goes_by_the_prefix_alone(policy, monkeypatch):
    """Tokens behind one hidden state decide, those behind the other do not."""
    state = torch.zeros(1, 8, policy.model.config.hidden_size)
    state[0, ::2, 0], state[0, 1::2, 1] = 1.0, 1.0
    rollouts = looking(half_and_half([[True] * 8]), hidden=state)
    places = torch.tensor([[0, t] for t in range(8)])
    decides = torch.tensor([0.25, 0.0] * 4)
    monkeypatch.setattr(pointers, "RIDGE", 1e-3)
    monkeypatch.setattr(pointers, "decided_at_some", lambda *_: (places, decides, {}))
    weight = make_weighting("pointer", {}, policy)(rollouts, policy)
    torch.testing.assert_close(weight[0], torch.tensor([2.1, 0.1] * 4, dtype=weight.dtype),
                               atol=1e-2, rtol=0)


@pytest.mark.parametrize("name", pointers.NAMES)
def test_a_pointer_can_be_asked_of_sampled_answers(policy, name):
    rollouts = sample_batch(policy, 1, 2, 2)
    weight = make_weighting(name, {}, policy)(rollouts, policy)
    assert weight.shape == rollouts.mask.shape and (weight[rollouts.mask] > 0).all()


def test_train_with_pointers_still_has_the_choices_that_they_import():
    assert "hindsight_lr" in program(ROOT, "-m", "research.train", "--help", "hindsight")
