"""Each weighting by hand, on a few tokens."""
import math

import pytest
import torch

from conftest import hand_made, looking, make_weighting, one_row
from lab.engine.tokens import ANSWER, BRACKET, NUMBER, OPERATOR, OTHER, SPACE, TAG, THINK, WORD
from grpo import gradient_size
from lab.credit.weightings import rescaled_weight

HALF, LOG_2, LOG_3 = math.log(0.5), math.log(2), math.log(3)
FAR = -(3 + math.log(10))  # with entropy 1 and strictness 0.1, taco's r = -log p - 1 - log 10 = 2
UP_TO_10 = {"entropy": list(range(11))}


def raw(name, rollouts, **own):
    return rescaled_weight(make_weighting(name, own, None), name, rollouts, rescale_to="none")[0]


@pytest.mark.parametrize("name, own, known, weight", [
    ("none", {}, {"log_prob": [-1.0, -2.0]}, [1, 1]),
    ("inverse_logprob", {"epsilon": 0.1}, {"log_prob": [-0.01, -3.0, 0.0]},
     [1 / 0.11, 1 / 3.1, 10]),
    # the numbers of the published form: 8.3 at -0.01 and 0.010 at -3
    ("inverse_logprob_as_published", {"epsilon": 0.1}, {"log_prob": [-0.01, -3.0, 0.0]},
     [0.1 / 0.11 ** 2, 0.1 / 3.1 ** 2, 10]),
    # two words: p = 0.8, sum p^2 = 0.68, s = sqrt(1 - 1.6 + 0.68) = 0.2 sqrt 2
    ("equal_gradient", {"epsilon": 0.1}, {"log_prob": [math.log(0.8)], "collision": [0.68]},
     [1 / (0.2 * 2 ** 0.5 + 0.1)]),
    ("entropy_weighted", {"entropy_temp": 1.0}, {"entropy": [0, LOG_2, LOG_3]}, [0.5, 1, 1.5]),
    ("entropy_weighted", {"entropy_temp": 0.5}, {"entropy": [0, LOG_2, LOG_3]},
     [3 / 14, 12 / 14, 27 / 14]),
    ("entropy_ratio", {"entropy_beta": 1.0}, {"entropy": [0.0, 1, 5]}, [0, 0.5, 2.5]),
    ("entropy_ratio", {"entropy_beta": 2.0}, {"entropy": [0.0, 0.25, 1.25]}, [0, 0, 4]),
    ("entropy_ratio", {"entropy_beta": 1.0}, {"entropy": [0.0, 0]}, [1, 1]),
    ("entropy_masking", {"mask_percentile": 80.0}, UP_TO_10, [0] * 8 + [1] * 3),
    ("entropy_masking", {"mask_percentile": 0.0}, UP_TO_10, [1] * 11),
    ("entropy_masking", {"mask_percentile": 100.0}, UP_TO_10, [0] * 10 + [1]),
    ("low_probability", {"probability_share": 0.2}, {"log_prob": [HALF, 0, -30]}, [0.9, 1, 0.8]),
    ("low_probability", {"probability_share": 0.0}, {"log_prob": [HALF, 0, -30]}, [1, 1, 1]),
    ("negative_only", {}, {"advantage": [0.7, -0.7, 0]}, [0.1, 1, 0.1]),
    # 1 - 0.9 (1 - exp(-2)); not where r is below 0, and not where the answer is blamed
    ("taco", {"tail_strictness": 0.1},
     {"log_prob": [FAR, FAR, FAR, -1], "entropy": [1.0] * 4, "advantage": [0.7, -0.7, 0, 0.7]},
     [1 - 0.9 * (1 - math.exp(-2)), 1, 1, 1]),
    ("taco", {"tail_strictness": 0.1},  # r = 2.5: even less likely
     {"log_prob": [FAR], "entropy": [0.5], "advantage": [0.7]}, [1 - 0.9 * (1 - math.exp(-2.5))])])
def test_weights_by_hand(name, own, known, weight):
    rollouts = one_row(**{key: [float(x) for x in values] for key, values in known.items()})
    assert raw(name, rollouts, **own)[0].tolist() == pytest.approx(weight, rel=1e-5, abs=1e-7)


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
    size = gradient_size(log_probs[:, 0].detach().float(), collision.detach().float())
    expected = logits.grad.norm(dim=1).float()
    torch.testing.assert_close(size, expected, rtol=0.2, atol=0)  # float32 knows p = 1 no better
    torch.testing.assert_close(size[[0, 2]], expected[[0, 2]])


