"""The algorithm: advantages by hand, losses against autograd of the formula, the record against the batch."""
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import rollouts as frame
from conftest import PROMPTS, assert_same_gradient, copied, gradients, hand_made, spoken
from countdown_task import Problem
from engine.tokens import load_tokenizer
from grpo import divergence, dr_grpo, group_z_score, policy_loss, rloo, span, update
from countdown_task import Task
from credit.placebo import shuffled_advantage
from credit.preferences import best_and_worst, update_preferences
from credit.weight import token_weight
from harness.registry import ADVANTAGES, MITIGATIONS, make
from qwen2_model import Qwen2
from engine.finite import NotFinite
from engine.forward import micro_batches, response_log_probs
from engine.rollouts import sample_answers, score_answers
from harness.credit_file import read_credit, write_credit
from engine.sampler import Generation, generate


def settings(**changed):
    return SimpleNamespace(**{"micro_batch": 64, "max_grad_norm": 0.0, "epochs": 1, "pairs": None, "loss_norm": "token", "max_new_tokens": 14, "kl": 0.0,
                              "kl_kind": "k3", "clip_low": 0.2, "clip_high": 0.28, **changed})


def test_twelve_of_sixteen_right():
    reward = torch.tensor([1.0] * 12 + [0.0] * 4)
    advantage = group_z_score(reward, torch.zeros(16, dtype=torch.long))
    assert advantage[0].item() == pytest.approx(0.577, abs=5e-4) and advantage[-1].item() == pytest.approx(-1.732, abs=5e-4)


