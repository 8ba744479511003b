"""Bias, direction and noise of every way of spreading credit, in a world small enough to be listed;
or, with --model, the exact credit of the tokens of a real model.

    python -m research exact --seed 1         # seconds; another seed is another policy
    python -m research exact --policies 20    # the median of twenty, and its 95% interval
    python -m research exact --model runs/x   # before, in the middle of and after this run: minutes

With --model, every answer to a problem is listed that has a probability of --above or more. So V of
each prefix is known, and the credit of each token (listed.py). Shown are what each kind of token
decides beside its share of plain GRPO's gradient, and whether what a step does to a token follows
its credit. Answers have to be short: of those that think there are too many.

Without --model, the world (world.py) is a Qwen2 of a few hundred parameters with answers of at most
four tokens out of three. True is the gradient of J, the probability to be right. An --advantage and
a --mitigation make from a batch, which is one group, by the same functions that train, the estimate

    sum over the group's answers and their tokens of  weight * advantage * grad log pi / G

All batches that can be drawn are listed with their probability (batches.py). An idea that is a
class keeps a state or samples more: it is shown as n/a.
"""
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import Interval
from analysis.tables import Table, by_row
from engine.errors import UserError
from grpo import gradient_size
from harness.flags import Flag, Requirement, check_value
from research.probes.batches import Batches, Listed, estimator, list_advantages, list_weights
from research.probes.common import COMMON, Findings, Progress
from research.probes.world import World, make_world

SMALL: Requirement = (lambda s: not s.model, "the small world: leave --model out")
REAL: Requirement = (lambda s: bool(s.model), "--model")
FLAGS = {
    "model": Flag(None, "a model folder, several of them separated by commas, or a finished run"),
    "answers": Flag(None, "answers in a group: 2 or 3 in the small world (default 3), with --model "
                    "2 or more (default 8)", least=2, most=1000, kind=int),
    "length": Flag(4, "most tokens of an answer", least=2, most=5, requires=SMALL),
    "policies": Flag(1, "of this seed and the next ones", least=1, most=1000, requires=SMALL),
    "only": Flag(None, "these beside plain GRPO and exact credit, separated by commas",
                 requires=SMALL),
    "config": Flag(None, "a file of settings as train.py takes it, with the task and its flags; by "
                   "default that of the run that a folder of --model is, or lies in",
                   requires=REAL),
    "questions": Flag(24, "problems whose answers are listed", least=2, most=10_000,
                      requires=REAL),
    "training": Flag(False, "take the problems of the first step of a training instead of held-out "
                     "ones", requires=REAL),
    "above": Flag(1e-4, "answers of at least this probability are listed", above=0, most=0.1,
                  requires=REAL),
    "max_new_tokens": Flag(0, "most tokens of an answer; 0 is what suits the model", most=10_000,
                           requires=REAL),
    "dtype": Flag("float32", "to compute in; in bfloat16 rounding is part of each change",
                  choices=("float32", "bfloat16"), requires=REAL),
    "device": Flag("cpu", "cpu, cuda or cuda:N", requires=REAL),
    **COMMON}
PLAIN = ("none", "grpo", "dr_grpo", "rloo")
HOLDS = 1e-5  # an identity holds when its sides differ by less, relative to the right one
LEGEND = (
    "bias: size of (mean estimate - true gradient) over that of the true gradient; cosine: "
    "between the two; noise: trace of the covariance over the squared part of the mean that lies "
    "along the true gradient, the number of batches until noise and signal are alike.")


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    for name, flag in FLAGS.items():
        if vars(args)[name] != flag.default and not flag.has_effect(vars(args)):
            raise UserError(f"--{name} has no effect without {flag.requires[1]}")
    if args.model:
        from research.probes.listed import measure_model
        args.answers = args.answers or 8
        return measure_model(args, folder)
    args.answers = args.answers or 3
    check_value("answers", args.answers, Flag(3, least=2, most=3))
    return measure_world(args)


def measure_world(args: SimpleNamespace) -> Findings:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    seeds = range(args.seed, args.seed + args.policies)
    progress = Progress(**{str(seed): 1.0 for seed in seeds})
    only = args.only and [*PLAIN, *args.only.split(",")]
    findings = [of_policy(seed, args, only, lambda share: progress(str(seed), share))
                for seed in seeds]
    if args.policies == 1:
        return findings[0]
    weightings, advantages, _ = zip(*(found.tables for found in findings))
    intro = (f"{args.policies} policies. The first: {findings[0].intro[0]}")
    return Findings("Worlds that can be listed", [intro, LEGEND],
                    [over_policies(weightings, "none"), over_policies(advantages, "rloo")])


