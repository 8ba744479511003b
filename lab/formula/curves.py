"""How does the push depend on the ratio of new and old probability, and on that of old and sampler?

The ratios of one answer's tokens are moved at a time, over a grid from e^-4 to e^4, for good
answers and for bad ones. Where the response stops to be proportional, or constant, or 0, lies a
bound. Each line of the table is tried with these bounds, on batches in which all ratios differ.
"""
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .batches import Case, stretched
from .calling import LossFailed
from .formula import Formula, first_right, gradient_of, left_by, tidy, view_of
from .terms import RATIOS, SAMPLERS

FINE = [1 + sign * 1e-5 * 2 ** k for k in range(14) for sign in (1, -1)]
GRID = sorted({1.0, *FINE, *torch.linspace(-4.0, 4.0, 81).double().exp().tolist()})
PROBED = 6  # tokens of each answer of Curves.case
TRIES = 8  # at a time, while a bound is looked for: one for each answer
# The rewards of four answers in two batches, whose mean is 0. The first two answers are probed: in
# the first batch the one is good and the other bad, and in the second one neither is.
REWARDS_OF_FOUR = (1.0, -1.0, 0.0, 0.0), (0.0, 0.0, 1.0, -1.0)
MOST = 8  # where more bounds are seen, each token has its own, and none is one of the ratio


