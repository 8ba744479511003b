"""The algorithm: advantages by hand, log-probs, loss and update against autograd of their formulas,
AdamW against torch's."""
import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
from conftest import ROOT, hand_made, refusal, untidy_model
from countdown_task import Problem, Task
from grpo import dr_grpo, group_z_score, rloo
from plain_forward import plain_logits
from properties import draw, given
from qwen2_model import generate, load_model, load_tokenizer


def batch_with(reward, group, **scores):
    scores = {name: torch.tensor(value) for name, value in {"reward": reward, **scores}.items()}
    return hand_made([[True, True]] * len(group), group=torch.tensor(group), scores=scores)


def test_advantages_by_hand_in_two_interleaved_groups():
    """Group 0: 1 and 3, mean 2, std 1; group 1: 0, 0, 3, mean 1, std sqrt(2)."""
    batch, root = batch_with([1.0, 0.0, 3.0, 0.0, 3.0], [0, 1, 0, 1, 1]), 2 ** 0.5 + 1e-4
    found = grpo.grpo(batch)[:, 1].tolist()
    assert found == pytest.approx([-1 / 1.0001, -1 / root, 1 / 1.0001, -1 / root, 2 / root])
    assert dr_grpo(batch)[:, 1].tolist() == pytest.approx([-1, -1, 1, -1, 2])
    assert rloo(batch)[:, 1].tolist() == pytest.approx([-2, -1.5, 2, -1.5, 3])  # minus the others'


@given(draw.floats(-2, 2, width=32), draw.integers(2, 17))
def test_a_group_of_equal_rewards_gets_exactly_nothing(reward, count):
    """The float32 mean of seven times 0.06 is not 0.06; divided by 1e-4 the difference would be a
    signal."""
    for advantage in (grpo.grpo, dr_grpo, rloo):
        assert not advantage(batch_with([reward] * count, [0] * count)).any()

# multiples of 1/16: sums and products with small numbers are exact in float32
NUMBERS = draw.integers(-64, 64).map(lambda number: number / 16)


@given(draw.lists(draw.lists(NUMBERS, min_size=2, max_size=6), min_size=1, max_size=4),
       draw.sampled_from([1, 2, 8]), NUMBERS, draw.randoms(use_true_random=False))
def test_the_z_score_does_without_scale_and_shift_and_other_groups(groups, scale, shift, shuffler):
    """Where std + 1e-4 is in the place of the std, what is left is the mean of 0 and the sign. The
    answers of groups may stand in any order."""
    answers = [(number, value) for number, values in enumerate(groups) for value in values]
    shuffler.shuffle(answers)
    group = torch.tensor([number for number, _ in answers])
    value = torch.tensor([value for _, value in answers])
    found = group_z_score(scale * value + shift, group)
    for number, values in enumerate(groups):
        std = np.std(values)
        alone = np.array([one for its_group, one in answers if its_group == number])
        exact = (alone - alone.mean()) / std if std else 0 * alone
        expected = exact * scale * std / (scale * std + 1e-4)
        assert found[group == number].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model():
    return untidy_model()


