"""Which advantage and which counting have these pushes? All pairs are tried at once.

The push of an answer is advantage * weight, so the difference between two batches that differ in
their rewards alone is A c - A' c'. For all advantages A and weights c of the tables, the share of
the measured numbers that a pair leaves over comes from a few products of matrices. What fits best
is then computed exactly.
"""
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batches import Batch, Case
from .ours import Formula, View, advantage_of, cost_of, lengths, trained
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


def best_fit(table: "Table", extreme: list[Measured], tolerance: float) -> Fit:
    """The simplest pair that leaves nothing over, or that which leaves least. Where several fit,
    the extreme batches decide."""
    fits = []
    for number, formulas in enumerate(tiers(table.start)):
        if number in (1, 2) and any(fit.left_over < tolerance for fit in fits):
            continue  # ordinary batches are explained: only limits can be missing
        if number not in table.tried:
            table.tried[number] = table.candidates(formulas)
        fits += table.tried[number]
        exact = [fit for fit in fits if fit.left_over < tolerance]
        if exact and not extreme:
            return min(exact, key=simplicity)
        held = [(share_left(fit.formula, extreme), fit) for fit in exact]
        if any(rest < tolerance for rest, _ in held):
            return min((fit for rest, fit in held if rest < tolerance), key=simplicity)
    exact = [fit for fit in fits if fit.left_over < tolerance]
    if exact:
        return min(exact, key=lambda fit: (round(share_left(fit.formula, extreme), 3),
                                           simplicity(fit)))
    return min(fits, key=lambda fit: fit.left_over)


def tiers(start: Formula) -> Iterator[list[Formula]]:
    """The advantages in the order in which they are tried: the usual ones first."""
    usual = [replace(start, centre=centre, scale=scale, epsilon=epsilon)
             for centre, scale in (("mean", "n"), ("mean", "n-1"), ("mean", "none"),
                                   ("raw", "none"), ("leave one out", "none"))
             for epsilon in ((0.0,) if scale in WITHOUT_EPSILON else EPSILONS)]
    yield usual
    yield [replace(start, groups=groups, centre=centre, scale=scale, epsilon=epsilon)
           for groups in GROUPS for centre in CENTRES for scale in SCALES
           for epsilon in ((0.0,) if scale in WITHOUT_EPSILON else EPSILONS)]
    yield [replace(formula, order=order) for order in ORDERS for formula in usual if order]
    yield [replace(formula, finish=finish) for finish in FINISHES for formula in usual if finish]
    yield [replace(formula, reward=reward) for reward in REWARDS for formula in usual if reward]