def of_policy(seed: int, args: SimpleNamespace, only: list[str] | None,
              progress: Callable[[float], None]) -> Findings:
    world = make_world(seed, args.length)
    batches = Batches.all(world, args.answers)
    advantages = list_advantages(world, batches, seed, lambda share: progress(share / 4), only)
    weights = list_weights(world, batches, advantages.values["grpo"],
                           lambda share: progress((1 + 3 * share) / 4), only)
    tables = [weighting_table(world, batches, advantages.values["rloo"], weights),
              advantage_table(world, batches, advantages),
              identities(world, batches, advantages.values)]
    length = world.probability @ world.rollouts.length.double()
    intro = (f"{len(world.probability)} answers, {len(world.score)} choices, "
             f"{world.score.shape[1]} parameters; J = {world.J:.3f}, {length:.2f} tokens an "
             f"answer; {len(batches.which):,} different groups of {args.answers} answers, with "
             "their probabilities.")
    return Findings("A world that can be listed", [intro, LEGEND], tables)


def over_policies(tables: Sequence[Table], plain: str) -> Table:
    """The median of each number, and its interval; noise also over that of `plain`."""
    numbers: dict[str, list] = {}
    for table in tables:
        of = {name: values for name, *values in table.rows if values[-1] != "n/a"}
        for name, values in of.items():
            numbers.setdefault(name, []).append([*values, values[-1] / of[plain][-1]])
    rows = [[name, *itertools.chain(*(median_of(column) for column in zip(*of)))]
            for name, of in numbers.items()]
    formats = {next(iter(tables[0].columns)): ""}
    for column, spec in (("bias", ".3f"), ("cosine", ".3f"), ("noise", ".2f"), ("times", ".2f")):
        formats |= {column: spec, f"{column} 95%": spec}
    return Table(tables[0].name, f"{tables[0].title}: medians of {len(tables)} policies",
                 by_row(formats, rows), "",
                 [f"with 95% intervals of the median; times: noise over that of {plain} on the "
                  "same policy", *tables[0].notes[:1]],
                 {"times": f"noise over {plain}'s", **{f"{column} 95%": "95% interval" for column in
                  ("bias", "cosine", "noise", "times")}})


def median_of(values: Collection[float]) -> tuple[float, Interval]:
    """And its 95% interval, between two of the values: the k-th from each end, of which the median
    lies outside with the chance of less than k heads among so many coins. None of fewer than 6."""
    order, n = sorted(values), len(values)
    k = next(k for k in range(n + 1) if sum(math.comb(n, i) for i in range(k + 1)) > 0.025 * 2 ** n)
    interval = (order[k - 1], order[n - k]) if k else (math.nan, math.nan)
    return float(np.median(order)), interval


def measured_rows(world: World, batches: Batches, listed: Listed,
                  advantage: torch.Tensor | float = 1.0) -> list[list]:
    G = batches.which.shape[1]
    return [[name, *estimator(world, batches, values * advantage / G).against(
        world.gradient).values()] for name, values in listed.values.items()]


def columns_of(name: str, rows: list[list], listed: Listed) -> dict[str, tuple]:
    not_listed = [[other, "n/a", "n/a", "n/a"] for other in listed.reasons]
    return by_row({name: "", "bias": ".3f", "cosine": ".4f", "noise": ".2f"}, rows + not_listed)


def advantage_table(world: World, batches: Batches, advantages: Listed) -> Table:
    rows = measured_rows(world, batches, advantages)
    unbiased = [row for row in rows if row[1] < HOLDS]
    quietest = min(unbiased, key=lambda row: row[3])
    return Table("advantages", "Advantages, all weights 1",
                 columns_of("advantage", rows, advantages),
                 f"Without bias: {', '.join(row[0] for row in unbiased)}.\n"
                 f"Among these {quietest[0]} has the least noise: {quietest[3]:.2f}.",
                 ["critics know V exactly, wrong ones a random number for each index; vine has "
                  "segments of two tokens and exact values; batch_mean is dr_grpo, as a batch is "
                  "one group", *why_not(advantages)])


def weighting_table(world: World, batches: Batches, rloo: torch.Tensor, weights: Listed) -> Table:
    rows = measured_rows(world, batches, weights, rloo)
    plain = next(row[3] for row in rows if row[0] == "none")
    keep = [row[0] for row in rows if 1 - row[2] < HOLDS]
    quieter = [row[0] for row in rows if row[3] < plain * (1 - HOLDS)]
    return Table(
        "weightings", "Weightings, with the advantage rloo",
        columns_of("mitigation", rows, weights),
        f"Weightings that keep the true direction: {', '.join(keep)}.\n"
        f"Less noise than no weighting ({plain:.2f}): {', '.join(quieter) or 'none'}.",
        ["weights are rescaled to mean 1 over a batch, which here is one group (as published: "
         "never); oracle knows the true credit; a weighting that looks at the advantage sees that "
         "of grpo", *why_not(weights)], {"mitigation": "weighting"})