def test_attention_credit_by_hand():
    """Five tokens, the last two the answer. Token 0 receives 0.2 and 0.4, token 1 nothing, 2 gets
    0.6 and 0, 3 gets 0.3 from the last."""
    attention = torch.zeros(2, 5, 5)
    attention[0, 3, :3] = torch.tensor([0.2, 0.0, 0.6])
    attention[0, 4, :4] = torch.tensor([0.4, 0.0, 0.0, 0.3])
    section = torch.tensor([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], dtype=torch.uint8)
    rollouts = hand_made([[True] * 5, [True, True, False, False, False]], section=section)
    received = torch.tensor([0.3, 0.0, 0.3, 0.3, 0.0])
    expected = (0.5 + 2 * received / received.mean()).clamp(0.1, 6.5)
    weight = raw("attention_credit", looking(rollouts, attention=attention), credit_scale=2.0)
    torch.testing.assert_close(weight[0], expected)
    torch.testing.assert_close(weight[1, :2], expected.mean().expand(2))  # no answer section
    high = raw("attention_credit", looking(rollouts, attention=attention * 0 + torch.eye(5)[0]),
               credit_scale=0.5)
    assert high.max() <= 0.5 + 3 * 0.5 and high[rollouts.mask].min() >= 0.1


def test_random_has_mean_one_and_standard_deviation_one():
    weight = raw("random", hand_made(torch.ones(100, 1000, dtype=torch.bool)))
    assert weight.mean().item() == pytest.approx(1, abs=0.02)
    assert weight.std().item() == pytest.approx(1, abs=0.02)


TEXTS = [" try", ",", " ", "3", " *", "=", "</think>", "7", "end", "plus"]
SECTIONS = [THINK] * 6 + [OTHER, ANSWER, OTHER, THINK]
KINDS = [WORD, WORD, SPACE, NUMBER, OPERATOR, BRACKET, TAG, NUMBER, WORD, WORD]


@pytest.mark.parametrize("name, own, advantage, weight", [
    ("by_kind", {"word_weight": 0.25, "number_weight": 2.0}, 0.7,
     [0.25, 0.25, 1, 2, 2, 1, 1, 1, 1, 0.25]),
    ("by_kind", {"word_weight": 1.0, "number_weight": 0.0}, 0.7, [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]),
    # words are praised more and blamed less
    ("planning", {"planning_boost": 0.25}, 0.7, [1.25, 1.25, 1, 1, 1, 1, 1, 1, 1, 1.25]),
    ("planning", {"planning_boost": 0.25}, -0.7, [0.75, 0.75, 1, 1, 1, 1, 1, 1, 1, 0.75]),
    ("planning", {"planning_boost": 0.25}, 0.0, [1] * 10)])
def test_kinds_of_tokens_are_told_apart_inside_the_think_section(name, own, advantage, weight):
    section, kind = torch.tensor([[SECTIONS], [KINDS]], dtype=torch.uint8)
    rollouts = hand_made([[True] * 10], texts=[TEXTS], section=section, kind=kind,
                         advantage=torch.full((1, 10), advantage))
    assert raw(name, rollouts, **own).tolist() == [weight]


def test_future_attention_by_hand():
    """Four tokens, a window of 1: token 0 receives attention from 2 and 3, token 1 from 3. Tokens 2
    and 3 have no tokens far enough behind them, so they get 1. Attention from near tokens does not
    count. The second answer has three tokens: its token 0 receives attention only from token 2."""
    attention = torch.zeros(2, 4, 4)
    attention[:, 1, 0] = attention[:, 2, 1] = attention[0, 3, 2] = 0.9  # near
    attention[:, 2, 0], attention[0, 3, :2] = 0.5, 0.1
    mask = [[True] * 4, [True, True, True, False]]
    rollouts = looking(hand_made(mask), attention=attention)
    weight = raw("future_attention", rollouts, future_window=1)  # 0.3 and 0.1, mean 0.2
    torch.testing.assert_close(weight, torch.tensor([[1.5, 0.5, 1, 1], [1, 1, 1, 0]]))
    assert raw("future_attention", rollouts, future_window=3).tolist() == [[1] * 4, [1, 1, 1, 0]]


PRODUCTS = [1.0, 2.0, 3.0, 5.0, 6.0, -8.5, -8.5]  # of (log p - mean) and (advantage - mean)


def with_products(**known):
    """Advantages are 3 + 1 and 3 - 1, one each for every product, so the mean of log-probs is -3
    and that of advantages 3. What is beyond the mask is junk."""
    junk = torch.full((2, 1), -1000.0)
    log_prob = torch.tensor([PRODUCTS, [-product for product in PRODUCTS]]) - 3
    advantage = torch.tensor([[4.0] * 7, [2.0] * 7])
    return hand_made([[True] * 7 + [False]] * 2, log_prob=torch.cat([log_prob, junk], 1),
                     advantage=torch.cat([advantage, junk], 1), **known)


@pytest.mark.parametrize("share, left_out", [(0.0, 1), (0.15, 2), (0.22, 3), (1.0, 4)])
def test_covariance_leaves_out_a_share_of_all_tokens_and_at_least_one(share, left_out):
    """Of 14 tokens 4 lie strictly within the band from 1 to 5. Which of them are drawn depends on
    the generator."""
    drawn = set()
    for seed in range(20):
        rollouts = with_products(generator=torch.Generator().manual_seed(seed))
        weight = raw("covariance", rollouts, covariance_share=share)
        places = ((weight == 0) & rollouts.mask).nonzero().tolist()
        assert len(places) == left_out
        drawn |= set(map(tuple, places))
    assert drawn == {(0, 1), (0, 2), (1, 1), (1, 2)}
