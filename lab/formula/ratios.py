"""How does a push depend on the ratio of new and old probability?

One token's (or one answer's) ratio is moved at a time, over a grid from e^-24 to e^24, for a good
answer and for a bad one. Where the response stops to be proportional, or constant, or 0, lies a
bound. Each line of RATIOS is tried with these bounds: first on the measured curves, then on batches
in which all ratios differ.
"""
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .batches import Case
from .calling import LossFailed
from .credit import tidy
from .ours import Formula, advantage_of, gradient_of, trained_in
from .reading import KNOWN
from .tables import BY_RATE, BY_TRYING, GATE_BOUNDS, GATES, RATIOS, USUAL_NUMBERS

FINE = [1 + sign * 1e-5 * 2 ** k for k in range(14) for sign in (1, -1)]
FAR = [math.exp(sign * size) for size in (4.5, 5.5, 7, 9, 11, 14, 17, 19, 21, 24)
       for sign in (1, -1)]
GRID = sorted({1.0, *FINE, *FAR, *torch.linspace(-4.0, 4.0, 81).double().exp().tolist()})
# The rewards of four answers in two batches. The first two are probed: in the first batch the one
# is good and the other bad, and in the second one both have an advantage of 0.
REWARDS_OF_FOUR = (((1.0, 0.0, .5, .5), (.5, .5, 1.0, 0.0)),
                   ((1.0, -1.0, 0.0, 0.0), (0.0, 0.0, 1.0, -1.0)),
                   ((1.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 0.0)))


