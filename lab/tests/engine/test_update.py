"""The algorithm: losses against autograd of the formula, the record against the batch, and answers
behind a prompt that is computed once, against rows of their own."""
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
from lab.analysis.run_folders import read_columns, read_credit
from lab.countdown import Problem, Task
from lab.credit.weightings import span
from lab.engine.model_folder import read_model_folder
from lab.engine.policy import Policy
from lab.engine.sampler import generate
from lab.engine.tokens import load_tokenizer
from lab.engine.update import update
from lab.harness.record import write_credit
from small import (PROMPTS, copied, fill_beyond_the_mask, gradients, hand_made, log_probs_behind,
                   spoken)


def settings(**changed):
    usual = dict(micro_batch=64, max_grad_norm=0.0, epochs=1, pairs=None, loss_norm="token",
                 max_new_tokens=14, temperature=1.0, kl=0.0, kl_kind="k3", clip_low=0.2,
                 clip_high=0.28, lora=0, parts=1, seed=0)
    return SimpleNamespace(**{**usual, **changed})


def test_each_span_gets_its_own_part_of_the_score():
    kind = torch.tensor([[0, 5, 2, 5, 6]] * 2, dtype=torch.uint8)     # word, tag, number, tag, end
    section = torch.tensor([[1, 0, 2, 0, 0]] * 2, dtype=torch.uint8)  # think, -, answer, -, -
    scores = {"reward": [1.1, 0.0], "format": [1.0, 0.5], "answer": [1.0, 0.0],
              "reasoning": [0.2, 0.8]}
    batch = hand_made([[True] * 5] * 2, kind=kind, section=section,
                      scores={name: torch.tensor(value) for name, value in scores.items()})
    expected = torch.tensor([-0.3, 0.25, 0.5, 0.25, 0])
    torch.testing.assert_close(span(batch), torch.stack([expected, -expected]))


def row_log_probs(model, rollouts, row, temperature=1.0):
    ids = rollouts.ids[row, rollouts.mask[row]].tolist()
    return log_probs_behind(model, PROMPTS[row // 3], ids, temperature)[range(len(ids)), ids]


def run_update(model, rollouts, **changed):
    """A model with the gradient of an update that changes nothing, and its metrics."""
    copy, weight = copied(model), rollouts.mask.float()
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.0)
    return copy, update(copy, optimizer, rollouts, weight, settings(**changed))[0]


def written_out(model, reference, old, rollouts, weight, s):
    """The loss row by row and token by token, from the formulas alone."""
    lengths, loss = rollouts.mask.sum(1).tolist(), 0
    for row, n in enumerate(lengths):
        if not n:
            continue
        lp = row_log_probs(model, rollouts, row, s.temperature)
        with torch.no_grad():
            ref = row_log_probs(reference, rollouts, row, s.temperature)
        divisor = {"token": sum(lengths), "sequence": n * sum(n > 0 for n in lengths),
                   "constant": 6 * 14}[s.loss_norm]
        for t in range(n):
            A, w = rollouts.advantage[row, t], weight[row, t]
            if s.epochs == 1:
                objective = w * A * lp[t]
            else:
                ratio = (lp[t] - old[row][t]).exp()
                bounded = torch.clip(ratio, 1 - s.clip_low, 1 + s.clip_high)
                objective = w * min(ratio * A, bounded * A)
            d = ref[t] - lp[t]
            kl = torch.expm1(d) - d if s.kl_kind == "k3" else d ** 2 / 2
            loss = loss + (s.kl * kl - objective) / divisor
    return loss


@pytest.mark.numerics
@pytest.mark.parametrize("drop, changed", [
    (False, {}), (True, {}), (False, {"loss_norm": "sequence"}), (True, {"loss_norm": "constant"}),
    (False, {"kl": 0.3, "kl_kind": "k2", "loss_norm": "sequence"}),
    (False, {"epochs": 2, "kl": 0.2, "loss_norm": "constant"}),
    (False, {"temperature": 0.7, "kl": 0.2}), (False, {"temperature": 0.7, "epochs": 2}),
    (True, {"epochs": 2, "loss_norm": "sequence"})])
def test_every_loss_against_autograd_of_its_formula(small_model, rollouts, monkeypatch, drop,
                                                    changed):
    """Plain gradient descent on both sides: after the last update all parameters agree. What is
    beyond the mask is junk. The logits of four tokens are made at a time. The norm that is reported
    is the one before clipping."""
    monkeypatch.setattr("lab.engine.log_probs.LOGITS_AT_ONCE", 50 * 4)
    if drop:
        kept = rollouts.mask & (torch.arange(6) != 1)[:, None]
        rollouts = dataclasses.replace(rollouts, mask=kept)
    fill_beyond_the_mask(rollouts)
    s, reference = settings(**{"micro_batch": 4, **changed}), copied(small_model, 0.02)
    weight = torch.rand(rollouts.mask.shape, generator=torch.Generator().manual_seed(0))
    model, other = copied(small_model), copied(small_model)
    result, _ = update(model, torch.optim.SGD(model.parameters(), lr=0.3), rollouts, weight, s,
                       reference)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    with torch.no_grad():
        old = [row_log_probs(other, rollouts, row, s.temperature)
               if rollouts.mask[row].any() else None for row in range(6)]
    for epoch in range(s.epochs):
        optimizer.zero_grad()
        loss = written_out(other, reference, old, rollouts, weight, s)
        loss.backward()
        if epoch == 0:
            # terms of size 1, and the eps of float32 for each of 60 of them
            assert result["loss"] == pytest.approx(loss.item(), abs=1e-5)
            norm = gradients(other).norm().item()
            assert result["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        if s.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(other.parameters(), s.max_grad_norm)
        optimizer.step()
    for (name, one), two in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4, msg=name)
    assert not torch.equal(next(model.parameters()), next(small_model.parameters()))
    assert result["sampler_gap"] < 1e-5


def test_each_part_of_the_answers_makes_an_update(small_model, rollouts):
    """The first by the plain loss, the second with ratio and clipping to what sampled; each answer
    in one part."""
    rollouts = dataclasses.replace(rollouts, step=3)
    weight, s = rollouts.mask.float(), settings(parts=2)
    model, other = copied(small_model), copied(small_model)
    metrics, _ = update(model, torch.optim.SGD(model.parameters(), lr=0.3), rollouts, weight, s)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    sampled = [rollouts.log_prob[row, rollouts.mask[row]] for row in range(6)]
    order = torch.randperm(6, generator=grpo.generator_of("parts", 0, 3))
    for epochs, rows in ((1, order[:3]), (2, order[3:])):
        part = dataclasses.replace(rollouts, mask=torch.zeros_like(rollouts.mask))
        part.mask[rows] = rollouts.mask[rows]
        optimizer.zero_grad()
        written_out(other, other, sampled, part, weight, settings(epochs=epochs)).backward()
        optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()),
                               rtol=1e-4, atol=1e-5)
    assert metrics["N"] == rollouts.mask.sum() and "ratio_mean" in metrics


