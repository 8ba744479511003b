"""Every weighting and every advantage: what must hold for all, and what they may look at."""
import dataclasses
from functools import cache

import pytest
import torch

from conftest import INSTALL, ROOT
from small import (ASKED, OWN, SPOKEN, copied, facts_behind, fill_beyond_the_mask, make_weighting,
                   spoken)
from lab.engine.methods import (ADVANTAGES, MITIGATIONS, NEVER_RESCALED, WHOLE_ANSWERS,
                                checked_credit, make)
from lab.engine.credited import rescaled_weight

WEIGHTINGS, CREDITS = (sorted({*choices, *(name for of, name, _ in OWN if of is choices)})
                       for choices in (MITIGATIONS, ADVANTAGES))
# lab/tests/credit/test_credit_of_turns.py; and what examples/dpo.py has registered, if it is loaded
CREDITS = [name for name in CREDITS if name not in ("turn_credit", "without_luck", "dpo")]
FLAGS = {"learned_importance": {"importance_warmup": 0}, "vine": {"values_k": 1},
         "measured": {"measured_k": 1, "measured_above": 0.5}}


def credit(policy, name, rollouts):
    """What a weighting or an advantage gives each token."""
    if name in MITIGATIONS:
        chosen = make_weighting(name, FLAGS.get(name, {}), policy)
        return rescaled_weight(chosen, name, rollouts, policy)[0]
    advantage = make(ADVANTAGES[name], FLAGS.get(name, {}), policy)
    return checked_credit(advantage, name, rollouts, policy)


@pytest.fixture(scope="module", autouse=True)
def own():
    """The methods that a user has added, while these tests run."""
    for choices, name, function in OWN:
        choices.data[name] = function
    yield
    for choices, name, _ in OWN:
        del choices.data[name]


@pytest.fixture(scope="module", autouse=True)
def spoken_once(policy):
    """What the policy, which no method may change, says of these texts is computed once."""
    found = cache(lambda prompt, ids: facts_behind(policy.model, prompt, ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("small.facts_behind", lambda _, prompt, ids: found(tuple(prompt), tuple(ids)))
        yield


@pytest.fixture(scope="module")
def plain(policy):
    """The credit of a method on the usual batch, worked out once: some sample for it."""
    return cache(lambda name: credit(policy, name, spoken(policy)))


@pytest.mark.parametrize("name", [*WEIGHTINGS, *CREDITS])
def test_what_holds_for_every_method(policy, plain, name):
    """The same from the same generator, without gradient, and the policy stays as it was. Neither
    padding nor the micro-batch changes it."""
    rollouts, before = spoken(policy), copied(policy.model)
    policy.model.zero_grad()
    for value in (rollouts.log_prob, rollouts.entropy):
        value.requires_grad_()
    found = credit(policy, name, rollouts)
    assert torch.equal(found, plain(name)) and found.isfinite().all() and not found.requires_grad
    is_of_project = all(name != added for _, added, _ in OWN)
    if name in CREDITS and is_of_project:
        is_whole = torch.equal(found, found[:, :1] * rollouts.mask)
        # these are so in an answer of one turn, gae with its default
        assert is_whole == (name in {*WHOLE_ANSWERS, "gae", "turn_mean"})
    for parameter, earlier in zip(policy.model.parameters(), before.parameters()):
        assert torch.equal(parameter, earlier) and parameter.grad is None
    junk = spoken(policy)
    fill_beyond_the_mask(junk)
    torch.testing.assert_close(credit(policy, name, junk), found, atol=1e-6, rtol=0)
    small = spoken(policy, micro_batch=1)
    torch.testing.assert_close(credit(policy, name, small), found, atol=1e-5, rtol=0)


def assert_weights(weight, name, mask):
    """Finite, not negative, 0 beyond the mask, and mean 1 after rescaling."""
    assert weight.shape == mask.shape and weight.dtype == torch.float32
    assert weight.isfinite().all() and (weight >= 0).all() and not weight[~mask].any()
    if mask.any() and name not in NEVER_RESCALED:
        assert weight[mask].mean().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_what_holds_for_all_weights_also_of_odd_batches(policy, plain, name):
    """Answers of one token, without <answer>, with nothing in it; rewards all equal, or not; an
    answer that was dropped, and all of them."""
    rollouts = spoken(policy)
    assert_weights(plain(name), name, rollouts.mask)
    for texts in (["<|im_end|>", "<|im_end|>"], [SPOKEN[0], "<|im_end|>"],
                  ["</think>\n<answer></answer>", " 3"]):
        odd = spoken(policy, texts, ASKED[:1])
        assert_weights(credit(policy, name, odd), name, odd.mask)
    for kept in (torch.arange(6) != 2, torch.arange(6) < 0):
        some = dataclasses.replace(rollouts, mask=rollouts.mask & kept[:, None])
        assert_weights(credit(policy, name, some), name, some.mask)


def test_hidden_and_attention_are_those_of_a_plain_forward_pass(policy):
    """hidden[b, t] predicts token t; attention[b, i, j] is what token j received when token i was
    predicted."""
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    referee = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "models/tiny",
                                                                attn_implementation="eager")
    rollouts = spoken(policy, micro_batch=4)
    for b, n in enumerate(rollouts.length.tolist()):
        prompt = rollouts.prompt_ids[rollouts.group[b]]
        with torch.no_grad():
            out = referee(torch.tensor([prompt + rollouts.ids[b, :n].tolist()]),
                          output_attentions=True, output_hidden_states=True)
        P, states, received = len(prompt), out.hidden_states[-1][0], out.attentions[-1][0].mean(0)
        torch.testing.assert_close(rollouts.hidden[b, :n], states[P - 1:-1], atol=1e-4, rtol=0)
        torch.testing.assert_close(rollouts.attention[b, :n, :n], received[P - 1:-1, P:].tril(-1),
                                   atol=1e-5, rtol=0)
    assert not rollouts.hidden[~rollouts.mask].any()


def test_the_extra_forward_pass_is_made_only_when_somebody_looks_and_once(policy, monkeypatch):
    passes, forward = [], policy.model.model.forward
    monkeypatch.setattr(policy.model.model, "forward",
                        lambda *args: passes.append(1) or forward(*args))
    # prompts and answers are a call each
    for name, expected in (("none", 0), ("equal_gradient", 0), ("entropy_weighted", 0),
                           ("attention_credit", 2), ("learned_importance", 2)):
        rollouts = spoken(policy)
        passes.clear()
        credit(policy, name, rollouts)
        assert len(passes) == expected, name
