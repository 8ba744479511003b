"""What a loss optimises: right and wrong losses are named as what they are, and a check fails where
it should."""
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from lab.tests.formula_losses import (LOSSES, advantage_in_float16, answer, clip,
                                      entropy_of, k3, log_probs, make, mean, misaligned,
                                      one_minus_p, over_the_std_of_others, token,
                                      undetached_kl_in_the_reward, z)

from lab.formula import (LossFailed, NotPassed, check, differences, find_formula, judge,
                         of_log_probs, tables, take)
from lab.formula.__main__ import main
from lab.formula.calling import load_loss
from lab.formula.codes import codes, unmet, unnamed
from lab.formula.ours import Formula, Term, ours
from lab.formula.reading import first_right
from lab.formula.search import Found
from lab.formula.words import (about_advantage, about_count, about_ratio, mistakes, sentences,
                               unusual)

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


@cache
def found_of(name):
    """What is found of a loss of the table, which several tests ask."""
    return find_formula(LOSSES[name][0])


def a_third(names):
    """The others are slow tests, which .ci/run runs."""
    return [pytest.param(name, marks=[pytest.mark.slow] if number % 3 else [])
            for number, name in enumerate(names)]


@pytest.mark.parametrize("name", a_third(LOSSES))
def test_every_loss_is_named_as_what_it_is(name):
    """Or it is not understood, if it is one of those that the page lists."""
    words, formula = LOSSES[name][1], found_of(name)
    found = codes(formula)
    assert words <= found, (words - found, formula.differs)
    assert ("understood" in found) == ("understood" in words)
    assert sentences(formula)


@pytest.mark.parametrize("name, said", [
    ("kl on all places", ["kl elsewhere"]),
    ("mask inverted", ["mask inverted", "prompt", "padding", "no first", "no end"]),
    ("shifted back", ["shift -1"]), ("icepop", []),
    ("width", ["constant over width of a row"]),
    ("cispo undetached", ["cispo undetached"]), ("old one place off", ["old misplaced 1"]),
    pytest.param("kl in the reward, undetached", ["reward undetached"], marks=pytest.mark.slow),
    ("kl in the reward", [])])
def test_what_is_called_a_mistake(name, said):
    """Each has the name by which it is let pass. A KL in the reward is none if it is detached."""
    assert [remark.name for remark in mistakes(found_of(name))] == said
    assert judge(found_of(name), allow=said).mistakes == []


def test_a_gradient_through_the_reward_is_seen_where_the_advantage_is_linear():
    found = find_formula(undetached_kl_in_the_reward(mean, lambda log_p, batch, a: log_p * a))
    assert found.trains_reward and {"mean", "token", "no ratio"} <= codes(found)

    def with_a_target(logits, batch):
        """The KL of the whole batch is held at a number: it is no part of a reward."""
        kl = ((log_probs(logits, batch) - batch.reference_log_prob) * batch.mask).sum()
        return make()(logits, batch) + .01 * (kl - 1) ** 2

    assert not find_formula(with_a_target).trains_reward


@pytest.mark.parametrize("name, said", [
    ("whitened", ["whitened again"]), ("openrlhf", ["dead pushed"]),
    ("whitened over answers", []),  # what is centred in each group has the mean 0 in the batch
    ("icepop", ["mask"]), ("temperature", ["temperature 0.8"]),
    ("sum for GSPO's mean", ["summed clip"]), ("micro-batch", ["micro-batch 2"]),
    ("clamped below one", ["cispo"]), ("random", ["random"]), ("published grpo", [])])
