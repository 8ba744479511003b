"""Every weighting: what must hold for all of them, and each one by hand on a few tokens."""
import dataclasses
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from conftest import (ASKED, ROOT, SPOKEN, assert_same_gradient, copied, gradients, hand_made,
                      looking, make_weighting, one_row, spoken)
from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED
from engine.tokens import ANSWER
from mitigations import rescaled_weight
from grpo import gradient_size, update
from harness.own_code import checked_credit
from harness.load import make
from engine.errors import UserError

ALL = sorted(MITIGATIONS)
FLAGS = {"learned_importance": {"importance_warmup": 0}, "oracle": {"oracle_k": 1},
         "measured": {"measured_k": 1, "measured_above": 0.5}, "vine": {"values_k": 1}}


def weights(policy, name, rollouts, own=None, **how):
    chosen = make_weighting(name, FLAGS.get(name, {}) if own is None else own, policy)
    return rescaled_weight(chosen, name, rollouts, policy, **how)[0]


def credit(policy, name, rollouts):
    """What a weighting or an advantage gives each token."""
    if name in MITIGATIONS:
        return weights(policy, name, rollouts)
    advantage = make(ADVANTAGES[name], FLAGS.get(name, {}), policy)
    return checked_credit(advantage, name, rollouts, policy)


@pytest.fixture(scope="module")
def plain(policy):
    """The weights or the advantages of a method on the usual batch, worked out once: some sample
    for them."""
    return cache(lambda name: credit(policy, name, spoken(policy)))


@pytest.mark.parametrize("name", ALL)
def test_what_holds_for_all_weights(policy, plain, name):
    """Detached, finite, not negative, 0 beyond the mask, mean 1 after rescaling; and the same from
    the same generator."""
    rollouts = spoken(policy)
    for value in (rollouts.log_prob, rollouts.entropy):
        value.requires_grad_()
    weight = weights(policy, name, rollouts)
    assert weight.shape == rollouts.mask.shape and weight.dtype == torch.float32
    assert not weight.requires_grad and weight.isfinite().all() and (weight >= 0).all()
    assert not weight[~rollouts.mask].any() and weight.any()
    if name not in NEVER_RESCALED:
        assert weight[rollouts.mask].mean().item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(weight, plain(name))


@pytest.mark.parametrize("name", [*ALL, *sorted(ADVANTAGES)])
def test_neither_padding_nor_the_micro_batch_changes_a_method(policy, plain, name):
    junk = spoken(policy)
    for tensor, value in ((junk.log_prob, -9.0), (junk.entropy, 50.0), (junk.collision, 0.7),
                          (junk.advantage, 4.0), (junk.ids, 7), (junk.section, ANSWER),
                          (junk.kind, 3)):
        tensor.masked_fill_(~junk.mask, value)
    torch.testing.assert_close(credit(policy, name, junk), plain(name), atol=1e-6, rtol=0)
    small = spoken(policy, micro_batch=1)
    torch.testing.assert_close(credit(policy, name, small), plain(name), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_odd_batches(policy, name):
    """Answers of one token, without <answer>, with nothing in it; rewards all equal, or not; an
    answer that was dropped, and all of them."""
    for texts in (["<|im_end|>", "<|im_end|>"], [SPOKEN[0], "<|im_end|>"],
                  ["</think>\n<answer></answer>", " 3"]):
        rollouts = spoken(policy, texts, ASKED[:1])
        weight = weights(policy, name, rollouts)
        assert weight.isfinite().all() and weight[rollouts.mask].sum() > 0
    rollouts = spoken(policy)
    for kept in (torch.arange(6) != 2, torch.arange(6) < 0):
        some = dataclasses.replace(rollouts, mask=rollouts.mask & kept[:, None])
        weight = weights(policy, name, some)
        assert weight.isfinite().all() and not weight[~kept].any()
        if kept.any() and name not in NEVER_RESCALED:
            assert weight[some.mask].mean().item() == pytest.approx(1, abs=1e-6)


def raw(name, rollouts, **own):
    return rescaled_weight(make_weighting(name, own, None), name, rollouts, rescale_to="none")[0]


def test_none_is_one():
    assert torch.equal(raw("none", hand_made([[True, True], [True, False]])),
                       torch.tensor([[1.0, 1], [1, 0]]))


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


def test_inverse_logprob_by_hand():
    rollouts = one_row(log_prob=[-0.01, -3.0, 0.0])
    torch.testing.assert_close(
        raw("inverse_logprob", rollouts, epsilon=0.1)[0], torch.tensor([1 / 0.11, 1 / 3.1, 10.0]))
    # the numbers of the published form: 8.3 at -0.01 and 0.010 at -3
    torch.testing.assert_close(
        raw("inverse_logprob_as_published", rollouts, epsilon=0.1)[0],
        torch.tensor([0.1 / 0.11 ** 2, 0.1 / 3.1 ** 2, 10.0]))


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


def test_equal_gradient_by_hand():
    # two words: p = 0.8, sum p^2 = 0.68, s = sqrt(1 - 1.6 + 0.68) = 0.2 sqrt 2
    weight = raw("equal_gradient", one_row(log_prob=[math.log(0.8)], collision=[0.68]), epsilon=0.1)
    assert weight.item() == pytest.approx(1 / (0.2 * 2 ** 0.5 + 0.1), rel=1e-5)


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


def test_hidden_and_attention_are_those_of_a_plain_forward_pass(policy):
    """hidden[b, t] predicts token t; attention[b, i, j] is what token j received when token i was
    predicted."""
    transformers = pytest.importorskip("transformers")
    referee = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "models/tiny",
                                                                attn_implementation="eager")
    rollouts = spoken(policy, micro_batch=4)
    for b, n in enumerate(rollouts.length.tolist()):
        prompt = rollouts.prompt_ids[rollouts.group[b]]
        with torch.no_grad():
            out = referee(torch.tensor([prompt + rollouts.ids[b, :n].tolist()]),
                          output_attentions=True, output_hidden_states=True)
        states, received = out.hidden_states[-1][0], out.attentions[-1][0].mean(0)
        for i in range(n):
            torch.testing.assert_close(rollouts.hidden[b, i], states[len(prompt) - 1 + i],
                                       atol=1e-4, rtol=0)
            for j in range(n):
                expected = received[len(prompt) - 1 + i, len(prompt) + j].item() if j < i else 0.0
                assert rollouts.attention[b, i, j].item() == pytest.approx(expected, abs=1e-5)
    assert not rollouts.hidden[~rollouts.mask].any()