@pytest.fixture(scope="module")
def rollouts(model):
    """Two problems, three answers each, of different lengths; the second group teaches nothing."""
    found = generate(model, PROMPTS, 3, 14, (2, 4, 9, 17, 30, 31, 33), grpo.generator_of("it", 0))
    advantage = torch.tensor([1.2, -0.7, -0.5, 0.0, 0.0, 0.0])[:, None] * found.mask
    assert len(set(found.mask.sum(1).tolist())) > 2
    known = found._asdict() | dict(prompt_ids=PROMPTS, group=torch.arange(6) // 3)
    return hand_made(known.pop("mask"), advantage=advantage, **known)


def copied(model, noise=0.0):
    own, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return own


def row_log_probs(model, rollouts, row):
    """Of one answer's tokens: the logits behind token P - 1 + t predict token t."""
    prompt, n = PROMPTS[row // 3], int(rollouts.mask[row].sum())
    ids = rollouts.ids[row, :n].tolist()
    logits = plain_logits(model, prompt + ids)[len(prompt) - 1:-1]
    return logits.log_softmax(-1)[range(n), ids]


def written_out(model, reference, old, rollouts, weight, s):
    """The loss row by row and token by token, from the formulas alone."""
    loss = 0
    for row, n in enumerate(rollouts.mask.sum(1).tolist()):
        lp, ref = row_log_probs(model, rollouts, row), row_log_probs(reference, rollouts, row)
        for t in range(n):
            A, ratio = rollouts.advantage[row, t], (lp[t] - old[row][t]).exp()
            bounded = torch.clip(ratio, 1 - s.clip_low, 1 + s.clip_high)
            objective = A * lp[t] if s.epochs == 1 else min(ratio * A, bounded * A)
            d = ref.detach()[t] - lp[t]
            loss = loss + s.kl * (torch.expm1(d) - d) - weight[row, t] * objective
    return loss / rollouts.mask.sum()


def test_a_sampled_batch_has_the_texts_scores_and_labels_of_its_tokens():
    """Answers to the first problem come first."""
    folder, problems = ROOT / "models/tiny", [Problem((3, 5, 7), 22), Problem((2, 4, 6), 2)]
    model, tokenizer, task = load_model(folder), load_tokenizer(folder), Task("short")
    batch = grpo.sample(model, tokenizer, task, problems, 3, 60, grpo.generator_of("a batch"))
    assert batch.group.tolist() == [0, 0, 0, 1, 1, 1] and 0 < batch.reward.sum()
    for row, n in enumerate(batch.length.tolist()):
        text, beyond = "".join(batch.texts[row]), [0] * (len(batch.ids[row]) - n)
        assert text == batch.answers[row] == tokenizer.decode(
            batch.ids[row, :n].tolist(), skip_special_tokens=False)
        for part, value in task.score(problems[row // 3], text).items():
            assert batch.scores[part][row].item() == pytest.approx(value)
        sections, kinds = task.label(batch.texts[row])
        assert batch.section[row].tolist() == [*sections, *beyond]
        assert batch.kind[row].tolist() == [*kinds, *beyond]
    most = 1024 - max(len(ids) for ids in batch.prompt_ids)
    for asked, tokens, said in ((problems, most + 1, "can have 1025 tokens, and the model takes"),
                                ([Problem((4316, 5, 7), 22)], 60, "cannot spell the prompt")):
        assert said in refusal(grpo.sample, model, tokenizer, task, asked, 3, tokens, None)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    assert "probabilities are not finite" in refusal(
        grpo.sample, model, tokenizer, task, problems, 3, 60, grpo.generator_of("it"))


def settings(**changed):
    usual = dict(micro_batch=4, max_grad_norm=0.0, epochs=1, kl=0.0, clip_low=0.2, clip_high=0.28)
    return SimpleNamespace(**usual | changed)


def updated(model, rollouts, weight, s=settings(), reference=None):
    """An update with plain gradient descent in the place of AdamW, and the change of the tokens as
    train.py measures it."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.003)
    before = grpo.frozen_log_probs(model, rollouts, 4)
    of_reference = reference and grpo.frozen_log_probs(reference, rollouts, 4)
    metrics, columns = grpo.update(model, sgd, rollouts, weight, s, of_reference)
    return metrics, columns, grpo.frozen_log_probs(model, rollouts, 4) - before


def any_weight(rollouts):
    weight = torch.rand(rollouts.mask.shape, generator=torch.Generator().manual_seed(0))
    return weight * rollouts.mask


@pytest.mark.parametrize("changed", [
    {}, {"micro_batch": 1}, {"kl": 0.3}, {"epochs": 3, "clip_low": 0.01, "clip_high": 0.02},
    {"epochs": 2, "kl": 0.2}, {"max_grad_norm": 0.01}], ids=str)
def test_every_update_against_autograd_of_its_formula(model, rollouts, changed):
    """Plain gradient descent on both sides: after the last update all parameters agree. The norm
    that is reported is the one before clipping. So are what the tokens did: their change, the
    ratios and the mean divergence before the last update."""
    s, weight, mask = settings(**changed), any_weight(rollouts), rollouts.mask
    ours, other = copied(model), copied(model)
    reference = copied(model, 0.02) if s.kl else None
    sgd = torch.optim.SGD(other.parameters(), lr=0.003)
    found, columns, measured = updated(ours, rollouts, weight, s, reference)
    old = [row_log_probs(other, rollouts, row).detach() for row in range(6)]
    for epoch in range(s.epochs):
        sgd.zero_grad()
        loss = written_out(other, reference or model, old, rollouts, weight, s)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in other.parameters()]).norm().item()
        if epoch == 0:
            assert found["loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert found["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        if s.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(other.parameters(), s.max_grad_norm)
        ratio = [(row_log_probs(other, rollouts, row) - old[row]).exp() for row in range(6)]
        sgd.step()
    for mine, expected in zip(ours.parameters(), other.parameters()):
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-4)
    assert not torch.equal(next(ours.parameters()), next(model.parameters()))
    change = [row_log_probs(other, rollouts, row) - old[row] for row in range(6)]
    rounding = dict(atol=1e-3, rtol=1e-3)  # float32, which each update carries on
    torch.testing.assert_close(measured[mask].double(), torch.cat(change), **rounding)
    assert not measured[~mask].any()
    if s.epochs > 1:  # the answers of the second group have no gradient, unless there is a KL term
        rows = slice(None) if s.kl else slice(0, 3)
        expected, A = torch.cat(ratio[rows]), rollouts.advantage[rows][mask[rows]]
        torch.testing.assert_close(columns["ratio"][rows][mask[rows]].double(), expected,
                                   **rounding)
        beyond = ((A > 0) & (expected > 1 + s.clip_high)) | ((A < 0) & (expected < 1 - s.clip_low))
        assert found["ratio_mean"] == pytest.approx(expected.mean().item(), rel=1e-4)
        assert found["clipped_share"] == pytest.approx(beyond.double().mean().item())
        assert found["gradient_norm_last"] == pytest.approx(norm, rel=1e-3)
        assert beyond.any()
    if s.kl:
        d = torch.cat([row_log_probs(reference, rollouts, row) for row in range(6)])
        d = d - torch.cat(old) - torch.cat(ratio).log()
        assert found["kl"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-3)
    tokens = int(mask.sum() if s.kl else mask[:3].sum())
    assert (found["N"], found["trained_tokens"]) == (int(mask.sum()), tokens)
    assert found["sampler_gap"] < 1e-5 and found["skipped"] is None


def test_the_log_probs_of_an_update_are_those_of_each_answer_alone(model, rollouts):
    for rows in ([0, 1, 2, 3, 4, 5], [4, 1], [2]):
        found = grpo.log_probs(model, rollouts, torch.tensor(rows))
        for values, row in zip(found, rows):
            expected = row_log_probs(model, rollouts, row)
            torch.testing.assert_close(values[:len(expected)].double(), expected, atol=1e-4, rtol=0)
            assert not values[len(expected):].any()


def test_the_loss_by_hand():
    """Two answers of 2 and 1 tokens, N = 4: -(3 * 2 * -0.5 + 1 * 2 * -1 + 2 * -1 * -0.2) / 4."""
    mask = torch.tensor([[True, True], [True, False]])
    log_prob, weight = torch.tensor([[-0.5, -1], [-0.2, 9]]), torch.tensor([[3.0, 1], [2, 9]])
    advantage = torch.tensor([[2.0, 2], [-1, -1]])
    assert grpo.policy_loss(log_prob, advantage, weight, mask, 4).item() == pytest.approx(1.15)


@pytest.mark.parametrize("low, high, A, old, loss", [  # p = 0.5 now; weight 2; N = 1
    (0.2, 0.28, 1.0, 0.5, -2.0), (0.2, 0.28, 1.0, 0.25, -2.56), (0.2, 0.28, 1.0, 1.0, -1.0),
    (0.2, 0.28, -1.0, 0.25, 4.0), (0.2, 0.28, -1.0, 1.0, 1.6), (0.5, 1.0, -1.0, 0.8, 1.25)])
def test_clipping_by_hand(low, high, A, old, loss):
    """The ratios are 1, 2 and 1/2, and 0.625: only where the objective would gain is it bounded."""
    now, one = torch.tensor([[0.5]]).log().requires_grad_(), torch.ones(1, 1)
    found = grpo.clipped_loss(now, torch.tensor([[old]]).log(), A * one, 2 * one, one.bool(), 1,
                              low, high)
    found.backward()
    assert found.item() == pytest.approx(loss)
    is_bounded = loss in (-2.56, 1.6)
    assert now.grad.item() == pytest.approx(0 if is_bounded else loss)


@pytest.mark.parametrize("changed, weight, why", [
    ({"advantage": torch.zeros(6, 1)}, 1.0, "every group's answers had equal rewards"),
    ({"advantage": torch.zeros(6, 1), "scores": {"reward": torch.arange(6.0)}}, 1.0,
     "every advantage is 0, although answers of a group had different rewards"),
    ({}, 0.0, "no token has both a weight and an advantage"),
    ({"advantage": torch.zeros(6, 1), "finished": torch.zeros(6, dtype=torch.bool)}, 1.0,
     "equal rewards, and none was finished within --max_new_tokens")])
def test_without_a_gradient_the_optimizer_makes_no_step(
        model, rollouts, monkeypatch, changed, weight, why):
    """AdamW would go on by what it remembers."""
    batch = dataclasses.replace(rollouts, **changed)
    batch.advantage = batch.advantage * batch.mask
    monkeypatch.setattr("torch.optim.SGD.step", lambda *_: pytest.fail("a step was made"))
    found, columns, change = updated(copied(model), batch, weight * batch.mask)
    assert found["skipped"].endswith(why) and found["trained_tokens"] == 0
    assert (found["loss"], found["gradient_norm"], found["sampler_gap"]) == (0, None, None)
    assert not change.any() and columns == {}


def test_a_gradient_that_is_not_finite_moves_nothing(model, rollouts):
    ours = copied(model)
    said = refusal(updated, ours, rollouts, any_weight(rollouts) * 1e38)
    assert said.startswith("the gradient is not finite")
    for mine, before in zip(ours.parameters(), model.parameters()):
        assert torch.equal(mine, before)


def test_a_sampler_that_differs_from_the_update_is_refused(model, rollouts):
    shifted = dataclasses.replace(rollouts, log_prob=rollouts.log_prob.roll(1, 1) * rollouts.mask)
    assert "log-probs of sampler and update differ by" in refusal(
        updated, copied(model), shifted, any_weight(rollouts))
    # differences of both signs do not cancel
    signs = torch.ones_like(rollouts.log_prob)
    signs[:, ::2] = -1
    shifted.log_prob = (rollouts.log_prob + 0.2 * signs) * rollouts.mask
    assert "differ by 0.2 a token" in refusal(
        updated, copied(model), shifted, any_weight(rollouts))


def test_adamw_is_torchs_to_the_last_bit():
    """The last parameter never has a gradient, and stays."""
    for decay in (0.0, 0.1):
        torch.manual_seed(0)
        ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5, 1), (2, 2), (7,))]
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        one = grpo.AdamW(ours, 1e-2, decay)
        other = torch.optim.AdamW(theirs, 1e-2, weight_decay=decay, foreach=False)
        for step in range(10):
            for p, q in zip(ours[:-1], theirs):
                p.grad = torch.randn_like(p) * 10 ** -step
                q.grad = p.grad.clone()
            one.step()
            other.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
