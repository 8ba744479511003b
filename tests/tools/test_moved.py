"""What moved a token: by hand where only the last matrix learns, against autograd, in a run."""
import re
from types import SimpleNamespace

import pytest
import torch

from engine.tokens import load_tokenizer
from harness.record import read_columns, read_credit
from test_change import RATE, WIDTH, coin, thrown  # noqa: F401  coin is a fixture
from test_grpo import row_log_probs, settings
from tools import follow
from tools.helpers.moved import about_largest, movers, what_moved


def account(model, folder, rollouts, b, t, rate, **changed):
    """The table's columns by who: plain steps, AdamW's."""
    model.save_pretrained(folder)
    s = SimpleNamespace(**vars(settings(**changed)), learning_rate=rate, weight_decay=0.0)
    weight = rollouts.mask.float()
    rows = what_moved(folder, None, rollouts, weight, s, b, t).rows
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
    rows = dict(re.findall(r"^\| ([a-z' ]+?) +\| .*\| +([-+.\d]+) \|$", capsys.readouterr().out,
                           re.M))
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


def test_a_part_that_is_not_known_is_not_among_the_largest():
    """Of earlier steps the plain step knows nothing."""
    rows = [["itself", 1, 0.5], ["other problems", 7, -0.75], ["earlier steps", None, None]]
    said = about_largest(rows, "plain step")
    assert said.endswith("the column plain step: other problems (-0.75000), itself (+0.50000)")
