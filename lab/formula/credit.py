"""Which advantage and which counting have these pushes? All pairs are tried at once.

The push of an answer is advantage * weight, so the difference between two batches that differ in
their rewards alone is A c - A' c'. For all advantages A and weights c of the tables, the share of
the measured numbers that a pair leaves over comes from a few products of matrices. What fits best
is then computed exactly.
"""
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from .batches import Batch, Case
from .ours import Formula, View, advantage_of, cost_of, lengths, trained
from .reading import KNOWN
from .tables import (CENTRES, COUNTS, EPSILONS, FINISHES, GROUPS, ORDERS, REWARDS, SCALES,
                     WITHOUT_EPSILON)


@dataclass(frozen=True)
class Measured:
    """One number for each answer: its push in a batch less that in another one, of which only the
    rewards differ. `views` are of the two, `known` are the answers that have a number."""
    views: tuple[View, View]
    number: Tensor
    known: Tensor


@dataclass(frozen=True)
class Fit:
    formula: Formula
    left_over: float  # of the numbers, the largest share of all batches


def best_fit(start: Formula, measured: list[Measured], extreme: list[Measured]) -> Fit:
    """The simplest pair that leaves nothing over, or that which leaves least. Where several fit,
    the extreme batches decide."""
    table, fits = Table(start, measured), []
    for formulas in tiers(start):
        fits += table.candidates(formulas)
        exact = [fit for fit in fits if fit.left_over < KNOWN]
        held = [fit for fit in exact if share_left(fit.formula, extreme) < KNOWN]
        if held:
            return min(held, key=simplicity)
    if exact:
        return min(exact, key=lambda fit: (round(share_left(fit.formula, extreme), 3),
                                           simplicity(fit)))
    return min(fits, key=lambda fit: fit.left_over)


def tiers(start: Formula) -> Iterator[list[Formula]]:
    """The advantages in the order in which they are tried: the usual ones first. A reward that is
    whitened is not among them, because it is the z-score of the batch."""
    yield usual(start)
    yield [replace(formula, finish=finish) for finish in FINISHES for formula in usual(start)
           if finish and not (finish.startswith("whitened") and formula.centre == "raw")]
    yield [replace(formula, reward=reward) for reward in REWARDS for formula in usual(start)
           if reward]
    yield [replace(formula, order=order) for order in ORDERS for formula in usual(start) if order]
    yield every(start)


def usual(start: Formula) -> list[Formula]:
    return [replace(start, centre=centre, scale=scale, epsilon=epsilon)
            for centre, scale in (("mean", "n"), ("mean", "n-1"), ("mean", "none"),
                                  ("raw", "none"), ("leave one out", "none"))
            for epsilon in epsilons(scale)]


def every(start: Formula) -> list[Formula]:
    """Each baseline and each scale, among the answers of each way to compare."""
    return [replace(start, groups=groups, centre=centre, scale=scale, epsilon=epsilon)
            for groups in GROUPS for centre in CENTRES for scale in SCALES
            for epsilon in epsilons(scale)]


def epsilons(scale: str) -> tuple[float, ...]:
    return (0.0,) if scale in WITHOUT_EPSILON else EPSILONS


def simplicity(fit: Fit) -> tuple[float, ...]:
    """How much a formula needs: an odd factor, a line far down in its table."""
    formula = fit.formula
    size = abs(formula.factor)
    is_odd = formula.count != "constant" and abs(size - 1) > 1e-9
    return (not is_short(size), is_odd,
            list(COUNTS).index(formula.count), formula.length != "",
            list(CENTRES).index(formula.centre), list(SCALES).index(formula.scale),
            list(GROUPS).index(formula.groups), list(FINISHES).index(formula.finish))


def is_short(value: float) -> bool:
    """Whether the number or its inverse has at most four digits."""
    return any(abs(float(f"{x:.4g}") / x - 1) < 1e-9 for x in (value, 1 / value))


def with_price(formula: Formula, measured: list[Measured]) -> Formula:
    """The formula with the price of its cost at which least is left over (Gauss-Newton)."""
    def numbers(price: float) -> Tensor:
        priced = replace(formula, price=price)
        return torch.cat([scaled(one, explained(priced, one)) for one in measured])

    wanted, price = torch.cat([scaled(one, one.number) for one in measured]), 0.0
    for _ in range(12):
        now = numbers(price)
        slope = (numbers(price + 1e-6) - now) / 1e-6
        step = float((slope * (wanted - now)).sum() / slope.square().sum().clamp(min=1e-300))
        price += max(-.5, min(.5, step))
        if abs(step) < 1e-12:
            break
    return replace(formula, price=tidy(price) if abs(price) > 1e-9 else 0.0)


def with_length_cost(best: Fit, start: Formula, measured: list[Measured]) -> Fit:
    """The fit of an advantage whose reward lacks something for the answer's length, if one is
    exact. Where all lengths are equal, such a cost does not show, and the advantage does."""
    even = [one for one in measured if len(one.views[0].batch.mask.sum(1).unique()) == 1]
    exact = [fit for fit in Table(start, even).candidates(usual(start))[:8]
             if fit.left_over < KNOWN]
    # all counts give these batches the same: one fit of each advantage is enough
    distinct = {replace(fit.formula, count="", length="", factor=1.0): fit for fit in exact}
    for fit in distinct.values():
        for count in ("token", "answer", "constant", "sum", "group"):
            for beyond in range(8):
                # one factor for all counts: it is that of the even batch
                weights = [float(COUNTS[way](lengths(even[0].views[0], ""),
                                             even[0].views[0].batch)[0])
                           for way in (fit.formula.count, count)]
                factor = tidy(fit.formula.factor * weights[0] / weights[1])
                formula = replace(fit.formula, count=count, factor=factor,
                                  cost=f"length beyond {beyond}" if beyond else "length")
                priced = with_price(formula, measured[:2])
                rest = share_left(priced, measured)
                if rest < KNOWN and priced.price:
                    return Fit(priced, rest)
    return best


