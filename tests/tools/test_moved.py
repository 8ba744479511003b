"""What moved a token: by hand where only the last matrix learns, against autograd, in a run."""
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import make_tokenizer
from engine.model_folder import write_model_folder
from engine.tokens import load_tokenizer, token_bytes
from harness.read_record import read_columns, read_credit
from harness.record import credit_path
from test_change import RATE, WIDTH, coin, thrown  # noqa: F401  coin is a fixture
from test_grpo import row_log_probs, settings
from tools import follow
from tools.helpers.moved import (about_largest, about_step, about_sums, contributions,
                                 gradient_of_token, movers, tokens_that_moved, what_moved)


def account(model, folder, rollouts, b, t, rate, **changed):
    """The table's columns by who: plain steps, AdamW's."""
    write_model_folder(model, folder)
    s = SimpleNamespace(**vars(settings(**changed)), learning_rate=rate, weight_decay=0.0)
    weight = rollouts.mask.float()
    groups, _ = what_moved(folder, None, rollouts, weight, s, make_tokenizer(), b, t)
    rows = groups.rows
    return {row[0]: row[2] for row in rows}, {row[0]: row[3] for row in rows}


def test_a_coin_by_hand(coin, tmp_path):  # noqa: F811
    """Six throws, p = 1/2. The gradient of log p(0) at the logits is (1/2, -1/2), so another 0 with
    A pushes by A / 6 x width / 2, a 1 by as much the other way. The step is as long as one that
    moves each parameter by the rate, which makes rate x sqrt(parameters) / norm(gradient); the
    gradient is (1, -1) x width times the sum of all A, signed, / 12."""
    batch = thrown([0, 0, 1, 0, 1, 0], [1.0, 0.5, 0.25, -2.0, -0.5, 0.0])
    batch = batch.__class__(**{**vars(batch), "group": torch.tensor([0, 0, 0, 0, 0, 1]),
                               "prompt_ids": [[1], [1]]})
    plain, adamw = account(coin, tmp_path, batch, 0, 0, 1e-5)
    net = 1.0 + 0.5 - 0.25 - 2.0 + 0.5
    norm = abs(net) / 12 * (2 * WIDTH) ** 0.5
    parameters = sum(p.numel() for p in coin.parameters())
    unit = 1e-5 * parameters ** 0.5 / norm * WIDTH / 12
    expected = {"itself": 1.0, "the rest of its answer": 0.0, "its group's better answers": 0.25,
                "its group's worse answers": -1.5, "other problems": 0.0}
    assert {who: plain[who] / unit for who in expected} == pytest.approx(expected, abs=1e-4)
    assert plain["sum"] == pytest.approx(net * unit, rel=1e-4)
    assert plain["measured"] == pytest.approx(plain["sum"], rel=0.05)  # float32 of log 2
    # AdamW's first step moves every parameter that has a gradient by the rate: here against `net`
    assert adamw["sum"] == pytest.approx(-1e-5 * WIDTH, rel=1e-3)
    assert adamw["itself"] / adamw["sum"] == pytest.approx(1.0 / net, rel=1e-3)


@pytest.mark.numerics
@pytest.mark.parametrize("changed", [{}, {"loss_norm": "sequence"}, {"max_grad_norm": 0.01}])
def test_the_parts_add_up_and_the_step_agrees(small_model, rollouts, tmp_path, changed):
    """The sum is the inner product with the whole gradient, by autograd of the formula; with a tiny
    rate a step does what it says."""
    b, t = 0, 1
    plain, adamw = account(small_model, tmp_path, rollouts, b, t, 2e-6, **changed)
    parameters = list(small_model.parameters())
    own = torch.autograd.grad(row_log_probs(small_model, rollouts, b)[t], parameters)
    N, length, loss = rollouts.mask.sum(), rollouts.length, 0
    for row in range(6):
        m = N / (6 * length[row]) if changed.get("loss_norm") else 1
        log_prob = row_log_probs(small_model, rollouts, row)
        loss = loss - (m * rollouts.advantage[row, :length[row]] * log_prob).sum() / N
    whole = torch.autograd.grad(loss, parameters)
    along, norm = (sum((x * y).sum() for x, y in zip(whole, other)) for other in (own, whole))
    size = sum(p.numel() for p in parameters) ** 0.5
    assert plain["sum"] == pytest.approx(float(-along * 2e-6 * size / norm.sqrt()), rel=1e-3)
    others = adamw.keys() - {"sum", "measured"}
    assert sum(adamw[who] for who in others) == pytest.approx(adamw["sum"], rel=1e-2)
    for found in (plain, adamw):
        assert found["measured"] == pytest.approx(found["sum"], rel=0.05, abs=2e-5)
        assert abs(found["sum"]) > 1e-4


