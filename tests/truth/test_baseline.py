"""The best baseline by hand, by a grid, and in a bandit of three actions small enough to draw every possible sample."""
import itertools
import json

import numpy as np
import pytest
import torch

from truth import __main__ as probes
from conftest import spoken
from engine.forward import response_log_probs
from truth import baseline
from truth.baseline import (BEST, LENGTH, MEAN, NOTHING, OWN, TOKEN, Answers, beside_the_mean, correlations, differences, gaps, look, noise_of,
                            others_of, over_questions, saving, second_moment, sides, square_of_expectation, token_advantage, token_baseline,
                            weighted_mean)

P = np.array([0.5, 0.25, 0.25])   # of the bandit's actions
SCORES = np.eye(3) - P            # grad log p of each: |g|^2 = 0.375, 0.875, 0.875
SQUARE = (SCORES ** 2).sum(1)
FLAT, STEEP = np.array([0.5, 1.0, 0.0]), np.array([1.0, 0.0, 0.2])  # rewards with Cov(|g|^2, R) = 0, and another


def samples(n):
    """Every sample of n actions (3^n, n), and how likely it is."""
    drawn = np.array(list(itertools.product(range(3), repeat=n)))
    return drawn, P[drawn].prod(1)


def known_answers(reward, square, length=None, by_token=()):
    reward, square = np.atleast_2d(reward).astype(float), np.atleast_2d(square).astype(float)
    length = np.ones_like(reward) if length is None else np.atleast_2d(length).astype(float)
    return Answers(reward, square, length, square, dict(by_token), np.zeros(len(reward)))


def test_the_best_baseline_by_hand_and_by_a_grid():
    """|g|^2 = 1, 3 and R = 0, 1: b* = 3 / 4, where the noise is (1 * 9/16 + 3 * 1/16) / 2 = 3 / 8."""
    reward, square = np.array([[0.0, 1.0]]), np.array([[1.0, 3.0]])
    best = weighted_mean(reward, square)
    assert best == pytest.approx(0.75) and second_moment(reward, square, best[:, None]) == pytest.approx(0.375)
    grid = np.linspace(-1, 2, 301)
    noise = np.array([second_moment(reward, square, b)[0] for b in grid])
    assert grid[noise.argmin()] == pytest.approx(0.75)
    np.testing.assert_allclose(noise, 0.375 + (grid - 0.75) ** 2 * 2)  # E|g|^2 = 2


@pytest.mark.parametrize("reward, best, excess", [(FLAT, 0.5, 0.0), (STEEP, 0.37, 0.02025)])
def test_the_mean_is_best_exactly_without_covariance(reward, best, excess):
    """As a population of four answers, a a b c. STEEP: mean 0.55, E|g|^2 = 0.625, E[|g|^2 R] = 0.1875 + 0.04375,
    so b* = 0.37 and the excess is 0.18^2 * 0.625."""
    actions = [0, 0, 1, 2]
    R, square = reward[actions][None], SQUARE[actions][None]
    assert weighted_mean(R, square) == pytest.approx(best)
    found = gaps(known_answers(np.tile(R, 16), np.tile(square, 16)))[0]
    assert found.value == pytest.approx(best - R.mean())
    assert second_moment(R, square, R.mean()) - second_moment(R, square, best) == pytest.approx(excess)
    assert (R.mean() - best) ** 2 * square.mean() == pytest.approx(excess)
    assert (found.p < 0.05) == (excess > 0)


def test_a_question_with_few_rewards_of_a_kind_has_no_interval():
    reward = np.array([[1.0] * 5 + [0.0] * 15, [1.0] * 6 + [0.0] * 14, [0.1] * 20])
    found = gaps(known_answers(reward, np.tile(np.arange(1.0, 21), (3, 1))))
    assert [np.isfinite(e.p) for e in found] == [False, True, False] and sides(found) == ["too few", "lower", "too few"]
    assert found[2].value == pytest.approx(0)


def test_the_interval_of_a_gap_covers_the_truth():
    drawn = np.random.default_rng(0).choice(3, (600, 64), p=P)
    found = gaps(known_answers(STEEP[drawn], SQUARE[drawn]))
    assert 0.93 < np.mean([e.low < 0.37 - 0.55 < e.high for e in found]) < 0.97


