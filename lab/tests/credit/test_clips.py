"""Bounds of an update: at ratio 1 the gradient of plain GRPO, elsewhere numbers by hand."""
import pytest
import torch

import lab.run as train
from lab.engine.methods import CLIP_KINDS
from lab.engine.update import ppo as policy_loss
from runs import SHORT

MASK = torch.tensor([[True, True, True], [True, True, False]])
ADVANTAGE = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, 0.0]])
WEIGHT = torch.tensor([[1.0, 0.5, 2.0], [1.0, 1.5, 0.0]])
CLIP = (0.2, 0.28)


def gradient(loss, log_ratio):
    """The gradient of 5 times the loss with respect to log_prob, with its sign turned."""
    old = torch.full((2, 3), -1.0) * MASK
    log_prob = (old + log_ratio * MASK).requires_grad_()
    loss(log_prob, ADVANTAGE, WEIGHT, MASK, 5.0, old, CLIP).backward()
    return -5 * log_prob.grad


@pytest.mark.parametrize("kind", list(CLIP_KINDS))
def test_at_ratio_1_every_kind_has_the_gradient_of_plain_grpo(kind):
    torch.testing.assert_close(gradient(CLIP_KINDS[kind], torch.zeros(2, 3)),
                               WEIGHT * ADVANTAGE * MASK)
    at_first = torch.full((2, 3), -1.0, requires_grad=True)  # the first pass has no old log-probs
    CLIP_KINDS[kind](at_first, ADVANTAGE, WEIGHT, MASK, 5.0).backward()
    plain = torch.full((2, 3), -1.0, requires_grad=True)
    policy_loss(plain, ADVANTAGE, WEIGHT, MASK, 5.0).backward()
    torch.testing.assert_close(at_first.grad, plain.grad)


def test_a_run_takes_the_loss_of_its_clip_kind(monkeypatch, tmp_path):
    """For each pass over the batch, with the bounds that are typed."""
    bounds = []

    def noted(*given):
        bounds.append(given[-1])
        return policy_loss(*given)

    monkeypatch.setitem(CLIP_KINDS.data, "gspo", noted)
    train.train_beyond([*SHORT, "--steps", "1", "--epochs", "3", "--clip_kind", "gspo",
                        "--clip_low", "0.1", "--change_every", "0", "--out", str(tmp_path / "x")])
    assert len(bounds) == 3 and set(bounds) == {(0.1, 0.28)}


RATIO = torch.tensor([[2.0, 1.1, 0.5], [4.0, 0.5, 1.0]])  # of each token


def test_by_hand_where_ratios_differ():
    log_ratio, usual = RATIO.log(), WEIGHT * ADVANTAGE
    ppo = gradient(policy_loss, log_ratio)
    # token (0, 0) is beyond 1.28 and pushed on; (1, 1) is below 0.8 and pushed on
    torch.testing.assert_close(ppo, usual * RATIO * torch.tensor([[0, 1, 1], [1, 0, 0]]))
    # the pushed down token with ratio 4 is above the bound of 3
    torch.testing.assert_close(gradient(CLIP_KINDS["dual"], log_ratio),
                               usual * RATIO * torch.tensor([[0, 1, 1], [0, 0, 0]]))
    torch.testing.assert_close(gradient(CLIP_KINDS["cispo"], log_ratio),
                               usual * RATIO.clamp(0.8, 1.28) * MASK)
    # one ratio an answer: (2 * 1.1 * 0.5)^(1/3) = 1.0323 and (4 * 0.5)^(1/2) = 1.4142
    of_answer = torch.tensor([[1.1 ** (1 / 3)], [2 ** 0.5]])
    torch.testing.assert_close(gradient(CLIP_KINDS["gspo"], log_ratio), usual * of_answer * MASK)
    # gmpo bounds the tokens first: 1.28 * 1.1 * 0.5 and 4 * 0.8; a bounded token has no gradient
    of_answer = torch.tensor([[(1.28 * 1.1 * 0.5) ** (1 / 3)], [3.2 ** 0.5]])
    torch.testing.assert_close(gradient(CLIP_KINDS["gmpo"], log_ratio),
                               usual * of_answer * torch.tensor([[0, 1, 1], [1, 0, 0]]))


def test_the_soft_gate_falls_off_on_both_sides():
    """The derivative of 4 / tau sigmoid(tau (r - 1)) by log r is 4 r sigmoid (1 - sigmoid)."""
    found = gradient(CLIP_KINDS["sapo"], RATIO.log())
    for tau, row in ((1.0, 0), (1.05, 1)):
        gate = torch.sigmoid(tau * (RATIO[row] - 1))
        expected = WEIGHT[row] * ADVANTAGE[row] * 4 * RATIO[row] * gate * (1 - gate)
        torch.testing.assert_close(found[row], expected)


def test_tokens_that_moved_far_enough_are_left_out():
    """The old probability is 0.368. Ratio 2 moved it up by 0.368, which is beyond 0.15 where it is
    pushed up; ratio 0.5 moved it down by 0.184, beyond it where it is pushed down."""
    found = gradient(CLIP_KINDS["dppo"], RATIO.log())
    expected = WEIGHT * ADVANTAGE * RATIO * torch.tensor([[0, 1, 1], [1, 0, 0]])
    torch.testing.assert_close(found, expected)