class Curves:
    """The response of a loss to a ratio: its push divided by that at a ratio of 1. `moves` is the
    field of a case that has the logarithm of the ratio."""

    def __init__(self, search: Any, moves: str):
        self.search, self.moves = search, moves
        case = search.case(33, 8, 4, equal_lengths=True)
        row = torch.arange(32)
        place = (row + row // 4 + row // 8) % 4
        self.case, self.other = (case.with_reward(torch.tensor(rewards).double()[place])
                                 for rewards in REWARDS_OF_FOUR)
        self.still = search.push(self.case, self.other)
        usable = view_of(case, search.formula).trained & case.mask
        usable &= self.still.abs() > 1e-7 * self.still.abs().max()
        self.slots = {sign: [(b, int(usable[b].nonzero()[0])) for b in range(32)
                             if place[b] == of and usable[b].any()]
                      for sign, of in ((1, 0), (-1, 1))}

    def curve(self, sign: int, values: list[float]) -> list[float]:
        """The response of answers of this sign to these ratios."""
        slots, found = self.slots[sign], []
        for first in range(0, len(values) if slots else 0, max(1, len(slots))):
            log_ratio = torch.zeros_like(self.still)
            part = list(zip(slots, values[first:]))
            for (b, _), value in part:
                log_ratio[b] = math.log(value)
            pair = [replace(case, **{self.moves: log_ratio}) for case in (self.case, self.other)]
            moved = self.search.push(*pair)
            found += [float(moved[slot] / self.still[slot]) for slot, _ in part]
        return found

    def bounds(self, sign: int, values: list[float]) -> Iterator[float]:
        """The ratios at which the response changes its form."""
        for first, last, power in lawful_runs(values):
            for inside, outside in ((first, first - 1), (last, last + 1)):
                if 0 <= outside < len(GRID):
                    yield self.end_of_law(sign, GRID[inside], values[inside], power, GRID[outside])

    def end_of_law(self, sign: int, inside: float, value: float, power: float,
                   outside: float) -> float:
        """The ratio between two others at which the response stops to be value * ratio^power."""
        start = inside
        for _ in range(14):
            tries = [inside + (outside - inside) * (k + 1) / (TRIES + 1) for k in range(TRIES)]
            wanted = [value * (ratio / start) ** power for ratio in tries]
            holds = [abs(a - b) <= 1e-7 * max(abs(b), 1e-9)
                     for a, b in zip(self.curve(sign, tries), wanted)]
            last = holds.index(False) if False in holds else TRIES
            ends = [inside, *tries, outside]
            inside, outside = ends[last], ends[last + 1]
            if abs(outside - inside) < 1e-10 * inside:
                break
        return snapped((inside + outside) / 2)

    def points(self) -> list[float] | None:
        """All bounds; None if no ratio changes the response."""
        found, is_flat = set(), True
        for sign in (1, -1):
            values = self.curve(sign, GRID)
            is_flat &= all(abs(value - 1) < 1e-9 for value in values)
            found.update(float(f"{point:.9g}") for point in self.bounds(sign, values)
                         if point > 1e-12) if values else None
        return None if is_flat else sorted(found) if len(found) <= MOST else []


def lawful_runs(values: list[float]) -> list[tuple[int, int, float]]:
    """(first, last, power) of the stretches of the grid where the response is proportional to a
    power of the ratio: 1, 0, or -1; or where it is 0."""
    found, first = [], 0
    for law, intervals in groupby(map(law_between, GRID, GRID[1:], values, values[1:])):
        last = first + len(list(intervals))
        if law is not None and last > first + 1:
            found.append((first, last, 0.0 if math.isinf(law) else law))
        first = last
    return found


def law_between(ratio: float, next_ratio: float, value: float, next_value: float) -> float | None:
    """The power between two points of the grid, if it is a whole number; infinite if both values
    are 0."""
    if abs(value) < 1e-11 and abs(next_value) < 1e-11:
        return math.inf
    if value * next_value <= 0:
        return None
    power = math.log(next_value / value) / math.log(next_ratio / ratio)
    return float(round(power)) if abs(power - round(power)) < 1e-3 else None


def snapped(value: float) -> float:
    return round(value, 6) if abs(round(value, 6) - value) < 3e-7 * max(1, value) else value


def find_ratio(search: Any) -> None:
    """The objective and its bounds, if one is right."""
    changes = changes_of(search, 0.0) if search.knows("credit") else []
    try:
        points = Curves(search, "log_ratio").points()
    except LossFailed:
        return
    start = search.formula
    if points is None:
        return search.settle("ratio", replace(start, ratio="no ratio"))
    if changes:
        fits = (at_its_slope(start, replace(start, ratio=name, bounds=bounds), search.case(33))
                for name in sorted(RATIOS, key=lambda name: count_of_bounds(RATIOS[name].function))
                for bounds in bounds_for(name, RATIOS[name].function, points))
        search.settle("ratio", first_right(fits, lambda formula: left_by(formula, changes)))


def find_sampler(search: Any) -> None:
    """The correction for the engine that sampled, if one is right."""
    changes = changes_of(search, 1.0) if search.knows("credit", "ratio") else []
    start = search.formula
    if not changes:
        return
    if left_by(start, changes) < 1e-6:
        return search.settle("sampler", start)
    points = Curves(search, "log_sampler").points() or []
    fits = (replace(start, sampler=name, limits=limits) for name in SAMPLERS if name
            for limits in bounds_for(name, SAMPLERS[name].function, points))
    search.settle("sampler", first_right(fits, lambda formula: left_by(formula, changes)))


def changes_of(search: Any, sampler: float) -> list[tuple[Case, Case, Tensor]]:
    """Batches in which all ratios differ, with rewards from -1 to 1, so that a raw reward is
    negative, too; none if the loss refuses one of them."""
    cases = [stretched(search.case(seed).moved(seed, size, sampler=far * sampler), 2, -1)
             for seed, size, far in ((34, .3, .2), (35, 1.2, 1), (36, .05, 4), (37, 4.0, .6))]
    pairs = [(case, case.with_reward(case.reward.roll(1))) for case in cases]
    found = [(case, other, search.tried(search.change, case, other)) for case, other in pairs]
    return [] if any(gradient is None for _, _, gradient in found) else found


def count_of_bounds(line: object) -> int:
    return line.__code__.co_argcount - 1


def bounds_for(name: str, line: object, points: list[float]) -> list[tuple[float, ...]]:
    """All choices of a line's bounds among those that were seen, or none."""
    count = count_of_bounds(line)
    if name.startswith("summed") or name.endswith("of answer"):
        points = [snapped(point ** PROBED) for point in points]
    lows, highs = [*points, -math.inf], [*points, math.inf]
    if count == 2:
        return [(low, high) for low in lows for high in highs if low < high and (
            math.isfinite(low) or math.isfinite(high))]
    if count == 3:
        return [(low, high, most) for low in lows for high in highs for most in points
                if low < high < most or math.isinf(high) and low < most]
    return [()]


def at_its_slope(start: Formula, formula: Formula, on_policy: Case) -> Formula:
    """The formula with a factor that leaves its gradient where the ratio is 1 as it was, since the
    factor was measured there: an objective that is clamped below 1 has another slope than 1."""
    before = gradient_of(start, on_policy)
    slope = float((gradient_of(formula, on_policy) * before).sum() / before.square().sum())
    return replace(formula, factor=tidy(formula.factor / slope)) if slope else formula
