"""The noise-to-signal ratio of a batch's gradient."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import refusal
from torch import nn

from engine.errors import UserError
from lab.__main__ import main
from lab.probes.common import policy_from_flags, sample_batch
from lab.probes.signal import (PLAIN, Unmoved, cosine, folded, folded_gradient,
                                    inner_products, mean_of_pairs, noise_to_signal, ratio_table,
                                    refuse_beyond_memory, settings_of)


def parameters(*gradients):
    found = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(*gradient.shape))
        parameter.grad = gradient
        found.append(parameter)
    return found


def test_by_hand():
    """Two batches with the gradients (3, 1) and (1, 3): <g_1, g_2> = 6 is the squared signal, and
    both have the square 10, so the noise is 4. Doubled gradients have the same ratio."""
    one = torch.tensor([[3.0, 1.0], [1.0, 3.0]])
    inner = inner_products([one, 2 * one])
    assert inner.shape == (2, 2, 2, 2)
    assert inner[0, 0].tolist() == [[10, 6], [6, 10]]
    assert inner[0, 1].tolist() == [[20, 12], [12, 20]]
    assert mean_of_pairs(inner[0, 0]) == 6
    assert noise_to_signal(inner[0, 0]) == noise_to_signal(inner[1, 1]) == pytest.approx(4 / 6)
    assert cosine(inner) == pytest.approx(1)
    turned = torch.tensor([[-1.0, 3.0], [-3.0, 1.0]])  # by 90 degrees
    assert cosine(inner_products([one, turned])) == pytest.approx(0)
    assert np.isnan(noise_to_signal(np.array([[1.0, -0.1], [-0.1, 1.0]])))  # no signal is seen


def test_a_ratio_is_found_again():
    """100 batches whose gradients are 1 in each of 50 places plus noise of variance 4: the squared
    signal is 50, the noise 200. With half of the noise's length a method is worth a batch four
    times as large."""
    generator = torch.Generator().manual_seed(0)
    noise = 2 * torch.randn(100, 50, generator=generator)
    inner = inner_products([1 + noise, 3 * (1 + noise / 2)])
    table = ratio_table([PLAIN, "quieter"], inner)
    plain, quieter = ({name: cell for name, cell in zip(("ratio", "factor", "cosine"), row[1:])}
                      for row in table.rows)
    assert plain["ratio"].value == pytest.approx(4, rel=0.15)
    assert plain["ratio"].low < 4 < plain["ratio"].high and plain["factor"] is None
    assert quieter["factor"].low < 4 < quieter["factor"].high
    assert quieter["cosine"].value == pytest.approx(1, abs=0.05)
    assert "quieter: its gradient is as noisy as that of plain GRPO with a batch" in table.finding


def test_folding_keeps_inner_products_on_average():
    """Two gradients of 70 numbers each, folded into 16, over 4,000 ways to fold: the mean of the
    inner products is that of the whole gradients. A parameter without gradient counts as 0, and
    changes nothing for those after it."""
    generator = torch.Generator().manual_seed(1)
    one, two = (torch.randn(70, generator=generator) for _ in range(2))
    two += one / 2
    of_one, of_two = parameters(one[:40].view(8, 5), one[40:]), parameters(two[:40], two[40:])
    found = torch.stack([folded(of_one, 16, seed) @ folded(of_two, 16, seed)
                         for seed in range(4000)])
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - one @ two) < 4 * error and error < 0.05 * abs(one @ two)
    assert torch.equal(folded(of_one, 16), folded(of_one, 16))
    of_one[0].grad = None
    zeros = parameters(torch.zeros(8, 5))
    assert torch.equal(folded(of_one, 16), folded([*zeros, of_one[1]], 16))


def test_the_probe(learner, tmp_path, monkeypatch, capsys):
    """With weights that are all the same number, a method is plain GRPO."""
    monkeypatch.chdir(tmp_path)
    small = ["--model", str(learner), "--questions", "4", "--answers", "8", "--batches", "4",
             "--max_new_tokens", "24"]
    main(["signal", *small, "--only", "by_kind --word_weight 1, entropy_weighted"])
    numbers = json.loads((tmp_path / "results" / "signal-s0" / "numbers.json").read_text())
    plain, same, other = (list(row.values()) for row in numbers["tables"][0]["rows"])
    assert same[1:] != other[1:] and plain[1] == same[1]
    assert "batch 1.00 times as large" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--placebo weights", "--drop_unfinished", "--rescale gradient",
                                   "--loss_norm sequence"])
def test_a_flag_of_training_that_is_taken_changes_the_gradient(learner, flags):
    """Every method with it, against the same method without it, in one batch."""
    args = SimpleNamespace(model=str(learner), max_new_tokens=24, device="cpu", threads=1, seed=0,
                           config=None)
    policy = policy_from_flags(args)
    batch = sample_batch(policy, questions=4, answers=8)
    assert 0 < batch.finished.sum() < len(batch.finished)
    optimizer = Unmoved(policy.model.parameters(), learning_rate=0.0)
    plain, changed = (folded_gradient(policy, optimizer, batch, settings_of(typed, args), 1)
                      for typed in ("by_kind --word_weight 9", f"by_kind --word_weight 9 {flags}"))
    assert plain.any() and changed.any()
    assert (changed - plain).norm() > 0.01 * plain.norm()


def test_more_gradients_than_fit_are_refused(monkeypatch):
    monkeypatch.setattr("lab.probes.signal.bytes_of_machine", lambda: 400 * 2 ** 20)
    refuse_beyond_memory(5, 10)  # 50 gradients of 4 MB
    assert "name fewer batches" in refusal(refuse_beyond_memory, 6, 10)


@pytest.mark.parametrize("typed, said", [
    ("nothing", "there is no weighting or advantage 'nothing'"),
    ("", "there is no weighting or advantage ''"), ("by_kind --speed 3", "speed"),
    ("dpo", "there is no weighting or advantage 'dpo'"), ("'by_kind", "No closing quotation"),
    ("by_kind --mitigation none", "names two choices of --mitigation"),
    *((f"by_kind --{flag}", f"--{flag.split()[0]} makes no other method here")
      for flag in ("temperature 0.6", "kl 0.1", "epochs 3", "questions 4", "answers 4", "seed 7",
                   "numbers 3", "max_grad_norm 0.1", "steps 9"))])
def test_what_is_no_method(typed, said):
    args = SimpleNamespace(model="models/tiny", max_new_tokens=0, device="cpu", threads=1, seed=0,
                           config=None)
    with pytest.raises((UserError, SystemExit), match=said):
        settings_of(typed, args)
