"""Methods of 2026 by hand: what the answer section loses without a piece of thinking, how steep it
is at a token, and weights by entropy and by probability.
The gradient at the embeddings is tested in test_claims_of_phase1.py."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small import hand_made, make_weighting, one_row, spoken

from lab.credit.of_2026 import (counterfactual, delta, falls_without, grail, oar_g, papo,
                                pieces_of, rise_of_entropy)
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


def raw(name, rollouts, **own):
    return rescaled_weight(make_weighting(name, own, None), name, rollouts, rescale_to="none")[0]


@pytest.mark.parametrize("name, own, known, weight", [
    ("quadrants", {"quadrant_low": 0.4}, {"entropy": [3, 0, 0.6], "advantage": [1, 1, -1]},
     [2.5, 0.4, 0.1]),
    ("grpo_trace", {"trace_decay": 0.5}, {"entropy": [0, 0, 0]}, [1.75, 1.5, 1]),
    # the last two entropies are at or above the median, so the first token counts itself and these
    ("s_trace", {"trace_decay": 0.5, "trace_quantile": 0.5}, {"entropy": [0, 1, 2]},
     [1.75, 1.5, 1]),
    ("rsi_s", {}, {"log_prob": [-1, -1, -1], "entropy": [1, 3, 0.4]}, [1, 0, 0]),
    ("rsi_s", {}, {"log_prob": [-1, -1], "entropy": [3, 0.4]}, [1, 1])])
def test_weights_by_hand(name, own, known, weight):
    rollouts = one_row(**{key: [float(x) for x in values] for key, values in known.items()})
    assert raw(name, rollouts, **own)[0].tolist() == pytest.approx(weight, rel=1e-5, abs=1e-7)


def test_a3po_raises_rare_tokens_of_right_answers_and_likely_ones_of_wrong_answers():
    """Half of the scale is left at step 50 of 100."""
    batch = hand_made([[True] * 2] * 2, log_prob=torch.tensor([[-1.0, -2], [-1, -2]]), step=50,
                      advantage=torch.tensor([[1.0, 1], [-1, -1]]))
    assert raw("a3po", batch, a3po_share=0.4).tolist() == [[1, 1.5], [1.5, 1]]


def test_the_slope_of_the_entropy_is_that_of_autograd():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    log_p = logits.log_softmax(-1)
    of_entropy, = torch.autograd.grad(-(log_p.exp() * log_p).sum(), logits, retain_graph=True)
    of_log_p, = torch.autograd.grad(log_p[range(3), [4, 0, 2]].sum(), logits)
    found = rise_of_entropy(logits.detach(), torch.tensor([4, 0, 2]))
    torch.testing.assert_close(found, (of_entropy * of_log_p).sum(-1))


def test_papo_turns_when_the_entropy_is_above_its_mean(policy):
    batch, method = spoken(policy), papo(policy)
    first = method(batch, policy)
    second = method(replace(batch, entropy=batch.entropy * 2), policy)
    assert {0.5, 1.5} <= {*first[batch.mask].tolist()}
    torch.testing.assert_close((first + second)[batch.mask], torch.tensor(2.0).expand(
        int(batch.mask.sum())))
    assert method.state_dict()["usual"].item() == pytest.approx(
        1.1 * batch.entropy[batch.mask].mean().item(), rel=1e-5)


def test_grail_weighs_by_the_steepness_at_a_token(policy):
    """The mean weight of an answer with an answer section is 1, half of which all tokens have; the
    last token of an answer is not read. Other answers have the weight 1."""
    batch = spoken(policy)
    weight = grail(policy)(batch, policy)
    has_section = ((batch.section == ANSWER) & batch.mask).any(1)
    for row, inside in enumerate(batch.mask):
        found = weight[row, inside]
        assert found.mean().item() == pytest.approx(1, abs=1e-5)
        assert found[-1].item() == pytest.approx(0.5 if has_section[row] else 1, abs=1e-5)
        assert found.min() >= 0.5 and (found.std() > 0.1) == bool(has_section[row])
