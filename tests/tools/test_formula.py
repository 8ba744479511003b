"""What a loss optimises: each of some eighty losses, right and wrong, is named as what it is."""
import json
import sys
from dataclasses import replace

import pytest
import torch
from conftest import refusal
from formula_losses import (LOSSES, answer, cispo, clip, entropy_of, k3, k3_clamped, log_probs,
                            make, mean, token, z)

from engine.errors import UserError
from tools.formula import load_loss, main
from tools.helpers.formula_decode import LossFailed
from tools.helpers.formula_fit import find_formula
from tools.helpers.formula_flags import about_flags, table_of_tokens
from tools.helpers.formula_report import codes, sentences, unmet

FILE = """
import torch

def loss(logits, batch):
    print("a line of the user's")
    log_p = logits.log_softmax(-1)[:, :-1].gather(2, batch.ids[:, 1:, None]).squeeze(2)
    advantage = torch.zeros_like(batch.reward)
    for number in batch.group.unique():
        rows = batch.group == number
        r = batch.reward[rows]
        advantage[rows] = (r - r.mean()) / (r.std() + 1e-6)
    return -(log_p * advantage[:, None] * batch.mask[:, 1:]).sum() / batch.mask.sum()

def broken(logits, batch):
    return logits[99]
"""


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_named_as_what_it_is(name):
    loss, words = LOSSES[name]
    formula = find_formula(loss)
    found = codes(formula)
    assert words <= found, (words - found, formula.not_understood)
    assert ("understood" in found) == ("understood" in words)
    assert sentences(formula)


@pytest.mark.parametrize("loss, sentence", [
    (lambda logits, batch: logits.sum((1, 2)), "a tensor (16,), and a loss is one number"),
    (lambda logits, batch: 1.0, "it returned float"),
    (lambda logits, batch: logits.detach().sum(), "a number without a gradient"),
    (lambda logits, batch: logits.sum() * float("nan"), "it returned nan"),
    (lambda logits, batch: batch.mask.zero_().sum() + logits.sum(), "it changes batch.mask"),
    (lambda logits, batch: logits.data.mul_(2).sum() + logits.sum(), "it changes logits in place"),
    (lambda logits, batch: logits.div_(2).sum(), "it changes logits in place"),
    (lambda logits, batch: logits.sum().backward() or logits.sum(), "it calls backward itself"),
    (lambda logits, batch: make()(logits, batch) * (1 + torch.rand(())), "it is random"),
    (lambda logits, batch: logits.cuda().sum(), "The batch is on the CPU"),
    (lambda logits, batch: delattr(batch, "mask") or logits.sum(), "it changes batch.mask"),
    (lambda logits, batch: batch.reward.sub_(1).sum() + logits.sum(), "it changes batch.reward"),
    (lambda logits, batch: sys.exit(0), "it calls sys.exit"),
    (lambda logits, batch: logits[99], "it raised IndexError")])
def test_what_is_no_loss_is_refused_in_a_sentence(loss, sentence):
    with pytest.raises(LossFailed) as error:
        find_formula(loss)
    assert sentence in str(error.value)


def without_the_last_place(mask):
    return torch.cat([mask[:, :-1], torch.zeros_like(mask[:, :1])], 1)


@pytest.mark.parametrize("changed, seen", [
    (lambda batch: {"mask": without_the_last_place(batch.mask)}, "rows without padding"),
    (lambda batch: {"reward": batch.reward.clamp(min=0)}, "rewards below 0 and above 1"),
    (lambda batch: {"reward": batch.reward.clamp(max=10)}, "rewards below 0 and above 1")])
def test_what_only_some_batches_show(changed, seen):
    """Plain GRPO that is another loss on rows, or rewards, that are rare in small batches."""
    def loss(logits, batch):
        return make()(logits, replace(batch, **changed(batch)))

    assert any(seen in reason for reason in find_formula(loss).not_understood)


def test_a_limit_that_only_a_long_answer_reaches():
    def loss(logits, batch):
        log_p = logits.log_softmax(-1)[:, :-1].gather(2, batch.ids[:, 1:, None]).squeeze(2)
        advantage = z(1, 1e-4)(batch)
        mask = batch.mask[:, 1:] * (batch.mask.sum(1, keepdim=True) < 30)
        return -(log_p * advantage * mask).sum() / mask.sum()

    assert any("that tries long answers" in reason for reason in find_formula(loss).not_understood)


