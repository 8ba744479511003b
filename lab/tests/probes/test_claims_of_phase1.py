"""Phase 1: the gradient at the embeddings, computed in a second way; statistics by hand."""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import spoken

from lab.engine.model import Qwen2
from qwen2_model import rotary
from qwen2_model import causal
from lab.analysis.token_table import TokenTable
from lab.probes.claim_rules import CannotBeSeen
from lab.probes.claims_of_phase1 import (class_ratio, first_over_last_fifth, fresh,
                                         phase_one, phases, random_text)
from lab.probes.common import sample_batch


def gradient_by_hand(model, batch, b):
    """(n, D) of answer b alone: prompt and answer in one row, labels shifted as is usual."""
    prompt, answer = batch.prompt_ids[batch.group[b]], batch.ids[b, :batch.length[b]].tolist()
    x = F.embedding(torch.tensor([prompt + answer]), model.model.embed_tokens.weight)
    embeddings = x = x.detach().requires_grad_()
    for layer in model.model.layers:
        x = layer(x, *rotary(torch.arange(x.shape[1]), model.config), causal)
    logits = model.logits(model.model.norm(x))[0, len(prompt) - 1:-1]
    loss = F.cross_entropy(logits, torch.tensor(answer))
    return torch.autograd.grad(loss, embeddings)[0][0, len(prompt):]


def test_phase_1_is_the_gradient_of_the_cross_entropy_at_the_embeddings(small_model, policy,
                                                                        rollouts):
    """Two answers are equal: each has the gradient of its own tokens alone."""
    rollouts = replace(rollouts, **{name: getattr(rollouts, name)[[0, 1, 1, 3, 4, 5]]
                                    for name in ("ids", "mask")})
    small = SimpleNamespace(model=small_model, settings=SimpleNamespace(micro_batch=4),
                            tokenizer=policy.tokenizer)
    of_batch = phase_one(small, rollouts)
    expected = [gradient_by_hand(small_model, rollouts, b) for b in range(len(rollouts.mask))]
    assert all(g[-1].abs().max() == 0 for g in expected)  # the last token predicts nothing
    g = torch.cat([g[:-1] for g in expected]).double()
    np.testing.assert_allclose(of_batch["size"], g.norm(dim=-1), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(of_batch["signed"], g.mean(-1), rtol=1e-3, atol=1e-7)
    assert all(p.grad is None for p in small_model.parameters())


def tokens_of(size, fifth=None, **known):
    """A table of which only these columns matter. The token of a fifth is one of five."""
    size = np.asarray(size, float)
    dull = np.zeros(len(size), int)
    place = dull if fifth is None else np.asarray(fifth)
    return TokenTable({"signed": size, "size": size, "problem": dull, "answer": dull,
                       "class": dull, "position": place, "length": dull + 5,
                       **{name: np.asarray(values) for name, values in known.items()}})


def test_ratios_by_hand():
    """Filler 2 and 6 early, 1 late; reasoning 1 early, 4 late: 3 / 2.5; at like positions each
    fifth counts the same: (4 + 4 + 4 + 4 + 1) / (1 + 1 + 1 + 1 + 4)."""
    tokens = tokens_of([2.0, 6, 1, 1, 4, 100], fifth=[0, 0, 4, 0, 4, 2],
                       **{"class": [0, 0, 0, 1, 1, 2]})
    assert class_ratio(tokens) == pytest.approx(3 / 2.5)
    assert first_over_last_fifth(tokens) == pytest.approx(3 / 2.5)
    every = tokens_of([4.0, 1, 1, 2] * 5, fifth=np.arange(20) // 4,
                      **{"class": [0, 0, 1, 1] * 5})
    assert class_ratio(every, 5) == pytest.approx(2.5 / 1.5)
    uneven = tokens_of([4.0, 1] * 4 + [1, 4], fifth=np.arange(10) // 2,
                       **{"class": [0, 1] * 5})
    assert class_ratio(uneven, 5) == pytest.approx(17 / 8)


def test_controls_keep_what_they_should(policy):
    """Fresh weights are those that a new model begins with."""
    batch, state = spoken(policy), torch.get_rng_state()
    model = fresh(policy.model, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(map(torch.equal, (p for p in model.parameters() if p.dim() == 2),
                       (p for p in policy.model.parameters() if p.dim() == 2)))
    again = fresh(policy.model, 1)
    assert isinstance(model, Qwen2) and all(map(torch.equal, model.parameters(),
                                                again.parameters()))
    text = random_text(policy, batch)
    assert torch.equal(text.mask, batch.mask) and not text.ids[~text.mask].any()
    assert text.ids.unique().numel() > 50


def test_the_controls_are_of_the_same_answers(policy):
    """They are of each token but the last. The terms of the loss count down to 1."""
    found = phases(policy, SimpleNamespace(problems=2))
    assert len({len(tokens) for tokens in found.values()}) == 1
    terms = found["loss terms"]
    assert (terms["size"] == terms["length"] - 1 - terms["position"]).all()
    s = found["gradient"]["size"]
    assert sorted(s) != sorted(found["shuffled"]["size"]) or not s.any()


def test_answers_of_one_token_have_no_phase_1(policy, monkeypatch):
    one = sample_batch(policy, 2, 2)
    mask = one.mask.clone()
    mask[:, 1:] = False
    monkeypatch.setattr("lab.probes.claims_of_phase1.sample_batch",
                        lambda *_: replace(one, mask=mask, written=mask))
    with pytest.raises(CannotBeSeen, match="every answer has a single token"):
        phases(policy, SimpleNamespace(problems=2))