def test_what_is_called_unusual(name, said):
    found = found_of(name)
    assert [remark.name for remark in unusual(found)] == said and (name == "random" or not mistakes(
        found))
    lines = sentences(found)
    assert ("Unusual, check that you want it:" in lines) == bool(said)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_by_hand():
    """Rewards 1 2 3 6 of one group: mean 3, variance 14 / 4 or 14 / 3. The others of the first are
    2 3 6, with the mean 11 / 3 and the variance 13 / 3. By lengths of 1 to 4 the mean is 38 / 10.
    """
    r, label, n = numbers(1, 2, 3, 6), torch.zeros(4, dtype=torch.int64), numbers(1, 2, 3, 4)
    first = {"mean": 3, "raw": 0, "leave one out": 11 / 3, "by length": 3.8}
    assert {name: float(line(r, label, n)[0]) for name, line in tables.CENTRES.items()} == (
        pytest.approx(first))
    std, of_sample = 3.5 ** .5, (14 / 3) ** .5
    scales = {"none": 1, "n": std + .5, "n-1": of_sample + .5, "n root": 2,
              "n-1 root": (14 / 3 + .5) ** .5, "n max": std, "n-1 max": of_sample,
              "n-1 of others": (13 / 3) ** .5 + .5, "batch n": std + .5,
              "batch n-1": of_sample + .5, "mean": 3.5}
    assert {name: float(line(r, label, .5).flatten()[0])
            for name, line in tables.SCALES.items()} == pytest.approx(scales)
    odd = tables.SCALES["n-1 of others"](numbers(1, 1, 1, 3), label, .5)  # the last has equal ones
    assert odd.tolist() == pytest.approx([(4 / 3) ** .5 + .5] * 3 + [1])
    assert tables.SCALES["n max"](r, label, 2.5)[0] == 2.5


def test_finished_advantages_by_hand():
    """Over tokens, of which the answers have 1, 2, 3 and 4, the mean of -2 -1 0 3 is 8 / 10, and
    the sum of squares 7.84 + 2 * 3.24 + 3 * 0.64 + 4 * 4.84 = 35.6."""
    A, n = numbers(-2, -1, 0, 3), numbers(1, 2, 3, 4)
    for name, last in (("limit 1", 1), ("limit 5", 3), ("whitened n", 3 / 3.5 ** .5),
                       ("whitened n-1", 3 / (14 / 3) ** .5),
                       ("over tokens n 1e-08 root", 2.2 / 3.56 ** .5),
                       ("over tokens n 1e-08 max", 2.2 / 3.56 ** .5),
                       ("over tokens n-1 1e-08 root", 2.2 / (35.6 / 9) ** .5)):
        assert float(tables.FINISHES[name](A, n)[-1]) == pytest.approx(last), name
    assert tables.FINISHES["limit 1"](A, n).tolist() == [-1, -1, 0, 1]


def test_countings_by_hand():
    """Two groups of two answers, with 1 2 3 4 tokens in rows of 8; each prompt has 2. The rewards
    of the first group are equal, the third answer has none, and the last two ended."""
    n = numbers(1, 2, 3, 4)
    ids = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0],
                        [1, 1, 1, 1, 9, 0, 0, 0], [1, 1, 1, 1, 1, 9, 0, 0]])
    mask = ((torch.arange(8) >= 2) & (ids > 0)).double()
    batch = SimpleNamespace(ids=ids, mask=mask, prompt_length=torch.full((4,), 2), end_id=9,
                            pad_id=0, reward=numbers(1, 1, 0, 1), group=torch.tensor([0, 0, 1, 1]))
    last = {"token": 1 / 10, "answer": 1 / 16, "group": 1 / 14, "sum": 1, "constant": 1 / 4,
            "answer multiplied by the number of answers": 1 / 4,
            "answer divided by the number of answers": 1 / 64,
            "token divided by the number of answers": 1 / 40,
            "constant over longest answer": 1 / 16, "constant over width of a row": 1 / 32,
            "constant over width less one": 1 / 28, "square of length": 1 / 64,
            "token (with prompt)": 1 / 18, "live token": 1 / 7, "micro-batch 2": 1 / 14,
            "micro-batch 3": 1 / 8, "micro-batch 4": 1 / 10, "micro-batch 8": 1 / 10}
    assert {name: float(line(n, batch)[-1]) for name, line in tables.COUNTS.items()} == (
        pytest.approx(last))


def test_terms_by_hand():
    """Of a reference that is twice as likely as the policy, d = log 2 = 0.693147, a ratio of 3 and
    an entropy of 0.5. A k3 is 2 - d - 1, and 1 / 2 + d - 1 the other way round."""
    d, ratio, entropy = numbers(math.log(2)), numbers(3), numbers(.5)
    values = {"entropy": -.5, "k1": -.693147, "k2": .240227, "k3": .306853,
              "k3 exchanged": .193147, "k3 with ratio": .920558, "k1 with ratio": -2.079442,
              "absolute": .693147, "k3 at most 10": .306853, "k2 where k3 is below 10": .240227}
    assert {name: float(line(d, ratio, entropy)) for name, line in tables.TERMS.items()} == (
        pytest.approx(values, abs=1e-6))
    far = numbers(3.0)  # e^3 - 3 - 1 = 16.1
    assert float(tables.TERMS["k3 at most 10"](far, ratio, entropy)) == 10
    assert float(tables.TERMS["k2 where k3 is below 10"](far, ratio, entropy)) == 0


