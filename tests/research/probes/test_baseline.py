"""The best baseline by hand, by a grid, and in a bandit of three actions small enough to draw every
possible sample."""
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import spoken

from engine.forward import response_log_probs
from research.probes import baseline
from research.probes.baseline_noise import (
    BEST, LENGTH, MEAN, NOTHING, OWN, TOKEN, Answers, against_mean, correlations, draw_others,
    exact_saving, gaps, mean_over_questions, measure_answers, noise_of_baselines,
    ratio_over_questions, second_moment, square_of_expectation, token_advantage, token_baseline,
    weighted_mean)
from research.probes.baseline_tables import (
    baselines_table, claims_table, gap_verdicts, noise_verdicts, questions_table, sizes_table)
from research.probes.common import run_probe

P = np.array([0.5, 0.25, 0.25])   # of the bandit's actions
SCORES = np.eye(3) - P            # grad log p of each: |g|^2 = 0.375, 0.875, 0.875
SQUARE = (SCORES ** 2).sum(1)
FLAT = np.array([0.5, 1.0, 0.0])  # rewards with Cov(|g|^2, R) = 0
STEEP = np.array([1.0, 0.0, 0.2])  # and with another


def generator(seed=0):
    return np.random.default_rng(seed)


def samples(n):
    """Every sample of n actions (3^n, n), and how likely it is."""
    drawn = np.array(list(itertools.product(range(3), repeat=n)))
    return drawn, P[drawn].prod(1)


def known_answers(reward, square, length=None, by_token=()):
    reward = np.atleast_2d(reward).astype(float)
    square = np.atleast_2d(square).astype(float)
    length = np.ones_like(reward) if length is None else np.atleast_2d(length).astype(float)
    return Answers(reward, square, length, square, dict(by_token), np.zeros(len(reward)))


def test_the_best_baseline_by_hand_and_by_a_grid():
    """|g|^2 = 1, 3 and R = 0, 1: b* = 3 / 4, where the noise is (1 * 9/16 + 3 * 1/16) / 2 = 3 / 8.
    Elsewhere E|g|^2 = 2 times the square of the distance is added."""
    reward, square = np.array([[0.0, 1.0]]), np.array([[1.0, 3.0]])
    best = weighted_mean(reward, square)
    assert best == pytest.approx(0.75)
    assert second_moment(reward, square, best[:, None]) == pytest.approx(0.375)
    grid = np.linspace(-1, 2, 301)
    noise = np.array([second_moment(reward, square, b)[0] for b in grid])
    assert grid[noise.argmin()] == pytest.approx(0.75)
    np.testing.assert_allclose(noise, 0.375 + (grid - 0.75) ** 2 * 2)


@pytest.mark.parametrize("reward, best, excess", [(FLAT, 0.5, 0.0), (STEEP, 0.37, 0.02025)])
def test_the_mean_is_best_exactly_without_covariance(reward, best, excess):
    """As a population of four answers, a a b c. STEEP: mean 0.55, E|g|^2 = 0.625,
    E[|g|^2 R] = 0.1875 + 0.04375, so b* = 0.37 and the excess is 0.18^2 * 0.625."""
    actions = [0, 0, 1, 2]
    R, square = reward[actions][None], SQUARE[actions][None]
    assert weighted_mean(R, square) == pytest.approx(best)
    gap, = gaps(known_answers(np.tile(R, 16), np.tile(square, 16)))
    assert gap.value == pytest.approx(best - R.mean())
    assert (gap.p < 0.05) == (excess > 0)
    of_mean, of_best = second_moment(R, square, R.mean()), second_moment(R, square, best)
    assert of_mean - of_best == pytest.approx(excess)
    assert (R.mean() - best) ** 2 * square.mean() == pytest.approx(excess)


def test_a_question_with_few_rewards_of_a_kind_has_no_interval():
    reward = np.array([[1.0] * 5 + [0.0] * 15, [1.0] * 6 + [0.0] * 14, [0.1] * 20])
    of_questions = gaps(known_answers(reward, np.tile(np.arange(1.0, 21), (3, 1))))
    assert [np.isfinite(e.p) for e in of_questions] == [False, True, False]
    assert gap_verdicts(of_questions) == ["too few", "lower", "too few"]
    assert of_questions[2].value == pytest.approx(0)


def test_the_interval_of_a_gap_covers_the_truth():
    drawn = generator().choice(3, (600, 64), p=P)
    of_questions = gaps(known_answers(STEEP[drawn], SQUARE[drawn]))
    covered = [e.low < 0.37 - 0.55 < e.high for e in of_questions]
    assert 0.93 < np.mean(covered) < 0.97


