"""The law: credit by token is a batch size in disguise.

If a method's gradient has a third of plain GRPO's noise at the same signal, it should lead as plain
GRPO with three times the batch leads. So plain GRPO's own leads by batch size, and the noise of a
method measured before training, say what the method should be worth; nothing is fitted.

    noise    trace of the covariance of a batch's gradient at the parameters, over the square of its
             mean along the true gradient, which is exact here
    ratio    noise over that of plain GRPO on the same policy
    cosine   between the method's mean gradient and the true one: what the law leaves out

All is in the space of the parameters: what the tokens that decide nothing do to shared weights is
in it. AdamW, which divides by a scale of each parameter, and what happens to the noise while a
policy learns something else, are not.
"""
import math
from statistics import fmean

import torch

from research.dial.arms import EXACT, PLAIN, Arm, arm_of
from research.dial.training import AdamW, gradients
from research.dial.world import Dials, World

BATCHES = 64     # of each policy


def noise_ratio_to_lead(ratio: float, curve: dict[float, float]) -> float:
    """The lead of a method whose noise is `ratio` times plain GRPO's. `curve` has plain GRPO's own
    lead by the factor of its batch, infinity for the exact gradient.

    Straight between two batches by the logarithm of their size, and from the largest to the exact
    gradient by the noise; beyond what was measured the last value holds.
    """
    sizes = sorted(curve)
    size = min(max(1 / ratio if ratio > 0 else math.inf, sizes[0]), sizes[-1])
    if size in curve:
        return curve[size]
    below = max(known for known in sizes if known < size)
    above = min(known for known in sizes if known > size)
    place = (1 - below / size if above == math.inf else
             math.log(size / below) / math.log(above / below))
    return curve[below] + place * (curve[above] - curve[below])


def noise_of(dials: Dials, names: list[str], rate: float, steps: int,
             seeds: range) -> dict[str, dict]:
    """Of each arm: noise over plain GRPO's and cosine, of policies that are untrained and half
    trained by plain GRPO. One whose answers all have the same reward says nothing."""
    found = {name: {"untrained": [], "half": []} for name in names}
    for seed in seeds:
        for when, parameters in zip(("untrained", "half"), trained(dials, seed, rate, steps // 2)):
            plain, _ = noise_and_cosine(dials, arm_of(PLAIN), seed, parameters)
            for name in names if math.isfinite(plain) else []:
                noise, cosine = noise_and_cosine(dials, arm_of(name), seed, parameters)
                found[name][when].append((noise / plain, cosine))
    return {name: {when: [math.exp(fmean(math.log(ratio) for ratio, _ in pairs)),
                          fmean(cosine for _, cosine in pairs)]
                   for when, pairs in of.items() if pairs} for name, of in found.items()}


def trained(dials: Dials, seed: int, rate: float, steps: int) -> list[torch.Tensor]:
    """Parameters (1, P) before and after so many steps of plain GRPO."""
    arm, world = arm_of(PLAIN), World(dials, [seed])
    method, optimizer, start = arm.start(world), AdamW(world.parameters, [rate]), world.parameters
    for step in range(1, steps + 1):
        gradient, _ = gradients(world, arm, method, step)
        world.parameters = world.parameters + optimizer.change(gradient)
    return [start, world.parameters]


def noise_and_cosine(dials: Dials, arm: Arm, seed: int,
                     parameters: torch.Tensor) -> tuple[float, float]:
    """Of many batches of one policy. Where nothing points along the true gradient the noise is
    without end; here it is very large."""
    world = World(dials, [seed] * BATCHES)
    world.parameters = parameters.expand(BATCHES, -1)
    draws = [("noise", seed, number) for number in range(BATCHES)]
    found, _ = gradients(world, arm, arm.start(world), 1, draws)
    world = World(dials, [seed])
    world.parameters = parameters
    true, _ = gradients(world, arm_of(EXACT), None, 1)
    return against(found.double(), true[0].double())


def against(found: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """Noise and cosine of gradients (n, P). The square of a mean of few holds some of their
    variance, which is taken out."""
    mean, variance = found.mean(0), found.var(0).sum().item()
    if variance == 0:
        return math.nan, math.nan
    along = (mean @ true / true.norm()).item()
    square = (mean @ mean).item() - variance / len(found)
    cosine = along / math.sqrt(square) if square > along ** 2 else math.copysign(1.0, along)
    return variance / max(along, 1e-6 * variance ** 0.5) ** 2, cosine
