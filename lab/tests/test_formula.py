"""What a loss optimises: each of 131 losses, right and wrong, is named as what it is."""
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import ROOT
from lab.tests.formula_losses import (LOSSES, advantage_in_float16, cispo, clip,
                                      entropy_of, k3, log_probs, make, mean, micro_batch,
                                      token, z)

from lab.formula import find_formula, tables
from lab.formula.__main__ import WrongInput, main
from lab.formula.calling import LossFailed, load_loss
from lab.formula.ours import Formula, Term
from lab.formula.reading import first_right
from lab.formula.search import Found
from lab.formula.words import (about_advantage, about_count, about_ratio, codes, mistakes,
                               sentences, unmet)

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
    """Or it is not understood, if it is one of those that the page lists."""
    loss, words = LOSSES[name]
    formula = find_formula(loss)
    found = codes(formula)
    assert words <= found, (words - found, formula.differs)
    assert ("understood" in found) == ("understood" in words)
    assert sentences(formula)


@pytest.mark.parametrize("name, said", [
    ("kl on all places", ["A KL term stands outside the answers"]),
    ("mask inverted", ["Only what is no answer", "The prompt", "The padding", "The token that"]),
    ("shifted back", ["The shift goes the wrong way"]),
    ("whitened over answers", []), ("kl without the end", []), ("rejection sampling", [])])
def test_what_is_called_a_mistake(name, said):
    """A mean over the whole batch of what is centred in each group is 0, so no group with equal
    rewards is pushed by it."""
    found = mistakes(find_formula(LOSSES[name][0]))
    assert len(found) == len(said) and all(map(str.startswith, found, said))


def found_as(*sure, **settings):
    return Found(Formula(sure=frozenset(sure), **settings), unexplained=0.0)


@pytest.mark.parametrize("question, settings, said", [
    ("credit", {"groups": "mixed"}, "Groups are mixed"),
    ("credit", {"order": " of row after"}, "An answer has the advantage of another row"),
    ("credit", {"scale": "variance n"}, "The variance stands where the std belongs"),
    ("credit", {"count": "token divided by the number of answers"}, "The number of answers"),
    ("ratio", {"ratio": "gspo clip wrong side", "bounds": (.8, 1.2)}, "The clip is on the wrong"),
    ("ratio", {"ratio": "mask", "bounds": (.8, 1.2)}, "The minimum is missing"),
    ("ratio", {"ratio": "inverse ratio"}, "The ratio is upside down")])
def test_a_line_that_is_hardly_ever_meant_is_a_mistake_if_the_question_has_an_answer(
        question, settings, said):
    [mistake] = mistakes(found_as(question, **settings))
    assert mistake.startswith(said) and mistakes(found_as(**settings)) == []


def test_a_mistake_of_two_kl_terms_is_told_once():
    terms = [Term("k3 exchanged", "token", "all", .1), Term("k1", "token", "all", -.1)]
    said = mistakes(found_as(kls=tuple(terms)))
    assert [sentence.split(" stands")[0][:20] for sentence in said] == [
        "A KL term", "In the k3 the policy", "A KL term has the wr", "The KL is k1 in the "]


def test_a_ratio_is_told_in_words():
    for loss, said in ((make(objective=cispo), "is a detached weight, clamped to [0.5, 3]"),
                       (LOSSES["truncated"][0], "clamped to at most 2"),
                       (LOSSES["minimum missing"][0], "has no gradient outside [0.8, 1.2]")):
        [ratio] = [line for line in sentences(find_formula(loss)) if line.startswith("Ratio")]
        assert said in ratio


def test_a_rounded_advantage_is_told_as_such():
    said = sentences(find_formula(make(advantage_in_float16)))
    assert "may be rounding" in said[-1] and " 0.0%" not in said[-2]
    assert "more than" not in said[-2]  # as it is if a clamped advantage is nearest by chance
    other = sentences(find_formula(LOSSES["kl off the advantage"][0]))
    assert not any("rounding" in line for line in other)


def test_of_a_loss_that_is_not_understood_no_mistake_is_excluded():
    found = find_formula(LOSSES["square of a kl in the reward"][0])
    assert sentences(found)[0] == "Mistakes: none seen in what is understood."


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


def plain_but(changed):
    """Plain GRPO that sees another batch than it is given."""
    return lambda logits, batch: make()(logits, replace(batch, **changed(batch)))