class Curves:
    """The response of a loss to a ratio: its push divided by that at a ratio of 1."""

    def __init__(self, search: Any):
        self.search = search
        case = search.case(33, 8, 4, equal_lengths=True)
        row = torch.arange(32)
        place = (row + row // 4 + row // 8) % 4  # all four in a group, also where these are mixed
        for first, second in REWARDS_OF_FOUR:
            self.case = case.with_reward(torch.tensor(first).double()[place])
            self.other = case.with_reward(torch.tensor(second).double()[place])
            rest = advantage_of(self.other.batch(), search.formula)[place < 2]
            if not rest.abs().max() > 1e-9 * advantage_of(self.case.batch(),
                                                          search.formula).abs().max():
                break
        self.still = search.push(self.case, self.other)
        is_probed = (place < 2)[:, None] & trained_in(case, search.formula) & case.mask
        self.usable = is_probed & (self.still.abs() > 1e-7 * self.still.abs().max())
        self.sign = torch.where(place == 0, 1, -1)
        self.is_of_answer = False

    def moved(self, log_ratio: Tensor) -> Tensor:
        pair = [replace(case, log_ratio=log_ratio) for case in (self.case, self.other)]
        return self.search.push(*pair) / torch.where(self.usable, self.still, 1.0)

    def find_level(self) -> None:
        """Whether a token's ratio changes the pushes of other tokens of its answer."""
        probed = torch.zeros_like(self.usable)
        for b in self.usable.any(1).nonzero().flatten().tolist():
            probed[b, int(self.usable[b].nonzero().flatten()[0])] = True
        changed = torch.zeros_like(self.usable)
        for size in (1e-3, -1e-3, 3.0, -3.0):
            changed |= self.usable & ((self.moved(size * probed.double()) - 1).abs() > 1e-6)
        self.is_of_answer = bool((changed & ~probed).any())

    def curve(self, sign: int, values: list[float]) -> list[float]:
        """The response of answers of this sign to these ratios."""
        slots = [(b, j) for b, j in self.usable.nonzero().tolist() if self.sign[b] == sign]
        if self.is_of_answer:
            slots = list({b: (b, j) for b, j in slots}.values())
        found: list[float] = []
        for first in range(0, len(values) if slots else 0, max(1, len(slots))):
            log_ratio = torch.zeros_like(self.still)
            part = list(zip(slots, values[first:first + len(slots)]))
            for (b, j), value in part:
                where = (b, slice(None)) if self.is_of_answer else (b, j)
                log_ratio[where] = math.log(value)
            moved = self.moved(log_ratio)
            found += [float(moved[b, j]) for (b, j), _ in part]
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
        for _ in range(12):
            tries = [inside + (outside - inside) * (k + 1) / 17 for k in range(16)]
            wanted = [value * (ratio / start) ** power for ratio in tries]
            holds = [abs(a - b) <= 1e-7 * max(abs(b), 1e-9)
                     for a, b in zip(self.curve(sign, tries), wanted)]
            last = holds.index(False) if False in holds else 16
            ends = [inside, *tries, outside]
            inside, outside = ends[last], ends[last + 1]
            if abs(outside - inside) < 1e-10 * inside:
                break
        return snapped((inside + outside) / 2)


def lawful_runs(values: list[float]) -> list[tuple[int, int, float]]:
    """(first, last, power) of the stretches of the grid where the response is proportional to a
    power of the ratio: 1, 0, or -1; or where it is 0."""
    laws: list[float | None] = []
    for k in range(len(GRID) - 1):
        a, b = values[k], values[k + 1]
        if abs(a) < 1e-11 and abs(b) < 1e-11:
            laws.append(math.inf)
        elif a * b <= 0:
            laws.append(None)
        else:
            power = math.log(b / a) / math.log(GRID[k + 1] / GRID[k])
            near = round(power)
            laws.append(float(near) if abs(power - near) < 1e-3 and abs(near) < 4 else None)
    runs, k = [], 0
    while k < len(laws):
        end = k
        while end + 1 < len(laws) and laws[end + 1] == laws[k]:
            end += 1
        if laws[k] is not None and end > k:
            runs.append((k, end + 1, 0.0 if math.isinf(laws[k]) else laws[k]))
        k = end + 1
    return runs


def snapped(value: float) -> float:
    return round(value, 6) if abs(round(value, 6) - value) < 3e-9 * max(1, value) else value


def find_ratio(search: Any) -> None:
    """The objective and its bounds; that which is nearest if none is right."""
    try:
        curves = Curves(search)
    except LossFailed:
        return
    if not curves.usable.any():
        return
    curves.find_level()
    measured = {sign: curves.curve(sign, GRID) for sign in (1, -1)}
    points = sorted({float(f"{point:.9g}") for sign, values in measured.items() if values
                     for point in curves.bounds(sign, values) if point > 1e-12})
    fits = proposals(search.formula, points, curves, measured)
    best = judged(search, fits)
    if best is None or best[0] > KNOWN:
        tried = [*by_trying(search.formula, points), *gated(search.formula, points)]
        second = judged(search, tried)
        best = min((one for one in (best, second) if one), key=lambda pair: pair[0], default=None)
    if best is None:
        return
    error, formula = best
    formula = with_on_policy_factor(formula)
    is_without = formula.ratio == "no ratio" and formula in fits  # as the curves alone show
    if error <= KNOWN or is_without:
        search.settle("ratio", formula)
    else:
        search.formula = formula


def proposals(start: Formula, points: list[float], curves: Curves,
              measured: dict[int, list[float]]) -> list[Formula]:
    """The lines of RATIOS that have the measured curves, with the bounds that were seen."""
    found = []
    for name, gate in itertools.product(RATIOS, gates_seen(points)):
        start = replace(start, gate=gate, gate_bound=gates_seen(points)[gate])
        if name in BY_TRYING or gate and name == "mask":
            continue
        is_of_answer = name.startswith(("gspo", "gmpo", "summed", "vespo"))
        if is_of_answer != curves.is_of_answer and name != "no ratio":
            continue
        numbers = rates_seen(measured) if name in BY_RATE else bounds_for(name, points)
        for bounds in numbers:
            formula = replace(start, ratio=name, bounds=bounds)
            if has_curves(formula, curves, measured):
                found.append(formula)
    return found


def gates_seen(points: list[float]) -> dict[str, float]:
    """No gate, or a log-ratio that is clamped as far out as the outermost bounds."""
    size = max((abs(math.log(point)) for point in points), default=0.0)
    return {"": 0.0} | ({"log-ratio within": tidy(size)} if size > 4.4 else {})


def bounds_for(name: str, points: list[float]) -> list[tuple[float, ...]]:
    """All choices of a line's bounds among those that were seen, or none."""
    count = RATIOS[name].__code__.co_argcount - 1
    if name.startswith("inverse"):
        points = [snapped(1 / point) for point in points]
    lows, highs = [*points, -math.inf], [*points, math.inf]
    if name in ("topr", *BY_TRYING):
        return [(high,) for high in points]
    if count == 2:
        return [(low, high) for low in lows for high in highs if low < high and (
            math.isfinite(low) or math.isfinite(high))]
    if count == 3:
        return [(low, high, most) for low in lows for high in highs for most in points
                if low < high < most or math.isinf(high) and low < most]
    return [()]


def rates_seen(measured: dict[int, list[float]]) -> list[tuple[float, ...]]:
    """The rates of SAPO's gate for good and for bad answers, solved from one point of the curve."""
    k = min(range(len(GRID)), key=lambda k: abs(GRID[k] - .6))
    taus = []
    for sign in (1, -1):
        share = measured[sign][k] / GRID[k] if measured[sign] else 1.0
        if not 1e-9 < share < 1 - 1e-9:
            return []
        taus.append(tidy(2 * math.acosh(share ** -.5) / abs(GRID[k] - 1)))
    return [(taus[0], taus[1])]


def has_curves(formula: Formula, curves: Curves, measured: dict[int, list[float]]) -> bool:
    for sign, values in measured.items():
        if not values:
            continue
        wanted = response(formula, sign, curves.case)
        if math.isnan(wanted[0]):
            return False
        off = [abs(a - b) for a, b in zip(values, wanted)]
        if any(gap > 1e-5 * max(1.0, abs(b)) for gap, b in zip(off, wanted)):
            return False
    return True


def response(formula: Formula, sign: int, case: Case) -> list[float]:
    """The response that a line of RATIOS has to GRID, as Curves measures it: for answers of one
    token. Where the ratio is that of a sum, its logarithm is as many times as large."""
    n = int(case.length[0]) if formula.ratio.startswith(("summed", "vespo")) else 1
    at_one = float(slopes(formula, sign, torch.zeros(1, dtype=torch.float64)))
    if at_one == 0:
        return [math.nan] * len(GRID)
    grid = torch.tensor(GRID, dtype=torch.float64).log()
    return (slopes(formula, sign, n * grid) / at_one).tolist()


def slopes(formula: Formula, sign: int, log_ratio: Tensor) -> Tensor:
    """How the objective of one token grows with its log-prob, at each of these log-ratios."""
    leaf = torch.zeros_like(log_ratio).requires_grad_(True)
    d = (leaf + log_ratio)[:, None]
    x = SimpleNamespace(d=d, mean=d, sum=d, n=torch.ones_like(d), mean_of=lambda v: v,
                        log_p=leaf[:, None], p=d.exp(), old_p=torch.ones_like(d),
                        A=torch.full_like(d, float(sign)))
    gate = GATES[formula.gate](x, formula.gate_bound + 1e-9)
    objective = gate * RATIOS[formula.ratio](x, *formula.bounds)
    return torch.autograd.grad(objective.sum(), leaf)[0]


def judged(search: Any, formulas: list[Formula]) -> tuple[float, Formula] | None:
    """The formula that explains most of batches in which all ratios differ, and what it leaves
    over. Without a known advantage nothing can be explained, so the first one is taken."""
    if not formulas:
        return None
    if not search.knows("credit"):
        return 1.0, formulas[0]
    cases = [search.case(34).moved(34, .3), search.case(35).moved(35, 1.2),
             search.case(36).moved(36, .05), search.case(37).moved(37, 24.0)]
    wanted = []
    for case in cases:
        other = case.with_reward(case.reward.roll(1))
        try:
            wanted.append((case, other, search.change(case, other)))
        except LossFailed:
            return None
    found = []
    for formula in formulas:
        plain = with_on_policy_factor(formula)
        worst = 0.0
        for case, other, change in wanted:
            if found and worst > min(found, key=lambda pair: pair[0])[0]:
                break
            off = change - gradient_of(plain, case) + gradient_of(plain, other)
            worst = max(worst, float(off.norm() / change.norm()))
        found.append((worst if math.isfinite(worst) else 1e9, formula))
        if worst < 1e-9:
            break
    return min(found, key=lambda pair: pair[0])


def with_on_policy_factor(formula: Formula) -> Formula:
    """The factor was measured where the ratio is 1. An objective whose slope there is another
    number than 1, as one that is clamped below 1, has its part in it."""
    if formula.ratio in BY_TRYING:
        return formula
    slope = float(slopes(formula, 1, torch.zeros(1, dtype=torch.float64)))
    return replace(formula, factor=tidy(formula.factor / slope)) if slope else formula


def by_trying(start: Formula, points: list[float]) -> list[Formula]:
    """Lines whose bounds are no ratios, with usual numbers; and all others, as the nearest."""
    found = [replace(start, ratio=name, bounds=(most,)) for name in BY_TRYING
             for most in USUAL_NUMBERS]
    near = [point for point in points if .01 < point < 20][:6]
    for name in ("no ratio", "ratio", "clip", "cispo", "mask", "gspo clip", "clip dual"):
        found += [replace(start, ratio=name, bounds=bounds) for bounds in bounds_for(name, near)]
    return found


def gated(start: Formula, points: list[float]) -> list[Formula]:
    """PPO's clip on the answers that a gate lets through."""
    lows = [*[p for p in points if .1 < p < .999], .8, .9, .7]
    highs = [*[p for p in points if 1.001 < p < 10], 1.2, 1.28]
    return [replace(start, ratio="clip", bounds=(low, high), gate=gate, gate_bound=bound)
            for gate in GATES for low in dict.fromkeys(lows) for high in dict.fromkeys(highs)
            for bound in GATE_BOUNDS[gate] if gate]
