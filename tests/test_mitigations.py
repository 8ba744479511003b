"""Each weighting by hand, on a few tokens."""
import math

import pytest
import torch

import mitigations
from conftest import hand_made, one_row, refusal
from countdown_task import ANSWER, BRACKET, NUMBER, OPERATOR, OTHER, SPACE, TAG, THINK, WORD
from grpo import values_of

LOG_2, LOG_3 = math.log(2), math.log(3)
UP_TO_10 = {"entropy": list(range(11))}


def raw(name, rollouts, **own):
    return mitigations.MITIGATIONS[name](rollouts, **own) * rollouts.mask


@pytest.mark.parametrize("name, own, known, weight", [
    ("none", {}, {"log_prob": [-1.0, -2.0]}, [1, 1]),
    ("inverse_logprob", {"epsilon": 0.1}, {"log_prob": [-0.01, -3.0, 0.0]},
     [1 / 0.11, 1 / 3.1, 10]),
    # two words: p = 0.8, sum p^2 = 0.68, s = sqrt(1 - 1.6 + 0.68) = 0.2 sqrt 2
    ("equal_gradient", {"epsilon": 0.1}, {"log_prob": [math.log(0.8)], "collision": [0.68]},
     [1 / (0.2 * 2 ** 0.5 + 0.1)]),
    ("entropy_weighted", {"entropy_temp": 1.0}, {"entropy": [0, LOG_2, LOG_3]}, [0.5, 1, 1.5]),
    ("entropy_weighted", {"entropy_temp": 0.5}, {"entropy": [0, LOG_2, LOG_3]},
     [3 / 14, 12 / 14, 27 / 14]),
    ("entropy_masking", {"mask_percentile": 80.0}, UP_TO_10, [0] * 8 + [1] * 3),
    ("entropy_masking", {"mask_percentile": 0.0}, UP_TO_10, [1] * 11),
    ("entropy_masking", {"mask_percentile": 100.0}, UP_TO_10, [0] * 10 + [1])])
def test_weights_by_hand(name, own, known, weight):
    rollouts = one_row(**{key: [float(x) for x in values] for key, values in known.items()})
    assert raw(name, rollouts, **own)[0].tolist() == pytest.approx(weight, rel=1e-5, abs=1e-7)


def test_the_defaults_are_those_of_the_notes():
    defaults = {}
    for function in mitigations.MITIGATIONS.values():
        defaults |= function.__kwdefaults__ or {}
    assert defaults == {"think_discount": 0.5, "epsilon": 0.1, "entropy_temp": 1.0,
                        "mask_percentile": 80.0, "word_weight": 0.5, "number_weight": 1.0}


@pytest.mark.parametrize("texts, weight", [
    (["a", "<answer>", " 3", "</answer>", "end"], [0.5, 0.5, 1, 1, 1]),
    (["a", "<", "answer", ">", " 3", "</answer>"], [0.5, 0.5, 0.5, 0.5, 1, 1]),  # cut in pieces
    (["a", "<answer", ">\n", "3"], [0.5, 0.5, 0.5, 1]),  # a token that touches the tag
    (["<answer>", "</answer>", "<answer>"], [0.5, 1, 1]),  # the first one counts
    (["a", "b", "<answer>"], [0.5, 0.5, 0.5]), (["a", "b", "</think>"], [0.5, 0.5, 0.5])])
def test_outcome_conditional_by_hand(texts, weight):
    rollouts = hand_made([[True] * len(texts)], texts=[texts])
    assert raw("outcome_conditional", rollouts, think_discount=0.5)[0].tolist() == weight
    assert raw("outcome_conditional", rollouts, think_discount=1.0)[0].tolist() == [1] * len(texts)


