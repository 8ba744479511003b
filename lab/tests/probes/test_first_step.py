"""The first step of AdamW: by hand, against the book's gradient, and what is told of it."""
import json

import pytest
import torch

import grpo
from lab.analysis.statistics import Estimate
from lab.harness.build import load_policy, make_advantage, make_weighting
from lab.harness.settings import make_settings
from lab.probes.common import gradient, sample_batch
from lab.probes.first_step import BLOCKS, Gradients, coefficient, compared, first_steps, gain
from lab.tools import first_step
from lab.tools.first_step import Known, calibration, in_words
from small import spoken

SMALL = {"questions": 2, "answers": 4, "threads": 1, "max_new_tokens": 24}


def test_the_gain_is_a_sum_over_pairs_of_different_blocks():
    """Two batches in each block. A second method whose gradients are all twice as large makes the
    same step, and one with the opposite sign loses as much as plain GRPO gains."""
    draw = torch.Generator().manual_seed(0)
    slopes, found = torch.randn(2, 2 * BLOCKS, 3, generator=draw)
    slope, plain, double, against = (Gradients(3) for _ in range(4))
    for number in range(2 * BLOCKS):
        slope.add(number, slopes[number])
        for of, factor in ((plain, 1), (double, 2), (against, -1)):
            of.add(number, factor * found[number])
    scale = found.square().sum(0).sqrt()
    expected = sum(float((slopes[i] * found[j] / scale).sum()) for i in range(2 * BLOCKS)
                   for j in range(2 * BLOCKS) if i % BLOCKS != j % BLOCKS)
    assert gain(slope.first, plain, torch.ones(BLOCKS, dtype=torch.bool)) == pytest.approx(
        expected, rel=1e-4)
    same, opposite = (compared(slope.first, of, plain) for of in (double, against))
    assert [same.value, same.low, same.high] == pytest.approx([0] * 3, abs=1e-5)
    assert [opposite.value, opposite.high] == pytest.approx([-2, -2], abs=1e-5)


def test_the_gradient_is_that_of_the_books_loss(policy):
    """With weights, and with a constant in the place of N."""
    s = make_settings(SMALL | {"mitigation": "entropy_ratio", "loss_norm": "constant"})
    batch = spoken(policy)
    factor = coefficient(policy, batch, s, (make_advantage(s, policy), make_weighting(s, policy)))
    log_prob = grpo.log_probs(policy.model, batch, batch.rows)
    relative = batch.entropy / batch.entropy[batch.mask].mean()
    weight = relative * batch.mask / relative[batch.mask].mean()
    answers_times_most = len(batch.mask) * s.max_new_tokens
    loss = grpo.policy_loss(log_prob, batch.advantage, weight, batch.mask, answers_times_most)
    of_book = torch.autograd.grad(-loss, policy.model.parameters())
    torch.testing.assert_close(gradient(policy, batch, factor),
                               torch.cat([g.flatten() for g in of_book]), atol=1e-4, rtol=1e-3)


def test_a_factor_changes_nothing_and_the_other_sign_does():
    """rloo is dr_grpo times 4/3. An arm that is given a function of its own uses this function."""
    plain, rloo = (make_settings(SMALL | {"advantage": name}) for name in ("dr_grpo", "rloo"))
    policy = load_policy(plain)
    sign = (lambda rollouts, policy: -grpo.dr_grpo(rollouts)), make_weighting(plain, policy)
    found = first_steps(policy, {"plain": plain, "rloo": rloo, "mine": plain}, BLOCKS,
                        own={"mine": sign})
    assert found["rloo"].value == pytest.approx(0, abs=1e-4)
    assert found["mine"].value == pytest.approx(-2, abs=1e-4)


def test_more_batches_are_drawn_until_it_is_enough(monkeypatch):
    drawn, plain = [], make_settings(SMALL)
    monkeypatch.setattr("lab.probes.first_step.sample_batch",
                        lambda *args, step: drawn.append(step) or sample_batch(*args, step=step))
    policy = load_policy(plain)
    for is_enough, count in ((False, 2), (True, 1)):
        drawn.clear()
        first_steps(policy, {"plain": plain, "idea": plain}, BLOCKS, 2 * BLOCKS,
                    lambda _: is_enough)
        assert len({*drawn}) == len(drawn) == count * BLOCKS
    wide, short = Estimate(0.1, -0.2, 0.4), Estimate(0.1, 0.05, 0.15)
    assert [*map(first_step.is_enough, (wide, short, Estimate(-0.5, -0.9, -0.11)))] == [
        False, True, True]


def known(step, gained):
    return Known("board", "x", Estimate(step, step, step), Estimate(gained, gained, gained), 8)


def test_what_is_told():
    assert in_words(Estimate(-0.384, -0.52, -0.24)) == "38% less than plain GRPO's (-52% to -24%)"
    methods = [known(-0.3, -0.02), known(-0.11, 0.0), known(-0.1, -0.01), known(0.2, 0.03)]
    assert calibration(methods).startswith(
        "On the tiny model 1 of 2 methods below -10% lost a point or more in training, and 1 of "
        "the other 2. ")


def test_the_stored_table_is_read_and_refers_to_stored_runs():
    rows = json.loads(first_step.STORED.read_text())["values"]
    for one, row in zip(first_step.read_stored(), rows, strict=True):
        assert one.step.low <= one.step.value <= one.step.high and one.gain.low < one.gain.high
        assert one.pairs == row["pairs"] >= 5