def why_not(listed: Listed) -> list[str]:
    reasons = [f"{name} ({reason})" for name, reason in listed.reasons.items()]
    return [f"n/a: {'; '.join(reasons)}"] if reasons else []


def identities(world: World, batches: Batches, advantage: dict[str, torch.Tensor]) -> Table:
    """What theory says of the small world, each identity with both of its sides."""
    rows = [*rows_of_credit(world), *rows_of_batches(world, batches, advantage)]
    wrong, largest = sum(row[3] >= HOLDS for row in rows), max(row[3] for row in rows)
    holds = f"{wrong} of {len(rows)} identities do not hold" if wrong else (
        f"All {len(rows)} identities hold")
    formats = {"identity": "", "left": ".6f", "right": ".6f", "difference": ".1e"}
    return Table("identities", "What theory says", by_row(formats, rows),
                 f"{holds}: the largest relative difference is {largest:.0e}.",
                 ["left and right: sizes, where both are vectors; difference: size of the "
                  "difference over that of the right side"],
                 {"left": "left side", "right": "right side", "difference": "relative difference"})


def rows_of_credit(world: World) -> list[list]:
    p, J, rollouts = world.probability, world.J, world.rollouts
    collision = rollouts.collision.double()
    size = gradient_size(rollouts.log_prob.double(), collision)
    return [
        row("gradient of J by autograd = E[sum A_t grad log pi], A_t = V(after) - V(before)",
            world.gradient, gradient_with(world, world.credit)),
        row("sum_t E[A_t^2] = Var(R) = p (1 - p)",
            p @ world.credit.square().sum(1), torch.tensor(J * (1 - J))),
        row("E[s^2] of a token = 1 - sum p^2: the unsure ones get the larger gradients",
            p @ (size.square() * rollouts.mask).sum(1),
            p @ ((1 - collision) * rollouts.mask).sum(1))]


def rows_of_batches(world: World, batches: Batches, advantage: dict[str, torch.Tensor]) -> list:
    """What a weight does to the mean depends on whether it looks at the token that was drawn."""
    true, which, rollouts, rloo = world.gradient, batches.which, world.rollouts, advantage["rloo"]
    G = which.shape[1]
    c = z_score_factor(world.J, G)
    by_prefix = 1 + rollouts.entropy.double()
    by_token = 1 / (rollouts.log_prob.double().abs() + 0.1)
    before = world.worth[:, :-1]

    def mean(factor: torch.Tensor) -> torch.Tensor:
        return estimator(world, batches, factor / G).mean

    return [
        row("dr_grpo = (G - 1) / G of the true gradient",
            mean(advantage["dr_grpo"]), true * (G - 1) / G),
        row(f"z-score: c(p, G) times the true gradient, c({world.J:.2f}, {G}) = {c:.3f}",
            mean(advantage["grpo"]), c * true),
        row("weight by the prefix alone (1 + entropy): E[sum w A_t grad log pi]",
            mean(by_prefix[which] * rloo), gradient_with(world, by_prefix * world.credit)),
        row("weight by the token (1 / (abs(log p) + 0.1)): that + E[sum w (V - b) grad log pi]",
            mean(by_token[which] * rloo),
            gradient_with(world, by_token * (world.credit + before - world.J)))]


def gradient_with(world: World, values: torch.Tensor) -> torch.Tensor:
    """E[sum_t value_t grad log pi(y_t)] over single answers; `values` are (n, T)."""
    terms = (world.probability[:, None] * values * world.rollouts.mask).flatten()
    of_choices = torch.zeros(len(world.score), dtype=torch.float64)
    return of_choices.index_add(0, world.node.flatten(), terms) @ world.score


def row(identity: str, left: torch.Tensor, right: torch.Tensor) -> list:
    left, right = torch.atleast_1d(left).double(), torch.atleast_1d(right).double()
    difference = ((left - right).norm() / right.norm()).item()
    return [identity, left.norm().item(), right.norm().item(), difference]


def z_score_factor(p: float, G: int, epsilon: float = 1e-4) -> float:
    """By how much the z-score stretches the gradient of a problem of success p, rewards 0 and 1.

    The mean advantage of a right answer minus that of a wrong one. Without epsilon
    E sqrt((G-1-K)/(K+1)) + E sqrt(K/(G-K)),  K ~ Bin(G-1, p).
    """
    total = 0.0
    for K in range(G):  # right ones among the other answers
        chance = math.comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        if_right, if_wrong = (K + 1) / G, K / G  # share of right answers in the group
        up = (1 - if_right) / (math.sqrt(if_right * (1 - if_right)) + epsilon)
        down = if_wrong / (math.sqrt(if_wrong * (1 - if_wrong)) + epsilon)
        total += chance * (up + down)
    return total
