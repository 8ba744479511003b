"""The noise of each baseline, from the gradient of every answer alone; formulas in baseline.py.

Arrays are (Q, n), a row for each problem and a column for each of its answers, in float64.
"""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from analysis.statistics import FEWEST, Estimate, estimate
from engine.lab import Lab
from engine.rollouts import Rollouts
from grpo import gradient_size
from research.probes.common import answer_gradients

NOTHING, MEAN, BEST = "nothing", "mean", "b*"
LENGTH, TOKEN, OWN = "by length (OPO)", "by token (s^2)", "b*, own answers"
NAMES = (NOTHING, MEAN, BEST, LENGTH, TOKEN, OWN)
GROUPS = (8, 16)  # sizes of a training group


@dataclass
class Answers:
    reward: np.ndarray
    square: np.ndarray                # |g|^2
    length: np.ndarray
    logit_square: np.ndarray          # sum of s^2: |g|^2 at the logits, tokens taken one by one
    by_token: dict[int, np.ndarray]   # |sum_t (R - b_t) grad log p_t|^2, b_t from so many others
    squared_mean: np.ndarray          # (Q,) |E[R g]|^2

    @property
    def above(self) -> np.ndarray:
        """(Q, n): answers with more than the mean reward of their problem."""
        return self.reward > self.reward.mean(1, keepdims=True)

    @property
    def known(self) -> np.ndarray:
        """(Q,): problems with enough answers on either side of the mean to say something."""
        return np.minimum(self.above.sum(1), (~self.above).sum(1)) >= FEWEST


