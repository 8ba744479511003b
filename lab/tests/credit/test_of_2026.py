"""Methods of 2026 by hand: what the answer section loses without a piece of thinking, how steep it
is at a token, and weights by entropy and by probability.
The gradient at the embeddings is tested in test_claims_of_phase1.py."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small import hand_made, make_weighting, one_row, spoken

from lab.credit.of_2026 import counterfactual, delta, falls_without, oar_g, pieces_of
from lab.engine.credited import rescaled_weight
from lab.engine.forward import response_log_probs
from lab.engine.tokens import ANSWER, NUMBER, THINK, WORD


def test_a_piece_is_words_or_what_stands_between_them():
    mask = [[True] * 6 + [False], [True] * 7]
    section = torch.tensor([[THINK] * 4 + [0, THINK, THINK], [ANSWER] * 7])
    kind = torch.tensor([[WORD, WORD, NUMBER, WORD, WORD, NUMBER, NUMBER], [WORD] * 7])
    batch = hand_made(mask, section=section, kind=kind)
    assert list(pieces_of(batch)) == [(0, 0, 2), (0, 2, 3), (0, 3, 4), (0, 5, 6)]


def test_the_fall_is_that_of_a_text_written_with_blanks(policy):
    """Two pieces, each by an answer whose ids have the blanks from the start."""
    batch = spoken(policy)
    pieces = [piece for piece in pieces_of(batch) if (batch.section[piece[0]] == ANSWER).any()]
    weight = counterfactual(policy, piece_scale=2.0)(batch, policy)
    falls = falls_without(batch, policy, pieces)
    assert falls.max() > 0.1
    for number in (int(falls.argmax()), int(falls.argmin())):
        row, start, end = pieces[number]
        ids = batch.ids.clone()
        ids[row, start:end] = policy.tokenizer.token_to_id("<|endoftext|>")
        after = response_log_probs(policy.model, replace(batch, ids=ids), torch.tensor([row]))[0]
        fall = (batch.log_prob[row] - after.detach())[batch.section[row] == ANSWER].sum()
        assert falls[number].item() == pytest.approx(fall.item(), abs=1e-4)
        lost = max(0.0, 1 - (-fall).exp().item())
        assert weight[row, start:end].tolist() == pytest.approx([1 + 2 * lost] * (end - start),
                                                                abs=1e-4)


def test_weights_of_oar_by_hand(policy):
    """Stretched to 0, 1/4, 1/2 and 1. The median is 3/8, so the weights are 0.1, 2/3, 1 + 1/5 and
    2, over their mean 0.99167."""
    found = oar_g(policy).reshaped(torch.tensor([1.0, 2.0, 3.0, 5.0]))
    assert (found * 0.991667).tolist() == pytest.approx([0.1, 2 / 3, 1.2, 2], rel=1e-4)
    batch = spoken(policy)
    weight, think = oar_g(policy)(batch, policy), (batch.section == THINK) & batch.mask
    assert (weight[~think] == 1).all() and weight[think].std() > 0.1
    assert weight[0, think[0]].mean().item() == pytest.approx(1)


def test_delta_by_hand():
    """Gradients 1 and 0 of the right answer, -1 and 0 of the wrong one: centres 1/2 and -1/2,
    margins 2 and 0 on each side, with a spread of 1. Counted with sigmoid(2) = 0.8808 and 1/2, the
    centres are at 0.6379, and the margins 4 * 0.6379 and 0."""
    hidden = torch.tensor([[[2.0], [0]], [[-2.0], [0]]])  # p is 1/2
    batch = hand_made([[True, True]] * 2, log_prob=torch.full((2, 2), 0.5).log(),
                      advantage=torch.tensor([[1.0, 1], [-1, -1]]),
                      forward=SimpleNamespace(look=lambda *_, **__: {"hidden": hidden}))
    one = 0.8 + 0.4 * torch.tensor(4 * 0.6379).sigmoid().item()
    torch.testing.assert_close(delta(batch), torch.tensor([[one, 1], [one, 1]]), atol=1e-4, rtol=0)
    equal = replace(batch, advantage=torch.zeros(2, 2))  # a side without an answer
    assert (delta(equal) == 0.8).all()


def test_quadrants_by_hand():
    """The mean entropy is 1.2. Behind the first token, half of what it is is a quarter in a wrong
    answer."""
    rollouts = one_row(entropy=[3.0, 0.0, 0.6], advantage=[1.0, 1.0, -1.0])
    method = make_weighting("quadrants", {"quadrant_low": 0.4}, None)
    found = rescaled_weight(method, "quadrants", rollouts, rescale_to="none")[0]
    assert found[0].tolist() == pytest.approx([2.5, 0.4, 0.1], rel=1e-5)