def simplicity(fit: Fit) -> tuple[float, ...]:
    """How much a formula needs: other rates, an odd factor, a line far down in its table."""
    formula = fit.formula
    size = abs(formula.factor)
    is_odd = formula.count != "constant" and abs(size - 1) > 1e-9
    return (formula.positive != 1 or formula.negative != 1, not is_short(size), is_odd,
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


def with_length_cost(best: Fit, start: Formula, measured: list[Measured],
                     tolerance: float) -> Fit:
    """The fit of an advantage whose reward lacks something for the answer's length, if one is
    exact. Where all lengths are equal, such a cost does not show, and the advantage does."""
    even = [one for one in measured if len(one.views[0].batch.mask.sum(1).unique()) == 1]
    usual = next(tiers(start))
    table = Table(start, even)
    exact = [fit for fit in table.candidates(usual)[:8] if fit.left_over < tolerance]
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
                if rest < tolerance and priced.price:
                    return Fit(priced, rest)
    return best


class Table:
    """The weights that COUNTS gives to the answers of some batches, and the numbers measured."""

    def __init__(self, start: Formula, measured: list[Measured]):
        self.start, self.measured = start, measured
        self.tried: dict[int, list[Fit]] = {}  # by tier: a second tolerance asks again
        self.views = [one.views for one in measured]
        self.number = torch.cat([scaled(one, one.number) for one in measured])
        self.ways = [(count, length) for length in ("", "trained") for count in COUNTS]
        if all(torch.equal(view.trained, view.batch.mask > 0)
               for pair in self.views for view in pair):
            self.ways = [(count, "") for count in COUNTS]
        self.weights = [torch.stack([self.weight(side, *way) for way in self.ways])
                        for side in (0, 1)]

    def weight(self, side: int, count: str, length: str) -> Tensor:
        parts = []
        for one, views in zip(self.measured, self.views):
            view = views[side]
            weight = COUNTS[count](lengths(view, length), view.batch)
            parts.append(scaled(one, weight))
        return torch.cat(parts)

    def advantages(self, formulas: list[Formula], side: int) -> Tensor:
        every, parts = Advantages(formulas), []
        for one, views in zip(self.measured, self.views):
            parts.append(torch.where(one.known, every.of(views[side]), 0.0))
        return torch.cat(parts, 1)

    def candidates(self, formulas: list[Formula]) -> list[Fit]:
        """The pairs that leave little over, computed exactly, and the nearest one."""
        both = [self.advantages(formulas, side) for side in (0, 1)]
        single = self.squares_left(both)
        fits = self.exact_ones(formulas, both, single, rates=False)
        if not any(fit.left_over < 1e-6 for fit in fits):
            signs = [[A.clamp(min=0) for A in both], [A.clamp(max=0) for A in both]]
            fits += self.exact_ones(formulas, both, self.squares_left_by_sign(signs), rates=True)
        return fits

    def inner(self, A: list[Tensor], B: list[Tensor]) -> Tensor:
        """(advantages, ways): the inner product of A c - A' c' with B c - B' c'."""
        c, d = self.weights
        return ((A[0] * B[0]) @ c.square().T + (A[1] * B[1]) @ d.square().T
                - (A[0] * B[1] + A[1] * B[0]) @ (c * d).T)

    def with_number(self, A: list[Tensor]) -> Tensor:
        c, d = self.weights
        return (A[0] * self.number) @ c.T - (A[1] * self.number) @ d.T

    def squares_left(self, A: list[Tensor]) -> Tensor:
        explained = self.with_number(A).square() / self.inner(A, A).clamp(min=1e-300)
        return 1 - explained / self.number.square().sum()

    def squares_left_by_sign(self, signs: list[list[Tensor]]) -> Tensor:
        """The same where positive and negative advantages have a factor each."""
        up, down = signs
        uu, dd, ud = self.inner(up, up), self.inner(down, down), self.inner(up, down)
        un, dn = self.with_number(up), self.with_number(down)
        determinant = (uu * dd - ud.square()).clamp(min=1e-300)
        explained = (dd * un.square() + uu * dn.square() - 2 * ud * un * dn) / determinant
        return 1 - explained / self.number.square().sum()

    def exact_ones(self, formulas: list[Formula], both: list[Tensor], squares: Tensor,
                   rates: bool) -> list[Fit]:
        order = squares.nan_to_num(1.0, 1.0, 1.0).flatten().argsort()[:60].tolist()
        fits = []
        for index in order:
            which, way = divmod(index, len(self.ways))
            if fits and squares.flatten()[index] > 1e-7:
                break
            A = [side[which] for side in both]
            parts = [A] if not rates else [[a.clamp(min=0) for a in A], [a.clamp(max=0) for a in A]]
            columns = torch.stack([part[0] * self.weights[0][way] - part[1] * self.weights[1][way]
                                   for part in parts], 1)
            factors = torch.linalg.lstsq(columns, self.number[:, None]).solution[:, 0]
            fits.append(self.fit(formulas[which], self.ways[way], factors.tolist()))
        return fits

    def fit(self, formula: Formula, way: tuple[str, str], factors: list[float]) -> Fit:
        found = replace(formula, count=way[0], length=way[1], factor=tidy(factors[0]))
        if len(factors) == 2:
            up, down = factors
            largest = up if abs(up) >= abs(down) else down
            found = replace(found, factor=tidy(largest), positive=rate(up / largest),
                            negative=rate(down / largest))
        return Fit(found, share_left(found, self.measured))


class Advantages:
    """The advantages of many formulas, as `advantage_of` gives them one by one. What several
    formulas share, a baseline or a scale with all of its epsilons, is computed once a batch."""

    def __init__(self, formulas: list[Formula]):
        self.formulas = formulas
        self.plain = [which for which, formula in enumerate(formulas) if is_plain(formula)]
        differences: dict[tuple[str, str, str], int] = {}
        scales: dict[tuple[str, str, str], int] = {}
        self.above: list[int] = []
        self.below: list[int] = []
        for which in self.plain:
            one = formulas[which]
            difference, scale = ((one.reward, one.groups, name) for name in (one.centre, one.scale))
            self.above.append(differences.setdefault(difference, len(differences)))
            first = len(EPSILONS) * scales.setdefault(scale, len(scales))
            self.below.append(first + EPSILONS.index(one.epsilon))
        self.differences, self.scales = list(differences), list(scales)

    def of(self, view: View) -> Tensor:
        """(formulas, B)"""
        batch = view.batch
        found = torch.zeros(len(self.formulas), len(batch.reward), dtype=batch.reward.dtype)
        if self.plain:
            found[self.plain] = self.of_plain(batch)
        for which, formula in enumerate(self.formulas):
            if not is_plain(formula):
                cost = cost_of(view, formula) if formula.cost else None
                found[which] = advantage_of(batch, formula, cost)
        return found.nan_to_num(0.0, 0.0, 0.0)

    def of_plain(self, batch: Batch) -> Tensor:
        n = (batch.mask > 0).sum(1).to(batch.reward.dtype)
        epsilon = torch.tensor(EPSILONS, dtype=batch.reward.dtype)[:, None]
        rewards = {name: change(batch.reward, batch) for name, change in REWARDS.items()}
        groups = {name: compared(batch) for name, compared in GROUPS.items()}
        above, below = [], []
        for reward, group, centre in self.differences:
            r = rewards[reward]
            above.append(r - CENTRES[centre](r, groups[group], n))
        for reward, group, scale in self.scales:
            r = rewards[reward]
            size = SCALES[scale](r, groups[group], epsilon)  # (epsilons, B), or without them (B,)
            below.append(size.expand(len(EPSILONS), len(r)))
        return torch.stack(above)[self.above] / torch.cat(below)[self.below]


def is_plain(formula: Formula) -> bool:
    """Whether the advantage is just a difference, divided by a scale."""
    return not (formula.finish or formula.order or formula.cost or formula.minus)


def share_left(formula: Formula, measured: list[Measured]) -> float:
    """The largest share of a batch's numbers that the formula leaves over."""
    worst = 0.0
    for one in measured:
        wanted = torch.where(one.known, one.number, 0.0)
        off = (explained(formula, one) - wanted).norm()
        worst = max(worst, float(off / wanted.norm().clamp(min=1e-300)))
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
    size = torch.where(one.known, one.number, 0.0).norm().clamp(min=1e-300)
    return torch.where(one.known, value, 0.0) / size


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


def rate(value: float) -> float:
    """A rate with at most six digits; 0 where rounding left something."""
    return 0.0 if abs(value) < 1e-8 else float(f"{value:.6g}")
