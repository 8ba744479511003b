"""The best baseline by hand, by a grid, and in a bandit of three actions small enough to draw every
possible sample."""
import itertools

import numpy as np
import pytest
import torch
from conftest import spoken

from engine.forward import response_log_probs
from research.probes.baseline import (
    BEST, LENGTH, MEAN, NOTHING, OWN, Answers, baselines_table, beside_the_mean, draw_others,
    measure_answers, noise_of_baselines, over_questions, second_moment, square_of_expectation,
    weighted_mean)

P = np.array([0.5, 0.25, 0.25])   # of the bandit's actions
SCORES = np.eye(3) - P            # grad log p of each: |g|^2 = 0.375, 0.875, 0.875
SQUARE = (SCORES ** 2).sum(1)
STEEP = np.array([1.0, 0.0, 0.2])  # rewards with Cov(|g|^2, R) above 0


def generator(seed=0):
    return np.random.default_rng(seed)


def samples(n):
    """Every sample of n actions (3^n, n), and how likely it is."""
    drawn = np.array(list(itertools.product(range(3), repeat=n)))
    return drawn, P[drawn].prod(1)


def known_answers(reward, square, length, squared_mean=0.0):
    return Answers(reward, square, length, np.full(len(reward), squared_mean))


def test_the_best_baseline_by_hand_and_by_a_grid():
    """|g|^2 = 1, 3 and R = 0, 1: b* = 3 / 4, where the noise is (1 * 9/16 + 3 * 1/16) / 2 = 3 / 8.
    Elsewhere E|g|^2 = 2 times the square of the distance is added."""
    reward, square = np.array([[0.0, 1.0]]), np.array([[1.0, 3.0]])
    assert weighted_mean(reward, square) == pytest.approx(0.75)
    grid = np.linspace(-1, 2, 301)
    noise = np.array([second_moment(reward, square, b)[0] for b in grid])
    np.testing.assert_allclose(noise, 0.375 + (grid - 0.75) ** 2 * 2)


def test_others_are_any_others_and_never_the_answer_itself():
    drawn = draw_others(5, 3, 4000, generator())
    assert drawn.shape == (4000, 5, 3)
    for i in range(5):
        counts = np.bincount(drawn[:, i].ravel(), minlength=5)
        assert counts[i] == 0
        assert all(len(set(row)) == 3 for row in drawn[:50, i].tolist())
        assert np.delete(counts, i) / 4000 == pytest.approx([0.75] * 4, abs=0.03)


@pytest.mark.parametrize("k", [1, 2])
def test_a_mean_of_k_others_costs_the_variance_of_a_mean(k):
    """Averaged over every sample of three answers: E[(R - E R)^2 |g|^2] + Var(R) E|g|^2 / k. With
    the answer's own reward among the others, or its weight among theirs, it would be lower."""
    drawn, likely = samples(3)
    answers = known_answers(STEEP[drawn], SQUARE[drawn], length=SQUARE[drawn])
    noise = noise_of_baselines(answers, {k: draw_others(3, k, 50, generator())})
    centred = STEEP - P @ STEEP
    expected = P @ (centred ** 2 * SQUARE) + P @ centred ** 2 * (P @ SQUARE) / k
    assert likely @ noise[MEAN, k] == pytest.approx(expected)
    np.testing.assert_allclose(noise[BEST, k], noise[LENGTH, k])  # the lengths are |g|^2 here
    best = P @ (SQUARE * STEEP) / (P @ SQUARE)
    least = P @ ((STEEP - best) ** 2 * SQUARE)
    assert likely @ noise[BEST, k] > least > likely @ noise[OWN, k]
    assert likely @ noise[NOTHING, k] == pytest.approx(P @ (STEEP ** 2 * SQUARE))


def test_the_square_of_the_expectation_is_without_bias():
    """Over every sample of three answers."""
    drawn, likely = samples(3)
    reward, truth = STEEP[drawn], (P * STEEP) @ SCORES
    advantage = (reward - reward.mean(1, keepdims=True)) * 3 / 2
    terms = advantage[:, :, None] * SCORES[drawn]  # (27, 3, 3)
    squares, total = (terms ** 2).sum(2), (terms.sum(1) ** 2).sum(1)
    estimates = [square_of_expectation(t, s) for t, s in zip(total, squares)]
    assert likely @ estimates == pytest.approx(truth @ truth)


def test_sums_over_questions_by_hand():
    """12 over 6: the ratio is 2, the residuals 1 -1 0 0 0 0 have the standard deviation
    sqrt(2 / 5); t of 5 is 2.571."""
    e = over_questions(np.array([3.0, 1, 2, 2, 2, 2]), np.ones(6))
    assert e.value == 2
    assert e.high - 2 == pytest.approx(2.5706 * np.sqrt(2 / 5) / np.sqrt(6), rel=1e-3)
    assert np.isnan(over_questions(np.ones(5), np.ones(5)).low)
    assert np.isnan(over_questions(np.zeros(6), np.zeros(6)).value)


def test_gradients_of_answers_are_squared_and_summed_as_they_should(policy):
    """Two problems, three answers each: against one backward pass at a time."""
    batch, shares, parameters = spoken(policy), [], list(policy.model.parameters())
    answers = measure_answers(policy, batch, shares.append)
    assert shares[-1] == 1

    def gradient(b):
        log_prob = response_log_probs(policy.model, batch, torch.tensor([b]))
        parts = torch.autograd.grad(log_prob.sum(), parameters, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    g = torch.stack([gradient(b) for b in range(6)]).double().view(2, 3, -1)
    np.testing.assert_allclose(answers.square, g.square().sum(2), rtol=1e-4)
    np.testing.assert_allclose(answers.length.ravel(), batch.length)
    for q in range(2):
        R = batch.reward[3 * q:3 * q + 3].double()
        x = (R - (R.sum() - R) / 2)[:, None] * g[q]
        pairs = sum(x[i] @ x[j] for i, j in itertools.permutations(range(3), 2)) / 6
        assert answers.squared_mean[q] == pytest.approx(pairs.item() / 1.25, rel=1e-3)


def test_verdicts_follow_from_the_numbers():
    """Eight problems in which wrong answers have nine times the |g|^2, and length knows it."""
    reward = np.tile([1.0, 0.0], (8, 8))
    square = np.where(reward, 1.0, 9.0) + generator().random((8, 16))
    answers = known_answers(reward, square, length=10 * square, squared_mean=0.1)
    others = {15: draw_others(16, 15, 1, generator())}  # all
    table = baselines_table(answers, noise_of_baselines(answers, others))
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    mean = ((reward - 0.5) ** 2 * square).mean() * (16 / 15) ** 2
    assert rows[MEAN]["variance"] == 0 and rows[MEAN]["against a mean"] == "-"
    nothing = (reward ** 2 * square).mean()
    assert rows[NOTHING]["variance"] == pytest.approx((nothing - mean) / (mean - 0.1))
    words = {name: row["against a mean"] for name, row in rows.items()}
    assert words == {NOTHING: "less noise", MEAN: "-", BEST: "less noise", LENGTH: "less noise",
                     OWN: "-"}


def test_holm_leaves_out_what_is_not_a_comparison():
    more, equal = np.array([2.0, 2.2, 1.8, 2.0, 2.2, 1.8]), np.ones(6)
    found = beside_the_mean({(MEAN, 7): equal, (OWN, 7): more, (BEST, 7): more})
    assert {row: word for row, (_, word) in found.items()} == {(BEST, 7): "more noise"}
