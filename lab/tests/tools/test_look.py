"""What an idea does to the gradient, by hand."""
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import ROOT
from lab.engine.tokens import NUMBER, THINK, WORD
from lab.harness.build import load_policy, make_advantage, make_weighting
from lab.harness.settings import make_settings
from lab.analysis.weights import about_gradient, differs_within
from lab.tools.idea import credited, look, sample

KIND, ONES = np.array([WORD] * 8 + [NUMBER] * 2), np.ones(10)


def test_a_weighting_of_ten_tokens():
    """Eight words of weight 0.5 and two numbers of weight 3, sizes alike: shares 4/10 and 6/10 of
    8/10 and 2/10. A tenth is one token, but both numbers are equally heavy: they have 6 of 10."""
    weight = np.where(KIND == NUMBER, 3.0, 0.5)
    lines = about_gradient(True, KIND, ONES, ONES, ONES, weight, weight)
    assert lines[0].endswith("in plain GRPO: number 3.00, word 0.50")
    assert "the heaviest 20% of the tokens have 60% of all weight" == lines[1]


@pytest.mark.parametrize("lifted, said", [
    (0, "all tokens have the same share of all weight"),
    (1, "the heaviest 0.5% of the tokens have 9% of all weight"),
    (10, "the heaviest 5% of the tokens have 51% of all weight"),
    (20, "the heaviest 10% of the tokens have 69% of all weight"),
    (190, "the heaviest 95% of the tokens have 100% of all weight")])
def test_the_heaviest_are_those_that_are_lifted(lifted, said):
    """Of 200 tokens some have weight 20, all others 1. 10 of them have 200 of 390; the last of a
    tenth has weight 1, as most have."""
    weight = np.array([20.0] * lifted + [1.0] * (200 - lifted))
    kind, ones = np.array([WORD] * 200), np.ones(200)
    assert about_gradient(True, kind, ones, ones, ones, weight, weight)[1] == said


def test_equal_weights_stay_equal_where_batches_are_rescaled_differently():
    """Five tokens of each batch, of which two got 1 from the weighting and three 0.25. The second
    batch's factor is 2% larger. Four of ten are the heaviest, and not only the second batch's."""
    returned = np.array([1.0, 1.0, 0.25, 0.25, 0.25] * 2)
    rescaled = returned * np.repeat([1.0, 1.02], 5)
    for order, share in ((returned, 40), (rescaled, 20)):
        lines = about_gradient(True, KIND, ONES, ONES, ONES, rescaled, order)
        assert f"the heaviest {share}% of the tokens" in lines[1]


def test_weights_of_whole_answers_have_no_noise_to_take_away():
    """Two answers of two tokens and one; what is behind an answer's last token does not count."""
    mask = torch.tensor([[True, True], [True, False]])
    assert not differs_within(torch.tensor([[2.0, 2.0], [1.0, 0.0]]), mask)
    assert differs_within(torch.tensor([[2.0, 1.0], [1.0, 0.0]]), mask)
    lines = about_gradient(True, KIND, ONES, ONES, ONES, ONES, ONES, False)
    assert "all tokens of an answer have the same weight" in lines[-1]


def test_an_advantage_has_signs():
    """Of nine tokens where both have one, three turned. These are the largest, with 6 of 12."""
    mine = np.array([1, 1, 1, 1, 1, 1, -2, -2, -2, 0.0])
    lines = about_gradient(False, KIND, ONES, ONES, mine, ONES, ONES)
    assert lines[1] == ("the 30% of the tokens with the largest advantages have 50% of the sum of "
                        "abs(A)")
    assert lines[2].startswith("the sign of the new advantage differs from that of plain GRPO's at "
                               "33% ")


def test_of_a_large_model_one_batch_is_looked_at(monkeypatch, capsys):
    s = make_settings({"model": str(ROOT / "models/tiny"), "threads": 1, "questions": 2,
                       "answers": 4, "max_new_tokens": 48})
    monkeypatch.setattr("lab.engine.model.Qwen2.is_large", True)
    look("itself", s, s, True)
    said = capsys.readouterr().out
    assert "for 8 answers" in said and "all tokens of an answer have the same" in said


def test_it_is_what_training_gives_the_tokens(capsys):
    """The untrained model's answers; weights of plain GRPO change nothing."""
    plain = {"model": str(ROOT / "models/tiny"), "threads": 1, "questions": 2, "answers": 4,
             "max_new_tokens": 48}
    settings = [make_settings(plain | more) for more in ({}, {"mitigation": "by_kind"})]
    look("itself", settings[0], settings[0], True)
    printed = capsys.readouterr().out
    assert "for 32 answers" in printed and "all tokens of an answer have the same weight" in printed
    gradient = printed.partition("in plain GRPO: ")[2].partition("all tokens")[0]
    assert {part.split()[-1] for part in gradient.split(", ")} == {"1.00"}
    assert look("by_kind", *settings, True)  # tokens are of several categories
    said = capsys.readouterr().out
    assert "word 0." in said and "operator 1." in said
    # equal weights are equal in all four batches, although each batch is rescaled differently
    policy, heavy, total = load_policy(settings[0]), 0, 0
    for step in range(1, 5):
        batch = sample(policy, settings[0], step)
        heavy += int((batch.mask & ~((batch.kind == WORD) & (batch.section == THINK))).sum())
        total += int(batch.mask.sum())
    assert f"the heaviest {heavy / total:.0%} of the tokens" in " ".join(said.split())


def test_answers_that_are_dropped_have_no_weight(monkeypatch):
    """Of two answers to a problem one ends: the tokens of that one weigh 1 on average."""
    s = make_settings({"model": str(ROOT / "models/tiny"), "questions": 2, "answers": 2,
                       "max_new_tokens": 40, "drop_unfinished": True, "mitigation": "by_kind"})
    policy = load_policy(s)
    batch = sample(policy, s, 1)
    finished = torch.tensor([True, False, True, False])
    batch = replace(batch, finished=finished)
    rollouts, weight, _ = credited(
        batch, (make_advantage(s, policy), make_weighting(s, policy)), policy, s, 1)
    assert rollouts.mask[finished].any() and not rollouts.mask[~finished].any()
    assert weight[rollouts.mask].mean().item() == pytest.approx(1)