def test_others_are_any_others_and_never_the_answer_itself():
    drawn = draw_others(5, 3, 4000, generator())
    assert drawn.shape == (4000, 5, 3)
    for i in range(5):
        counts = np.bincount(drawn[:, i].ravel(), minlength=5)
        assert counts[i] == 0
        assert all(len(set(row)) == 3 for row in drawn[:50, i].tolist())
        assert np.delete(counts, i) / 4000 == pytest.approx([0.75] * 4, abs=0.03)


def test_all_others_are_all_others():
    drawn, = draw_others(5, 4, 1, generator(1))
    for i, row in enumerate(drawn.tolist()):
        assert sorted(row) == [j for j in range(5) if j != i]


@pytest.mark.parametrize("k", [1, 2])
def test_a_mean_of_k_others_costs_the_variance_of_a_mean(k):
    """Averaged over every sample of three answers: E[(R - E R)^2 |g|^2] + Var(R) E|g|^2 / k. With
    the answer's own reward among the others, or its weight among theirs, it would be lower."""
    drawn, likely = samples(3)
    answers = known_answers(STEEP[drawn], SQUARE[drawn], length=SQUARE[drawn],
                            by_token={k: np.zeros((27, 3))})
    noise = noise_of_baselines(answers, {k: draw_others(3, k, 50, generator())})
    centred = STEEP - P @ STEEP
    expected = P @ (centred ** 2 * SQUARE) + P @ centred ** 2 * (P @ SQUARE) / k
    assert likely @ noise[MEAN, k] == pytest.approx(expected)
    np.testing.assert_allclose(noise[BEST, k], noise[LENGTH, k])  # the lengths are |g|^2 here
    best = P @ (SQUARE * STEEP) / (P @ SQUARE)
    least = P @ ((STEEP - best) ** 2 * SQUARE)
    assert likely @ noise[BEST, k] > least > likely @ noise[OWN, k]
    assert likely @ noise[NOTHING, k] == pytest.approx(P @ (STEEP ** 2 * SQUARE))


def test_noise_of_weighted_baselines_against_a_plain_loop():
    rng = generator()
    reward, square = rng.random((2, 4)), rng.random((2, 4)) + 1
    length = rng.integers(1, 9, (2, 4)).astype(float)
    others = draw_others(4, 2, 3, rng)
    answers = known_answers(reward, square, length, by_token={2: square})
    noise = noise_of_baselines(answers, {2: others})
    weights = {MEAN: np.ones((2, 4)), BEST: square, LENGTH: length}
    for (name, weight), q in itertools.product(weights.items(), range(2)):
        R, w, terms = reward[q], weight[q], []
        for draw, i in itertools.product(range(3), range(4)):
            a, b = others[draw, i]
            subtracted = (w[a] * R[a] + w[b] * R[b]) / (w[a] + w[b])
            terms.append((R[i] - subtracted) ** 2 * square[q, i])
        assert noise[name, 2][q] == pytest.approx(np.mean(terms))
    np.testing.assert_allclose(noise[TOKEN, 2], square.mean(1))
    best = (square * reward).sum(1, keepdims=True) / square.sum(1, keepdims=True)
    np.testing.assert_allclose(noise[OWN, 2], ((reward - best) ** 2 * square).mean(1))


def test_length_and_token_baselines_by_hand():
    """Lengths 2 and 1, R = 1 and 0: OPO subtracts 2 / 3. By token, s^2 = 1 2, 3 1 and 1, so
    W = 1 3, 3 4 and 1; R = 1 0 0. b_1 = 1 / 5; the third answer does not reach the second place,
    b_2 = 3 / 7; nobody gets to a third."""
    assert weighted_mean(np.array([1.0, 0.0]), np.array([2, 1])) == pytest.approx(2 / 3)
    token_square = torch.tensor([[1.0, 2, 0], [3, 1, 0], [1, 0, 0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0]]).bool()
    b = token_baseline(torch.tensor([1.0, 0.0, 0.0]), token_square, mask)
    torch.testing.assert_close(b, torch.tensor([1 / 5, 3 / 7, 0.0]))


def test_token_advantage_against_a_plain_loop(lab):
    batch, others = spoken(lab), np.array([[1, 2], [2, 0], [1, 0]])
    random = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    token_square = random.double() * batch.mask
    advantage = token_advantage(batch, token_square, others)
    for b, t in itertools.product(range(6), range(batch.mask.shape[1])):
        above = below = 0.0
        for other in others[b % 3].tolist():
            i = b // 3 * 3 + other
            if batch.mask[i, t]:
                weight = token_square[i, :t + 1].sum()
                above, below = above + weight * batch.reward[i], below + weight
        subtracted = above / below if below else 0.0
        expected = float(batch.reward[b] - subtracted) if batch.mask[b, t] else 0.0
        assert advantage[b, t].item() == pytest.approx(expected, abs=1e-6)


