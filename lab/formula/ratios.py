"""How does the push depend on the ratio of new and old probability?

The ratios of one answer's tokens are moved at a time, over a grid from e^-4 to e^4, for good
answers and for bad ones. Where the response stops to be proportional, or constant, or 0, lies a
bound. Each line of RATIOS is tried with these bounds, on batches in which all ratios differ.
"""
import math
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from .batches import Case
from .calling import LossFailed
from .credit import tidy
from .ours import Formula, gradient_of, left_by, trained_in
from .reading import KNOWN, first_right
from .tables import RATIOS

FINE = [1 + sign * 1e-5 * 2 ** k for k in range(14) for sign in (1, -1)]
GRID = sorted({1.0, *FINE, *torch.linspace(-4.0, 4.0, 81).double().exp().tolist()})
PROBED = 6  # tokens of each answer of Curves.case
TRIES = 8  # at a time, while a bound is looked for: one for each answer
# The rewards of four answers in two batches, whose mean is 0. The first two answers are probed: in
# the first batch the one is good and the other bad, and in the second one neither is.
REWARDS_OF_FOUR = (1.0, -1.0, 0.0, 0.0), (0.0, 0.0, 1.0, -1.0)
MOST = 8  # where more bounds are seen, each token has its own, and none is one of the ratio
UNDETACHED = "cispo undetached"  # it is seen in how the tokens of an answer differ (search.py)
FLAT = 1e-9  # how far from 1 the response of a loss without a ratio may be


class Curves:
    """The response of a loss to a ratio: its push divided by that at a ratio of 1."""

    def __init__(self, search: Any):
        self.search = search
        case = search.case(33, 8, 4, equal_lengths=True)
        row = torch.arange(32)
        place = (row + row // 4 + row // 8) % 4  # all four in a group, also where these are mixed
        self.case, self.other = (case.with_reward(torch.tensor(rewards).double()[place])
                                 for rewards in REWARDS_OF_FOUR)
        self.still = search.push(self.case, self.other)
        usable = trained_in(case, search.formula) & case.mask
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
            pair = [replace(case, log_ratio=log_ratio) for case in (self.case, self.other)]
            moved = self.search.push(*pair)
            found += [float(moved[slot] / self.still[slot]) for slot, _ in part]
        return found

    def bounds(self, sign: int, values: list[float]) -> list[float]:
        """The ratios at which the response changes its form."""
        found = []
        for first, last, power in lawful_runs(values):
            for inside, outside in ((first, first - 1), (last, last + 1)):
                if 0 <= outside < len(GRID):
                    found.append(self.bisect(sign, GRID[inside], values[inside], power,
                                             GRID[outside]))
        return found

    def bisect(self, sign: int, inside: float, value: float, power: float,
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
    return round(value, 6) if abs(round(value, 6) - value) < 3e-9 * max(1, value) else value


def find_ratio(search: Any) -> None:
    """The objective and its bounds, if one is right."""
    try:
        curves = Curves(search)
        measured = {sign: curves.curve(sign, GRID) for sign in (1, -1)}
        points = sorted({float(f"{point:.9g}") for sign, values in measured.items() if values
                         for point in curves.bounds(sign, values) if point > 1e-12})
    except LossFailed:
        return
    points = points if len(points) <= MOST else []
    responses = [value for values in measured.values() for value in values]
    start, changes = search.formula, search.ratio_changes()
    if responses and all(abs(value - 1) < FLAT for value in responses):
        search.settle("ratio", replace(start, ratio="no ratio"))
    elif responses and changes:
        names = [name for name in RATIOS if (name == UNDETACHED) == (start.ratio == UNDETACHED)]
        names.sort(key=bounds_of)  # of few bounds there are few choices
        fits = (at_its_slope(start, replace(start, ratio=name, bounds=bounds), search.case(33))
                for name in names for bounds in bounds_for(name, points))
        chosen, left = first_right(fits, lambda formula: left_by(formula, changes), enough=1e-9)
        if chosen and left <= KNOWN:
            search.settle("ratio", chosen)


def bounds_of(name: str) -> int:
    """How many bounds a line of RATIOS has."""
    return RATIOS[name].function.__code__.co_argcount - 1


def bounds_for(name: str, points: list[float]) -> list[tuple[float, ...]]:
    """All choices of a line's bounds among those that were seen, or none."""
    count = bounds_of(name)
    if name.startswith("inverse"):
        points = [snapped(1 / point) for point in points]
    if name.startswith("summed"):
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