def test_the_extra_forward_pass_is_made_only_when_somebody_looks_and_once(policy, monkeypatch):
    passes, forward = [], policy.model.model.forward
    monkeypatch.setattr(policy.model.model, "forward",
                        lambda *args: passes.append(1) or forward(*args))
    for name, expected in (("none", 0), ("equal_gradient", 0), ("entropy_weighted", 0),
                           ("attention_credit", 1), ("learned_importance", 1)):
        rollouts = spoken(policy)
        passes.clear()
        weights(policy, name, rollouts)
        assert len(passes) == expected, name


def test_entropy_weightings_by_hand():
    rollouts = one_row(entropy=[0.0, math.log(2), math.log(3)])
    for temperature, parts in ((1.0, [1.0, 2, 3]), (0.5, [1.0, 4, 9])):
        expected = torch.tensor(parts) / sum(parts) * 3
        found = raw("entropy_weighted", rollouts, entropy_temp=temperature)[0]
        torch.testing.assert_close(found, expected)
    rollouts = one_row(entropy=[0.0, 1.0, 5.0])
    assert raw("entropy_ratio", rollouts, entropy_beta=1.0).tolist() == [[0, 0.5, 2.5]]
    assert raw("entropy_ratio", rollouts, entropy_beta=2.0).tolist() == [[0, 0, 4]]
    assert raw("entropy_ratio", one_row(entropy=[0.0, 0.0]), entropy_beta=1.0).tolist() == [[1, 1]]


def test_entropy_masking_by_hand():
    rollouts = one_row(entropy=[float(n) for n in range(11)])
    for percentile, weight in ((80.0, [0] * 8 + [1] * 3), (0.0, [1] * 11), (100.0, [0] * 10 + [1])):
        assert raw("entropy_masking", rollouts, mask_percentile=percentile)[0].tolist() == weight
    two = hand_made([[True, True], [True, False]], entropy=torch.tensor([[1.0, 2.0], [3.0, 99.0]]))
    assert raw("entropy_masking", two, mask_percentile=50.0).tolist() == [[0, 1], [1, 0]]


def test_random_has_mean_one_and_the_spread_that_was_asked_for():
    rollouts = hand_made(torch.ones(100, 1000, dtype=torch.bool))
    weight = raw("random", rollouts, placebo_std=0.5)
    assert weight.mean().item() == pytest.approx(1, abs=0.01)
    assert weight.std().item() == pytest.approx(0.5, abs=0.01)


