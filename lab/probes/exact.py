"""Bias, direction and variance of the gradient with every weighting and advantage, in a synthetic
task so small that all its answers are listed.

    python -m lab exact --seed 1         # takes seconds; another seed is another policy
    python -m lab exact --policies 20    # medians of twenty policies, with 95% intervals
    python -m lab exact --success 0.9    # the policy after a training
    python -m lab exact --only my_idea   # plain GRPO, exact credit and this method alone

The policy is a Qwen2 of a few hundred parameters, which knows three tokens and writes answers of at
most four (enumerated.py). The true gradient is that of J, the probability of a right answer. A
batch is one group of G answers. From it an advantage and a weighting make an estimate of the
gradient, by the same functions that train:

    sum over the group's answers and their tokens of  weight * advantage * grad log pi / G

All batches that can be drawn are listed with their probability, too, so the mean and the variance
of the estimate are exact. A method that keeps a state or samples more answers cannot be
listed in this way, and is shown as n/a.
"""
import difflib
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.analysis.statistics import Estimate
from lab.analysis.tables import WITH_INTERVAL, Columns, Row, Table, by_row
from lab.engine.methods import ADVANTAGES, MITIGATIONS
from lab.engine.errors import UserError
from lab.harness.flags import Flag
from lab.probes.common import COMMON, Findings, Progress
from lab.probes.enumerated import Batches, EnumeratedTask, estimator, make_enumerated
from lab.probes.enumerated_methods import Listed, list_advantages, list_weights

FLAGS = {
    "answers": Flag(3, "number of answers in a group", least=2, most=3),
    "length": Flag(4, "the most tokens of an answer", least=2, most=5),
    "policies": Flag(1, "number of policies: that of --seed, and those of the next seeds",
                     least=1, most=1000),
    "success": Flag(0.0, "train each policy first, along the true gradient, until it is right with "
                         "this probability", least=0, most=0.99),
    "only": Flag(None, "the methods to measure besides plain GRPO and exact credit, separated by "
                       "commas"),
    **COMMON}
EQUAL = 1e-5  # numbers are equal that differ by less, relative to their size
ALWAYS_SHOWN = ("none", "grpo", "dr_grpo", "rloo")
RATIO, SHORT = "noise-to-signal ratio", "noise over signal"  # in sentences, and in headings
LEGEND = (
    "The bias is the length of the mean estimate minus the true gradient, divided by the length "
    "of the true gradient. The cosine is that between the mean estimate and the true gradient. "
    f"{SHORT.capitalize()} is the {RATIO}: the trace of the covariance matrix, divided by the "
    "square of the mean's part along the true gradient. It is the number of batches over which "
    "one has to average until noise and signal are equal.")


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    seeds = range(args.seed, args.seed + args.policies)
    progress = Progress(**dict.fromkeys(map(str, seeds), 1.0))
    only = args.only and [*ALWAYS_SHOWN, *named_methods(args.only)]
    found, weightings, advantages = [], [], []
    for seed in seeds:
        findings = of_policy(seed, args, only, partial(progress, str(seed)))
        found.append(findings)
        weightings.append(findings.tables[0])
        advantages.append(findings.tables[1])
    # the rows of --only may be in either table
    first_tables = 2 if args.only and not MITIGATIONS.keys() >= {*named_methods(args.only)} else 1
    if args.policies == 1:
        found[0].first_tables = first_tables
        return found[0]
    intro = (f"The tables are made from {args.policies} policies. About the first of them: "
             f"{found[0].intro[0]}")
    return Findings("Synthetic tasks whose answers are all listed", [intro, LEGEND],
                    [over_policies(weightings, "none"), over_policies(advantages, "rloo")],
                    first_tables=first_tables)


def named_methods(text: str) -> list[str]:
    """The methods that --only names, separated by commas."""
    known = {**MITIGATIONS, **ADVANTAGES}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"--only: there is no weighting and no advantage {name!r}{hint}")
    return names


def of_policy(seed: int, args: SimpleNamespace, only: list[str] | None,
              progress: Callable[[float], None]) -> Findings:
    task = make_enumerated(seed, args.length, args.success)
    batches = Batches.all(task, args.answers)
    advantages = list_advantages(task, batches, seed, lambda share: progress(share / 4), only)
    grpo, rloo = advantages.values["grpo"], advantages.values["rloo"]
    weights = list_weights(task, batches, grpo,
                           lambda share: progress((1 + 3 * share) / 4), only)
    tables = [weighting_table(task, batches, rloo, weights),
              advantage_table(task, batches, advantages)]
    length = task.probability @ task.rollouts.length.double()
    choices, parameters = task.score.shape
    intro = (f"A policy of {parameters} parameters can write {len(task.probability)} answers. "
             f"There are {choices} pairs of a prefix and a token that may follow it. An answer is "
             f"right with the probability J = {task.J:.3f}, and has {length:.2f} tokens on "
             f"average. {args.answers} answers make {len(batches.which):,} different groups, whose "
             "probabilities are known.")
    return Findings("A synthetic task whose answers are all listed", [intro, LEGEND], tables)