@pytest.mark.parametrize("loss, seen", [
    (plain_but(lambda batch: {"mask": without_the_last_place(batch.mask)}), "rows without padding"),
    (plain_but(lambda batch: {"reward": batch.reward.clamp(max=7)}), "rewards below 0 and above 1"),
    (plain_but(lambda batch: {"mask": batch.mask * (batch.mask.sum(1, keepdim=True) < 30)}),
     "answers of up to 60 tokens"),
    (lambda logits, batch: make(z(0, 1e-4) if len(batch.group.unique()) < 5 else mean)(
        logits, batch), "six groups")])
def test_what_only_some_batches_show(loss, seen):
    """Each is another loss where batches are rare: the sentence says in which, and by how much."""
    found = find_formula(loss)
    assert not found.understood and seen in [name for name, _ in found.differs]
    assert seen in sentences(found)[-1]


def test_what_is_right_of_ordinary_batches_is_said():
    """Rewards above 7 are none of them."""
    loss = plain_but(lambda batch: {"reward": batch.reward.clamp(max=7)})
    assert {"z n 0.0001", "token", "no ratio"} <= codes(find_formula(loss))


@pytest.mark.parametrize("mask, said", [
    (lambda batch: batch.mask, "no replies"),
    (lambda batch: batch.mask.roll(1, 1), "no replies"),  # one place off, which is told itself
    (lambda batch: batch.mask.cumsum(1).clamp(max=1) * (batch.ids != batch.pad_id), "replies")])
def test_whether_the_replies_of_an_environment_are_trained(mask, said):
    """A choice and no mistake: a loss for answers of one turn may make its own mask."""
    found = find_formula(make(mask=mask))
    assert said in codes(found) and {"replies", "no replies"} & codes(found) == {said}
    assert any("what an environment wrote" in line for line in sentences(found)) == (
        said == "replies")


def test_a_loss_that_refuses_holes_is_not_asked_about_replies():
    def loss(logits, batch):
        if (batch.mask.diff(dim=1) > 0).sum() > len(batch.mask):
            raise ValueError("a hole")
        return make()(logits, batch)
    assert find_formula(loss).trains_replies is None


def test_a_new_loss_is_a_line():
    assert {"micro-batch 3", "understood"} <= codes(find_formula(make(count=micro_batch(3))))


def test_the_first_right_candidate_is_taken_or_the_nearest():
    left = {"far": .9, "right": 1e-7, "better": 0.0}
    assert first_right(left, left.get) == ("right", 1e-7)
    assert first_right(left, left.get, enough=1e-9) == ("better", 0.0)
    assert first_right(["far"], left.get) == ("far", .9)
    assert first_right(["wild"], lambda name: math.inf) == (None, math.inf)


@pytest.mark.parametrize("name", tables.RATIOS)
def test_a_ratio_has_a_sentence_of_its_line(name):
    count = tables.RATIOS[name].function.__code__.co_argcount - 1
    said = about_ratio(Formula(ratio=name, bounds=(.8, 1.25, 3.0)[:count]))
    assert "{" not in said and ("[0.8, 1.25]" in said or name.split()[-1] in said
                                or name == "no ratio")


def test_an_advantage_and_a_counting_have_sentences_of_their_lines():
    """All lines of baselines, scales and countings, and three of them as they are read."""
    for centre, scale in product(tables.CENTRES, tables.SCALES):
        said = about_advantage(Formula(centre=centre, scale=scale, epsilon=1e-4))
        assert "{" not in said and said.startswith("the reward")
        assert ("0.0001" in said) == (scale != "none") and (" minus " in said) == (centre != "raw")
    assert about_advantage(Formula(centre="leave one out", groups="batch")) == (
        "the reward minus the mean of the other answers of the whole batch")
    assert about_advantage(Formula(scale="n-1 max", epsilon=.1, finish="limit 5")) == (
        "the reward minus the mean of its group, divided by the std of its group over n - 1, at "
        "least 0.1, then limit 5")
    assert all("{" not in about_count(Formula(count=count)) for count in tables.COUNTS)
    assert about_count(Formula(count="constant", factor=1 / 64)) == (
        "a token counts 1 / (answers x 64)")


def test_a_loss_that_remembers_is_not_called_random():
    seen = [0.0]

    def loss(logits, batch):
        seen[0] = .9 * seen[0] + .1 * float(batch.reward.mean())
        return -token(log_probs(logits, batch) * (batch.reward - seen[0])[:, None], batch.mask,
                      batch)

    with pytest.raises(LossFailed, match="it remembers earlier calls"):
        find_formula(loss)