def round_trips():
    """Formulas that have, all together, every line of every table."""
    ways = [{"ratio": name, "bounds": (.8, 1.25, 3.0)[:line.function.__code__.co_argcount - 1]}
            for name, line in tables.RATIOS.items()]
    ways += [{"shape": shape} for shape in tables.SHAPES]
    advantages = [{"finish": name, "scale": "none" if "over" in name else "n-1"}
                  for name in tables.FINISHES]
    advantages += [{"groups": name} for name in tables.GROUPS]
    advantages += [{"scale": name, "epsilon": 1e-3 * (name != "none"),
                    "centre": "mean" if "batch" in name else centre}
                   for name, centre in zip(tables.SCALES, cycle(tables.CENTRES))]
    kls = [("entropy", ""), *product([*tables.TERMS][1:], tables.REFERENCES)]
    places = [name for name in tables.PLACES if name != "answer"]  # here it is what is trained
    counts = [name for name in tables.COUNTS if "live" not in name]
    terms = [(Term(kl, count, place, .04, reference),) for (kl, reference), place, count in zip(
        [*kls, *kls], cycle(places), counts)]
    for way, advantage, count, term in zip(cycle(ways), advantages, cycle(tables.COUNTS),
                                           [*terms, *[()] * len(advantages)]):
        yield Formula(**{"scale": "n-1", "epsilon": 1e-4, **advantage, **way}, count=count,
                      terms=term)


@pytest.mark.slow
@pytest.mark.parametrize("formula", list(round_trips()), ids=lambda formula: (
    f"{formula.ratio} {formula.shape} {formula.centre} {formula.scale} {formula.finish} "
    f"{formula.count} {[(term.kind, term.count, term.place) for term in formula.terms]}"))
def test_a_loss_made_of_lines_is_found_as_these_lines(formula):
    found = find_formula(lambda logits, batch: ours(logits, batch, formula))
    questions = frozenset({"credit", "shape", "ratio"})
    wanted = Found(replace(formula, sure=questions), unexplained=0.0)
    assert codes(wanted) <= codes(found), found.differs


def found_as(*sure, **settings):
    return Found(Formula(sure=frozenset(sure), **settings), unexplained=0.0)


@pytest.mark.parametrize("question, settings, said", [
    ("credit", {"groups": "mixed"}, "Groups are mixed"),
    ("credit", {"count": "token divided by the number of answers"}, "The number of answers"),
    ("ratio", {"ratio": "clip wrong side", "bounds": (.8, 1.2)}, "The clip is on the wrong"),
    ("ratio", {"ratio": "mask", "bounds": (.8, 1.2)}, "The minimum is missing"),
    ("ratio", {"ratio": "inverse ratio"}, "The ratio is upside down")])
def test_a_line_that_is_hardly_ever_meant_is_a_mistake_if_the_question_has_an_answer(
        question, settings, said):
    [mistake] = mistakes(found_as(question, **settings))
    assert mistake.sentence.startswith(said) and mistakes(found_as(**settings)) == []


def test_what_is_unusual_by_its_settings():
    """A batch in place of a group, bounds of 0.2 where 0.8 was meant, a KL to the old model alone.
    """
    for settings, name in (({"groups": "batch"}, "batch"),
                           ({"ratio": "clip", "bounds": (.2, 1.2)}, "clip"),
                           ({"terms": (Term("k3", "token", "trained", .1, " to old"),)},
                            "kl to old")):
        seen = unusual(found_as("credit", "ratio", **settings))
        assert [remark.name for remark in seen] == [name]
    assert unusual(found_as("ratio", ratio="clip", bounds=(-math.inf, 1.2))) == []