def numbers_by_policy(tables: Sequence[Table], plain: str) -> dict[str, list[list[float]]]:
    """Bias, cosine and noise-to-signal ratio of each method, a row for each policy. A fourth number
    is the ratio divided by that of `plain` on the same policy."""
    numbers: dict[str, list[list[float]]] = {}  # method: a row for each policy
    for table in tables:
        listed = [row for row in table.rows if row[-1] != "n/a"]
        plain_noise = next(row[-1] for row in listed if row[0] == plain)
        for name, *values in listed:
            times = values[-1] / plain_noise
            numbers.setdefault(name, []).append([*values, times])
    return numbers


def over_policies(tables: Sequence[Table], plain: str) -> Table:
    """The median of each number and its interval."""
    rows: list[Row] = []
    for name, policies in numbers_by_policy(tables, plain).items():
        rows.append([name, *map(median_of, zip(*policies))])
    first = tables[0]
    formats = {next(iter(first.columns)): ""}
    headings = {"bias": "bias", "cosine": "cosine", "noise": SHORT,
                "times": f"{SHORT}, times {plain}'s"}
    for column, spec in (("bias", ".3f"), ("cosine", ".3f"), ("noise", ".2f"), ("times", ".2f")):
        formats[column] = spec
        headings[column] += WITH_INTERVAL
    return Table(first.name, f"{first.title}: medians of {len(tables)} policies",
                 by_row(formats, rows), "",
                 [f"Intervals are 95% intervals of the median. In the last column each policy's "
                  f"{SHORT} is divided by that of {plain} on the same policy",
                  *first.notes[:1]], headings)


def median_of(values: Collection[float]) -> Estimate:
    """The median and its 95% interval, from the k-th smallest value to the k-th largest. The true
    median is beyond one end with the probability that n coins show fewer than k heads. Fewer than
    6 values have no interval."""
    order, n = sorted(values), len(values)
    k, ways = 0, 1  # of 2 ** n, in which k heads or fewer come
    while ways <= 0.025 * 2 ** n:
        k += 1
        ways += math.comb(n, k)
    median = float(np.median(order))
    if k == 0:
        return Estimate(median)
    return Estimate(median, low=order[k - 1], high=order[n - k])


def measured_rows(task: EnumeratedTask, batches: Batches, listed: Listed,
                  advantage: torch.Tensor | float = 1.0) -> list[Row]:
    G = batches.which.shape[1]
    rows: list[Row] = []
    for name, values in listed.values.items():
        estimate = estimator(task, batches, values * advantage / G)
        found = estimate.against(task.gradient)
        rows.append([name, found["bias"], found["cosine"], found["noise"]])
    return rows


def columns_of(name: str, rows: list[Row], listed: Listed) -> Columns:
    not_listed: list[Row] = [[other, "n/a", "n/a", "n/a"] for other in listed.reasons]
    return by_row({name: "", "bias": ".3f", "cosine": ".4f", "noise": ".2f"}, rows + not_listed)


def advantage_table(task: EnumeratedTask, batches: Batches, advantages: Listed) -> Table:
    rows = measured_rows(task, batches, advantages)
    unbiased = [row for row in rows if row[1] < EQUAL]
    names = ", ".join(row[0] for row in unbiased)
    lowest, *_, ratio = min(unbiased, key=lambda row: row[3])
    return Table("advantages", "Advantages, with all weights 1",
                 columns_of("advantage", rows, advantages),
                 f"These advantages are unbiased: {names}.\n"
                 f"Among them {lowest} has the lowest {RATIO}: {ratio:.2f}.",
                 ["A critic knows V exactly here, and a wrong critic has a random number for each "
                  "position instead. one-step is V after the token minus V before it. vine has "
                  "segments of two tokens, and exact values. batch_mean is the same as dr_grpo, "
                  "because a batch is one group", *why_not(advantages)],
                 {"noise": SHORT})


def weighting_table(task: EnumeratedTask, batches: Batches, rloo: torch.Tensor,
                    weights: Listed) -> Table:
    rows = measured_rows(task, batches, weights, rloo)
    noise = {name: ratio for name, _, _, ratio in rows}
    plain = noise["none"]
    equal, keep, lower = [], [], []
    for name, _, cosine, ratio in rows:
        differs = (weights.values[name] - weights.values["none"]).abs().max() > EQUAL
        if name != "none" and not differs:
            equal.append(name)
            continue
        if name != "none" and 1 - cosine < EQUAL:
            keep.append(name)
        if ratio < plain * (1 - EQUAL):
            lower.append(name)
    sentences = [
        "Of the weightings that differ from no weighting, these keep the direction of the true "
        f"gradient: {', '.join(keep) or 'none'}.",
        f"These have a lower {RATIO} than no weighting ({plain:.2f}): "
        f"{', '.join(lower) or 'none'}."]
    if equal:
        sentences.append("In this task these give every token the weight 1, so it says nothing "
                         f"about them: {', '.join(equal)}.")
    return Table(
        "weightings", "Weightings, with the advantage rloo",
        columns_of("mitigation", rows, weights), "\n".join(sentences),
        ["Weights are rescaled to a mean of 1 over the batch, which here is one group; those of "
         "inverse_logprob_as_published are never rescaled. oracle knows the true credit. A "
         "weighting that looks at the advantage sees that of grpo", *why_not(weights)],
        {"mitigation": "weighting", "noise": SHORT})


def why_not(listed: Listed) -> list[str]:
    reasons = [f"{name} ({reason})" for name, reason in listed.reasons.items()]
    return [f"n/a, with the reason: {'; '.join(reasons)}"] if reasons else []
