"""How much of a batch's gradient is noise with each arm of the board, against plain GRPO?

    python -m research noise
    python -m research noise --only hindsight,measured      # beside plain GRPO
    python -m research noise --model runs/x/checkpoints/step_000100 --batches 100

A batch's gradient g is signal and noise. Half of the noise is worth a batch of twice the size. Of
each arm, in the same batches, before training, at all parameters, clipped as training clips it:

    noise     E|g - mean|^2 / |mean|^2, of plain GRPO over that of the arm: above 1 is less noise
    cosine    of the arm's mean gradient with plain GRPO's. What does not point along that is no
              signal, unless plain GRPO is wrong: then only noise times cosine^2 is worth a batch
    cost      of a step with it over a plain one: in sampled tokens, and in processor seconds of
              sampling, credit and gradient

A noise ratio above both costs is necessary for an arm to be ahead at the same price, and not
enough: it knows the first step of a training, not where the arm leads. An arm with a state learns
on the way, as in training.
"""
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time

import numpy as np
import torch

from analysis.statistics import Estimate
from analysis.tables import Table, by_row
from engine.errors import UserError
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.flags import shortened
from harness.own_code import metrics_of
from research.experiments.arms import ARMS, PLAIN, SCALE
from research.probes.common import OF_A_MODEL, Findings, Flag, Probe, gradients, sample_batch
from research.probes.direction import Directions
from research.probes.methods import Method, make_method
from research.probes.progress import Progress

FLAGS = {
    **OF_A_MODEL,
    "batches": Flag(100, "batches, each with the gradient of every arm", least=4, most=1_000_000,
                    quick=4),
    "questions": Flag(8, "problems in each of them", least=1, most=10_000, quick=1),
    "answers": Flag(8, "answers to each of those", least=2, most=1000, quick=2),
    "only": Flag("all", "these arms beside plain GRPO, with a comma between them")}
NOTE = ("ratios: above 1 where the arm's gradient is the less noisy, interval over blocks of "
        "batches; noise below cost: it lies above both costs, which is not enough to be ahead")


def measure(probe: Probe) -> Findings:
    args, policy = probe.args, probe.policy()
    progress = Progress(gradients=100)
    methods = {name: make_method(ARMS[name], policy) for name in chosen(args.only)}
    directions, costs = Directions(args.batches, PLAIN), Costs()
    for n in range(args.batches):
        progress("gradients", n / args.batches)
        with costs.timed(PLAIN):
            rollouts = sample_batch(policy, n + 1, args.questions, args.answers)
            gradients(policy, rollouts, {PLAIN: rollouts.advantage})
        costs.tokens[PLAIN] += int(rollouts.mask.sum())
        found = gradients(policy, rollouts, coefficients(policy, methods, rollouts, costs))
        for gradient in found.values():
            gradient *= clipping(gradient.norm().item(), policy.settings.max_grad_norm)
        directions.add(found)
    intro = [f"{policy.folder}: {args.batches} batches of {args.questions} x {args.answers} "
             "answers, before training."]
    return Findings("How noisy is the gradient of each arm?", intro,
                    [noise_table(directions, costs)], None, "a quarter of an hour")


def chosen(only: str) -> list[str]:
    """Plain GRPO and those that are asked for; larger batches have its gradient."""
    known = [name for name in ARMS if name not in SCALE]
    asked = known if only == "all" else only.split(",")
    for name in set(asked) - set(known):
        raise UserError(f"--only {shortened(only)}: there is no arm {name}, only "
                        f"{', '.join(known)}")
    return [name for name in known if name in (PLAIN, *asked)]


def clipping(norm: float, limit: float) -> float:
    return min(1.0, limit / norm) if limit and norm else 1.0


class Costs:
    """Of plain steps; and of each arm, what it takes beside one."""

    def __init__(self) -> None:
        self.tokens, self.seconds = Counter(), Counter()  # of a processor

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = process_time()
        yield
        self.seconds[name] += process_time() - start

    def ratio(self, name: str, of: Counter) -> float:
        return 1 + (of[name] / of[PLAIN] if name != PLAIN else 0)


def coefficients(policy: Policy, methods: dict[str, Method], rollouts: Rollouts,
                 costs: Costs) -> dict[str, torch.Tensor]:
    """Of the loss of training: over the number of the batch's tokens."""
    of_all = {}
    for name, method in methods.items():
        with costs.timed(name):
            of_all[name] = method.product(policy, rollouts) / rollouts.mask.sum()
        costs.tokens[name] += metrics_of(method.function).get("extra_tokens", 0)
    return of_all


def noise_table(directions: Directions, costs: Costs) -> Table:
    rows = []
    for name in directions.sums:
        noise = directions.noise_ratio(PLAIN, name)
        spent = [costs.ratio(name, of) for of in (costs.tokens, costs.seconds)]
        rows.append([name, noise.value, noise.interval, directions.cosine(name), *spent,
                     criterion(noise, spent, name)])
    rows.sort(key=lambda row: -np.nan_to_num(row[1], nan=-1.0))
    formats = {"arm": "", "noise": ".2f", "95%": ".2f", "cosine": ".3f", "tokens": ".2f",
               "seconds": ".2f", "criterion": ""}
    return Table("noise", "Noise of plain GRPO over that of each arm, against what the arm costs",
                 by_row(formats, rows), "", [NOTE],
                 {"noise": "noise ratio", "95%": "95% interval",
                  "cosine": "cosine of the means", "tokens": "cost in tokens",
                  "seconds": "cost in seconds"})


def criterion(noise: Estimate, spent: list[float], name: str) -> str:
    if name == PLAIN or not np.isfinite(noise.low):
        return ""
    if noise.low > max(spent):
        return "noise below cost"
    return "noise above cost" if noise.high < max(spent) else "open"
