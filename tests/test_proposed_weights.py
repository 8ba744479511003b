"""Weightings that others proposed, each by hand on a few tokens."""
import math

import pytest
import torch

from conftest import hand_made, looking, make_weighting, one_row
from engine.tokens import ANSWER, BRACKET, NUMBER, OPERATOR, OTHER, SPACE, TAG, THINK, WORD
from mitigations import rescaled_weight
from engine.errors import UserError


def raw(name, rollouts, **own):
    return rescaled_weight(make_weighting(name, own, None), name, rollouts, rescale_to="none")[0]


def labelled(texts, sections, kinds, **known):
    def codes(values):
        return torch.tensor([values], dtype=torch.uint8)
    return hand_made([[True] * len(texts)], texts=[texts], section=codes(sections),
                     kind=codes(kinds), **known)


TEXTS = [" try", ",", " ", "3", " *", "=", "</think>", "7", "end", "plus"]
SECTIONS = [THINK] * 6 + [OTHER, ANSWER, OTHER, THINK]
KINDS = [WORD, WORD, SPACE, NUMBER, OPERATOR, BRACKET, TAG, NUMBER, WORD, WORD]


def test_by_kind_tells_words_from_numbers_inside_the_think_section():
    rollouts = labelled(TEXTS, SECTIONS, KINDS)
    weight = raw("by_kind", rollouts, word_weight=0.25, number_weight=2.0)
    assert weight.tolist() == [[0.25, 0.25, 1, 2, 2, 1, 1, 1, 1, 0.25]]
    assert raw("by_kind", rollouts, word_weight=1.0, number_weight=0.0)[0, 3:5].tolist() == [0, 0]


def test_by_kind_can_go_by_the_earlier_experiments_regex():
    """Spaces and punctuation are filler there, equals signs and spelled operators reasoning."""
    weight = raw("by_kind", labelled(TEXTS, SECTIONS, KINDS), word_weight=0.25, number_weight=2.0,
                 kinds="regex")
    assert weight.tolist() == [[0.25, 0.25, 0.25, 2, 2, 2, 1, 1, 1, 2]]


def test_by_kind_reads_answers_of_unlike_length():
    rollouts = hand_made([[True, True, True], [True, True, False]], texts=[["so", "1", "+"],
                                                                        ["2", "so"]],
                         section=torch.full((2, 3), THINK, dtype=torch.uint8))
    weight = raw("by_kind", rollouts, word_weight=0.5, number_weight=3.0, kinds="regex")
    assert weight.tolist() == [[0.5, 3, 3], [3, 0.5, 0]]


def test_low_probability_by_hand():
    rollouts = one_row(log_prob=[math.log(0.5), 0.0, -30.0])
    torch.testing.assert_close(raw("low_probability", rollouts, probability_share=0.2),
                               torch.tensor([[0.9, 1.0, 0.8]]))
    assert raw("low_probability", rollouts, probability_share=0.0).tolist() == [[1, 1, 1]]


def test_taco_by_hand():
    """Entropy 1 and strictness 0.1: r = -log p - 1 - log 10 = 2 where -log p = 3 + log 10. Then
    1 - 0.5 (1 - exp(-2)); not where r is below 0, and not where the answer is blamed."""
    far = -(3 + math.log(10))
    rollouts = one_row(log_prob=[far, far, far, -1.0], entropy=[1.0] * 4,
                       advantage=[0.7, -0.7, 0.0, 0.7])
    expected = torch.tensor([[1 - 0.5 * (1 - math.exp(-2)), 1, 1, 1]])
    found = raw("taco", rollouts, tail_strictness=0.1, tail_damping=0.5)
    torch.testing.assert_close(found, expected)
    surer = one_row(log_prob=[far], entropy=[0.5], advantage=[0.7])  # r = 2.5: even less likely
    assert raw("taco", surer, tail_strictness=0.1, tail_damping=0.5).item() == \
        pytest.approx(1 - 0.5 * (1 - math.exp(-2.5)))


def test_planning_praises_the_words_of_the_think_section_more_and_blames_them_less():
    up, down = [0.7] * len(TEXTS), [-0.7] * len(TEXTS)
    for advantage, changed in ((up, 1.25), (down, 0.75), ([0.0] * len(TEXTS), 1.0)):
        rollouts = labelled(TEXTS, SECTIONS, KINDS, advantage=torch.tensor([advantage]))
        weight = raw("planning", rollouts, planning_boost=0.25)
        assert weight.tolist() == [[changed, changed, 1, 1, 1, 1, 1, 1, 1, changed]]