def test_what_is_said_of_a_kl_that_is_no_usual_term():
    said = sentences(find_formula(LOSSES["kl at the prompt too"][0]))
    [where] = [sentence for sentence in said if "outside the answers" in sentence]
    assert "the prompt, the last token of the prompt" in where
    found = find_formula(LOSSES["square of a kl in the reward"][0])
    assert "changes the push of all tokens of its answer" in found.not_understood[0]
    lengths = find_formula(LOSSES["root of the length in the reward"][0])
    assert "the length is a part of the reward" in lengths.not_understood[-1]
    [plain] = find_formula(LOSSES["advantage in float32"][0]).notes
    assert "compared with known ones to 1e-4" in plain


def test_expectations():
    formula = find_formula(make(z(1, 1e-4), token, clip(.2, .28)))
    assert unmet(formula, "z n-1 1e-4, token, clip 0.2 0.28, no kl, temperature 1, end") == []
    assert unmet(formula, "z n-1, understood") == []
    assert unmet(formula, "z n 1e-4, answer, clip 0.2 0.2") == ["z n 1e-4", "answer",
                                                                "clip 0.2 0.2"]
    with pytest.raises(UserError, match="did you mean token"):
        unmet(formula, "tokens")


def test_our_flags_that_have_the_gradient():
    [plain] = about_flags(find_formula(make()))
    assert plain == "The same gradient here: python train.py --advantage grpo --loss_norm token."
    published = make(mean, answer, clip(.2, .28))
    [clipped] = about_flags(find_formula(published))
    assert clipped.endswith("--advantage dr_grpo --loss_norm sequence --epochs 2 --clip_low 0.2 "
                            "--clip_high 0.28.")
    for other, flags in ((make(temperature=.8), "token --temperature 0.8."),
                         (make(objective=cispo), "--clip_high 2 --clip_kind cispo.")):
        assert about_flags(find_formula(other))[0].endswith(flags)
    [near] = about_flags(find_formula(make(kl=k3_clamped)))
    assert "--kl 0.04 --kl_kind k3. This holds as long as" in near
    sample = make(z(1, 1e-6))
    assert "it lacks the advantage z n-1 1e-06" in about_flags(find_formula(sample))[0]


def test_a_loss_without_a_reward():
    """A KL alone, or an entropy alone: nothing is said of temperatures, tokens or dead groups that
    it does not show."""
    def kl(logits, batch):
        return token(k3(log_probs(logits, batch), batch), batch.mask, batch)

    def entropy(logits, batch):
        return -token(entropy_of(logits), batch.mask, batch)

    for loss in (kl, entropy):
        formula = find_formula(loss)
        assert {"temperature 1", "shift 1"} <= codes(formula) and not formula.absent
        assert "dead nan" not in codes(formula)
        assert "no push depends on the reward" in formula.not_understood
        assert not any("no answer token" in reason for reason in formula.not_understood)


def test_a_loss_whose_pushes_are_rounding():
    """The two sides of its minimum cancel where the ratio is 1, and rounding chooses one."""
    def loss(logits, batch):
        log_prob = logits.log_softmax(-1)[:, :-1].gather(2, batch.ids[:, 1:, None]).squeeze(2)
        r = (log_prob - batch.old_log_prob[:, 1:]).exp()
        a = mean(batch)
        return -(torch.min(r * a, a / r) * batch.mask[:, 1:]).sum()

    assert "understood" not in codes(find_formula(loss))


def test_the_table_of_one_answer_shows_what_plain_grpo_gives():
    rows = table_of_tokens(find_formula(make(factor=2.0))).splitlines()
    first = next(row.split() for row in rows if "answer 1" in row)
    assert float(first[2]) == pytest.approx(2 * float(first[3]), abs=2e-3) and float(first[3])


def test_flags_and_table_of_a_loss_that_refuses_longer_floats():
    """Its tensors of float32 and float64 do not go together where casts become longer."""
    formula = find_formula(LOSSES["advantage in float32"][0])
    assert "it lacks the advantage z n-1 1e-06" in about_flags(formula)[0]
    assert "its end" in table_of_tokens(formula)


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "my_loss.py"
    path.write_text(FILE)
    main([str(path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "divided by the std of its group over n - 1 + 1e-06" in printed
    with pytest.raises(SystemExit) as ended:
        main([str(path), "--json", "--expect", "z n-1, answer"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["unmet"] == ["answer"] and found["advantage"] == "z n-1 1e-06"
    said = refusal(main, [str(path), "--function", "broken", "--traceback"])
    assert "it raised IndexError" in said and "my_loss.py" in capsys.readouterr().err
    assert "has no function" in refusal(main, [str(path), "--function", "absent"])
    assert "there is no file" in refusal(main, [str(tmp_path / "none.py")])


def test_a_file_that_cannot_be_loaded(tmp_path):
    path = tmp_path / "my_loss.py"
    path.write_text("import no_such_package")
    with pytest.raises(UserError, match="ModuleNotFoundError"):
        load_loss(path)
