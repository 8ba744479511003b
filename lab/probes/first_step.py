"""How much more, or less, does the first step with a method gain than one with plain GRPO?

AdamW moves each parameter by about mean(g) / sqrt(mean(g^2)), where g is the gradient of a batch.
To first order the expected reward then grows by the learning rate times

    gain = sum over all parameters of  slope * mean(g) / sqrt(mean(g^2))

The slope is that of the expected reward. The gradient of rloo estimates it, because on average it
points along it. Multiplied with the mean(g) of the same batches it would be too large, because they
share their luck. So the batches form ten blocks, and the slope of a block is multiplied with the
mean(g) of the other blocks alone. What is returned is the gain over plain GRPO's, minus 1, with an
interval by the jackknife over the blocks.
"""
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import numpy as np
import torch
from torch import Tensor

from grpo import rloo
from lab.analysis.statistics import Estimate, jackknife
from lab.engine.credited import credited
from lab.engine.methods import Method
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.update import length_scaling
from lab.harness.build import make_advantage, make_weighting
from lab.harness.screen import show_status
from lab.harness.settings import LabSettings
from lab.probes.common import gradient, sample_batch

BLOCKS = 10
Methods = tuple[Method, Method]  # an advantage and a weighting


class Gradients:
    """Sums over the batches of each block: gradients, and their squares."""

    def __init__(self, count: int):
        self.first, self.second = torch.zeros(2, BLOCKS, count)

    def add(self, number: int, found: Tensor) -> None:
        self.first[number % BLOCKS] += found.cpu()
        self.second[number % BLOCKS] += found.cpu().square()


def first_steps(policy: Policy, arms: Mapping[str, LabSettings], least: int, most: int = 0,
                enough: Callable[[Estimate], bool] = bool, own: Mapping[str, Methods] | None = None
                ) -> dict[str, Estimate]:
    """By the name of each arm but the first, with which they are compared, from `least` batches of
    the model, or from more, up to `most`, until each is `enough`. `own` has the methods of arms, if
    they are not those that the settings name."""
    methods = {name: (make_advantage(s, policy), make_weighting(s, policy))
               for name, s in arms.items() if name not in (own or {})} | dict(own or {})
    count = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    plain, *others = arms
    slope, sums = Gradients(count), {name: Gradients(count) for name in arms}
    found: dict[str, Estimate] = {}
    for number in range(max(least, most)):
        show_status(f"the first step, batch {number + 1}")
        with torch.no_grad():
            s = arms[plain]
            batch = sample_batch(policy, s.questions, s.answers, step=7001 + number)
        slope.add(number, gradient(policy, batch, rloo(batch)))
        for name, s in arms.items():
            # what a method draws depends on the seed and the step, and this is the first step
            drawn = replace(s, seed=s.seed + number)
            sums[name].add(number, gradient(policy, batch, coefficient(policy, batch, drawn,
                                                                       methods[name])))
        if number + 1 >= least and (number + 1) % BLOCKS == 0:
            found = {name: compared(slope.first, sums[name], sums[plain]) for name in others}
            if all(map(enough, found.values())):
                break
    show_status("")
    return found


def coefficient(policy: Policy, batch: Rollouts, s: LabSettings, methods: Methods) -> Tensor:
    """(B, T): what the log-probs are multiplied with in the loss of the first step, with a plus."""
    with redirect_stdout(StringIO()):  # what a method says, a training says once
        mine, weight, _ = credited(batch, methods, replace(policy, settings=s), s, step=1)
    scale = length_scaling(mine.length, s.loss_norm, s.max_new_tokens)
    return weight * mine.advantage * mine.mask * scale / mine.mask.sum().clamp(min=1)


def compared(slope: Tensor, mine: Gradients, plain: Gradients) -> Estimate:
    """The gain of mine over plain, minus 1. `slope` is summed over the batches of each block."""
    def ratio(kept: np.ndarray) -> float:
        inside = torch.from_numpy(kept)
        return gain(slope, mine, inside) / gain(slope, plain, inside) - 1
    return jackknife(ratio, np.arange(BLOCKS))


def gain(slope: Tensor, of: Gradients, kept: Tensor) -> float:
    """Of the blocks that are kept, up to a factor that all methods share."""
    square = of.second[kept].sum(0)
    slope, scaled = slope[kept], of.first[kept] * square.clamp(min=1e-30).rsqrt()
    return float(slope.sum(0) @ scaled.sum(0) - (slope * scaled).sum())
