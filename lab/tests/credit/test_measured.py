"""Credit of single tokens, by hand: on a table of what other tokens are worth, and of tokens that
are replaced or deleted."""
import math

import pytest
import torch

from lab.credit.causal_ablation import after_deletion, deletion, with_deletions
from lab.credit.measured import measured
from lab.credit.monte_carlo import continuation_rewards
from lab.engine.tokens import ANSWER
from small import ASKED, hand_made, make_weighting, spoken


def test_measured_credit_by_hand(policy, monkeypatch):
    """Tokens of probability 1/2, but for one that is likely; other tokens are worth the table.
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
    method = measured(policy, measured_k=2)
    expected = torch.tensor([[0.1875, 0.375, 0], [0.125, 0, -0.5]])
    torch.testing.assert_close(method(rollouts, policy), expected)
    assert method.metrics == {"extra_tokens": 5}
    places = [((0, ()), 4), ((0, (4,)), 6), ((0, ()), 4), ((0, (4, 5)), 6)]
    assert asked == [place for place in places for _ in range(2)]


def test_a_continuation_begins_with_its_prefix_and_without_the_excluded_token(policy, monkeypatch):
    """The reward is here the token after the prefix."""
    rollouts, begun = spoken(policy), (5, 6)
    monkeypatch.setattr(type(policy), "reward_of",
                        lambda self, problem, ids: float(ids[2]) if ids[:2] == begun else -1.0)

    def rewards(without):
        rollouts.generator = torch.Generator().manual_seed(1)
        found, price = continuation_rewards(policy, rollouts, [(0, begun)] * len(without), 30,
                                            without=without)
        assert price["extra_answers"] == 30 * len(without) and (found >= 0).all()
        return found

    often = int(rewards([-1])[0].mode().values)
    free, without = rewards([-1, often])
    assert (free == often).any() and not (without == often).any()


MASK = torch.tensor([[True] * 5, [True] + [False] * 4])
IDS = torch.tensor([[4, 5, 6, 7, 8], [9, 0, 0, 0, 0]])
GROUP = torch.tensor([0, 1])


def test_causal_ablation_by_hand(policy, monkeypatch):
    """Every second of five tokens: the reward changes by 1, 0 and 0.5, linear in between."""
    asked = []

    def rewards(policy, rollouts, prefixes, k, without):
        asked.extend(zip(prefixes, without))
        return torch.tensor([[0.0], [1.0], [0.5], [1.0]]), {"extra_tokens": 17}
    monkeypatch.setattr("lab.credit.causal_ablation.continuation_rewards", rewards)
    rollouts = hand_made(MASK, ids=IDS, group=GROUP, scores={"reward": torch.tensor([1.0, 0.25])})
    weighting = make_weighting("causal_ablation", {"ablate_every": 2}, policy)
    weight = weighting(rollouts, policy)
    torch.testing.assert_close(weight, torch.tensor([[1, 0.5, 0, 0.25, 0.5], [0.75, 0, 0, 0, 0]]))
    assert asked == [((0, ()), 4), ((0, (4, 5)), 6), ((0, (4, 5, 6, 7)), 8), ((1, ()), 9)]
    assert weighting.metrics == {"extra_tokens": 17}


def test_an_answer_without_a_token_by_hand():
    """The answer section is 6 and 7: of " 4 5 6 7 8" without the 5 both come later, without the 6
    only the 7, without the 7 none."""
    answer = torch.tensor([[0, 0, ANSWER, ANSWER, 0], [0] * 5])
    rollouts = hand_made(MASK, ids=IDS, log_prob=-IDS.float(), section=answer, group=GROUP)
    shorter, later = with_deletions(rollouts, [(0, 1), (0, 2), (0, 3), (1, 0)])
    assert shorter.ids.tolist() == [[4, 6, 7, 8, 0], [4, 5, 7, 8, 0], [4, 5, 6, 8, 0], [0] * 5]
    assert torch.equal(shorter.log_prob, -shorter.ids.float())
    assert shorter.length.tolist() == [4, 4, 4, 0] and shorter.group.tolist() == [0, 0, 0, 1]
    assert later.nonzero().tolist() == [[0, 1], [0, 2], [1, 2]]


def test_deletion_against_the_model_asked_row_by_row(policy):
    """log p of the answer section with the token, minus that of the text without it."""
    rollouts = spoken(policy)
    places = [(row, t) for row, length in enumerate(rollouts.length.tolist())
              for t in range(0, length, 5)]
    expected = []
    for row, t in places:
        length, prompt = int(rollouts.length[row]), rollouts.prompt_ids[rollouts.group[row]]
        ids = rollouts.ids[row, :length].tolist()
        later = [i for i in range(t + 1, length) if rollouts.section[row, i] == ANSWER]
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + ids[:t] + ids[t + 1:]]))[0]
        log_probs = logits.log_softmax(-1)
        without = [log_probs[len(prompt) + i - 2, ids[i]].item() for i in later]
        expected.append(rollouts.log_prob[row, later].sum().item() - sum(without))
    changes = after_deletion(rollouts, policy, places)
    assert changes.tolist() == pytest.approx(expected, abs=2e-3)
    assert changes.abs().max() > 1 and (changes == 0).any()


def test_deletion_samples_nothing(policy):
    """Linear between the places; an answer without its section weighs nothing."""
    rollouts = spoken(policy)
    flags = {"ablate_every": 4, "ablation": "delete"}
    weighting = make_weighting("causal_ablation", flags, policy)
    weight = weighting(rollouts, policy)
    one, two = after_deletion(rollouts, policy, [(0, 0), (0, 4)]).abs().tolist()
    assert weight[0, [0, 2, 4]].tolist() == pytest.approx([one, (one + two) / 2, two], rel=1e-5)
    assert weighting.metrics == {} and not weight[3].any()


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