def test_mistakes_come_first():
    said = sentences(find_formula(LOSSES["shift and sign"][0]))
    assert said[0] == "Mistakes: 2."
    assert "reversed" in said[1] and "shift is missing" in said[2]
    assert sentences(find_formula(make()))[0] == "Mistakes: none seen."


def test_a_detached_ratio_trains_nothing_but_the_kl():
    def loss(logits, batch):
        log_prob = log_probs(logits, batch)
        r, a = (log_prob - batch.old_log_prob).exp().detach(), z(1, 1e-6)(batch)
        value = torch.minimum(r * a, r.clamp(.8, 1.2) * a) - .04 * k3(log_prob, batch)
        return -token(value, batch.mask, batch)

    found = find_formula(loss)
    assert found.understood and "kl k3 0.04" in codes(found)
    [first, *_] = mistakes(found)
    assert first.startswith("The reward trains nothing")
    assert not any("only some" in sentence for sentence in sentences(found))


def test_expectations():
    formula = find_formula(make(z(1, 1e-4), token, clip(.2, .28)))
    assert unmet(formula, "z n-1 1e-4, token, clip 0.2 0.28, no kl, temperature 1, end") == []
    assert unmet(formula, "z n-1, understood") == []
    assert unmet(formula, "z n 1e-4, answer, clip 0.2 0.2") == ["z n 1e-4", "answer",
                                                                "clip 0.2 0.2"]
    assert unmet(formula, "tokens") == ["tokens"]
    with pytest.raises(ValueError, match="names no clause"):
        unmet(formula, ",")


def test_a_loss_without_a_reward():
    """A KL alone, or an entropy alone: nothing is said of temperatures, tokens or dead groups that
    it does not show."""
    def kl(logits, batch):
        return token(k3(log_probs(logits, batch), batch), batch.mask, batch)

    def entropy(logits, batch):
        return -token(entropy_of(logits), batch.mask, batch)

    for loss in (kl, entropy):
        formula = find_formula(loss)
        assert {"temperature 1", "shift 1", "understood"} <= codes(formula)
        assert "dead nan" not in codes(formula) and not formula.has_reward


def test_a_loss_whose_pushes_are_rounding():
    """The two sides of its minimum cancel where the ratio is 1, and rounding chooses one."""
    def loss(logits, batch):
        log_prob = logits.log_softmax(-1)[:, :-1].gather(2, batch.ids[:, 1:, None]).squeeze(2)
        r = (log_prob - batch.old_log_prob[:, 1:]).exp()
        a = mean(batch)
        return -(torch.min(r * a, a / r) * batch.mask[:, 1:]).sum()

    assert "understood" not in codes(find_formula(loss))


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "my_loss.py"
    path.write_text(FILE)
    main([str(path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "divided by the std of its group over n - 1 + 1e-06" in printed
    with pytest.raises(SystemExit) as ended:
        main([str(path), "--expect", "z n-1, answer"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "Expected, and not so: answer\n" in printed
    assert "z n-1 1e-06" in printed.partition("What holds: ")[2]
    with pytest.raises(WrongInput, match="it raised IndexError"):
        main([str(path), "--function", "broken", "--traceback"])
    assert "my_loss.py" in capsys.readouterr().err
    with pytest.raises(WrongInput, match="has no function"):
        main([str(path), "--function", "absent"])
    with pytest.raises(WrongInput, match="there is no file"):
        main([str(tmp_path / "none.py")])


@pytest.mark.parametrize("text, said", [
    ("import no_such_package", "ModuleNotFoundError"),
    ("import sys\nsys.exit(0)", "ends this program when it is imported")])
def test_a_file_that_cannot_be_loaded(tmp_path, text, said):
    path = tmp_path / "my_loss.py"
    path.write_text(text)
    with pytest.raises(LossFailed, match=said):
        load_loss(path)


def test_the_folder_works_alone(tmp_path):
    """Copied into an empty folder, with torch and nothing of this project."""
    shutil.copytree(ROOT / "lab/formula", tmp_path / "formula")
    (tmp_path / "my_loss.py").write_text(FILE)
    done = subprocess.run([sys.executable, "-m", "formula", "my_loss.py", "--expect", "z n-1, end"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Mistakes: none seen.") == 1


def test_the_page_names_lines_of_each_table():
    page = (ROOT / "docs/formula.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"\(`(\w+)`\) \| (.*) \|", page))
    assert len(rows) == 12
    for name, said in rows.items():
        lines = {line.strip() or "as it is" for line in getattr(tables, name)}
        assert set(said.split("; ")) <= lines, name