def test_the_gap_sees_log_probs_that_are_not_the_models(small_model, rollouts):
    """Also at another temperature, where it is that of temperature 1."""
    off = dataclasses.replace(rollouts, log_prob=rollouts.log_prob - 0.1)
    _, result = run_update(small_model, off, temperature=0.7)
    assert result["sampler_gap"] == pytest.approx(0.1, rel=1e-3)


def test_a_batch_of_which_every_answer_was_dropped_is_skipped_and_said(small_model, rollouts):
    empty = dataclasses.replace(rollouts, mask=rollouts.mask & False)
    model, result = run_update(small_model, empty)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert result["skipped"] == "no answer was finished" and result["gradient_norm"] is None


def test_what_was_written_can_be_read_again(policy, tmp_path):
    batch = spoken(policy)
    path = tmp_path / "credit" / "step_000004.npz"
    path.parent.mkdir()
    write_credit(path, dataclasses.replace(batch, step=4), batch.mask.float())
    assert list(path.parent.iterdir()) == [path]
    again = read_credit(tmp_path, 4, policy.tokenizer, problems=batch.problems)
    columns = read_columns(tmp_path, 4)
    types = {name: columns[name].dtype for name in ("token_id", "group", "kind", "weight")}
    assert types == {"token_id": np.int32, "group": np.int32, "kind": np.uint8,
                     "weight": np.float32}
    for name in ("mask", "ids", "log_prob", "entropy", "collision", "section", "kind", "advantage",
                 "group", "finished"):
        found, expected = getattr(again, name), getattr(batch, name)
        assert torch.equal(found, expected) and found.dtype == expected.dtype, name
    for name in ("texts", "answers", "prompt_ids"):
        assert getattr(again, name) == getattr(batch, name)
    assert all(torch.equal(again.scores[name], batch.scores[name]) for name in batch.scores)
    assert again.step == 4


def test_the_end_of_turn_stops_also_a_model_whose_own_list_lacks_it(learner, monkeypatch):
    model, tokenizer, asked = read_model_folder(learner), load_tokenizer(learner), {}
    other = dataclasses.replace(model.config, eos_token_id=(7,))
    monkeypatch.setattr(model, "config", other)
    monkeypatch.setattr("lab.engine.policy.generate", lambda *args, **sampling: (
        asked.update(sampling) or generate(*args, **sampling)))
    policy = Policy(model, tokenizer, Task(prompt="short"), settings(max_new_tokens=3), learner)
    policy.ask([Problem((3, 5, 7), 22)], 2, seed=0)
    ends = {tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
    assert set(asked["stop_ids"]) == {7, *ends}