def test_the_square_of_the_expectation_is_without_bias():
    """Over every sample of three answers; and a group's gradient has the variance of the text."""
    drawn, likely = samples(3)
    reward, truth = STEEP[drawn], (P * STEEP) @ SCORES
    advantage = (reward - reward.mean(1, keepdims=True)) * 3 / 2
    terms = advantage[:, :, None] * SCORES[drawn]  # (27, 3, 3)
    squares, total = (terms ** 2).sum(2), (terms.sum(1) ** 2).sum(1)
    estimates = [square_of_expectation(t, s) for t, s in zip(total, squares)]
    assert likely @ estimates == pytest.approx(truth @ truth)
    of_group = likely @ total / 9 - truth @ truth
    of_answer = likely @ squares.mean(1) - truth @ truth
    assert 3 * of_group == pytest.approx(of_answer + truth @ truth / 2)


@pytest.mark.parametrize("reward, excess", [(FLAT, 0.0), (STEEP, 0.02025)])
def test_what_the_exact_best_would_save(reward, excess):
    """20,000 samples of twelve answers: half-way between b* on its own answers and b* on others,
    neither of which is right."""
    drawn = generator().choice(3, (20_000, 12), p=P)
    answers = known_answers(reward[drawn], SQUARE[drawn], by_token={11: np.zeros((20_000, 12))})
    noise = noise_of_baselines(answers, {11: draw_others(12, 11, 1, generator())})
    saved = exact_saving(answers, noise).value * noise[MEAN, 11].mean()
    assert saved == pytest.approx(excess, abs=0.001)
    exact_mean = P @ ((reward - P @ reward) ** 2 * SQUARE)
    assert exact_mean - noise[OWN, 11].mean() > excess + 0.004
    assert exact_mean - noise[BEST, 11].mean() < excess - 0.004


def test_sums_over_questions_by_hand():
    """12 over 6: the ratio is 2, the residuals 1 -1 0 0 0 0 have the standard deviation
    sqrt(2 / 5); t of 5 is 2.571."""
    e = ratio_over_questions(np.array([3.0, 1, 2, 2, 2, 2]), np.ones(6))
    assert e.value == 2
    assert e.high - 2 == pytest.approx(2.5706 * np.sqrt(2 / 5) / np.sqrt(6), rel=1e-3)
    certain = ratio_over_questions(np.array([2.0, 4, 6, 8, 10, 12]), np.arange(1.0, 7))
    assert certain.interval == (2, 2)  # the same ratio in all
    assert np.isnan(mean_over_questions(np.ones(5)).low)
    assert np.isnan(ratio_over_questions(np.zeros(6), np.zeros(6)).value)


def test_correlations_by_hand():
    falling = correlations(np.array([[1.0, 2, 3]]), np.array([[6.0, 4, 2]]))
    np.testing.assert_allclose(falling, -1)