def weighed(weight, rollouts, **how):
    return rescaled_weight(lambda rollouts, policy: weight, "by hand", rollouts, **how)


def test_rescaling_by_hand():
    probability = torch.tensor([[0.8, 0.5], [0.8, 0.1]])
    rollouts = hand_made([[True, True], [True, False]], log_prob=probability.log(),
                         collision=torch.tensor([[0.68, 0.5], [0.68, 0.9]]),
                         advantage=torch.tensor([[1.0, 1.0], [-2.0, 9.0]]))
    s = torch.tensor([[0.08, 0.5], [0.08, 0.0]]).sqrt()
    weight = torch.tensor([[2.0, 0.5], [4.0, 7.0]])
    as_it_is, expected = weighed(weight, rollouts, rescale_to="none")[0], weight * rollouts.mask
    torch.testing.assert_close(as_it_is, expected)
    torch.testing.assert_close(weighed(weight, rollouts)[0], expected * 3 / 6.5)
    size = rollouts.advantage.abs() * s * rollouts.mask
    after = (weighed(weight, rollouts, rescale_to="gradient")[0] * size).sum().item()
    assert after == pytest.approx(size.sum().item(), rel=1e-5)


def test_weights_that_cannot_be_rescaled_to_the_gradient_are_left_and_it_is_said():
    advantage = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    rollouts = hand_made([[True, True], [True, True]], advantage=advantage)
    for tiny in (0.0, 1e-42):
        weight = torch.tensor([[tiny, tiny], [2.0, 1.0]])
        weight, said = weighed(weight, rollouts, rescale_to="gradient")
        assert weight[1].tolist() == [2, 1] and "not rescaled" in said["weight_note"]
    nothing = dataclasses.replace(rollouts, advantage=torch.zeros(2, 2))
    assert weighed(torch.ones(2, 2), nothing, rescale_to="gradient")[1]["weight_note"] is None


def test_weights_that_are_all_zero_become_one_and_it_is_said():
    rollouts = hand_made([[True, True], [True, False]])
    weight, said = weighed(torch.zeros(2, 2), rollouts)
    assert torch.equal(weight, rollouts.mask.float())
    assert "all weights were 0" in said["weight_note"]


def test_a_negative_weight_is_refused():
    with pytest.raises(UserError, match="weighting my_idea is negative at 1 of 3 tokens, first"):
        rescaled_weight(lambda rollouts, policy: torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),
                        "my_idea", hand_made([[True, True], [True, False]]))


def test_what_is_odd_beyond_the_mask_does_not_matter_and_one_number_an_answer_is_enough():
    rollouts = hand_made([[True, True], [True, False]])
    odd = torch.tensor([[1.0, 1.0], [1.0, float("inf")]])
    assert weighed(odd, rollouts)[0].tolist() == [[1, 1], [1, 0]]
    assert weighed(1 / rollouts.length[:, None], rollouts, rescale_to="none")[0].tolist() == \
        [[0.5, 0.5], [1, 0]]


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["none", "entropy_weighted", "inverse_logprob", "random"])
def test_weights_reach_the_gradient(policy, plain, name):
    """One update with them is autograd of  - sum weight * advantage * log_prob / N  written out row
    by row."""
    rollouts = spoken(policy)
    weight = plain(name)
    copy, other = copied(policy.model), copied(policy.model)
    s = SimpleNamespace(micro_batch=4, max_grad_norm=0.0, epochs=1, loss_norm="token",
                        max_new_tokens=60, kl=0.0, kl_kind="k3", clip_low=0.2, clip_high=0.28)
    update(copy, torch.optim.SGD(copy.parameters(), lr=0.0), rollouts, weight, s)
    loss = 0
    for b, n in enumerate(rollouts.length.tolist()):
        prompt, row = rollouts.prompt_ids[rollouts.group[b]], rollouts.ids[b, :n]
        logits = other(torch.tensor([prompt + row.tolist()]))[0, len(prompt) - 1:-1]
        log_probs = logits.log_softmax(-1)
        loss = loss - (weight[b, :n] * rollouts.advantage[b, :n] * log_probs[range(n), row]).sum()
    (loss / rollouts.mask.sum()).backward()
    assert_same_gradient(gradients(copy), gradients(other))