class Table:
    """The weights that COUNTS gives to the answers of some batches, and the numbers measured."""

    def __init__(self, start: Formula, measured: list[Measured]):
        self.measured = measured
        self.number = torch.cat([scaled(one, one.number) for one in measured])
        is_whole = all(torch.equal(view.trained, view.batch.mask > 0)
                       for one in measured for view in one.views)
        self.ways = [(count, length) for length in ("", "trained")[:1 if is_whole else 2]
                     for count in COUNTS]
        self.weights = [torch.stack([self.weight(side, *way) for way in self.ways])
                        for side in (0, 1)]

    def weight(self, side: int, count: str, length: str) -> Tensor:
        parts = []
        for one in self.measured:
            view = one.views[side]
            parts.append(scaled(one, COUNTS[count](lengths(view, length), view.batch)))
        return torch.cat(parts)

    def advantages(self, formulas: list[Formula], side: int) -> Tensor:
        parts = []
        for one in self.measured:
            found = advantages_of(formulas, one.views[side].batch)
            parts.append(torch.where(one.known, found, 0.0))
        return torch.cat(parts, 1)

    def candidates(self, formulas: list[Formula]) -> list[Fit]:
        """The pairs that leave little over, computed exactly, and the nearest one."""
        A, B = (self.advantages(formulas, side) for side in (0, 1))
        c, d = self.weights
        along = (A * self.number) @ c.T - (B * self.number) @ d.T  # (advantages, ways)
        size = A.square() @ c.square().T + B.square() @ d.square().T - 2 * (A * B) @ (c * d).T
        left = 1 - along.square() / size.clamp(min=1e-300) / self.number.square().sum()
        left = left.nan_to_num(1.0, 1.0, 1.0).flatten()
        fits: list[Fit] = []
        for index in left.argsort()[:60].tolist():
            if fits and left[index] > 1e-7:
                break
            which, way = divmod(index, len(self.ways))
            column = A[which] * c[way] - B[which] * d[way]
            factor = float((column * self.number).sum() / column.square().sum())
            count, length = self.ways[way]
            found = replace(formulas[which], count=count, length=length, factor=tidy(factor))
            fits.append(Fit(found, share_left(found, self.measured)))
        return fits


def advantages_of(formulas: list[Formula], batch: Batch) -> Tensor:
    """(formulas, B) the advantages, as `advantage_of` gives them one by one. A baseline or a scale
    that several formulas share is computed once."""
    n = (batch.mask > 0).sum(1).to(batch.reward.dtype)

    @cache
    def difference(reward: str, groups: str, centre: str) -> Tensor:
        r = REWARDS[reward](batch.reward, batch)
        return r - CENTRES[centre](r, GROUPS[groups](batch), n)

    @cache
    def scale(reward: str, groups: str, name: str, epsilon: float) -> Tensor:
        r = REWARDS[reward](batch.reward, batch)
        return SCALES[name](r, GROUPS[groups](batch), epsilon)

    found = []
    for one in formulas:
        value = difference(one.reward, one.groups, one.centre) \
            / scale(one.reward, one.groups, one.scale, one.epsilon)
        if one.finish or one.order:
            value = ORDERS[one.order](FINISHES[one.finish](value.nan_to_num(0.0), n))
        found.append(value)
    return torch.stack(found).nan_to_num(0.0, 0.0, 0.0)


def share_left(formula: Formula, measured: list[Measured]) -> float:
    """The largest share of a batch's numbers that the formula leaves over."""
    worst = 0.0
    for one in measured:
        wanted = torch.where(one.known, one.number, 0.0)
        off = (explained(formula, one) - wanted).norm()
        worst = max(worst, float(off / size_of(one)))
    return worst


def explained(formula: Formula, one: Measured) -> Tensor:
    """(B,) the numbers that the formula gives to the known answers."""
    sides = []
    for view in one.views:
        cost = cost_of(view, formula) if formula.cost else None
        weight = COUNTS[formula.count](lengths(view, formula.length), view.batch)
        sides.append(formula.factor * advantage_of(view.batch, formula, cost) * weight)
    return torch.where(one.known, sides[0] - sides[1], 0.0).nan_to_num(0.0, 0.0, 0.0)


def scaled(one: Measured, value: Tensor) -> Tensor:
    """The values of the known answers; batches with large numbers weigh no more than others."""
    return torch.where(one.known, value, 0.0) / size_of(one)


def size_of(one: Measured) -> float:
    """The norm of the known numbers; 1 if all are 0, as where no reward earns anything."""
    return float(torch.where(one.known, one.number, 0.0).norm()) or 1.0


def view_of(case: Case, formula: Formula) -> View:
    view = View(case.logits, case.batch(), formula.lens)
    view.trained = trained(view, formula)
    return view


def tidy(factor: float) -> float:
    """The number, or one with few digits, or the inverse of one, that is as good as equal to it."""
    for digits in range(1, 7 if factor else 0):
        short = float(f"{factor:.{digits}g}")
        if abs(short / factor - 1) < 3e-7:
            return short
        inverse = 1 / float(f"{1 / factor:.{digits}g}")
        if abs(inverse / factor - 1) < 3e-7:
            return inverse
    return factor
