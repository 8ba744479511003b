"""Which number is best to subtract from the reward, and what does the group's mean cost beside it?

Question. Let g be the gradient of an answer's log-prob and R its reward. As E[g] = 0, (R - b) g has
the same expectation, the gradient of E[R], for every b that is made without this answer. Its noise
is least at one b* (Greensmith et al. 2004, JMLR 5):

    E|(R - b) g|^2 = E|(R - b*) g|^2 + (b - b*)^2 E|g|^2
    b* = E[|g|^2 R] / E|g|^2,    b* - E[R] = Cov(|g|^2, R) / E|g|^2

So the mean is the best baseline exactly where that covariance is 0. That advantages sum to zero
only says that the mean was subtracted, not that it is the best. How far off is it, and is anything
that one could use instead better?

Measurement. Many answers to each problem, the gradient of each answer alone, and the noise of five
baselines. One of them has a cheap stand-in for |g|^2, the answer's length (OPO, 2505.23585):

    by length   b = sum_i l_i R_i / sum_i l_i

Every baseline is made from other answers than the one it is scored on: from all the others, or from
7 or 15 of them, as in a training group of 8 or 16, where the mean of the others is RLOO and, times
(G-1)/G, the group mean of Dr. GRPO. "Own answers" are the exception: they show how much too good a
baseline looks on the answers it was made from.

Reading it. If the mean is good enough, b* has hardly less noise. If not, a baseline weighted by
|g|^2, or by a stand-in, has clearly less. Which answers have large gradients changes as a model
learns, so ask again of a checkpoint: --model runs/x/checkpoints/step_000100.

Left out: the z-score. It divides by a number that differs from group to group, which weights
problems anew and is no baseline.
"""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.statistics import FEWEST, Estimate, estimate, verdicts
from analysis.tables import Table
from harness.flags import Flag
from engine.policy import Policy
from engine.rollouts import Rollouts
from research.probes.common import OF_A_MODEL, Findings, Probe, answer_gradients, sample_batch
from research.probes.progress import Progress

FLAGS = {
    **OF_A_MODEL,
    "questions": Flag(16, "problems", least=2, most=10_000, quick=6),
    "answers": Flag(64, "answers to each of them", least=8, most=1000, quick=9)}
GROUPS = (8, 16)  # sizes of a training group
DRAWS = 50        # how often others are drawn, where these are not all there are
NOTHING, MEAN, BEST = "nothing", "mean", "b*"
LENGTH, OWN = "by length (OPO)", "b*, own answers"
NAMES = (NOTHING, MEAN, BEST, LENGTH, OWN)


@dataclass
class Answers:
    """(Q, n), a row for each problem, in float64."""
    reward: np.ndarray
    square: np.ndarray         # |g|^2
    length: np.ndarray
    squared_mean: np.ndarray   # (Q,) |E[R g]|^2


def measure(probe: Probe) -> Findings:
    Q, n = probe.args.questions, probe.args.answers
    rng, progress = np.random.default_rng(probe.args.seed), Progress(sampling=1, gradients=6)
    progress("sampling")
    policy = probe.policy()
    rollouts = sample_batch(policy, 0, Q, n)
    sizes = {n - 1} | {size - 1 for size in GROUPS if size <= n}
    others = {k: draw_others(n, k, DRAWS if k < n - 1 else 1, rng)
              for k in sorted(sizes, reverse=True)}
    answers = measure_answers(policy, rollouts, lambda share: progress("gradients", share))
    table = baselines_table(answers, noise_of_baselines(answers, others))
    intro = [f"{policy.folder}: {Q} problems x {n} answers, at temperature 1.",
             "Intervals are 95%, by Student's t over problems unless said otherwise. A difference "
             "is named where it is clear after Holm's correction over the rows of its table."]
    return Findings(
        "The best number to subtract from the reward, and what the group's mean costs", intro,
        [table], None, "some minutes")


