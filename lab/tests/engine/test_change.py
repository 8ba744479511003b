"""The change of each token in a step: by hand for a model of which only the last matrix learns,
against other forward passes, and in runs."""
import dataclasses
import math

import numpy as np
import pytest
import torch

from small import copied, hand_made
from lab.engine.update import update
from lab.analysis.run_folders import read_columns
from lab.engine.model import Qwen2
from qwen2_model import ModelConfig
from lab_runs import run
from runs import lines, timeless
from test_update import row_log_probs, settings

WIDTH, RATE = 8, 0.25


@pytest.fixture
def coin():
    """A model that writes 0 or 1. All hidden states are (1, ..., 1), so only the last matrix
    learns: a step changes the logits by rate x width x (onehot - p) x A / N."""
    model = Qwen2(ModelConfig(vocab_size=2, hidden_size=WIDTH, intermediate_size=8, head_dim=8,
                              num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("embed" in name or "norm" in name))
    return model


def thrown(ids, advantage):
    """Answers of one token to one problem."""
    ids, advantage = torch.tensor(ids)[:, None], torch.tensor(advantage)[:, None]
    return hand_made(torch.ones_like(ids, dtype=torch.bool), ids=ids, advantage=advantage,
                     prompt_ids=[[1]], log_prob=torch.full(ids.shape, -math.log(2)))


def stepped(model, batch, rate=RATE, weight=None, **changed):
    """The model after a step of plain gradient descent, with its metrics and columns."""
    copy = copied(model)
    weight = batch.mask.float() if weight is None else weight
    sgd = torch.optim.SGD(copy.parameters(), lr=rate)
    result = update(copy, sgd, batch, weight, settings(**changed), is_measured=True)
    return copy, *result


@pytest.mark.parametrize("ids, advantage, net", [
    ([0, 1], [1.0, -1.0], 1.0),                       # both push 0 up: (1 + 1) / 2
    ([0, 0], [1.0, -1.0], 0.0),                       # the same token in both answers: they cancel
    ([0, 0, 0, 0], [1.0, -0.6, -0.6, -0.6], -0.2),    # so a token of the better answer falls
    ([0, 1, 0, 1], [1.0, 1.0, -1.0, 0.0], -0.25)])    # the last has no push, and rises
def test_a_coin_by_hand(coin, ids, advantage, net):
    """It begins at p = 1/2. The difference of the logits grows by rate x width x net, where `net`
    is the mean of A for 0 and of -A for 1; then p is 1 / (1 + exp(-difference))."""
    _, _, columns = stepped(coin, thrown(ids, advantage))
    apart = RATE * WIDTH * net
    of = {0: math.log(2 / (1 + math.exp(-apart))), 1: math.log(2 / (1 + math.exp(apart)))}
    expected = [of[i] for i in ids]
    assert columns["change"].squeeze(1).tolist() == pytest.approx(expected, abs=5e-6)


@pytest.mark.numerics
@pytest.mark.parametrize("changed", [{}, {"temperature": 0.7}, {"micro_batch": 1, "epochs": 3}])
def test_it_is_the_log_prob_after_minus_before(small_model, rollouts, changed):
    """It is measured for all tokens: those of the second group have no push and change too. A
    dropped answer has no change."""
    kept = rollouts.mask & (torch.arange(6) != 1)[:, None]
    rollouts = dataclasses.replace(rollouts, mask=kept)
    model, _, columns = stepped(small_model, rollouts, **changed)
    assert not columns["change"][1].any()
    for row in (0, 2, 3, 4, 5):
        n = int(rollouts.mask[row].sum())
        after, before = (row_log_probs(m, rollouts, row).detach() for m in (model, small_model))
        torch.testing.assert_close(columns["change"][row, :n], after - before, atol=2e-5, rtol=1e-3)
        assert (after - before).abs().max() > 1e-4 and not columns["change"][row, n:].any()


def test_a_step_that_does_nothing_changes_nothing(small_model, rollouts):
    """The change is exactly 0, because both passes cut the batch in the same way."""
    for rate, weight in ((0.0, None), (1.0, torch.zeros_like(rollouts.log_prob))):
        _, _, columns = stepped(small_model, rollouts, rate, weight, micro_batch=2)
        assert not columns["change"].any()
    nobody = dataclasses.replace(rollouts, advantage=0 * rollouts.advantage)
    _, metrics, columns = stepped(small_model, nobody)
    assert metrics["skipped"] and columns["change"].shape == rollouts.mask.shape


def test_a_run_is_the_same_with_and_without(learner, tmp_path):
    """The credit file has one more column when it is due, and no other number differs."""
    folders = [tmp_path / name for name in ("with", "without")]
    for folder, every in zip(folders, (2, 0)):
        run("--model", learner, "--out", folder, "--steps", 4, "--eval_every", 0,
            "--change_every", every)
    ours, theirs = (lines(folder / "metrics.jsonl") for folder in folders)
    for step, (one, two) in enumerate(zip(ours, theirs), 1):
        columns, plain = (read_columns(folder, step) for folder in folders)
        assert columns.keys() - plain.keys() == ({"change"} if step != 2 else set())
        assert timeless(one) == timeless(two)
        for name in plain:
            np.testing.assert_array_equal(columns[name], plain[name], name)
    a, b = (folder / "checkpoints/step_000004/model.safetensors" for folder in folders)
    assert a.read_bytes() == b.read_bytes()
