"""Other tokens in the place of some, or none, by hand."""
import pytest
import torch

from conftest import ASKED, hand_made, make_weighting, spoken
from credit.causal_ablation import deletion

MASK = torch.tensor([[True] * 5, [True] + [False] * 4])
IDS = torch.tensor([[4, 5, 6, 7, 8], [9, 0, 0, 0, 0]])
GROUP = torch.tensor([0, 1])


def test_causal_ablation_by_hand(policy, monkeypatch):
    """Every second of five tokens: the reward changes by 1, 0 and 0.5, linear in between."""
    asked = []

    def rewards(policy, rollouts, prefixes, k, without):
        asked.extend(zip(prefixes, without))
        return torch.tensor([[0.0], [1.0], [0.5], [1.0]]), {"extra_tokens": 17}
    monkeypatch.setattr("credit.causal_ablation.continuation_rewards", rewards)
    rollouts = hand_made(MASK, ids=IDS, group=GROUP, scores={"reward": torch.tensor([1.0, 0.25])})
    weighting = make_weighting("causal_ablation", {"ablate_every": 2}, policy)
    weight = weighting(rollouts, policy)
    torch.testing.assert_close(weight, torch.tensor([[1, 0.5, 0, 0.25, 0.5], [0.75, 0, 0, 0, 0]]))
    assert asked == [((0, ()), 4), ((0, (4, 5)), 6), ((0, (4, 5, 6, 7)), 8), ((1, ()), 9)]
    assert weighting.metrics == {"extra_tokens": 17}


def test_the_reward_of_the_rest_by_hand(policy):
    """A right answer is worth 1 + 0.1 for the format, which is 0.05 without </think> and 0.01
    without an answer tag. The other is wrong by a 7 too many: without it, it is worth 1 more."""
    texts = [" 3 + 5 = 8.</think>\n<answer> 3 + 5 + 7</answer><|im_end|>",
             "</think>\n<answer> 3 + 5 + 7 7</answer>"]
    rollouts = spoken(policy, texts, ASKED[:1])
    think, answer = [0.05] * 3, [0.09] * 3  # three tokens each
    right = [0] * 6 + think + [1.09] * 3 + [1] * 5 + [1.09] * 3 + [0]
    wrong = think + answer + [0] * 4 + [-1] * 2 + answer
    credit = deletion(policy)(rollouts, policy)
    assert credit[0].tolist() == pytest.approx(right, abs=1e-6)
    assert credit[1].tolist() == pytest.approx(wrong + [0] * 6, abs=1e-6)
    assert not credit[0, :6].any() and not credit[1, 6:10].any()  # exactly