def draw_others(n: int, k: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(draws, n, k): for each of n answers k of the others, those that follow it in a shuffled
    circle."""
    following = np.arange(n)[:, None] + np.arange(1, k + 1)
    others = np.empty((draws, n, k), int)
    for draw in others:
        order = rng.permutation(n)
        draw[order] = order[following % n]
    return others


def measure_answers(policy: Policy, rollouts: Rollouts,
                    progress: Callable[[float], None]) -> Answers:
    """Gradients answer by answer, of which only the squares and one sum a problem are kept."""
    Q = len(rollouts.prompt_ids)
    n = len(rollouts.mask) // Q
    reward = rollouts.reward.double().cpu().numpy().reshape(Q, n)
    advantage = (reward - reward.mean(1, keepdims=True)) * n / (n - 1)

    square, squared_mean, total = np.zeros((Q, n)), np.zeros(Q), 0
    for b, [gradient] in enumerate(answer_gradients(policy, rollouts, [rollouts.mask.float()])):
        q, i = divmod(b, n)
        square[q, i] = float(gradient @ gradient)
        total = total + advantage[q, i] * gradient
        if i == n - 1:  # the last answer to this problem
            of_terms = advantage[q] ** 2 * square[q]
            squared_mean[q] = square_of_expectation(float(total @ total), of_terms)
            total = 0
        progress((b + 1) / (Q * n))
    length = rollouts.length.cpu().numpy().reshape(Q, n).astype(float)
    return Answers(reward, square, length, squared_mean)


def square_of_expectation(total_square: float, squares: np.ndarray) -> float:
    """|E x|^2 from n terms x_i = (R_i - mean of the others) g_i: their squares, that of their sum.

    What is left of the latter are the products of different answers. Each of the two is in the
    other's mean, which adds a (n-1)^2-th part.
    """
    n = len(squares)
    return (total_square - squares.sum()) / (n * (n - 1)) / (1 + 1 / (n - 1) ** 2)


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
    noise[NOTHING, max(others)] = second_moment(reward, square, 0.0)
    best = weighted_mean(reward, square)[:, None]
    noise[OWN, max(others)] = second_moment(reward, square, best)
    rows = sorted(noise, key=lambda row: (-row[1], NAMES.index(row[0])))
    return {row: noise[row] for row in rows}


def over_questions(amount: np.ndarray, whole: np.ndarray) -> Estimate:
    """(Q,), (Q,): sum over sum; its error from how much problems differ."""
    n, error = len(amount), np.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        value = amount.sum() / whole.sum()
        if n >= FEWEST:
            error = (amount - value * whole).std(ddof=1) * np.sqrt(n) / whole.sum()
    return estimate(float(value), float(error), n - 1)


def beside_the_mean(noise: dict[tuple, np.ndarray]) -> dict[tuple, tuple[Estimate, str]]:
    """What each baseline adds to the noise of the mean of as many others, as a share of it."""
    beside = {(name, k): over_questions(moment - noise[MEAN, k], noise[MEAN, k])
              for (name, k), moment in noise.items() if name not in (MEAN, OWN)}
    words = verdicts(list(beside.values()), ("more noise", "less noise"), 0.0)
    return {row: (e, word) for (row, e), word in zip(beside.items(), words)}


def baselines_table(answers: Answers, noise: dict[tuple, np.ndarray]) -> Table:
    most, fewest = max(k for _, k in noise), min(k for _, k in noise)
    mean, beside = noise[MEAN, most], beside_the_mean(noise)
    variance = {row: over_questions(moment - mean, mean - answers.squared_mean)
                for row, moment in noise.items()}
    columns = {
        "baseline": ("", [name for name, _ in noise]),
        "others": ("d", [None if name in (NOTHING, OWN) else k for name, k in noise]),
        "variance": ("+.1%", [e.value for e in variance.values()]),
        "95%": ("+.1%", [e.interval for e in variance.values()]),
        "against a mean": ("", [beside[row][1] if row in beside else "-" for row in noise])}
    changes = [f"{name} {variance[name, most].value:+.1%}"
               for name in (NOTHING, BEST, LENGTH)]
    finding = (f"Noise beside that of the mean of all {most} others: {', '.join(changes)}.\n"
               f"In a group of {fewest + 1} the mean of the others costs "
               f"{variance[MEAN, fewest].value:+.1%}, b* {variance[BEST, fewest].value:+.1%}.")
    notes = ["Variance: what a baseline adds to E|(R - b) g|^2 it adds to the variance, as all "
             "have the same expectation. A mean of k others has Var(R) E|g|^2 / k more than the "
             "exact one. The last column compares with a mean of as many others."]
    headings = {"others": "made from so many others", "variance": "variance, change",
                "95%": "95% interval of it", "against a mean": "beside a mean of as many"}
    return Table("baselines", f"Noise of each baseline, over that of the mean of all {most} others",
                 columns, finding, notes, headings)
