"""The noise of a gradient from its parts: by hand, against exact numbers where all batches are
listed, and in a real backward pass."""
import itertools

import numpy as np
import pytest
import torch

from lab.tools import page as program
from lab.engine.methods import ADVANTAGES
from lab.gradient_noise import PartNorms, in_words, noise_of, noise_share, parts_of, share_with
from lab.tests.listed import Kind, World
from runs import lines, run


def test_noise_by_hand():
    """Parts (2, 1) and (0, 1) differ by (2, 0). Of (3, 0), (0, 0) and (0, 0) one has all."""
    assert noise_of([5.0, 1.0], 8.0) == 4.0
    assert noise_of([9.0, 0.0, 0.0], 9.0) == (3 * 9 - 9) / 2
    assert noise_of([1.0, 1.0], 4.0) == 0.0 and noise_of([5.0], 5.0) is None
    assert noise_of([1.0, 1.0], 4.0 + 1e-9) == 0.0


@pytest.mark.parametrize("name, kind, k", [
    ("grpo", Kind(turns=2, problems=3, limit=4, stop=(0, 1, 2)), 2),
    ("rloo", Kind(turns=3, problems=3, limit=7, stop=(0, 1), vocabulary=2), 2),
    ("turn_mean", Kind(turns=2, problems=3, limit=4, stop=(0, 1, 2), size=1), 3)])
def test_noise_and_signal_are_unbiased(name, kind, k):
    """All batches of k groups, of which each is a random answer to a random problem: the mean
    estimates are the variance of the batch's gradient, and the squared length of its mean."""
    chances, gradients = World(kind).estimates(ADVANTAGES[name])
    mean = chances @ gradients
    variance = float(chances @ (gradients - mean).square().sum(1)) / k
    noise = signal = 0.0
    products = (gradients @ gradients.T).tolist()
    p = chances.tolist()
    for groups in itertools.product(range(len(p)), repeat=k):
        squares = [products[group][group] / k ** 2 for group in groups]
        of_sum = sum(products[one][other] for one in groups for other in groups) / k ** 2
        chance = np.prod([p[group] for group in groups])
        found = noise_of(squares, of_sum)
        noise, signal = noise + chance * found, signal + chance * (of_sum - found)
    assert noise == pytest.approx(variance, rel=1e-6)
    assert signal == pytest.approx(float(mean @ mean), rel=1e-6)


def test_the_parts_of_a_backward_pass():
    """Two parts, of which the first has two micro-batches. A parameter without a gradient is 0."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1)])
    norms = PartNorms(model)
    for inputs, ends in (([1.0, 0.0], False), ([1.0, 1.0], True), ([0.0, 1.0], True)):
        model[0](torch.tensor(inputs)).sum().backward()
        if ends:
            norms.end_part()
    assert norms.squares == [5.0, 1.0] and norms.noise == 4.0
    assert PartNorms(model).noise is None


def test_parts_have_equally_many_problems():
    group = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5])
    assert [part.tolist() for part in parts_of(group, 3)] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    assert len(parts_of(group, 4)) == 3 and len(parts_of(group[:4] * 0, 8)) == 1
    assert len(parts_of(torch.arange(7), 3)) == 1 and len(parts_of(torch.arange(7), 9)) == 7


def test_the_share_over_steps():
    """In each step half of the square is noise. A step that was skipped is left out; with four
    times the problems 1/8 of 5/8 is noise."""
    noise = [2.0, 4.0] * 10
    length = [2.0, 8 ** 0.5] * 10
    share = noise_share([*noise, None, 1.0], [*length, 2.0, None])
    assert share.value == pytest.approx(0.5) and share.low == pytest.approx(share.high)
    assert share_with(0.5, 4) == pytest.approx(1 / 5) and share_with(1.0, 4) == 1.0
    assert "about 50% was noise (50% to 50%). With four times the problems about 20%" in in_words(
        share)
    assert noise_share(noise[:19], length[:19]) is None and "not known" in in_words(None)


def test_the_interval_holds_the_truth():
    """Of 200 simulated runs of 60 steps, in which the gradient of each step is that of two halves.
    95% of the intervals should hold 1 / (1 + 1 / 4); by chance 180 to 199."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(200):
        halves = generator.normal(size=(60, 2, 10)) * 2 ** 0.5 / 10 ** 0.5 / 2 ** 0.5
        halves[:, :, 0] += 0.25 * 2 ** 0.5 / 2 ** 0.5
        squares, of_sum = (halves ** 2).sum(2), (halves.sum(1) ** 2).sum(1)
        noise = [noise_of(list(part), whole) for part, whole in zip(squares, of_sum)]
        share = noise_share(noise, list(of_sum ** 0.5))
        truth = 2.0 / (2.0 + 0.25)
        held += share.low <= truth <= share.high
    assert 180 <= held <= 199


def test_a_run_measures_it_and_its_page_says_it(learner, tmp_path, capsys):
    """The gradient is that of a run without the flag, to rounding."""
    common = ["--model", learner, "--questions", 4, "--answers", 4, "--steps", 6, "--eval_every",
              0, "--checkpoint_every", 0, "--change_every", 0, "--learning_rate", 1e-9]
    run(*common, "--out", tmp_path / "plain")
    run(*common, "--noise_parts", 2, "--out", tmp_path / "parts")
    plain, parts = (lines(tmp_path / name / "metrics.jsonl") for name in ("plain", "parts"))
    for one, other in zip(plain, parts):
        if one["gradient_norm"]:
            assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
            # with two parts the noise is |g_1 - g_2|^2, and |g|^2 is |g_1 + g_2|^2
            assert other["gradient_noise"] > 0
        assert one["gradient_noise"] is None
    program.main([str(tmp_path / "parts")])
    assert " noise" in capsys.readouterr().out
