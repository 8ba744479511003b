"""The claims of the paper: one advantage for all tokens makes the gradient sparse, gives it rank 2,
and makes the group's mean the best baseline. Sparsity is seen in the record, and the rest at the
run's first and last model: rank.py and baseline.py beside this file have the definitions."""
from contextlib import suppress
from math import comb, hypot

import numpy as np
import torch
from torch.linalg import vector_norm

from lab.analysis.statistics import Estimate, Floats, mean_over, over_problems
from lab.analysis.tables import Cell
from lab.engine.policy import Policy
from lab.probes.baseline import BEST, MEAN, bandit, baselines, squares
from lab.probes.claim_rules import (ARITHMETIC, HOLDS, NOT, ONE_READING, THRESHOLDS, CannotBeSeen,
                                    Evidence, Found, above, below, claim, decided,
                                    difference_of_means, mean_difference, own_critic, together)
from lab.probes.common import gradient, sample_batch
from lab.probes.rank import (CRITIC, GROUP_SIZES, NO_BASELINE, ONES, PLANTED, RANDOM, RANDOM_SUM,
                             RANKS, SHUFFLED, Z, FoundRanks, found_ranks, mean_rank)

CONFIDENT = 0.99
STABLE, ENTROPY, OVER_ANSWERS = (  # name, matrix and kind of rank
    ("stable, one matrix", "B", "stable"), ("entropy, one matrix", "B", "entropy"),
    ("entropy, over answers", "A", "entropy"))
MORE = "lab/probes/rank.py"


@claim(3, "The gradient becomes sparser over training", "", "lab/results/sparsity.txt")
def becomes_sparser(seen: Evidence) -> Found:
    """Four measures. Three say how much gradient is left: the share of groups without spread, the
    share of tokens with p > 0.99, and the mean of 1 - sum p^2. Each is the difference between the
    last fifth of the steps and the first. The fourth is Hoyer's sparsity of the gradient over all
    parameters, for the first and the last model."""
    problem, (first, last) = seen["problem"], seen.ends()
    groups = difference_of_means(without_spread(seen, last), without_spread(seen, first))
    sure = mean_difference(problem, (np.exp(seen["log_prob"]) > CONFIDENT) * 1.0, last, first)
    left = mean_difference(problem, 1 - seen["collision"], last, first)
    numbers: dict[str, object] = {"groups without spread": groups, "tokens with p > 0.99": sure,
                                  "1 - sum p^2": left}
    verdicts = [above(0)(groups), above(0)(sure), below(0)(left)]
    with suppress(CannotBeSeen):  # without the two models it is three measures
        before, after = (seen.of_model(hoyer_of_policy, model) for model in seen.before_and_after())
        numbers |= {"Hoyer at first": before, "at the end": after}
        verdicts.append(HOLDS if after > before else NOT)
    signed = {name: (x, "+.3f" if isinstance(x, Estimate) else ".3f")
              for name, x in numbers.items()}
    return Found(together(verdicts), signed, by_interval=True)


def without_spread(seen: Evidence, inside: np.ndarray) -> Floats:
    """(problems,) 1 for each problem whose answers all have the advantage 0, else 0. The problems
    are those of the tokens `inside`."""
    problem = np.unique(seen["problem"][inside], return_inverse=True)[1]
    signal = np.bincount(problem, seen["advantage"][inside] != 0)
    return (signal == 0).astype(float)


def hoyer_of_policy(policy: Policy, seen: Evidence) -> float:
    """Hoyer's sparsity of the gradient of sum_t A_t log p with respect to all parameters."""
    rollouts = sample_batch(policy, seen.problems, 8)
    return hoyer(gradient(policy, rollouts, rollouts.advantage))


def hoyer(numbers: torch.Tensor) -> float:
    """Hoyer's sparsity (2004), (sqrt n - l1 / l2) / (sqrt n - 1): 0 where all n numbers are equal
    in size, 1 where all but one are 0, about 0.2 for Gaussian ones, and NaN where all are 0."""
    parts = numbers.split(1_000_000)  # torch copies what it adds up in float64
    l1 = sum(vector_norm(part, 1, dtype=torch.float64).item() for part in parts)
    l2 = hypot(*(vector_norm(part, 2, dtype=torch.float64).item() for part in parts))
    root = len(numbers) ** 0.5
    return (root - l1 / l2) / (root - 1) if l2 else float("nan")