def test_the_gradient_size_is_that_of_autograd_also_where_p_is_nearly_one():
    logits = torch.tensor([[3.0, 1.0, -2.0], [18.0, 0.0, 0.0], [-9.0, 0.0, 0.5]],
                          dtype=torch.double, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    log_probs[:, 0].sum().backward()
    collision = log_probs.exp().square().sum(-1)
    size = mitigations.gradient_size(log_probs[:, 0].detach().float(), collision.detach().float())
    expected = logits.grad.norm(dim=1).float()
    torch.testing.assert_close(size, expected, rtol=0.2, atol=0)  # float32 knows p = 1 no better
    torch.testing.assert_close(size[[0, 2]], expected[[0, 2]])


TEXTS = [" try", ",", " ", "3", " *", "=", "</think>", "7", "end", "plus"]
SECTIONS = [THINK] * 6 + [OTHER, ANSWER, OTHER, THINK]
KINDS = [WORD, WORD, SPACE, NUMBER, OPERATOR, BRACKET, TAG, NUMBER, WORD, WORD]


@pytest.mark.parametrize("name, own, advantage, weight", [
    ("by_kind", {"word_weight": 0.25, "number_weight": 2.0}, 0.7,
     [0.25, 0.25, 1, 2, 2, 1, 1, 1, 1, 0.25]),
    ("by_kind", {"word_weight": 1.0, "number_weight": 0.0}, 0.7, [1, 1, 1, 0, 0, 1, 1, 1, 1, 1])])
def test_kinds_of_tokens_are_told_apart_inside_the_think_section(name, own, advantage, weight):
    section, kind = torch.tensor([[SECTIONS], [KINDS]], dtype=torch.uint8)
    rollouts = hand_made([[True] * 10], texts=[TEXTS], section=section, kind=kind,
                         advantage=torch.full((1, 10), advantage))
    assert raw(name, rollouts, **own).tolist() == [weight]


def test_a_function_gets_a_copy_of_the_batch_and_its_generator():
    """What it changes in place has no effect elsewhere; the next function draws other numbers."""
    def mine(batch):
        batch.entropy.fill_(9.0)
        batch.scores["reward"] += 1
        return torch.rand(batch.mask.shape, generator=batch.generator)

    rollouts = hand_made([[True, True], [True, False]])
    entropy, reward = rollouts.entropy.clone(), rollouts.reward.clone()
    first, second = (values_of(mine, rollouts, {}) for _ in range(2))
    assert torch.equal(rollouts.entropy, entropy) and torch.equal(rollouts.reward, reward)
    assert not torch.equal(first, second) and not first[~rollouts.mask].any()


WRONG = [  # what a function returns, and what is said of it
    (lambda batch: None, "should return a tensor (B, T) = (2, 2), got None"),
    (lambda batch: batch.reward, "should return a tensor (B, T) = (2, 2), got (2,)"),
    (lambda batch: batch.entropy / 0, "is inf at token 0 of answer 0"),
    (lambda batch: torch.tensor([[1, 1], [float("nan"), 1]]), "is nan at token 0 of answer 1"),
    (lambda batch: -1e30 * batch.entropy, "is -1e+30 at token 0 of answer 0"),
    (lambda batch: batch.log_prob, "is negative at 3 tokens. Weights may not be")]


@pytest.mark.parametrize("function, said", WRONG)
def test_a_wrong_weighting_is_told_with_its_file_and_line(function, said):
    line, rollouts = function.__code__.co_firstlineno, hand_made([[True, True], [True, False]])
    assert refusal(mitigations.weights, function, rollouts, {}).startswith(
        f"<lambda> (test_mitigations.py:{line}) {said}")


@pytest.mark.parametrize("values, rescale, weights", [
    ([[0.125, 0.125], [0.5, math.nan]], "mean", [[0.5, 0.5], [2, 0]]),
    ([[0.125, 0.125], [0.5, math.nan]], "none", [[0.125, 0.125], [0.5, 0]]),
    ([[1.0], [0.25]], "mean", [[4 / 3, 4 / 3], [1 / 3, 0]]),  # a number for each answer
    ([[0.5, 2.0]], "mean", [[0.5, 2], [0.5, 0]]),  # for each position
    ([[0.0, 0.0]], "mean", [[0.0, 0], [0, 0]]),  # then nothing is learned
    ([[1e-45, 1e-45]], "mean", [[1e-45, 1e-45], [1e-45, 0]])])  # 1 / their sum is too large
def test_rescaled_weights_have_a_mean_of_1_over_the_tokens(values, rescale, weights):
    """Padding may hold anything."""
    rollouts = hand_made([[True, True], [True, False]])
    found, said = mitigations.weights(lambda _: torch.tensor(values), rollouts, {}, rescale)
    torch.testing.assert_close(found, torch.tensor(weights), rtol=1e-6, atol=0)
    assert found[0, 1] == pytest.approx(said["weight_factor"] * values[0][-1])
    assert said["weight_max"] == found.max()