@pytest.mark.parametrize("term, settings, code, mistake", [
    (("k3", "answer", "answer"), {}, "kl k3 0.04 answer", []),
    (("entropy", "sum", "trained"), {}, "entropy 0.04 sum", []),
    (("k3", "token of its own", "trained"), {"length": "trained"}, "kl k3 0.04", []),
    (("k3", "token", "answer"), {"kinds": tables.ANSWER - {"end"}}, "kl k3 0.04 on answers", []),
    (("k3", "constant over width of a row", "answer"), {},
     "kl k3 0.04 constant over width of a row", ["kl constant over width of a row"]),
    (("entropy", "sum", "all"), {"count": "sum"}, "entropy 0.04", ["entropy elsewhere"])])
def test_a_term_says_its_counting_and_place_where_they_are_not_those_of_the_policy_loss(
        term, settings, code, mistake):
    found = found_as(terms=(Term(*term, .04),), **settings)
    assert code in codes(found) and [remark.name for remark in mistakes(found)] == mistake
    assert ("entropy elsewhere" in codes(found)) == (term[2] == "all")
    plain = "entropy 0.04" if term[0] == "entropy" else "kl k3 0.04"
    assert bool(unmet(found, [plain])) == (code != plain)


def test_a_mistake_of_two_kl_terms_is_told_once():
    terms = [Term("k3 exchanged", "token", "all", .1), Term("k1", "token", "all", -.1)]
    said = mistakes(found_as(terms=tuple(terms)))
    assert [remark.name for remark in said] == [
        "kl elsewhere", "kl k3 exchanged", "kl reversed", "kl k1"]


def test_a_rounded_advantage_is_told_as_such():
    said = sentences(find_formula(make(advantage_in_float16)))
    assert "may be rounding" in said[-1] and " 0.0%" not in said[-2]
    assert "The nearest formula is the one above" in said[-2]
    other = sentences(found_of("constant baseline"))
    assert not any("rounding" in line for line in other)


def test_of_a_loss_that_is_not_understood_is_said_what_was_measured():
    """It has the advantages 0.1 and -1, and 1 / 32 of the weight, in groups with the rewards 1,
    0.5, 0 and 0, of which the first is above 0.5. Without a ratio the old log-probs move nothing.
    """
    def loss(logits, batch):
        a = torch.where(batch.reward > .5, .1, -1.0)[:, None]
        return -answer(log_probs(logits, batch) * a, batch.mask, batch)

    found = find_formula(loss)
    said = sentences(found)
    assert said[0] == "Not understood. Mistakes: none seen in what is."
    assert not any("(nearest)" in line for line in said) and not found.is_near
    assert [line for line in said if "the ratio of every token is" in line] == [
        f"  - where the ratio of every token is {ratio}: +0.1, -1, -1, -1."
        for ratio in ("0.5", "1", "2")]
    some = Found(differs=dict.fromkeys(["six groups", "ratios", "a", "b", "c"], .5))
    assert sentences(some)[-1].count("50.0% with ") == 5  # four of these if all batches differ


def test_what_does_not_depend_on_the_reward_is_not_said_of_the_whole():
    """The square has a part (sum of log-ratios)^2 that no reward moves."""
    def loss(logits, batch):
        d = ((log_probs(logits, batch) - batch.old_log_prob) * batch.mask).sum(1)
        return (mean(batch)[:, 0] - .1 * d).square().mean()

    found = find_formula(loss)
    assert not found.understood and "no ratio" not in codes(found)
    assert "mean" in codes(found)
    assert any(line.startswith("Advantage, as far as it depends on the reward: ")
               for line in sentences(found))


@pytest.mark.parametrize("loss, sentence", [
    (lambda logits, batch: 1.0, "it returned a float, and a loss is a tensor with one number"),
    (lambda logits, batch: None, "it returned nothing, and a loss is"),
    (lambda logits, batch: logits.sum((1, 2)), "it returned a tensor of shape (16,), and"),
    (lambda logits, batch: logits.detach().sum(), "raised RuntimeError: element 0 of tensors does"),
    (lambda logits, batch: logits.sum() * float("nan"), "its gradient is not finite"),
    (lambda log_prob, advantage, weight: log_prob.sum(),
     "lab.formula calls loss(logits, batch), such as examples/a_loss.py, and this function has the "
     "arguments (log_prob, advantage, weight). `of_log_probs` makes a loss"),
    (lambda logits, batch: sys.exit(0), "it calls sys.exit"),
    (lambda logits, batch: os._exit(0), "it calls os._exit"),
    (lambda logits, batch: logits[99], "it raised IndexError: index 99 is out of bounds for "
     "dimension 0 with size 16 (test_formula.py, line ")])
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
    assert not found.understood and seen in found.differs
    assert any(seen in line for line in sentences(found))


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
    assert [remark.name for remark in unusual(found)] == ["replies"] * (said == "replies")