# ------------------------------------------------------------------- rank


@claim(3, "The gradient's effective rank is about 2, whatever the group's size", "2 at R = 2, 4, 8",
       MORE)
def rank_2(seen: Evidence) -> Found:
    """The paper names neither the matrix nor the kind of rank. So five ranks of two matrices are
    computed, and those are counted that may be about 2, by their intervals, at R = 2, 4 and 8. A
    matrix with a row for each answer has at most the rank R."""
    found, numbers, near = seen.of_model(ranks), dict[str, tuple[str, str]](), 0
    least, most = THRESHOLDS["rank 2 from"].number, THRESHOLDS["rank 2 to"].number
    for matrix, name in (("B", "one matrix"), ("A", "over answers")):
        for kind in RANKS:
            of_sizes = [mean_rank(found, matrix, Z, R, kind) for R in GROUP_SIZES]
            near += all(x.high > least and x.low < most for x in of_sizes)
            values = ", ".join(f"{x.value:.2f}" for x in of_sizes)
            interval = "{:.2f} to {:.2f}".format(*of_sizes[-1].interval)
            numbers[f"{kind}, {name}"] = (f"{values} ({interval})", "")
    verdict = HOLDS if near == len(numbers) else ONE_READING if near else NOT
    return Found(verdict, {f"of {len(numbers)} ranks may be": (near, "d"), **numbers})


@claim(3, "The rank is 2 because advantages sum to zero", "intrinsic", MORE)
def rank_by_zero_sum(seen: Evidence) -> Found:
    """If that were the reason, the rank would be well above 2 if all advantages were 1, because
    these do not sum to zero. Multiplying a row by a number other than 0 changes no rank."""
    return decided(above(THRESHOLDS["rank well above"].number), {
        "with all advantages 1, stable, one matrix": beside_z_score(seen, ONES, STABLE)}, "+.2f")


@claim(3, "Rewards by token would raise the rank well above 2", "would settle it", MORE)
def rank_by_token(seen: Evidence) -> Found:
    """Planted rewards, which pay each number token, and random numbers by token. The paper names
    this as the test that would settle its claim."""
    return decided(above(THRESHOLDS["rank well above"].number), {
        f"{arm}, {of[0]}": beside_z_score(seen, arm, of)
        for arm in (PLANTED, RANDOM) for of in (STABLE, OVER_ANSWERS)}, "+.2f")


@claim(3, "A critic or another baseline would raise the rank", "could restore it", MORE)
def rank_by_critic(seen: Evidence) -> Found:
    """A linear critic that was trained on eight batches, and no baseline at all."""
    return decided(above(0), {f"{arm}, {of[0]}": beside_z_score(seen, arm, of)
                              for arm in (CRITIC, NO_BASELINE) for of in (STABLE, OVER_ANSWERS)},
                   "+.2f")


@claim(3, "Other estimators whose advantages sum to zero share the rank", "may generalize", MORE)
def rank_of_other_estimators(seen: Evidence) -> Found:
    """RLOO and Dr. GRPO are the z-score times one number, so they have the same ranks. Z-scores of
    other answers, and random numbers that sum to zero, change it little."""
    return Found(ARITHMETIC, {f"{arm}, {STABLE[0]}": beside_z_score(seen, arm, STABLE)
                              for arm in (SHUFFLED, RANDOM_SUM)}, "+.2f")


@claim(3, "The rank collapses over training", "title", MORE)
def rank_collapses(seen: Evidence) -> Found:
    """Of eight answers: does the rank fall from the run's first model to its last, and is it about
    2 or less then? Ranks may fall while a model learns, and the entropy ranks stay far above 2."""
    verdicts, numbers = [], dict[str, tuple[Cell, str]]()
    for name, matrix, kind in (STABLE, ENTROPY, OVER_ANSWERS):
        before, after = ([one[kind] for one in seen.of_model(ranks, model)[matrix, Z, 8]]
                         for model in seen.before_and_after())
        fall, at_end = difference_of_means(after, before), mean_over(after)
        verdicts += [below(0)(fall), below(THRESHOLDS["rank 2 to"].number)(at_end)]
        numbers |= {name: (fall, "+.2f"), f"at the end, {name}": (at_end, ".2f")}
    return Found(together(verdicts), numbers, by_interval=True)