def test_advantages_by_hand_in_two_interleaved_groups():
    # group 0: 1 and 3, mean 2, std 1; group 1: 0, 0, 3, mean 1, std sqrt(2)
    advantage = group_z_score(torch.tensor([1.0, 0.0, 3.0, 0.0, 3.0]), torch.tensor([0, 1, 0, 1, 1]))
    expected = [-1 / 1.0001, -1 / (2 ** 0.5 + 1e-4), 1 / 1.0001, -1 / (2 ** 0.5 + 1e-4), 2 / (2 ** 0.5 + 1e-4)]
    torch.testing.assert_close(advantage, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("reward", [0.06, 0.1, 1.1, 0.0, 1 / 3])
@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_groups_without_spread_get_exactly_zero(reward, count):
    """The float32 mean of seven times 0.06 is not 0.06; divided by 1e-4 the difference would be a signal."""
    assert not group_z_score(torch.full((count,), reward), torch.zeros(count, dtype=torch.long)).any()


def batch_with(reward, group, **scores):
    scores = {name: torch.tensor(value) for name, value in {"reward": reward, **scores}.items()}
    return hand_made([[True, True]] * len(group), group=torch.tensor(group), scores=scores)


def test_dr_grpo_and_rloo_by_hand():
    batch = batch_with([1.0, 0.0, 0.0, 0.5, 0.1, 0.1], [0, 1, 0, 0, 1, 1])
    assert dr_grpo(batch)[:, 1].tolist() == pytest.approx([0.5, -0.2 / 3, -0.5, 0, 0.1 / 3, 0.1 / 3], abs=1e-7)
    for i, g in enumerate(batch.group.tolist()):
        others = [batch.reward[j].item() for j in range(6) if batch.group[j] == g and j != i]
        assert rloo(batch)[i, 0].item() == pytest.approx(batch.reward[i].item() - sum(others) / 2, abs=1e-7)
    torch.testing.assert_close(rloo(batch), 3 / 2 * dr_grpo(batch))  # G / (G - 1) times


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_equal_rewards_gets_exactly_nothing(name):
    assert not ADVANTAGES[name](batch_with([0.06] * 7, [0] * 7)).any()


def test_each_span_gets_its_own_part_of_the_score():
    kind = torch.tensor([[0, 5, 2, 5, 6]] * 2, dtype=torch.uint8)     # word, tag, number, tag, end of turn
    section = torch.tensor([[1, 0, 2, 0, 0]] * 2, dtype=torch.uint8)  # think, -, answer, -, -
    scores = {"reward": [1.1, 0.0], "format": [1.0, 0.5], "answer": [1.0, 0.0], "reasoning": [0.2, 0.8]}
    batch = hand_made([[True] * 5] * 2, kind=kind, section=section, scores={name: torch.tensor(value) for name, value in scores.items()})
    torch.testing.assert_close(span(batch), torch.tensor([[-0.3, 0.25, 0.5, 0.25, 0], [0.3, -0.25, -0.5, -0.25, 0]]))


def test_the_placebo_of_the_advantages_stays_within_the_group():
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(6) < torch.tensor([2, 6, 3, 4, 1, 5])[:, None]
    answers = torch.arange(1.0, 7)[:, None] * mask
    batch = hand_made(mask, group=torch.tensor([0, 1, 0, 1, 0, 1]), advantage=answers, generator=generator)
    changed = False
    for _ in range(8):
        shuffled = shuffled_advantage(batch, whole_answers=True)
        assert torch.equal(shuffled != 0, mask) and torch.equal(shuffled, shuffled[:, :1] * mask)  # whole answers change places
        assert sorted(shuffled[::2, 0].tolist()) == [1, 3, 5] and sorted(shuffled[1::2, 0].tolist()) == [2, 4, 6]
        changed |= not torch.equal(shuffled, answers)
    tokens = dataclasses.replace(batch, advantage=torch.rand(6, 6, generator=generator) * mask)
    shuffled = shuffled_advantage(tokens, whole_answers=False)
    assert changed and not torch.equal(shuffled, tokens.advantage) and not shuffled[~mask].any()
    for rows in (slice(0, 6, 2), slice(1, 6, 2)):
        assert torch.equal(shuffled[rows][mask[rows]].sort().values, tokens.advantage[rows][mask[rows]].sort().values)


def test_the_sampler_and_the_training_forward_agree(small_model, rollouts):
    with torch.no_grad():
        log_prob = response_log_probs(small_model, rollouts, torch.arange(6))
    torch.testing.assert_close(log_prob, rollouts.log_prob, atol=1e-4, rtol=0)


def test_the_shift_is_right_where_an_error_of_one_would_show(small_model, rollouts):
    """Each row against its own plain forward pass: logits at position P - 1 + t predict token t."""
    rows = torch.tensor([4, 1])
    with torch.no_grad():
        log_prob = response_log_probs(small_model, rollouts, rows)
        for i, row in enumerate(rows.tolist()):
            prompt, n = PROMPTS[row // 3], int(rollouts.mask[row].sum())
            response = rollouts.ids[row, :n]
            logits = small_model(torch.tensor([prompt + response.tolist()]))[0]
            for t in range(n):
                expected = logits[len(prompt) - 1 + t].log_softmax(-1)[response[t]]
                assert log_prob[i, t].item() == pytest.approx(expected.item(), abs=1e-5)
    assert not log_prob[~rollouts.mask[rows]].any()


def test_the_loss_by_hand():
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]])
    advantage = torch.tensor([[2.0, 2.0], [-1.0, -1.0]])
    weight = torch.tensor([[1.0, 0.5], [1.0, 7.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert policy_loss(log_prob, advantage, weight, mask, 3).item() == pytest.approx(-(-2 - 2 + 3) / 3)


def test_the_clipped_loss_by_hand():
    """Ratios 1.5, 0.5, 1.1 and 0.5; clipped below 0.8 and above 1.28, only where that makes the objective smaller."""
    old = torch.zeros(4, 1)
    log_prob = torch.tensor([[1.5], [0.5], [1.1], [0.5]]).log()
    advantage, weight = torch.tensor([[1.0], [-1.0], [2.0], [1.0]]), torch.tensor([[1.0], [1.0], [0.5], [1.0]])
    objective = 1.28 - 0.8 + 1.1 + 0.5
    assert policy_loss(log_prob, advantage, weight, torch.ones(4, 1), 4, old, (0.2, 0.28)).item() == pytest.approx(-objective / 4)


def test_at_ratio_one_the_clipped_gradient_is_the_plain_one():
    torch.manual_seed(0)
    log_prob, advantage, weight = -torch.rand(5, 7), torch.randn(5, 7), torch.rand(5, 7)
    plain, clipped = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
    mask = torch.rand(5, 7) < 0.8
    policy_loss(plain, advantage, weight, mask, 9).backward()
    policy_loss(clipped, advantage, weight, mask, 9, log_prob, (0.2, 0.28)).backward()
    torch.testing.assert_close(plain.grad, clipped.grad)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_k2_and_k3_against_the_exact_divergence(kind):
    """Averaged over what pi samples, k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi), and k3 its value."""
    torch.manual_seed(0)
    logits, reference = torch.randn(5, dtype=torch.double, requires_grad=True), torch.randn(5, dtype=torch.double).log_softmax(0)
    log_pi = logits.log_softmax(0)
    probs = log_pi.exp().detach()
    estimate, = torch.autograd.grad((probs * divergence(log_pi, reference, kind)).sum(), logits, retain_graph=True)
    forward, backward = (log_pi.exp() * (log_pi - reference)).sum(), (reference.exp() * (reference - log_pi)).sum()
    exact, = torch.autograd.grad(forward if kind == "k2" else backward, logits, retain_graph=True)
    torch.testing.assert_close(estimate, exact)
    if kind == "k3":
        torch.testing.assert_close((probs * divergence(log_pi, reference, "k3")).sum(), forward)


class Observer:
    """An optimizer that only looks: the gradient after clipping stays in the model."""
    def __init__(self, model):
        self.model, self.steps, self.param_groups = model, 0, [{"params": list(model.parameters())}]

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none=set_to_none)

    def step(self):
        self.steps += 1


def run_update(model, rollouts, weight=None, **changed):
    copy = copied(model)
    observer = Observer(copy)
    weight = rollouts.mask.float() if weight is None else weight
    result, _ = update(copy, observer, rollouts, weight, settings(**changed))
    return copy, observer, result


@pytest.mark.numerics
def test_the_gradient_is_autograd_of_the_formula(small_model, rollouts):
    copy, _, result = run_update(small_model, rollouts)
    other = copied(small_model)
    z = group_z_score(rollouts.reward, rollouts.group)
    loss = 0
    for row in range(6):
        prompt, n = PROMPTS[row // 3], int(rollouts.mask[row].sum())
        ids = torch.tensor([prompt + rollouts.ids[row, :n].tolist()])
        log_probs = other(ids)[0, len(prompt) - 1:-1].log_softmax(-1)
        loss = loss - z[row] * log_probs[range(n), ids[0, len(prompt):]].sum()
    (loss / rollouts.mask.sum()).backward()
    assert_same_gradient(gradients(copy), gradients(other))
    assert result["loss"] == pytest.approx(loss.item() / int(rollouts.mask.sum()), abs=1e-6)
    assert result["gradient_norm"] == pytest.approx(gradients(other).norm().item(), rel=1e-4)
    assert result["sampler_gap"] < 1e-5


@pytest.mark.numerics
def test_the_micro_batch_size_changes_nothing(small_model, rollouts):
    weight = torch.rand(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)) * rollouts.mask
    whole, _, expected = run_update(small_model, rollouts, weight)
    for size in (1, 2, 5):
        part, _, result = run_update(small_model, rollouts, weight, micro_batch=size)
        assert_same_gradient(gradients(part), gradients(whole))
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert result["gradient_norm"] == pytest.approx(expected["gradient_norm"], abs=1e-5)


def test_the_largest_micro_batch_is_the_first():
    """Question 1's prompt makes its answers the larger ones, although they are shorter."""
    batch = hand_made(torch.arange(9) < torch.tensor([3, 9, 4, 4, 2, 0])[:, None], group=torch.arange(6) // 2, prompt_ids=[[5], [5] * 20, [5] * 2])
    assert [part.tolist() for part in micro_batches(batch, torch.arange(6), 2)] == [[2, 3], [0, 1], [4, 5]]
    assert [part.tolist() for part in micro_batches(batch, torch.tensor([0, 1, 4, 5]), 3)] == [[0, 1, 4], [5]]
    assert [part.tolist() for part in micro_batches(batch, torch.tensor([[1, 0], [3, 2]]), 1)] == [[[3, 2]], [[1, 0]]]
    assert micro_batches(batch, torch.tensor([], dtype=torch.long), 2) == []
    two_questions = hand_made(torch.ones(4, 5, dtype=torch.bool), group=torch.tensor([0, 1, 2, 2]), prompt_ids=[[5] * 3, [5] * 3, [5] * 4])
    assert [part.tolist() for part in micro_batches(two_questions, torch.arange(4), 2)] == [[0, 1], [2, 3]]  # a prompt counts once


@pytest.mark.numerics
def test_logits_in_chunks_change_nothing(small_model, rollouts, monkeypatch):
    whole, _, expected = run_update(small_model, rollouts)
    monkeypatch.setattr("engine.forward.LOGITS_AT_ONCE", 50 * 4)
    chunked, _, result = run_update(small_model, rollouts)
    assert_same_gradient(gradients(chunked), gradients(whole))
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_padding_never_counts(small_model, rollouts):
    whole, _, expected = run_update(small_model, rollouts)
    junk = {name: torch.where(rollouts.mask, getattr(rollouts, name), value)
            for name, value in (("ids", 3), ("log_prob", -7.0), ("entropy", 5.0), ("collision", 1.0))}
    other, _, result = run_update(small_model, dataclasses.replace(rollouts, **junk))
    assert torch.equal(gradients(whole), gradients(other)) and result == expected


@pytest.mark.numerics
def test_the_norm_reported_is_the_one_before_clipping(small_model, rollouts):
    free, _, expected = run_update(small_model, rollouts)
    clipped, _, result = run_update(small_model, rollouts, max_grad_norm=0.01)
    assert result["gradient_norm"] == pytest.approx(expected["gradient_norm"]) and result["gradient_norm"] > 0.01
    assert_same_gradient(gradients(clipped), gradients(free) * 0.01 / result["gradient_norm"])


def row_log_probs(model, rollouts, row):
    prompt, n = PROMPTS[row // 3], int(rollouts.mask[row].sum())
    ids = torch.tensor([prompt + rollouts.ids[row, :n].tolist()])
    return model(ids)[0, len(prompt) - 1:-1].log_softmax(-1)[range(n), ids[0, len(prompt):]]


def moved(model, seed=5):
    """Another model of the same shape, as the frozen reference."""
    other = copied(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return other


def written_out(model, reference, old, rollouts, weight, s):
    """The loss row by row and token by token, from the formulas alone."""
    lengths = rollouts.mask.sum(1).tolist()
    loss = 0
    for row, n in enumerate(lengths):
        if not n:
            continue
        lp = row_log_probs(model, rollouts, row)
        with torch.no_grad():
            ref = row_log_probs(reference, rollouts, row)
        divisor = {"token": sum(lengths), "sequence": n * sum(n > 0 for n in lengths), "constant": 6 * 14}[s.loss_norm]
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
@pytest.mark.parametrize("changed", [
    {"loss_norm": "sequence"}, {"loss_norm": "constant"}, {"kl": 0.3}, {"kl": 0.3, "kl_kind": "k2", "loss_norm": "sequence"},
    {"epochs": 2}, {"epochs": 3, "loss_norm": "sequence", "clip_low": 0.01, "clip_high": 0.02}, {"epochs": 2, "kl": 0.2, "loss_norm": "constant"},
    {"epochs": 2, "drop": True, "loss_norm": "sequence"}, {"loss_norm": "constant", "drop": True}, {"drop": True}])
def test_every_loss_against_autograd_of_its_formula(small_model, rollouts, changed):
    """Plain gradient descent on both sides: after the last update all parameters agree."""
    if changed.pop("drop", False):
        rollouts = dataclasses.replace(rollouts, mask=rollouts.mask & (torch.arange(6) != 1)[:, None])
    s, reference = settings(**{"micro_batch": 4, **changed}), moved(small_model)
    weight = torch.rand(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)) * rollouts.mask
    model, other = copied(small_model), copied(small_model)
    result, _ = update(model, torch.optim.SGD(model.parameters(), lr=0.3), rollouts, weight, s, reference)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    with torch.no_grad():
        old = [row_log_probs(other, rollouts, row) if rollouts.mask[row].any() else None for row in range(6)]
    for epoch in range(s.epochs):
        optimizer.zero_grad()
        loss = written_out(other, reference, old, rollouts, weight, s)
        loss.backward()
        if epoch == 0:
            assert result["loss"] == pytest.approx(loss.item(), abs=1e-6) and result["gradient_norm"] == pytest.approx(gradients(other).norm().item(), rel=1e-4)
        optimizer.step()
    for (name, one), two in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4, msg=name)
    assert not torch.equal(next(model.parameters()), next(small_model.parameters()))


@pytest.mark.numerics
def test_diagnostics_of_several_passes(small_model, rollouts):
    """After the first step the ratio has left 1; the share beyond the bounds and the KL are counted again by hand."""
    s, model = settings(epochs=2, kl=1e-9, clip_low=0.5, clip_high=0.0), copied(small_model)
    result, record = update(model, torch.optim.SGD(model.parameters(), lr=0.2), rollouts, rollouts.mask.float(), s, small_model)
    twin = copied(small_model)
    update(twin, torch.optim.SGD(twin.parameters(), lr=0.2), rollouts, rollouts.mask.float(), settings(), small_model)
    with torch.no_grad():
        new, old = (response_log_probs(m, rollouts, torch.arange(6)) for m in (twin, small_model))
    ratio, mask, A = (new - old).exp(), rollouts.mask, rollouts.advantage
    torch.testing.assert_close(record, ratio, rtol=1e-4, atol=1e-5)  # for the credit file
    outside = mask & (((A > 0) & (ratio > 1.0)) | ((A < 0) & (ratio < 0.5)))
    assert 0 < result["clipped_share"] == pytest.approx((outside.sum() / mask.sum()).item())
    assert result["ratio_mean"] == pytest.approx(ratio[mask].mean().item(), rel=1e-4)
    assert result["kl"] == pytest.approx(((1 / ratio) - 1 + ratio.log())[mask].mean().item(), rel=1e-3)
    assert result["gradient_norm_last"] != result["gradient_norm"]


def test_the_divergence_also_counts_answers_without_advantage(small_model, rollouts):
    assert run_update(small_model, rollouts, kl=0.0)[2]["trained_tokens"] < rollouts.mask.sum()
    copy = copied(small_model)
    result, _ = update(copy, Observer(copy), rollouts, rollouts.mask.float(), settings(kl=0.1), moved(small_model))
    assert result["trained_tokens"] == rollouts.mask.sum() and result["kl"] > 0


@pytest.mark.numerics
def test_dpo_against_autograd_of_its_formula(small_model, rollouts):
    """A pair a group: the best and the worst. When a group's answers are all equal it has none."""
    assert best_and_worst(rollouts).tolist() == [[0, 2]]
    rollouts.scores["reward"] = torch.tensor([1.1, 0.1, 0.06, 0.1, 0.3, 0.1])
    pairs = [(0, 2), (4, 3)]
    assert best_and_worst(rollouts).tolist() == [list(pair) for pair in pairs]
    s, reference = settings(dpo_beta=0.3, epochs=2, micro_batch=1), moved(small_model)
    model, other = copied(small_model), copied(small_model)
    result, implied = update_preferences(model, torch.optim.SGD(model.parameters(), lr=0.1), rollouts, s, reference)
    optimizer, losses = torch.optim.SGD(other.parameters(), lr=0.1), []
    for _ in range(2):
        loss = 0
        for pair in pairs:
            margin = [row_log_probs(other, rollouts, row).sum() - row_log_probs(reference, rollouts, row).sum().detach() for row in pair]
            loss = loss - torch.log(1 / (1 + torch.exp(-0.3 * (margin[0] - margin[1])))) / 2
        optimizer.zero_grad()
        loss.backward()
        losses.append((loss.item(), gradients(other)))
        optimizer.step()
    assert result["loss"] == pytest.approx(losses[0][0], rel=1e-4) and result["pairs"] == 2
    for one, two in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
    # the advantage on record is the one with which the policy loss has the same gradient
    copy = copied(small_model)
    update(copy, Observer(copy), dataclasses.replace(rollouts, advantage=implied), rollouts.mask.float(), settings())
    assert_same_gradient(gradients(copy), losses[0][1])


def test_dpo_without_pairs_is_skipped_and_said(small_model, rollouts):
    rollouts.scores["reward"] = torch.full((6,), 0.1)
    copy = copied(small_model)
    result, implied = update_preferences(copy, Observer(copy), rollouts, settings(dpo_beta=0.1), small_model)
    assert "equal rewards" in result["skipped"] and not implied.any()


@pytest.mark.parametrize("rescale", ["mean", "gradient", "none"])
def test_plain_grpo_is_bit_for_bit_the_one_line_without_weights(small_model, rollouts, rescale):
    """No weighting, no clipping, no divergence: what was built around the line leaves not a bit of it changed."""
    weight, _ = token_weight(make(MITIGATIONS["none"], {}, None), "none", rollouts, rescale=rescale)
    copy, _, result = run_update(small_model, rollouts, weight, micro_batch=2)
    other, rows = copied(small_model), torch.tensor([0, 1, 2])  # the other group's rewards are equal
    rows = rows[rollouts.length[rows].argsort(stable=True)]
    for part in rows.split(2):
        log_prob = response_log_probs(other, rollouts, part)
        (-(rollouts.advantage[part] * log_prob * rollouts.mask[part]).sum() / int(rollouts.mask.sum())).backward()
    assert torch.equal(gradients(copy), gradients(other))


def test_answers_without_advantage_are_not_computed_but_count(small_model, rollouts):
    _, _, result = run_update(small_model, rollouts)
    assert result["trained_tokens"] == rollouts.mask[:3].sum() < rollouts.mask.sum()


def test_a_batch_where_nothing_is_left_is_skipped_and_said(small_model, rollouts):
    copy, observer, result = run_update(small_model, dataclasses.replace(rollouts, advantage=torch.zeros_like(rollouts.log_prob)))
    assert observer.steps == 0 and result["skipped"] == "every group's answers had equal rewards"
    assert result["gradient_norm"] is None and result["loss"] == 0.0
    _, observer, result = run_update(small_model, rollouts, weight=torch.zeros_like(rollouts.log_prob))
    assert observer.steps == 0 and result["skipped"] == "all weights are 0"
    elsewhere = rollouts.mask.float() * (torch.arange(6) > 2)[:, None]  # only where all rewards are equal
    assert run_update(small_model, rollouts, weight=elsewhere)[2]["skipped"] == "no token has both a weight and an advantage"
    _, observer, result = run_update(small_model, dataclasses.replace(rollouts, mask=torch.zeros_like(rollouts.mask)))
    assert observer.steps == 0 and result["skipped"] == "no answer was finished"


def test_a_gradient_that_is_not_finite_changes_nothing(small_model, rollouts):
    model = copied(small_model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NotFinite, match="the gradient is not finite"):
        update(model, torch.optim.SGD(model.parameters(), lr=0.1), rollouts,
               torch.full_like(rollouts.log_prob, float("inf")), settings())
    assert all(torch.equal(x, y) for x, y in zip(before, model.parameters()))


def test_the_credit_file_is_the_batch(small_model, rollouts, tmp_path):
    advantage = rollouts.advantage
    weight = torch.rand(rollouts.mask.shape) * rollouts.mask
    write_credit(tmp_path / "credit" / "step_000001.npz", rollouts, weight)
    with np.load(tmp_path / "credit" / "step_000001.npz", allow_pickle=False) as file:
        columns = dict(file)
    lengths = rollouts.mask.sum(1).tolist()
    assert columns["episode_start"].tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    for b, (start, n) in enumerate(zip(columns["episode_start"], lengths)):
        for name, source in (("token_id", rollouts.ids), ("log_prob", rollouts.log_prob), ("entropy", rollouts.entropy),
                             ("collision", rollouts.collision), ("weight", weight), ("advantage", advantage),
                             ("section", rollouts.section), ("kind", rollouts.kind)):
            np.testing.assert_array_equal(columns[name][start:start + n], source[b, :n].numpy())
    assert columns["reward"].tolist() == rollouts.scores["reward"].tolist()  # as given, not normalised
    assert columns["group"].tolist() == [0, 0, 0, 1, 1, 1] and columns["finished"].dtype == bool
    assert columns["prompt_ids"].tolist() == PROMPTS[0] + PROMPTS[1] and columns["prompt_start"].tolist() == [0, 3]
    dtypes = {name: str(columns[name].dtype) for name in ("token_id", "log_prob", "weight", "advantage", "section", "kind")}
    assert dtypes == {"token_id": "int32", "log_prob": "float32", "weight": "float32", "advantage": "float32",
                      "section": "uint8", "kind": "uint8"}
    assert [p.name for p in (tmp_path / "credit").iterdir()] == ["step_000001.npz"]


def test_an_update_that_leaves_numbers_that_are_not_finite_is_refused(small_model, rollouts):
    model = copied(small_model)

    class Explodes(torch.optim.SGD):
        def step(self):
            super().step()
            with torch.no_grad():
                next(iter(model.parameters())).fill_(float("nan"))
    with pytest.raises(NotFinite, match="after the update a parameter is not finite"):
        update(model, Explodes(model.parameters(), lr=0.1), rollouts, rollouts.mask.float(),
               settings(epochs=3))


def test_what_was_written_can_be_read_again(policy, tmp_path):
    batch = spoken(policy)
    write_credit(tmp_path / "credit" / "step_000004.npz", batch, batch.mask.float())
    again = read_credit(tmp_path, 4, policy.tokenizer, problems=batch.problems)
    for name in ("mask", "ids", "log_prob", "entropy", "collision", "section", "kind", "advantage", "group", "finished"):
        assert torch.equal(getattr(again, name), getattr(batch, name)) and getattr(again, name).dtype == getattr(batch, name).dtype, name
    assert again.texts == batch.texts and again.responses == batch.responses and again.prompt_ids == batch.prompt_ids
    assert all(torch.equal(again.scores[name], batch.scores[name]) for name in batch.scores) and again.step == 4


def test_a_token_costs_at_most_28_bytes_on_disk(tmp_path):
    generator = torch.Generator().manual_seed(0)
    B, T = 64, 100
    mask = torch.ones(B, T, dtype=torch.bool)
    noise = {name: torch.rand(B, T, generator=generator) for name in ("log_prob", "entropy", "collision")}
    batch = hand_made(prompt_ids=[[1] * 14] * 8, group=torch.arange(B) // 8, ids=torch.randint(0, 150_000, (B, T), generator=generator),
                      mask=mask, **noise, kind=torch.randint(0, 7, (B, T), generator=generator).byte(),
                      advantage=torch.rand(B, T), scores={name: torch.rand(B, generator=generator) for name in ("reward", "format", "answer", "reasoning")})
    path = tmp_path / "credit" / "step_000001.npz"
    write_credit(path, batch, torch.rand(B, T))
    assert path.stat().st_size / (B * T) <= 28


def test_collect_scores_and_labels_what_was_sampled(learner, monkeypatch):
    """Two problems, two answers each, put in the sampler's mouth: each is scored against its own problem."""
    model, tokenizer = Qwen2.from_pretrained(learner), load_tokenizer(learner)
    texts = [" 3 + 5 = 8</think>\n<answer> 3 + 5</answer><|im_end|>", " no</think>\n<answer> 2 + 4</answer><|im_end|>",
             " no</think>\n<answer> 2 + 4</answer><|im_end|>", " 3 + 5 = 8"]
    ids = [tokenizer.encode(text).ids for text in texts]
    T = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (T - len(row)) for row in ids])
    mask = torch.tensor([[True] * len(row) + [False] * (T - len(row)) for row in ids])
    asked = {}

    def speak(model, prompts, **sampling):
        asked.update(sampling, prompts=prompts)
        return Generation(tokens, mask, torch.tensor([True, True, True, False]), *torch.zeros(3, 4, T))
    monkeypatch.setattr(frame, "generate", speak)
    task, problems = Task(prompt="short"), [Problem((3, 5), 8), Problem((2, 4), 6)]
    rollouts = sample_answers(model, tokenizer, task, problems, 2, max_new_tokens=T, seed=9)
    rollouts = score_answers(rollouts, tokenizer, task)
    assert rollouts.scores["answer"].tolist() == [1, 0, 1, 0] and rollouts.group.tolist() == [0, 0, 1, 1]
    assert rollouts.scores["reasoning"].tolist() == [1, 0, 0, 0] and rollouts.responses == texts
    assert rollouts.section[1][mask[1]].tolist() == [1, 0, 0, 0, 2, 2, 2, 0, 0]
    assert rollouts.kind[1][mask[1]].tolist() == [0, 5, 1, 5, 2, 3, 2, 5, 6]
    assert not rollouts.section[3][~mask[3]].any() and asked["seed"] == 9 and len(asked["prompts"]) == 2


def test_the_end_of_turn_stops_also_a_model_whose_own_list_lacks_it(learner, monkeypatch):
    model, tokenizer, asked = Qwen2.from_pretrained(learner), load_tokenizer(learner), {}
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, eos_token_id=(7,), pad_token_id=None))
    monkeypatch.setattr(frame, "generate", lambda *args, **sampling: asked.update(sampling) or generate(*args, **sampling))
    sample_answers(model, tokenizer, Task(prompt="short"), [Problem((3, 5, 7), 22)], 2, max_new_tokens=3)
    assert set(asked["stop_ids"]) == {7, tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