def test_a_loss_that_refuses_holes_is_not_asked_about_replies():
    def loss(logits, batch):
        if (batch.mask.diff(dim=1) > 0).sum() > len(batch.mask):
            raise ValueError("a hole")
        return make()(logits, batch)
    assert find_formula(loss).trains_replies is None


def test_the_first_right_candidate_is_taken_or_the_nearest():
    left = {"far": .9, "right": 1e-7, "better": 0.0}
    assert first_right(left, left.get) == ("right", 1e-7)
    assert first_right(left, left.get, enough=1e-9) == ("better", 0.0)
    assert first_right(["far"], left.get) == ("far", .9)
    assert first_right(["wild"], lambda name: math.inf) == (None, math.inf)


def test_a_ratio_has_a_sentence_of_its_line():
    """All lines, and two of them as they are read."""
    for name, line in tables.RATIOS.items():
        count = line.function.__code__.co_argcount - 1
        said = about_ratio(Formula(ratio=name, bounds=(.8, 1.25, 3.0)[:count]))
        assert "{" not in said and ("[0.8, 1.25]" in said) == (count > 1)
        assert ("above 3" in said) == (count > 2)
    assert about_ratio(Formula(ratio="cispo", bounds=(-math.inf, .2))).endswith("to at most 0.2")
    assert about_ratio(Formula(ratio="gspo clip dual", bounds=(.8, 1.2, 10.0))) == (
        "that of an answer is clipped as in PPO, to [0.8, 1.2], and a bad answer has no gradient "
        "above 10")


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
        "least 0.1, then clamped to [-5, 5]")
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
    said = sentences(found_of("shift and sign"))
    assert said[0] == "Mistakes: 2."
    assert said[1].startswith("1. [sign reversed] ") and said[2].startswith("2. [shift 0] ")
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
    assert first.name == "no reward" and "only the terms without reward act" in first.sentence
    assert not any("only some" in sentence for sentence in sentences(found))


GOOD = make(z(1, 1e-4), token, clip(.2, .28))
found_of_good = cache(lambda: find_formula(GOOD))
EXPECTED = "z n-1 1e-4, token, clip 0.2 0.28"


def test_an_expectation_holds_as_a_whole():
    found = found_of_good()
    for clauses, missing, unexpected in (
            (EXPECTED, [], []), (f"{EXPECTED}, no kl, temperature 1, end, understood", [], []),
            ("z n-1, token, clip", [], []),  # a number that is left out may be any
            ("z n-1 1e-4, token", [], ["clip 0.2 0.28"]),
            ("z n 1e-4, token, clip 0.2 0.2", ["z n 1e-4", "clip 0.2 0.2"],
             ["z n-1 0.0001", "clip 0.2 0.28"]),
            (f"{EXPECTED}, tokens", ["tokens"], [])):
        verdict = judge(found, clauses)
        assert (verdict.missing, verdict.unexpected) == (missing, unexpected)
        assert verdict.status == bool(missing + unexpected)
    with pytest.raises(ValueError, match="names no clause"):
        judge(found, ",")
    # numbers alone may be left out
    dual = Found(Formula(ratio="clip dual", bounds=(.8, 1.2, 3.0), sure=frozenset({"ratio"})))
    assert unmet(dual, ["clip 0.2 0.2"]) and not unmet(dual, ["clip 0.2 0.2 dual 3"])
    whitened = found_as("credit", scale="n", epsilon=1e-4, finish="whitened n")
    assert unmet(whitened, ["z n 1e-4"]) and "z n 0.0001 whitened n" in unnamed(whitened, ["token"])


