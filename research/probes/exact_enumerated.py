"""Bias, direction and variance in a synthetic task whose answers are all listed: what
`python -m research exact` measures without --model."""
import math
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import Estimate
from analysis.tables import WITH_INTERVAL, Columns, Row, Table, by_row
from research.probes.batches import Batches, Listed, estimator, list_advantages, list_weights
from research.probes.common import Findings, Progress
from research.probes.enumerated import EnumeratedTask, make_enumerated
from research.probes.identities import HOLDS, identities_table

PLAIN = ("none", "grpo", "dr_grpo", "rloo")
RATIO, SHORT = "noise-to-signal ratio", "noise over signal"  # in sentences, and in headings
LEGEND = (
    "The bias is the size of (mean estimate - true gradient) divided by that of the true gradient. "
    f"The cosine is that between the two gradients. {SHORT.capitalize()} is the {RATIO}: the trace "
    "of the covariance divided by the squared part of the mean that lies along the true gradient. "
    "It is the number of batches over which one has to average until noise and signal are equal.")


def measure_enumerated(args: SimpleNamespace) -> Findings:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    seeds = range(args.seed, args.seed + args.policies)
    progress = Progress(**{str(seed): 1.0 for seed in seeds})
    only = args.only and [*PLAIN, *args.only.split(",")]
    found = [of_policy(seed, args, only, lambda share: progress(str(seed), share))
             for seed in seeds]
    if args.policies == 1:
        return found[0]
    weightings, advantages, _ = zip(*(findings.tables for findings in found))
    intro = f"{args.policies} policies. The first: {found[0].intro[0]}"
    return Findings("Synthetic tasks whose answers are all listed", [intro, LEGEND],
                    [over_policies(weightings, "none"), over_policies(advantages, "rloo")])


def of_policy(seed: int, args: SimpleNamespace, only: list[str] | None,
              progress: Callable[[float], None]) -> Findings:
    task = make_enumerated(seed, args.length)
    batches = Batches.all(task, args.answers)
    advantages = list_advantages(task, batches, seed, lambda share: progress(share / 4), only)
    weights = list_weights(task, batches, advantages.values["grpo"],
                           lambda share: progress((1 + 3 * share) / 4), only)
    tables = [weighting_table(task, batches, advantages.values["rloo"], weights),
              advantage_table(task, batches, advantages),
              identities_table(task, batches, advantages.values)]
    length = task.probability @ task.rollouts.length.double()
    intro = (f"{len(task.probability)} answers, {len(task.score)} choices, "
             f"{task.score.shape[1]} parameters; J = {task.J:.3f}, {length:.2f} tokens an "
             f"answer; {len(batches.which):,} different groups of {args.answers} answers, with "
             "their probabilities.")
    return Findings("A synthetic task whose answers are all listed", [intro, LEGEND], tables)


def over_policies(tables: Sequence[Table], plain: str) -> Table:
    """The median of each number and its interval. In the last column the noise-to-signal ratio is
    divided by that of `plain` on the same policy."""
    numbers: dict[str, list[list[float]]] = {}  # method: a row for each policy
    for table in tables:
        of_policy = {name: values for name, *values in table.rows if values[-1] != "n/a"}
        for name, values in of_policy.items():
            times = values[-1] / of_policy[plain][-1]
            numbers.setdefault(name, []).append([*values, times])
    rows: list[Row] = []
    for name, policies in numbers.items():
        row: Row = [name]
        for column in zip(*policies):
            row.append(median_of(column))
        rows.append(row)
    formats = {next(iter(tables[0].columns)): ""}
    headings = {"bias": "bias", "cosine": "cosine", "noise": SHORT,
                "times": f"{SHORT}, times {plain}'s"}
    for column, spec in (("bias", ".3f"), ("cosine", ".3f"), ("noise", ".2f"), ("times", ".2f")):
        formats[column] = spec
        headings[column] += WITH_INTERVAL
    return Table(tables[0].name, f"{tables[0].title}: medians of {len(tables)} policies",
                 by_row(formats, rows), "",
                 ["with 95% intervals of the median; the last ratio is taken on the same policy",
                  *tables[0].notes[:1]], headings)


def median_of(values: Collection[float]) -> Estimate:
    """The median and its 95% interval, between two of the values: the k-th from each end. The
    median lies outside with the probability of fewer than k heads among so many coins. There is no
    interval of fewer than 6 values."""
    order, n = sorted(values), len(values)
    k = 0
    while sum(math.comb(n, heads) for heads in range(k + 1)) <= 0.025 * 2 ** n:
        k += 1
    median = float(np.median(order))
    return Estimate(median, order[k - 1], order[n - k]) if k else Estimate(median)


def measured_rows(task: EnumeratedTask, batches: Batches, listed: Listed,
                  advantage: torch.Tensor | float = 1.0) -> list[Row]:
    G = batches.which.shape[1]
    rows: list[Row] = []
    for name, values in listed.values.items():
        found = estimator(task, batches, values * advantage / G).against(task.gradient)
        rows.append([name, found["bias"], found["cosine"], found["noise"]])
    return rows


def columns_of(name: str, rows: list[Row], listed: Listed) -> Columns:
    not_listed: list[Row] = [[other, "n/a", "n/a", "n/a"] for other in listed.reasons]
    return by_row({name: "", "bias": ".3f", "cosine": ".4f", "noise": ".2f"}, rows + not_listed)


def advantage_table(task: EnumeratedTask, batches: Batches, advantages: Listed) -> Table:
    rows = measured_rows(task, batches, advantages)
    unbiased = [row for row in rows if row[1] < HOLDS]
    lowest = min(unbiased, key=lambda row: row[3])
    return Table("advantages", "Advantages, all weights 1",
                 columns_of("advantage", rows, advantages),
                 f"Unbiased: {', '.join(row[0] for row in unbiased)}.\n"
                 f"Among these {lowest[0]} has the lowest {RATIO}: {lowest[3]:.2f}.",
                 ["critics know V exactly, wrong ones have a random number for each index; vine "
                  "has segments of two tokens and exact values; batch_mean is dr_grpo, as a batch "
                  "is one group", *why_not(advantages)], {"noise": SHORT})


def weighting_table(task: EnumeratedTask, batches: Batches, rloo: torch.Tensor,
                    weights: Listed) -> Table:
    rows = measured_rows(task, batches, weights, rloo)
    plain = next(row[3] for row in rows if row[0] == "none")
    keep = [row[0] for row in rows if 1 - row[2] < HOLDS]
    lower = [row[0] for row in rows if row[3] < plain * (1 - HOLDS)]
    return Table(
        "weightings", "Weightings, with the advantage rloo",
        columns_of("mitigation", rows, weights),
        f"Weightings that keep the true direction: {', '.join(keep)}.\n"
        f"Weightings with a lower {RATIO} than no weighting ({plain:.2f}): "
        f"{', '.join(lower) or 'none'}.",
        ["weights are rescaled to mean 1 over a batch, which here is one group (as published: "
         "never); oracle knows the true credit; a weighting that looks at the advantage sees that "
         "of grpo", *why_not(weights)], {"mitigation": "weighting", "noise": SHORT})


def why_not(listed: Listed) -> list[str]:
    reasons = [f"{name} ({reason})" for name, reason in listed.reasons.items()]
    return [f"n/a: {'; '.join(reasons)}"] if reasons else []
