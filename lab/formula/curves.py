"""How does the push depend on the ratio of new and old probability, and on that of old and sampler?

The ratios of one answer's tokens are moved at a time, for good answers and for bad ones. Where the
ratio is almost 1 the push is a power of it, and where it stops to be that lies a bound. Each row of
the table is tried with these bounds, on batches in which all ratios differ.
"""
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .batches import Case, stretched
from .calling import LossFailed
from .formula import KNOWN, Formula, best_of, gradient_of, left_of, tidy, view_of
from .terms import BOUNDS, RATIOS, SAMPLERS, Setting, slots

FARTHEST, NEAREST = 4.0, 1e-6  # logarithms of ratios that are tried
# The rewards of four answers in two batches, whose mean is 0. The first two answers are probed: in
# the first batch the one is good and the other bad, and in the second one neither is.
REWARDS_OF_FOUR = (1.0, -1.0, 0.0, 0.0), (0.0, 0.0, 1.0, -1.0)


class Curves:
    """The response of a loss to a ratio: its push divided by its push at a ratio of 1. `moves`
    names the field of a case that has the logarithm of the ratio. Good and bad answers are moved to
    smaller and to larger ratios: these are four ways, each with `count` answers of its own, and all
    are followed at once."""

    def __init__(self, search: Any, moves: str):
        self.search, self.moves = search, moves
        self.case = search.case(33, 8, 16, equal_lengths=True)
        row = torch.arange(len(self.case.reward))
        place = (row + row // 4 + row // 8) % 4
        self.pair = [self.case.with_reward(torch.tensor(rewards).double()[place])
                     for rewards in REWARDS_OF_FOUR]
        usable = view_of(self.case, search.formula).trained & self.case.mask
        self.still = self.moved(self.case.log_ratio)
        usable &= self.still.abs() > 1e-7 * self.still.abs().max()
        answers = [row[(place == sign) & usable.any(1)] for sign in (0, 1)]
        answers = [found for found in answers if len(found) > 3]
        self.count = min(map(len, answers), default=0) // 2
        self.direction = torch.tensor([-1.0, 1.0] * len(answers)).double()[:, None]
        rows = [found[:2 * self.count].view(2, self.count) for found in answers]
        self.rows = torch.cat([row[:0].view(0, self.count), *rows])           # (ways, count)
        self.tokens = self.rows, usable.byte().argmax(1)[self.rows]  # the first of each answer

    def moved(self, logarithm: Tensor) -> Tensor:
        """(B, L): the pushes at the ratios with these logarithms."""
        return self.search.push(*[replace(case, **{self.moves: logarithm}) for case in self.pair])

    def response(self, logarithms: Tensor) -> Tensor:
        """(ways, count) the response at these ratios, or at one for each way."""
        logarithm = torch.zeros_like(self.still)
        logarithm[self.rows] = logarithms.expand(self.rows.shape)[..., None]
        return self.moved(logarithm)[self.tokens] / self.still[self.tokens]

    def points(self) -> list[float] | None:
        """Near a ratio of 1 the response is a power of the ratio. Returns the ratios at which that
        stops being true; None if no ratio changes the response."""
        if not self.count:
            return []
        near, far = NEAREST * self.direction, FARTHEST * self.direction       # (ways, 1)
        first = self.response(near)[:, :1]
        power = torch.where(first > 0, first.log() / near, 0.0).round(decimals=6)
        while (far - near).abs().max() > 1e-11:
            tries = near + (far - near) * torch.arange(self.count + 1) / self.count
            law = (power * tries).exp()[:, 1:]
            holds = (self.response(tries[:, 1:]) / law - 1).abs() < 1e-7
            if holds.all():
                break
            step = holds.byte().argmin(1, keepdim=True)
            step[holds.all(1)] = self.count - 1  # on this way nothing stops
            near, far = tries.gather(1, step), tries.gather(1, step + 1)
        ends = far[far.abs() < FARTHEST - 1e-6].tolist()
        points = {float(f"{snapped(math.exp(end)):.9g}") for end in ends}
        return sorted(points) if points or power.any() else None


def snapped(value: float) -> float:
    return round(value, 6) if abs(round(value, 6) - value) < 3e-7 * max(1, value) else value


def find_ratio(search: Any) -> None:
    """The objective and its bounds. A loss without a ratio to the old model may have one to the
    reference."""
    for old, moves in (("", "log_ratio"), ("reference for old", "log_reference")):
        try:
            points = Curves(search, moves).points()
        except LossFailed:
            return
        if points is not None:
            points = [1 / point for point in points] if old else points  # it is new over reference
            formula, left = best_of(with_bounds(search.formula.given(old=old), "ratio", points,
                                                search.case(33)), left_by(changes_of(search, 0.0)))
            if left < KNOWN or not old:
                return search.settle("ratio", formula, left)
    search.formula = replace(search.formula, sure=search.formula.sure | {"ratio"})


def find_sampler(search: Any) -> None:
    """The correction for the engine that sampled, if one is right."""
    start, left = search.formula, left_by(changes_of(search, 1.0))
    if not search.knows("credit", "ratio") or left(start) < KNOWN:
        return search.settle("sampler", start, left(start))
    points = search.tried(lambda: Curves(search, "log_sampler").points()) or []
    fits = [start.given(old="sampler for old"), *with_bounds(start, "sampler", points)]
    search.settle("sampler", *best_of(fits, left))


def changes_of(search: Any, sampler: float) -> list[tuple[Case, Case, Tensor]]:
    """Batches in which all ratios differ, with rewards from -1 to 1, so that a raw reward is
    negative, too; none if the loss refuses one of them."""
    cases = [stretched(search.case(seed).moved(seed, size, size, far * sampler), 2, -1)
             for seed, size, far in ((34, .3, .2), (35, 1.2, 1), (36, .05, 4), (37, 4.0, .6))]
    pairs = [(case, case.with_reward(case.reward.roll(1))) for case in cases]
    found = [(case, other, search.tried(search.change, case, other)) for case, other in pairs]
    return [] if any(gradient is None for _, _, gradient in found) else found


def left_by(changes: list[tuple[Case, Case, Tensor]]) -> Callable[[Formula], float]:
    """A function that says what share a formula's policy loss leaves over of the change between two
    cases, of which only the rewards differ: the first that is too large, or else the largest."""
    def left(formula: Formula) -> float:
        plain, worst = replace(formula, terms=()), 0.0 if changes else math.inf
        for case, other, gradient in changes:
            explained = gradient_of(plain, case) - gradient_of(plain, other)
            worst = max(worst, left_of(gradient, explained))
            if worst > KNOWN:
                break
        return worst
    return left


def with_bounds(start: Formula, part: str, points: list[float], on_policy: Case | None = None
                ) -> Iterator[Formula]:
    """The formula as it is, and with each row of this part and all bounds that were seen."""
    yield start
    before = gradient_of(start, on_policy) if on_policy else None
    for code in RATIOS if part == "ratio" else SAMPLERS:
        for numbers in numbers_for(slots(code), points):
            formula = start.given(**{part: Setting(code, numbers)})
            yield at_its_slope(formula, on_policy, before) if on_policy else formula


def numbers_for(names: list[str], points: list[float]) -> Iterator[tuple[float, ...]]:
    """All choices of a row's bounds among those that were seen, or none of one side."""
    for chosen in product([*points, None], repeat=len(names)):
        numbers = [-math.inf if point is None and name.startswith(("least", "inverse_least"))
                   else math.inf if point is None else BOUNDS[name](point)
                   for name, point in zip(names, chosen)]
        edges = [1 - number if "low" in name else 1 + number if "high" in name else number
                 for name, number in zip(names, numbers) if math.isfinite(number)]
        if bool(edges) == bool(names) and all(a < b for a, b in zip(edges, edges[1:])):
            yield tuple(snapped(number) if math.isfinite(number) else number for number in numbers)


def at_its_slope(formula: Formula, on_policy: Case, before: Tensor) -> Formula:
    """The formula with a factor that leaves its gradient where the ratio is 1 as it was, since the
    factor was measured there: an objective that is clamped below 1 has another slope than 1."""
    slope = float((gradient_of(formula, on_policy) * before).sum() / before.square().sum())
    return replace(formula, factor=tidy(formula.factor / slope)) if slope else formula