@pytest.mark.parametrize("loss, unexpected", [
    (make(z(1, 1e-4), token, clip(.2, .28), sign=-1.0), "sign reversed"),
    (make(z(1, 1e-4), token, misaligned), "old misplaced 1"),
    (make(z(1, 1e-4), token, one_minus_p), "weight 1-p undetached"),
    (make(z(1, 1e-4), token, clip(.2, .28), factor=2.0), "times 2"),
    (make(z(1, 1e-4), token, clip(.2, .28), temperature=.5), "temperature 0.5")])
def test_what_no_clause_names_fails(loss, unexpected):
    with pytest.raises(NotPassed, match=f"Not expected, and so: .*{re.escape(unexpected)}"):
        check(loss, EXPECTED)
    assert "random" in judge(found_of("random"), EXPECTED).unexpected


def test_the_status_of_a_loss_without_an_expectation():
    assert judge(found_of_good()).status == 0
    reversed_sign = found_of("sign")
    assert judge(reversed_sign).status == 1
    assert judge(reversed_sign, allow=["sign reversed"]).status == 0
    assert judge(reversed_sign, "z n 1e-4, token, no ratio", allow=["sign reversed"]).status == 0
    assert judge(reversed_sign, "z n 1e-4, token, no ratio, sign reversed").status == 0
    assert judge(found_of("softcapped")).status == 2
    assert judge(found_of("nothing")).status == 1
    assert check(GOOD).understood


def test_two_losses_have_the_same_gradient_or_it_is_said_where_not():
    def rewritten(logits, batch):
        """As GOOD, in another form: the smaller term by the sign of the advantage."""
        a = z(1, 1e-4)(batch)
        r = (log_probs(logits, batch) - batch.old_log_prob).exp()
        value = torch.where(a >= 0, r.clamp(max=1.28) * a, r.clamp(min=.8) * a)
        return -(value * batch.mask).sum() / batch.mask.sum()

    same = differences(GOOD, rewritten)
    assert max(same.values()) < 1e-12 and "replies of an environment" in same
    other = differences(GOOD, make(z(1, 1e-4), token, clip(.2, .2)))
    assert {name for name, share in other.items() if share > 1e-6} == {
        "ratios", "another reference", "replies of an environment"}
    assert max(differences(GOOD, make(z(1, 0.0), token, clip(.2, .28))).values()) == math.inf
    unknown = LOSSES["softcapped"][0]  # needs no table
    assert max(differences(unknown, unknown).values()) == 0.0
    def but_for_rounding(size):
        return lambda logits, batch: GOOD(logits, batch) * float(
            len(batch.group.unique()) < 6) + size * logits.sum()

    assert differences(but_for_rounding(0.0), but_for_rounding(1e-25))["six groups"] < 1e-6
    with pytest.raises(LossFailed, match="neither"):
        differences(LOSSES["nothing"][0], LOSSES["nothing"][0])


def test_an_adapter_gives_the_advantages_of_answers():
    """(B, 1, T) would be made of (B, T), and then (B, B, T), whose mean is 0."""
    def theirs(new, old, advantages, mask):
        return -((new - old).exp() * advantages.unsqueeze(1) * mask).sum() / mask.sum()

    check(of_log_probs(theirs, per_token=False), "z n-1 1e-4, token, ratio")
    found = find_formula(of_log_probs(theirs))
    assert found.is_zero and "per_token=False" in sentences(found)[-1]


