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
    names the field of a case that has the logarithm of the ratio."""

    def __init__(self, search: Any, moves: str):
        self.search, self.moves = search, moves
        self.case = search.case(33, 8, 4, equal_lengths=True)
        row = torch.arange(32)
        place = (row + row // 4 + row // 8) % 4
        self.pair = [self.case.with_reward(torch.tensor(rewards).double()[place])
                     for rewards in REWARDS_OF_FOUR]
        usable = view_of(self.case, search.formula).trained & self.case.mask
        self.still = self.moved(self.case.log_ratio)
        usable &= self.still.abs() > 1e-7 * self.still.abs().max()
        self.slots = [[(b, int(usable[b].nonzero()[0])) for b in range(32)
                       if place[b] == sign and usable[b].any()] for sign in (0, 1)]

    def moved(self, logarithm: Tensor) -> Tensor:
        """(B, L): the pushes at the ratios with these logarithms."""
        return self.search.push(*[replace(case, **{self.moves: logarithm}) for case in self.pair])

    def response(self, sign: int, logarithms: list[float]) -> list[float]:
        """The response at each of at most eight ratios, in good or in bad answers (`sign`)."""
        moved, logarithm = self.slots[sign][:len(logarithms)], torch.zeros_like(self.still)
        for (b, _), value in zip(moved, logarithms):
            logarithm[b] = value
        push = self.moved(logarithm)
        return [float(push[slot] / self.still[slot]) for slot in moved]

    def end_of_law(self, sign: int, farthest: float) -> tuple[float, float | None]:
        """Near a ratio of 1 the response is a power of the ratio. Returns this power, and the ratio
        at which that stops being true, or None if it never stops."""
        near, far = math.copysign(NEAREST, farthest), farthest
        [first] = self.response(sign, [near])
        power = 0.0 if first <= 0 else round(math.log(first) / near, 6)
        count = len(self.slots[sign])
        while abs(far - near) > 1e-11:
            tries = [near + (far - near) * k / count for k in range(1, count + 1)]
            values = self.response(sign, tries)
            holds = [abs(value / math.exp(power * one) - 1) < 1e-7
                     for one, value in zip(tries, values)]
            if all(holds):
                return power, None
            last = holds.index(False)
            near, far = [near, *tries][last], tries[last]
        return power, float(f"{snapped(math.exp(far)):.9g}")

    def points(self) -> list[float] | None:
        """The ratios at which the response changes its form; None if no ratio changes it."""
        signs = [sign for sign in (0, 1) if len(self.slots[sign]) > 1]
        found = [self.end_of_law(sign, farthest) for sign in signs
                 for farthest in (-FARTHEST, FARTHEST)]
        points = {point for _, point in found if point is not None}
        is_flat = signs and not points and not any(power for power, _ in found)
        return None if is_flat else sorted(points)


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
    try:
        points = Curves(search, "log_sampler").points() or []
    except LossFailed:
        points = []
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