@pytest.mark.numerics
@pytest.mark.parametrize("loss_norm", ["token", "sequence"])
def test_each_tokens_contribution_is_that_of_its_own_gradient(small_model, rollouts, loss_norm):
    """Against a backward pass for every token, along the gradient as AdamW's first step scales it:
    each of its numbers is multiplied by rate / abs(the same number of the batch's gradient)."""
    b, t, rate, N = 0, 1, 1e-3, rollouts.mask.sum()
    s = SimpleNamespace(**vars(settings(loss_norm=loss_norm, micro_batch=2)), learning_rate=rate)
    weight = 1 + rollouts.entropy * rollouts.mask
    parameters = list(small_model.parameters())
    gradients, factors, whole = {}, {}, [torch.zeros_like(p) for p in parameters]
    for row, t_other in rollouts.mask.nonzero().tolist():
        log_prob = row_log_probs(small_model, rollouts, row)[t_other]
        gradients[row, t_other] = torch.autograd.grad(log_prob, parameters)
        m = N / (6 * rollouts.length[row]) if loss_norm == "sequence" else 1.0
        factors[row, t_other] = (rollouts.advantage * weight)[row, t_other] * m / N
        for total, of_token in zip(whole, gradients[row, t_other]):
            total += factors[row, t_other] * of_token
    scaled = [g * rate / (of_batch.abs() + 1e-8) for g, of_batch in zip(gradients[b, t], whole)]
    expected = torch.zeros_like(weight)
    for cell, of_token in gradients.items():
        along = sum((x * y).sum() for x, y in zip(scaled, of_token))
        expected[cell] = factors[cell] * along
    own = gradient_of_token(small_model, rollouts, b, t, s)
    for found, by_hand in zip(own, gradients[b, t]):
        torch.testing.assert_close(found, by_hand, rtol=1e-3, atol=1e-5)
    found = contributions(small_model, scaled, rollouts, weight, s)
    assert (expected != 0).sum() > 5 and not found[~rollouts.mask].any()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_contributions_do_not_depend_on_chunks(small_model, rollouts, monkeypatch):
    s, weight = settings(micro_batch=3), rollouts.mask.float()
    own = gradient_of_token(small_model, rollouts, 0, 1, s)
    at_once = contributions(small_model, own, rollouts, weight, s)
    monkeypatch.setattr("engine.forward.LOGITS_AT_ONCE", 50 * 4)  # four tokens at a time
    in_chunks = contributions(small_model, own, rollouts, weight, s)
    torch.testing.assert_close(in_chunks, at_once, rtol=1e-4, atol=1e-6)


def test_the_largest_contributions_of_other_tokens_are_listed(rollouts):
    """The token itself has the largest, and is not among them; nor is one that is 0."""
    contribution = torch.zeros_like(rollouts.log_prob)
    cells = [0, 0, 2, 4], [1, 0, 0, 0]
    contribution[cells] = torch.tensor([9, 2, -3, 0.5])
    assert rollouts.mask[cells].all()
    table = tokens_that_moved(contribution, "step", rollouts, make_tokenizer(), 0, 1)
    rows = [(row[0], row[1], row[3], row[5]) for row in table.rows]
    assert rows == [(2, 0, "its group's worse answers", -3.0),
                    (0, 0, "the rest of its answer", 2.0), (4, 0, "other problems", 0.5)]
    assert [row[4] for row in table.rows] == pytest.approx(
        [rollouts.advantage[row[:2]].item() for row in rows])
    others = int(rollouts.mask.sum()) - 1
    assert table.notes[-1] == (f"All {others} other tokens of the batch raised its log-prob by "
                               "2.50000 and lowered it by 3.00000. The tokens in the table make "
                               "up 100% of these two")


def test_weight_decay_has_a_row_of_its_own(small_model, rollouts, tmp_path):
    """It moves the token as well, and with it the rows add up. Without it there is no such row."""
    write_model_folder(small_model, tmp_path)
    for decay in (0.0, 50.0):
        s = SimpleNamespace(**vars(settings()), learning_rate=1e-4, weight_decay=decay)
        groups, _ = what_moved(tmp_path, None, rollouts, rollouts.mask.float(), s,
                               make_tokenizer(), 0, 1)
        adamw = {row[0]: row[3] for row in groups.rows}
        assert ("weight decay" in adamw) == (decay > 0)
        assert decay == 0 or abs(adamw["weight decay"]) > 1e-4
        parts = adamw.keys() - {"sum", "measured"}
        assert sum(adamw[who] for who in parts) == pytest.approx(adamw["sum"], rel=0.02, abs=1e-5)