def test_gradients_of_answers_are_squared_and_summed_as_they_should(lab):
    """Two problems, three answers each: against one backward pass at a time."""
    batch, others = spoken(lab), {2: draw_others(3, 2, 1, generator())}
    shares = []
    answers = measure_answers(lab, batch, others, shares.append)
    assert shares[-1] == 1
    s_square = (1 - 2 * batch.log_prob.exp() + batch.collision).double() * batch.mask
    by_token = token_advantage(batch, s_square, others[2][0])
    parameters = list(lab.model.parameters())

    def gradient(b, coefficient):
        log_prob = response_log_probs(lab.model, batch, torch.tensor([b]))[0]
        parts = torch.autograd.grad((coefficient * log_prob).sum(), parameters,
                                    materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    g = torch.stack([gradient(b, 1.0) for b in range(6)]).double().view(2, 3, -1)
    np.testing.assert_allclose(answers.square, g.square().sum(2), rtol=1e-4)
    expected = [gradient(b, by_token[b]).square().sum() for b in range(6)]
    np.testing.assert_allclose(answers.by_token[2].ravel(), expected, rtol=1e-3)
    np.testing.assert_allclose(answers.length.ravel(), batch.length)
    np.testing.assert_allclose(answers.logit_square.ravel(), s_square.sum(1), rtol=1e-3)
    for q in range(2):
        R = batch.reward[3 * q:3 * q + 3].double()
        x = (R - (R.sum() - R) / 2)[:, None] * g[q]
        pairs = sum(x[i] @ x[j] for i, j in itertools.permutations(range(3), 2)) / 6
        assert answers.squared_mean[q] == pytest.approx(pairs.item() / 1.25, rel=1e-3)


def tables_of(answers):
    """As the probe makes them, from all 15 others."""
    noise = noise_of_baselines(answers, {15: draw_others(16, 15, 1, generator())})
    beside, of_questions = against_mean(noise), gaps(answers)
    tables = (claims_table(answers, of_questions, beside, exact_saving(answers, noise)),
              baselines_table(answers, noise, beside), questions_table(answers, of_questions),
              sizes_table(answers))
    return {table.name: table for table in tables}


@pytest.fixture
def steep_answers():
    """Eight problems in which wrong answers have nine times the |g|^2, and length knows it."""
    reward = np.tile([1.0, 0.0], (8, 8))
    square = np.where(reward, 1.0, 9.0) + generator().random((8, 16))
    answers = known_answers(reward, square, length=10 * square, by_token={15: square})
    answers.squared_mean = np.full(8, 0.1)
    return answers


def test_claims_are_decided_by_the_numbers(steep_answers):
    tables = tables_of(steep_answers)
    verdict = {row[0]: row[-1] for row in tables["claims"].rows}
    assert verdict["the group's mean is the best"] == "refuted"
    assert verdict["the zero sum makes it the best"] == "no condition"
    assert verdict["b* is better, 15 others"] == "holds"
    assert verdict["by length (OPO) is better, 15 others"] == "holds"
    assert verdict["by token (s^2) is better, 15 others"] == "the opposite"
    assert verdict["the mean is good enough"].startswith("at least 4")
    assert "clearly not the best baseline in 8 of 8" in tables["claims"].finding
    assert "clearly lower in 8" in tables["questions"].finding


def test_sizes_of_worse_and_better_answers(steep_answers):
    table = tables_of(steep_answers)["sizes"]
    length = dict(zip(table.columns, table.rows[1]))
    assert length["correlation"] == pytest.approx(1)
    better, worse = steep_answers.square[:, ::2].mean(1), steep_answers.square[:, 1::2].mean(1)
    assert length["worse/better"] == pytest.approx((worse / better).prod() ** (1 / 8))


def test_noise_beside_that_of_the_mean(steep_answers):
    reward, square = steep_answers.reward, steep_answers.square
    rows = {row[0]: row for row in tables_of(steep_answers)["baselines"].rows}
    assert rows[MEAN][2] == 0 and rows[BEST][2] < -0.3
    assert rows[MEAN][-1] == rows[OWN][-1] == "-"
    mean = ((reward - 0.5) ** 2 * square).mean() * (16 / 15) ** 2
    nothing = (reward ** 2 * square).mean()
    assert rows[NOTHING][2] == pytest.approx(nothing / mean - 1)
    assert rows[NOTHING][3] == pytest.approx((nothing - mean) / (mean - 0.1))


def test_rewards_that_are_all_the_same_leave_nothing_to_say():
    square = generator().random((8, 16)) + 1
    reward = np.full((8, 16), np.float32(0.1))
    tables = tables_of(known_answers(reward, square, square, {15: 0 * square}))
    assert "in 0 of 0 problems" in tables["claims"].finding
    assert "Too few problems" in tables["sizes"].finding
    words = {row[-1] for row in tables["claims"].rows}
    assert words <= {"too few", "not refuted", "no condition"}
    json.dumps([table.to_json() for table in tables.values()], allow_nan=False)


def test_holm_leaves_out_what_is_not_a_comparison():
    e = mean_over_questions(np.array([1.0, 1.1, 0.9, 1.0, 1.1, 0.9]))
    words = noise_verdicts({(MEAN, 7): e, (OWN, 7): e, (BEST, 7): e})
    assert words == {(MEAN, 7): "-", (OWN, 7): "-", (BEST, 7): "more noise"}


def run(folder, *more):
    argv = ["--quick", "--threads", "1", "--out", str(folder), *more]
    run_probe("baseline", baseline.__doc__, baseline.FLAGS, baseline.measure, argv)
    return json.loads((folder / "numbers.json").read_text())["tables"]


def test_the_probe_runs_and_repeats(tmp_path, capsys):
    flags = ["--questions", "2", "--answers", "9"]
    tables = run(tmp_path / "a", *flags)
    assert tables == run(tmp_path / "b", *flags)
    title = "Noise of each baseline, over that of the mean of all 8 others"
    assert tables[1]["title"] == title
    assert [table["name"] for table in tables] == ["claims", "baselines", "questions", "sizes"]
    rows = [(row["baseline"], row["others"]) for row in tables[1]["rows"]]
    made = [MEAN, BEST, LENGTH, TOKEN]
    assert rows == [(NOTHING, None), *((name, 8) for name in made), (OWN, None),
                    *((name, 7) for name in made)]
    assert all(table["finding"] for table in tables)
    assert (tmp_path / "a/report.html").stat().st_size > 10_000
    assert (tmp_path / "a/baseline.png").exists()