def test_others_are_any_others_and_never_the_answer_itself():
    chosen = others_of(5, 3, 4000, np.random.default_rng(0))
    assert chosen.shape == (4000, 5, 3)
    for i in range(5):
        counts = np.bincount(chosen[:, i].ravel(), minlength=5)
        assert counts[i] == 0 and all(len(set(row)) == 3 for row in chosen[:50, i].tolist())
        assert np.delete(counts, i) / 4000 == pytest.approx([0.75] * 4, abs=0.03)
    assert {frozenset(row) for row in others_of(5, 4, 1, np.random.default_rng(1))[0].tolist()} == {frozenset(range(5)) - {i} for i in range(5)}


@pytest.mark.parametrize("k", [1, 2])
def test_a_mean_of_k_others_costs_the_variance_of_a_mean(k):
    """Averaged over every sample of three answers: E[(R - E R)^2 |g|^2] + Var(R) E|g|^2 / k. With the answer's own reward
    among the others, or its weight among theirs, it would come out lower."""
    drawn, likely = samples(3)
    answers = known_answers(STEEP[drawn], SQUARE[drawn], SQUARE[drawn], {k: np.zeros((27, 3))})
    noise = noise_of(answers, {k: others_of(3, k, 50, np.random.default_rng(0))})
    centred = STEEP - P @ STEEP
    assert likely @ noise[MEAN, k] == pytest.approx(P @ (centred ** 2 * SQUARE) + P @ centred ** 2 * (P @ SQUARE) / k)
    np.testing.assert_allclose(noise[BEST, k], noise[LENGTH, k])  # the lengths are |g|^2 here
    best = P @ (SQUARE * STEEP) / (P @ SQUARE)
    least = P @ ((STEEP - best) ** 2 * SQUARE)
    assert likely @ noise[BEST, k] > least > likely @ noise[OWN, k]
    assert likely @ noise[NOTHING, k] == pytest.approx(P @ (STEEP ** 2 * SQUARE))


def test_noise_of_weighted_baselines_against_a_plain_loop():
    rng = np.random.default_rng(0)
    reward, square, length = rng.random((2, 4)), rng.random((2, 4)) + 1, rng.integers(1, 9, (2, 4)).astype(float)
    others = others_of(4, 2, 3, rng)
    noise = noise_of(known_answers(reward, square, length, {2: square}), {2: others})
    for name, weight in ((MEAN, np.ones((2, 4))), (BEST, square), (LENGTH, length)):
        for q in range(2):
            terms = []
            for draw, i in itertools.product(range(3), range(4)):
                a, b = others[draw, i]
                subtracted = (weight[q, a] * reward[q, a] + weight[q, b] * reward[q, b]) / (weight[q, a] + weight[q, b])
                terms.append((reward[q, i] - subtracted) ** 2 * square[q, i])
            assert noise[name, 2][q] == pytest.approx(np.mean(terms))
    np.testing.assert_allclose(noise[TOKEN, 2], square.mean(1))
    best = (square * reward).sum(1) / square.sum(1)
    np.testing.assert_allclose(noise[OWN, 2], [((reward[q] - best[q]) ** 2 * square[q]).mean() for q in range(2)])


def test_length_and_token_baselines_by_hand():
    """Lengths 2 and 1, R = 1 and 0: OPO subtracts 2 / 3. By token, s^2 = 1 2, 3 1 and 1, so W = 1 3, 3 4 and 1; R = 1 0 0. b_1 = 1 / 5;
    the third answer does not reach the second place, b_2 = 3 / 7; nobody gets to a third."""
    assert weighted_mean(np.array([1.0, 0.0]), np.array([2, 1])) == pytest.approx(2 / 3)
    size, mask = torch.tensor([[1.0, 2, 0], [3, 1, 0], [1, 0, 0]]), torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0]]).bool()
    torch.testing.assert_close(token_baseline(torch.tensor([1.0, 0.0, 0.0]), size, mask), torch.tensor([1 / 5, 3 / 7, 0.0]))


