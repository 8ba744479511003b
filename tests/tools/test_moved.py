"""What moved a token: by hand where only the last matrix learns, against autograd, in a run."""
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.model_folder import write_model_folder
from engine.tokens import load_tokenizer
from harness.read_record import read_columns, read_credit
from harness.record import credit_path
from test_change import RATE, WIDTH, coin, thrown  # noqa: F401  coin is a fixture
from test_grpo import row_log_probs, settings
from tools import follow
from tools.helpers import moved
from tools.helpers.moved import (TrainedBatch, gradient_of_token, movers, parts_of_answer,
                                 slopes)


def batch_of(folder, rollouts, weight=None, rate=1e-4, decay=0.0, trainer=None, **changed):
    s = SimpleNamespace(**vars(settings(**changed)), learning_rate=rate, weight_decay=decay)
    weight = rollouts.mask.float() if weight is None else weight
    return TrainedBatch(folder, trainer, rollouts, weight, s)


def parts_of_token(model, folder, rollouts, b, t, **changed):
    """By group its part of the change of one token."""
    write_model_folder(model, folder)
    parts = parts_of_answer(batch_of(folder, rollouts, **changed), b, range(t, t + 1))
    return {name: part[t].item() for name, part in parts.items()}


def test_a_coin_by_hand(coin, tmp_path):  # noqa: F811
    """Six throws. Another 0 with A pushes the first one by A, a 1 by as much the other way; AdamW's
    first step moves every parameter that has a gradient by the rate, here against their sum."""
    batch = thrown([0, 0, 1, 0, 1, 0], [1.0, 0.5, 0.25, -2.0, -0.5, 0.0])
    batch = batch.__class__(**{**vars(batch), "group": torch.tensor([0, 0, 0, 0, 0, 1]),
                               "prompt_ids": [[1], [1]]})
    found = parts_of_token(coin, tmp_path, batch, 0, 0, rate=1e-5)
    net = 1.0 + 0.5 - 0.25 - 2.0 + 0.5
    expected = {"itself": 1.0, "the rest of its answer": 0.0, "its group's better answers": 0.25,
                "its group's worse answers": -1.5, "other problems": 0.0}
    assert found["sum"] == pytest.approx(-1e-5 * WIDTH, rel=1e-3)
    assert found["measured"] == pytest.approx(found["sum"], rel=0.05)  # float32 of log 2
    shares = {who: found[who] / found["sum"] * net for who in expected}
    assert shares == pytest.approx(expected, abs=1e-3)


@pytest.mark.numerics
@pytest.mark.parametrize("changed", [{}, {"loss_norm": "sequence", "micro_batch": 2}])
def test_the_parts_are_those_of_every_tokens_own_gradient(small_model, rollouts, tmp_path, changed):
    """Against a backward pass for every token, along the gradient as AdamW's first step scales it:
    each of its numbers is multiplied by rate / abs(the same number of the batch's gradient)."""
    b, t, rate, N = 0, 1, 1e-5, rollouts.mask.sum()
    weight = 1 + rollouts.entropy * rollouts.mask
    parameters = list(small_model.parameters())
    gradients, factors, whole = {}, {}, [torch.zeros_like(p) for p in parameters]
    for row, t_other in rollouts.mask.nonzero().tolist():
        log_prob = row_log_probs(small_model, rollouts, row)[t_other]
        gradients[row, t_other] = torch.autograd.grad(log_prob, parameters)
        m = N / (6 * rollouts.length[row]) if changed else 1.0
        factors[row, t_other] = (rollouts.advantage * weight)[row, t_other] * m / N
        for total, of_token in zip(whole, gradients[row, t_other]):
            total += factors[row, t_other] * of_token
    scaled = [g * rate / (of_batch.abs() + 1e-8) for g, of_batch in zip(gradients[b, t], whole)]
    by_token = torch.zeros_like(weight)
    for cell, of_token in gradients.items():
        by_token[cell] = factors[cell] * sum((x * y).sum() for x, y in zip(scaled, of_token))
    expected = {name: by_token[mask].sum().item()
                for name, mask in movers(rollouts, b, t).items()}
    found = parts_of_token(small_model, tmp_path, rollouts, b, t, weight=weight, rate=rate,
                           max_grad_norm=0.0, **changed)
    size = max(abs(value) for value in expected.values())
    assert size > 1e-4
    for name, value in expected.items():
        # where a number of the gradient is near 0, the scale follows its rounding
        assert found[name] == pytest.approx(value, rel=0.01, abs=0.01 * size), name
    assert found["sum"] == pytest.approx(sum(expected.values()), rel=0.01, abs=0.01 * size)
    assert found["measured"] == pytest.approx(found["sum"], rel=0.05, abs=0.01 * size)