def test_future_attention_by_hand():
    """Four tokens, a window of 1: token 0 is looked at from 2 and 3, token 1 from 3; tokens 2 and 3
    from nowhere far, so they get 1. What is near counts for nothing."""
    attention = torch.zeros(1, 4, 4)
    attention[0, 1, 0] = attention[0, 2, 1] = attention[0, 3, 2] = 0.9  # near
    attention[0, 2, 0], attention[0, 3, 0], attention[0, 3, 1] = 0.5, 0.1, 0.1
    rollouts = looking(hand_made([[True] * 4]), attention=attention)
    weight = raw("future_attention", rollouts, future_window=1)
    torch.testing.assert_close(weight, torch.tensor([[1.5, 0.5, 1, 1]]))  # 0.3 and 0.1, mean 0.2
    assert raw("future_attention", rollouts, future_window=3).tolist() == [[1, 1, 1, 1]]


def test_future_attention_counts_only_tokens_of_the_answer():
    """The second answer has three tokens: token 0 is looked at from token 2 alone."""
    attention = torch.zeros(2, 4, 4)
    attention[:, 2, 0], attention[0, 3, :2] = 0.4, torch.tensor([0.2, 0.1])
    rollouts = looking(hand_made([[True] * 4, [True, True, True, False]]), attention=attention)
    weight = raw("future_attention", rollouts, future_window=1)
    torch.testing.assert_close(weight, torch.tensor([[1.5, 0.5, 1, 1], [1, 1, 1, 0]]))


PRODUCTS = [0.5, 2.0, 3.0, 4.0, 6.0, -7.75, -7.75]  # of (log p - mean) and (advantage - mean)


def with_products(**known):
    """Advantages are +1 and -1, one each for every product, so their mean is 0."""
    log_prob = torch.tensor([PRODUCTS, [-product for product in PRODUCTS]])
    advantage = torch.tensor([[1.0] * 7, [-1.0] * 7])
    return hand_made(torch.ones(2, 7, dtype=torch.bool), log_prob=log_prob, advantage=advantage,
                     **known)


def test_covariance_leaves_out_tokens_of_the_band():
    """A share of 1 takes them all: products strictly between low and high, here 2 and 3."""
    weight = raw("covariance", with_products(), covariance_share=1.0, covariance_low=0.5,
                 covariance_high=4.0)
    assert weight.tolist() == [[1, 0, 0, 1, 1, 1, 1]] * 2


@pytest.mark.parametrize("share, left_out", [(0.0, 1), (0.15, 2), (0.22, 3), (1.0, 4)])
def test_covariance_leaves_out_a_share_of_all_tokens_and_at_least_one(share, left_out):
    """Of 14 tokens 4 lie in the band. Which of them are drawn depends on the generator."""
    drawn = set()
    for seed in range(20):
        rollouts = with_products(generator=torch.Generator().manual_seed(seed))
        weight = raw("covariance", rollouts, covariance_share=share, covariance_low=0.5,
                     covariance_high=4.0)
        places = (weight == 0).nonzero().tolist()
        assert len(places) == left_out
        drawn |= set(map(tuple, places))
    assert drawn == {(0, 1), (0, 2), (1, 1), (1, 2)}


def test_covariance_is_about_the_mean_of_the_answers_tokens():
    """Log-probs are 3 lower, advantages 3 higher: the products stay, and so do those left out. What
    stands beyond the mask has no part in the means."""
    rollouts = with_products()
    mask = torch.tensor([[True] * 7 + [False]] * 2)
    far = torch.full((2, 1), -1000.0)
    moved = hand_made(mask, log_prob=torch.cat([rollouts.log_prob - 3, far], 1),
                      advantage=torch.cat([rollouts.advantage + 3, far], 1))
    weight = raw("covariance", moved, covariance_share=1.0, covariance_low=0.6,
                 covariance_high=4.1)
    assert weight.tolist() == [[1, 0, 0, 0, 1, 1, 1, 0]] * 2


def test_covariance_without_a_band_is_refused():
    with pytest.raises(UserError, match="--covariance_low 5.0 should be below --covariance_high 1"):
        raw("covariance", with_products(), covariance_low=5.0, covariance_high=1.0)