@pytest.mark.parametrize("rate, is_far", [(1e-5, False), (0.1, True)])
def test_a_plain_step_whose_sum_is_far_from_what_was_measured_has_no_column(
        small_model, rollouts, tmp_path, rate, is_far):
    """A long step is not of first order. A run whose AdamW is not known has no other column."""
    write_model_folder(small_model, tmp_path)
    s = SimpleNamespace(**vars(settings()), learning_rate=rate, weight_decay=0.0)
    for trainer in (None, tmp_path / "not kept"):
        groups, _ = what_moved(tmp_path, trainer, rollouts, rollouts.mask.float(), s,
                               make_tokenizer(), 0, 1)
        has_column = trainer is not None or not is_far
        assert ("plain step" in groups.columns) == has_column
        assert ("AdamW's step" in groups.columns) == (trainer is None)
        assert all(len(row) == len(groups.columns) for row in groups.rows)
        notes = " ".join(groups.notes)
        assert ("has no column here. The sum of its parts (" in notes) != has_column
        assert ("In the column plain step the sum (" in notes) == (is_far and has_column)


def test_a_step_whose_adamw_is_not_known_says_so(small_model, rollouts, tmp_path):
    """The checkpoint that sampled it has a model and no state of AdamW."""
    write_model_folder(small_model, tmp_path)
    s = SimpleNamespace(**vars(settings()), learning_rate=1e-4, weight_decay=0.1)
    groups, tokens = what_moved(tmp_path, tmp_path / "trainer", rollouts, rollouts.mask.float(), s,
                                make_tokenizer(), 0, 1)
    assert list(groups.columns) == ["moved by", "tokens", "plain step"]
    assert [row[0] for row in groups.rows][-3:] == ["other problems", "sum", "measured"]
    assert "AdamW's step is not shown, because" in " ".join(groups.notes)
    assert [*tokens.columns][-1] == "plain step"


@pytest.mark.parametrize("changed, words", [
    ({}, "that of the run"), ({"kl": 0.1}, "that of the run, without the KL term"),
    ({"epochs": 3}, "the first of the 3 that the run took on this batch")])
def test_what_adamws_step_is(changed, words):
    assert about_step(settings(**changed)) == f"AdamW's step is {words}"


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
    # the single tokens: answer, token, text, advantage and contribution are those on record
    tokens = re.findall(r"^\| +(\d+) \| +(\d+) \| (.*?\[.*\].) .* \| +([-+.\d]+) "
                        r"\| +([-+.\d]+) \|$", printed, re.M)
    assert len(tokens) == 5
    sizes = [abs(float(size)) for *_, size in tokens]
    assert sizes == sorted(sizes, reverse=True)
    for answer, token, text, advantage, _ in tokens:
        cell = int(answer), int(token)
        assert cell != (b, t) and batch.mask[cell] and batch.finished[cell[0]]
        assert float(advantage) == pytest.approx(float(batch.advantage[cell]), rel=1e-3)
        [piece] = token_bytes(load_tokenizer(recorded), [int(batch.ids[cell])])
        assert text[:-1].endswith(repr(f"[{piece.decode(errors='replace')}]")[1:-1])


def test_what_no_step_trained_on_is_not_taken_apart(recorded, capsys):
    batch = read_credit(recorded, 3, load_tokenizer(recorded))
    b = int((~batch.finished).nonzero()[0])  # --drop_unfinished
    follow.main([str(recorded), "--step", "3", "--answer", str(b), "--token", "0", "--moved"])
    printed = capsys.readouterr().out
    assert "left this answer out" in printed and "itself" not in printed


@pytest.mark.parametrize("total, measured, is_far", [
    (0.5, 0.4, False), (-0.04, -0.19, True), (0.19, 0.04, True), (0.2, -0.2, True),
    (0.0, 4e-6, False), (0.0, 0.0, False)])
def test_a_sum_that_is_far_from_what_was_measured_is_named(total, measured, is_far):
    """A step's parts explain a change only if they add up to it, nearly."""
    rows = [["itself", 1, 0.1, 9.0], ["sum", None, 0.1, total], ["measured", None, 0.1, measured]]
    said = about_sums(rows, ["moved by", "tokens", "plain step", "AdamW's step"])
    assert len(said) == is_far
    assert all(f"AdamW's step the sum ({total:+.5f}) is far" in text for text in said)


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


def test_a_part_that_is_not_known_is_not_among_the_largest():
    """Of earlier steps the plain step knows nothing."""
    rows = [["itself", 1, 0.5], ["other problems", 7, -0.75], ["earlier steps", None, None]]
    said = about_largest(rows, "plain step")
    assert said.endswith("the column plain step: other problems (-0.75000), itself (+0.50000)")