def test_slopes_do_not_depend_on_chunks(small_model, rollouts, monkeypatch):
    own = gradient_of_token(small_model, rollouts, 0, 1, settings(micro_batch=3))
    rows = torch.arange(len(rollouts.mask))
    at_once = slopes(small_model, own, rollouts, rows, 3)
    monkeypatch.setattr("engine.forward.LOGITS_AT_ONCE", 50 * 4)  # four tokens at a time
    in_chunks = slopes(small_model, own, rollouts, rows, 2)
    assert (at_once[rollouts.mask] != 0).all()
    torch.testing.assert_close(in_chunks, at_once, rtol=1e-4, atol=1e-6)


def test_weight_decay_has_a_row_of_its_own(small_model, rollouts, tmp_path):
    """It moves the token as well, and with it the rows add up. Without it there is no such row."""
    for decay in (0.0, 50.0):
        found = parts_of_token(small_model, tmp_path, rollouts, 0, 1, decay=decay)
        assert ("weight decay" in found) == (decay > 0)
        assert decay == 0 or abs(found["weight decay"]) > 1e-4
        parts = found.keys() - {"sum", "measured"}
        assert sum(found[who] for who in parts) == pytest.approx(found["sum"], rel=0.02, abs=1e-5)


def test_a_step_whose_adamw_is_not_known_says_so(rollouts, tmp_path):
    """The checkpoint that sampled it has a model and no state of AdamW."""
    batch = batch_of(tmp_path, rollouts, trainer=tmp_path / "none")
    assert "only in the two newest checkpoints" in batch.unknown(0)
    assert batch_of(tmp_path, rollouts).unknown(0) == ""


def test_every_token_pushes_once(rollouts):
    of_all = torch.stack(list(movers(rollouts, 1, 2).values())).int()
    assert (of_all.sum(0) == 1).all() and of_all[0].sum() == 1
    better, worse = of_all[2] * rollouts.mask, of_all[3] * rollouts.mask
    assert better.any(1).tolist() == [True, False, False, False, False, False]
    assert worse.any(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("step", [1, 3])
def test_in_a_run_adamws_step_is_that_on_record(recorded, capsys, step):
    """With dropped answers, weights, and at step 3 what AdamW keeps of earlier steps."""
    batch = read_credit(recorded, step, load_tokenizer(recorded))
    wanted = batch.entropy * batch.finished[:, None] * (batch.advantage != 0)
    b, t = divmod(int(wanted.argmax()), wanted.shape[1])
    follow.main([str(recorded), "--step", str(step), "--answer", str(b), "--token", str(t),
                 "--moved"])
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^\| ([a-z' ]+?) +\| .*\| +([-+.\d]+) \|$", printed, re.M))
    columns = read_columns(recorded, step)
    on_record = columns["change"][columns["episode_start"][b] + t]
    assert float(rows["measured"]) == pytest.approx(on_record, abs=2e-5) and abs(on_record) > 1e-4
    assert ("earlier steps" in rows) == (step == 3)
    parts = [float(value) for who, value in rows.items() if who not in ("sum", "measured")]
    assert sum(parts) == pytest.approx(float(rows["sum"]), abs=1e-4)


def test_what_no_step_trained_on_is_not_taken_apart(recorded, capsys):
    batch = read_credit(recorded, 3, load_tokenizer(recorded))
    b = int((~batch.finished).nonzero()[0])  # --drop_unfinished
    follow.main([str(recorded), "--step", "3", "--answer", str(b), "--token", "0", "--moved"])
    printed = capsys.readouterr().out
    assert "left this answer out" in printed and "itself" not in printed


@pytest.mark.parametrize("total, measured, is_far", [
    (0.5, 0.4, False), (-0.04, -0.19, True), (0.19, 0.04, True), (0.2, -0.2, True),
    (0.0, 4e-6, False), (0.0, 0.0, False)])
def test_when_a_sum_is_far_from_what_was_measured(total, measured, is_far):
    """A step's parts explain a change only if they add up to it, nearly."""
    assert moved.is_far(total, measured) == is_far


@pytest.mark.parametrize("kl, words", [(0.0, "the step made no update"),
                                       (0.1, "only the KL term did, and what AdamW keeps")])
def test_where_all_rewards_are_equal_only_a_kl_term_moves_a_token(recorded, tmp_path, capsys, kl,
                                                                  words):
    run = shutil.copytree(recorded, tmp_path / "run")
    config = json.loads((run / "config.json").read_text()) | {"kl": kl}
    (run / "config.json").write_text(json.dumps(config))
    columns = read_columns(run, 3)
    b = int(columns["finished"].nonzero()[0][0])
    columns["advantage"] *= 0
    np.savez_compressed(credit_path(run, 3), **columns)
    follow.main([str(run), "--step", "3", "--answer", str(b), "--token", "0", "--moved"])
    printed = capsys.readouterr().out
    assert words in printed and "itself" not in printed