def draw_others(n: int, k: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(draws, n, k): for each of n answers k of the others, drawn at random.

    They are those that follow it in a shuffled circle.
    """
    following = np.arange(n)[:, None] + np.arange(1, k + 1)
    others = np.empty((draws, n, k), int)
    for draw in others:
        order = rng.permutation(n)
        draw[order] = order[following % n]
    return others


def measure_answers(lab: Lab, rollouts: Rollouts, others: dict[int, np.ndarray],
                    progress: Callable[[float], None]) -> Answers:
    """Gradients answer by answer, of which only the squares and one sum a problem are kept."""
    Q = len(rollouts.prompt_ids)
    n = len(rollouts.mask) // Q
    reward = rollouts.reward.double().cpu().numpy().reshape(Q, n)
    advantage = (reward - reward.mean(1, keepdims=True)) * n / (n - 1)
    s = gradient_size(rollouts.log_prob, rollouts.collision).double()
    token_square = s.square() * rollouts.mask
    by_token = [token_advantage(rollouts, token_square, drawn[0]) for drawn in others.values()]
    coefficients = [rollouts.mask.float(), *by_token]

    squares, squared_mean = np.zeros((len(coefficients), Q, n)), np.zeros(Q)
    for b, gradients in enumerate(answer_gradients(lab, rollouts, coefficients)):
        q, i = divmod(b, n)
        squares[:, q, i] = [float(gradient @ gradient) for gradient in gradients]
        term = advantage[q, i] * gradients[0]
        if i == 0:  # the first answer to this problem
            total = torch.zeros_like(term)
        total = total + term
        if i == n - 1:
            of_terms = advantage[q] ** 2 * squares[0, q]
            squared_mean[q] = square_of_expectation(float(total @ total), of_terms)
        progress((b + 1) / (Q * n))

    def by_question(values: torch.Tensor) -> np.ndarray:
        return values.cpu().numpy().reshape(Q, n).astype(float)

    return Answers(reward, squares[0], by_question(rollouts.length),
                   by_question(token_square.sum(1)), dict(zip(others, squares[1:])), squared_mean)


def square_of_expectation(total_square: float, squares: np.ndarray) -> float:
    """|E x|^2 from n terms x_i = (R_i - mean of the others) g_i: their squares, that of their sum.

    What is left of the latter are the products of different answers. Each of the two is in the
    other's mean, which adds a (n-1)^2-th part.
    """
    n = len(squares)
    return (total_square - squares.sum()) / (n * (n - 1)) / (1 + 1 / (n - 1) ** 2)


def token_advantage(rollouts: Rollouts, token_square: torch.Tensor,
                    others: np.ndarray) -> torch.Tensor:
    """(B, T): R - b_t, from the others (n, k) of the same problem."""
    n, reward = len(others), rollouts.reward.double()
    advantage = torch.zeros_like(rollouts.log_prob)
    for b in range(len(advantage)):
        first = b // n * n  # answer of the problem
        rows = first + torch.as_tensor(others[b % n], device=reward.device)
        baseline = token_baseline(reward[rows], token_square[rows], rollouts.mask[rows])
        advantage[b] = reward[b] - baseline
    return advantage * rollouts.mask


def token_baseline(reward: torch.Tensor, token_square: torch.Tensor,
                   mask: torch.Tensor) -> torch.Tensor:
    """(k,), (k, T), (k, T) -> (T,): b_t, 0 where no answer gets that far."""
    weight = token_square.cumsum(1) * mask
    return torch.where(weight.sum(0) > 0, reward @ weight / weight.sum(0), 0.0)


def weighted_mean(reward: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Over the last axis. With |g|^2 as the weight it is b*."""
    return (weight * reward).sum(-1) / weight.sum(-1)


def second_moment(reward: np.ndarray, square: np.ndarray, baseline) -> np.ndarray:
    """(Q, ..., n) -> (Q,): the mean of |(R - b) g|^2."""
    moment = (reward - baseline) ** 2 * square
    return moment.reshape(len(moment), -1).mean(1)


def noise_of_baselines(answers: Answers,
                       others: dict[int, np.ndarray]) -> dict[tuple[str, int], np.ndarray]:
    """(Q,) for each baseline and number of others it is made from."""
    reward, square, noise = answers.reward, answers.square, {}
    weights = {MEAN: np.ones_like(reward), BEST: square, LENGTH: answers.length}
    for k, drawn in others.items():  # (draws, n, k)
        for name, weight in weights.items():
            baseline = weighted_mean(reward[:, drawn], weight[:, drawn])  # (Q, draws, n)
            noise[name, k] = second_moment(reward[:, None], square[:, None], baseline)
        noise[TOKEN, k] = answers.by_token[k].mean(1)
    best = weighted_mean(reward, square)[:, None]
    noise[NOTHING, max(others)] = second_moment(reward, square, 0.0)
    noise[OWN, max(others)] = second_moment(reward, square, best)
    rows = sorted(noise, key=lambda row: (-row[1], NAMES.index(row[0])))
    return {row: noise[row] for row in rows}


def against_mean(noise: dict[tuple, np.ndarray]) -> dict[tuple, Estimate]:
    """What each baseline adds to the noise of the mean of as many others, as a share of it."""
    return {(name, k): ratio_over_questions(moment - noise[MEAN, k], noise[MEAN, k])
            for (name, k), moment in noise.items()}


def exact_saving(answers: Answers, noise: dict[tuple, np.ndarray]) -> Estimate:
    """(mean - b*)^2 E|g|^2 as a share of the mean's noise: the saving if both were known exactly.

    The exact mean lacks Var(R) E|g|^2 / k. On the answers it was made from b* looks as much too
    good as it is too bad on others, up to terms in 1 / n^2: exact is half-way. (The square of
    Cov(|g|^2, R) from the same answers would be too large.)
    """
    k = max(k for _, k in noise)
    exact_mean = noise[MEAN, k] - answers.reward.var(1, ddof=1) * answers.square.mean(1) / k
    exact_best = (noise[BEST, k] + noise[OWN, k]) / 2
    return ratio_over_questions(exact_mean - exact_best, noise[MEAN, k])


def ratio_over_questions(amount: np.ndarray, whole: np.ndarray) -> Estimate:
    """(Q,), (Q,): sum over sum; its error from how much problems differ."""
    n = len(amount)
    with np.errstate(invalid="ignore", divide="ignore"):
        value, error = amount.sum() / whole.sum(), np.nan
        if n >= FEWEST:
            error = (amount - value * whole).std(ddof=1) * np.sqrt(n) / whole.sum()
    return estimate(float(value), float(error), n - 1)


def mean_over_questions(values: np.ndarray) -> Estimate:
    """As `ratio_over_questions`: with an interval only from FEWEST problems on."""
    return ratio_over_questions(values, np.ones_like(values))


def gaps(answers: Answers) -> list[Estimate]:
    """b* - mean of each problem.

    The error is the spread of each answer's influence on it, by Student's t over answers.
    """
    estimates = []
    for reward, square, known in zip(answers.reward, answers.square, answers.known):
        best, n, error = weighted_mean(reward, square), len(reward), np.nan
        if known:
            influence = square * (reward - best) / square.mean() - (reward - reward.mean())
            error = influence.std(ddof=1) / np.sqrt(n)
        estimates.append(estimate(float(best - reward.mean()), float(error), n - 1))
    return estimates


def correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(Q, n), (Q, n) -> (Q,)"""
    with np.errstate(invalid="ignore", divide="ignore"):
        return ((x - x.mean(1, keepdims=True)) * y).mean(1) / (x.std(1) * y.std(1))