def ranks(policy: Policy, seen: Evidence) -> FoundRanks:
    """Of the last model with credit by token, too."""
    critic = own_critic(seen) if policy is seen.model else None
    found = found_ranks(policy, seen.problems, critic)
    if not found:
        raise CannotBeSeen("no group of eight answers differs in reward")
    return found


def beside_z_score(seen: Evidence, arm: str, of: tuple[str, str, str]) -> Estimate:
    """The rank with an advantage minus that with the z-score, paired by problem."""
    found, (_, matrix, kind) = seen.of_model(ranks), of
    return mean_over([one[kind] - z[kind]
                      for one, z in zip(found[matrix, arm, 8], found[matrix, Z, 8])])


# ------------------------------------------------------------------- the baseline


@claim(3, "The group's mean is the best baseline", "optimal under conditions",
       "lab/probes/baseline.py")
def mean_is_best(seen: Evidence) -> Found:
    """By how much the mean square of the gradient changes if b*, the best baseline from the other
    answers, is subtracted in place of their mean; and if others are. Before a training the mean is
    nearly best, and after it few problems have most of the gradient."""
    first, last = (seen.of_model(squares_by_baseline, model) for model in seen.before_and_after())
    best = {"at first with b*": beside_the_mean(first, BEST),
            "at the end with b*": beside_the_mean(last, BEST)}
    verdicts = [above(THRESHOLDS["best baseline"].number)(x) for x in best.values()]
    others = {f"at the end, {name}": beside_the_mean(last, name)
              for name in last if name not in (MEAN, BEST)}
    return Found(together(verdicts), {**best, **others}, "+.1%", by_interval=True)


@claim(3, "There are conditions under which the mean is the best baseline", "derived",
       "lab/probes/baseline.py")
def mean_is_best_where(seen: Evidence) -> Found:
    """Exactly where the gradient's squared length does not vary with the reward. Of two answers,
    one of them right with probability p, only p = 1/2 is such a case. The figure is by how much
    more noise the mean leaves than b*."""
    costs = {}
    for p in (0.5, 0.25, 0.1):
        costs[f"at p = {p:g}"] = bandit([np.log(p / (1 - p)), 0.0], [1.0, 0.0])[2]
    return Found(ARITHMETIC, costs, ".0%")


def squares_by_baseline(policy: Policy, seen: Evidence) -> dict[str, Floats]:
    """(problems,) the mean square of (R - b) g with each baseline, of 16 answers to each."""
    shape = seen.problems, 16
    rollouts = sample_batch(policy, *shape)
    square = squares(policy, rollouts).reshape(shape)
    reward, length = (x.double().cpu().numpy().reshape(shape)
                      for x in (rollouts.reward, rollouts.length))
    return {name: ((reward - b) ** 2 * square).mean(1)
            for name, b in baselines(reward, square, length).items()}


def beside_the_mean(found: dict[str, Floats], name: str) -> Estimate:
    return over_problems(np.arange(len(found[name])), [found[name], found[MEAN]],
                         lambda own, usual: own / usual - 1)


# ------------------------------------------------------------------- the derivation


@claim(3, "GRPO follows from the policy-gradient theorem", "derived",
       "docs/reference/policy_gradient.md")
def from_the_theorem(seen: Evidence) -> Found:
    """The mean can be subtracted; since it contains the answer's own reward, it makes the gradient
    smaller by 1 / G. To divide by the standard deviation is no part of the theorem: it gives
    problems with a success of p different weights. These are for this run's G."""
    G = seen.run.config.get("answers")
    if not G:
        raise CannotBeSeen("the size of this run's groups is not on record")
    return Found(ONE_READING, {"for the mean alone": 1 - 1 / G,
                               "of a z-score at p = 0.02": weight_of_problem(0.02, G),
                               "at p = 0.5": weight_of_problem(0.5, G)})


def weight_of_problem(p: float, G: int) -> float:
    """c(p, G): the expected gradient of a group with z-scores is c times that of p. With K of the
    other G - 1 answers right, c = E sqrt((G - 1 - K) / (K + 1)) + E sqrt(K / (G - K))."""
    total = 0.0
    for K in range(G):
        chance = comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        total += chance * (((G - 1 - K) / (K + 1)) ** 0.5 + (K / (G - K)) ** 0.5)
    return total