def test_token_advantage_against_a_plain_loop(lab):
    batch, others = spoken(lab), np.array([[1, 2], [2, 0], [1, 0]])
    size = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)).double() * batch.mask
    found = token_advantage(batch, size, others)
    for b in range(6):
        for t in range(batch.mask.shape[1]):
            above = below = 0.0
            for i in (b // 3 * 3 + o for o in others[b % 3].tolist()):
                if batch.mask[i, t]:
                    above, below = above + size[i, :t + 1].sum() * batch.reward[i], below + size[i, :t + 1].sum()
            expected = batch.reward[b] - (above / below if below else 0) if batch.mask[b, t] else 0.0
            assert found[b, t].item() == pytest.approx(float(expected), abs=1e-6)


def test_the_square_of_the_expectation_is_without_bias():
    """Over every sample of three answers; and a group's gradient has as much variance as the text says."""
    drawn, likely = samples(3)
    reward, truth = STEEP[drawn], (P * STEEP) @ SCORES
    advantage = (reward - reward.mean(1, keepdims=True)) * 3 / 2
    terms = advantage[:, :, None] * SCORES[drawn]  # (27, 3, 3)
    squares, total = (terms ** 2).sum(2), (terms.sum(1) ** 2).sum(1)
    assert likely @ [square_of_expectation(t, s) for t, s in zip(total, squares)] == pytest.approx(truth @ truth)
    of_group = likely @ total / 9 - truth @ truth
    assert 3 * of_group == pytest.approx(likely @ squares.mean(1) - truth @ truth + truth @ truth / 2)


@pytest.mark.parametrize("reward, excess", [(FLAT, 0.0), (STEEP, 0.02025)])
def test_what_the_exact_best_would_save(reward, excess):
    """20,000 samples of twelve answers: half-way between b* on its own answers and b* on others, neither of which is right."""
    drawn, rng = np.random.default_rng(0).choice(3, (20_000, 12), p=P), np.random.default_rng(0)
    answers = known_answers(reward[drawn], SQUARE[drawn], by_token={11: np.zeros((20_000, 12))})
    noise = noise_of(answers, {11: others_of(12, 11, 1, rng)})
    exact = P @ ((reward - P @ reward) ** 2 * SQUARE)
    assert saving(answers, noise).value * noise[MEAN, 11].mean() == pytest.approx(excess, abs=0.001)
    assert exact - noise[OWN, 11].mean() > excess + 0.004 and exact - noise[BEST, 11].mean() < excess - 0.004


def test_sums_over_questions_by_hand():
    """12 over 6: the ratio is 2, the residuals 1 -1 0 0 0 0 have the standard deviation sqrt(2 / 5); t of 5 is 2.571."""
    e = over_questions(np.array([3.0, 1, 2, 2, 2, 2]), np.ones(6))
    assert e.value == 2 and e.high - 2 == pytest.approx(2.5706 * np.sqrt(2 / 5) / np.sqrt(6), rel=1e-3)
    assert over_questions(np.array([2.0, 4, 6, 8, 10, 12]), np.arange(1.0, 7)).interval == (2, 2)  # all the same: nothing uncertain
    assert np.isnan(over_questions(np.ones(5)).low) and np.isnan(over_questions(np.zeros(6), np.zeros(6)).value)
    np.testing.assert_allclose(correlations(np.array([[1.0, 2, 3]]), np.array([[6.0, 4, 2]])), -1)


def test_gradients_of_answers_are_squared_and_summed_as_they_should(lab):
    """Two questions, three answers each: against one backward pass at a time."""
    batch, others = spoken(lab), {2: others_of(3, 2, 1, np.random.default_rng(0))}
    shares = []
    answers = look(lab, batch, others, shares.append)
    size = (1 - 2 * batch.log_prob.exp() + batch.collision).double() * batch.mask
    by_token = token_advantage(batch, size, others[2][0])

    def gradient(b, coefficient):
        log_prob = response_log_probs(lab.model, batch, torch.tensor([b]))[0]
        found = torch.autograd.grad((coefficient * log_prob).sum(), list(lab.model.parameters()), materialize_grads=True)
        return torch.cat([part.flatten() for part in found])

    g = torch.stack([gradient(b, 1.0) for b in range(6)]).double().view(2, 3, -1)
    np.testing.assert_allclose(answers.square, g.square().sum(2), rtol=1e-4)
    np.testing.assert_allclose(answers.by_token[2].ravel(), [gradient(b, by_token[b]).square().sum() for b in range(6)], rtol=1e-3)
    np.testing.assert_allclose(answers.length.ravel(), batch.length)
    np.testing.assert_allclose(answers.logit_square.ravel(), size.sum(1), rtol=1e-3)
    for q in range(2):
        R = batch.reward[3 * q:3 * q + 3].double()
        x = (R - (R.sum() - R) / 2)[:, None] * g[q]
        pairs = sum(x[i] @ x[j] for i, j in itertools.permutations(range(3), 2)) / 6
        assert answers.pull[q] == pytest.approx(pairs.item() / 1.25, rel=1e-3)
    assert shares[-1] == 1


def tables(answers):
    """As the probe makes them, from all 15 others."""
    noise = noise_of(answers, {15: others_of(16, 15, 1, np.random.default_rng(0))})
    beside, questions = beside_the_mean(noise), gaps(answers)
    made = (baseline.of_claims(answers, questions, beside, saving(answers, noise)), baseline.of_baselines(answers, noise, beside),
            baseline.of_questions(answers, questions), baseline.of_sizes(answers))
    return {table.name: table for table in made}


def test_tables_say_what_is_there():
    """Eight questions in which wrong answers have nine times the |g|^2, and length knows it."""
    rng = np.random.default_rng(0)
    reward = np.tile([1.0, 0.0], (8, 8))
    square = np.where(reward, 1.0, 9.0) + rng.random((8, 16))
    answers = known_answers(reward, square, 10 * square, {15: square})
    answers.pull = np.full(8, 0.1)
    found = tables(answers)
    verdict = {row[0]: row[-1] for row in found["claims"].rows}
    assert verdict["the group's mean is the best"] == "refuted" and verdict["the zero sum makes it the best"] == "no condition"
    assert verdict["b* is better, 15 others"] == verdict["by length (OPO) is better, 15 others"] == "holds"
    assert verdict["by token (s^2) is better, 15 others"] == "the opposite" and verdict["the mean is good enough"].startswith("at least 4")
    assert "clearly not the best baseline in 8 of 8" in found["claims"].finding and "clearly lower in 8" in found["questions"].finding
    assert dict(zip(found["sizes"].columns, found["sizes"].rows[1]))["correlation"] == pytest.approx(1)
    assert found["sizes"].rows[1][3] == pytest.approx((square[:, 1::2].mean(1) / square[:, ::2].mean(1)).prod() ** (1 / 8))
    by_name = {row[0]: row for row in found["baselines"].rows}
    assert by_name[MEAN][2] == 0 and by_name[MEAN][-1] == by_name[OWN][-1] == "-" and by_name[BEST][2] < -0.3
    mean = ((reward - 0.5) ** 2 * square).mean() * (16 / 15) ** 2
    assert by_name[NOTHING][2] == pytest.approx((reward ** 2 * square).mean() / mean - 1)
    assert by_name[NOTHING][3] == pytest.approx(((reward ** 2 * square).mean() - mean) / (mean - 0.1))


def test_rewards_that_are_all_the_same_leave_nothing_to_say():
    square = np.random.default_rng(0).random((8, 16)) + 1
    found = tables(known_answers(np.full((8, 16), np.float32(0.1)), square, square, {15: 0 * square}))
    assert "in 0 of 0 questions" in found["claims"].finding and "Too few questions" in found["sizes"].finding
    assert {row[-1] for row in found["claims"].rows} <= {"too few", "not refuted", "no condition"}
    json.dumps([table.to_json() for table in found.values()], allow_nan=False)


def test_holm_leaves_out_what_is_not_a_comparison():
    e = over_questions(np.array([1.0, 1.1, 0.9, 1.0, 1.1, 0.9]))
    assert differences({(MEAN, 7): e, (OWN, 7): e, (BEST, 7): e}) == {(MEAN, 7): "-", (OWN, 7): "-", (BEST, 7): "more noise"}


def test_the_probe_runs_and_repeats(tmp_path, capsys):
    for name in "ab":
        probes.main(["baseline", "--quick", "--questions", "2", "--answers", "9", "--threads", "1", "--out", str(tmp_path / name)])
    assert "Noise of each baseline, over that of the mean of all 8 others" in capsys.readouterr().out
    a, b = (json.loads((tmp_path / name / "numbers.json").read_text()) for name in "ab")
    assert a["tables"] == b["tables"] and [t["name"] for t in a["tables"]] == ["claims", "baselines", "questions", "sizes"]
    rows = [(row["baseline"], row["others"]) for row in a["tables"][1]["rows"]]
    made = [MEAN, BEST, LENGTH, TOKEN]
    assert rows == [(NOTHING, None), *((name, 8) for name in made), (OWN, None), *((name, 7) for name in made)]
    assert all(t["finding"] for t in a["tables"]) and (tmp_path / "a/report.html").stat().st_size > 10_000 and (tmp_path / "a/baseline.png").exists()