def test_an_adapter_for_a_loss_of_log_probs():
    """verl's order of arguments, and a tuple that it returns."""
    def theirs(old_log_prob, log_prob, advantages, response_mask):
        r = (log_prob - old_log_prob).exp()
        value = torch.max(-advantages * r, -advantages * r.clamp(.8, 1.28))
        return (value * response_mask).sum() / response_mask.sum(), {"clipped": 0.0}

    check(of_log_probs(lambda new, old, advantage, mask: theirs(old, new, advantage, mask)),
          "z n-1 1e-4, token, clip 0.2 0.28")
    check(of_log_probs(lambda new, old, advantage, mask: theirs(old, new, advantage, mask),
                       lambda batch: over_the_std_of_others(batch)[:, 0]),
          "minus leave one out over n-1 of others 1e-06, token, clip 0.2 0.28")


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
    assert main([str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "divided by the std of its group over n - 1 + 1e-06" in printed
    assert main([str(path), "--expect", "z n-1, answer, no ratio"]) == 1
    printed = capsys.readouterr().out
    assert "Expected, and not so: answer.\nNot expected, and so: token." in printed
    assert 'as an expectation: "z n-1 1e-06, token, no ratio"' in printed
    for more, said in ((["--same-as", str(path), "--expect", "token"], "takes no --expect"),
                       (["--allow", "nonsense"], "no mistake has the name 'nonsense'"),
                       (["--function", "broken"], "with size 16 (my_loss.py, line 15)"),
                       (["--function", "absent"], "has no function"),
                       (["--expect", ","], "names no clause")):
        assert main([str(path), *more]) == 2 and said in capsys.readouterr().err
    assert main([str(tmp_path / "none.py")]) == 2
    assert "there is no Python file" in capsys.readouterr().err


def test_json_and_a_comparison_on_the_command_line(tmp_path, capsys):
    for name, old, new in (("good", "", ""), ("bad", "return -(", "return ("),
                           ("dead", " + 1e-6", "")):
        (tmp_path / f"{name}.py").write_text(FILE.replace(old, new))
    good, bad = str(tmp_path / "good.py"), str(tmp_path / "bad.py")
    assert main([bad, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == 1 and said["understood"]
    assert [remark["name"] for remark in said["mistakes"]] == ["sign reversed"]
    assert main([bad, "--json", "--allow", "sign reversed"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == 0
    assert main([good, "--json", "--function", "absent"]) == 2
    assert "has no function" in json.loads(capsys.readouterr().out)["error"]
    assert main([good, "--same-as", good]) == 0
    assert "The same gradient as" in capsys.readouterr().out
    assert main([good, "--same-as", str(tmp_path / "dead.py"), "--json"]) == 1
    differs = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["differs"]
    assert differs["groups with equal rewards"] is None
    assert main([good, "--same-as", bad]) == 1
    assert "more than" not in capsys.readouterr().out.partition("ordinary batches")[0][:20]


@pytest.mark.slow
def test_a_loss_that_never_ends_or_leaves_the_program_is_told(tmp_path):
    """Each would end a test program with the status 0, or not at all."""
    for text, said in (("    while True:\n        pass", "did not end within 3 seconds"),
                       ("    import os\n    os._exit(0)", "it calls os._exit")):
        (tmp_path / "my_loss.py").write_text(f"def loss(logits, batch):\n{text}\n")
        typed = ["-m", "lab.formula", str(tmp_path / "my_loss.py"), "--seconds", "3", "--json"]
        done = subprocess.run([sys.executable, *typed], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr
        assert said in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("text, said", [
    ("import no_such_package", "ModuleNotFoundError"),
    ("def loss(", r"SyntaxError: '\(' was never closed \(my_loss.py, line 1\)$"),
    ("import sys\nsys.exit(0)", "it calls sys.exit"),
    ("import os\nos._exit(0)", "it calls os._exit")])
def test_a_file_that_cannot_be_loaded(tmp_path, text, said):
    path = tmp_path / "my_loss.py"
    path.write_text(text)
    with pytest.raises(LossFailed, match=said):
        load_loss(path)


def test_the_folder_works_alone(tmp_path):
    """Copied into an empty folder, with torch and nothing of this project, it names itself."""
    shutil.copytree(ROOT / "lab/formula", tmp_path / "grpo_formula")
    (tmp_path / "my_loss.py").write_text(FILE)
    done = subprocess.run([sys.executable, "-m", "grpo_formula", "my_loss.py", "--expect",
                           "z n-1, token, no ratio"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Mistakes: none seen.") == 1
    helped = subprocess.run([sys.executable, "-m", "grpo_formula", "--help"], cwd=tmp_path,
                            capture_output=True, text=True).stdout
    assert "python -m grpo_formula MY_LOSS.py" in helped and "lab.formula" not in helped


def test_functions_are_taken_without_the_rest_of_their_file(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("import no_such_package\n\ndef helper(x):\n    return x * FACTOR\n")
    assert take(path, ["helper"], FACTOR=3).helper(2) == 6
    assert "no_such_package" not in sys.modules
    with pytest.raises(LossFailed, match="another version"):
        take(path, ["absent"])
