"""Which advantage and which counting have these pushes, and with which numbers?

The push of an answer is advantage * weight, so the difference between two batches that differ in
their rewards alone is A w - A' w'. The advantages of the table are tried one after the other, each
with all weights at once. How an advantage shrinks with its rewards says its epsilon before.
"""
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .batches import Case, mirrored, one_is_another, stretched, with_a_dead_group, with_other_reward
from .formula import KNOWN, MUCH_BETTER, Formula, advantage_of, best_of, tidy, view_of, weights
from .terms import CENTRES, COUNTS, FINISHES, GROUPS, LENGTHS, SCALES, Setting

USUAL = (("mean", "over n {e}"), ("mean", "over n-1 {e}"), ("mean", ""), ("raw", ""),
         ("leave one out", ""))  # baselines and scales that are tried first
PLAIN = ("token", "answer", "constant {N}")  # countings that are no reason for anything odd
COMMON = (1e-4, 1e-6, 1e-8)  # epsilons where another division hides how the advantage shrinks
SIZES = (1.0, 1e-2, 1e-4, 1e-7)  # by which rewards shrink


def find_credit(search: Any) -> None:
    """The advantage and the counting: those that explain all pushes, or most of them."""
    credit = Credit(search)
    best, left = best_of(credit.advantages(), lambda one: credit.fit(one)[1], len(USUAL))
    if best:
        search.settle("credit", credit.fit(best)[0], left)


def rewarded(search: Any) -> list[Case]:
    """Batches with rewards, lengths and sizes of many kinds."""
    even = search.case(32, equal_lengths=True)
    scale = torch.tensor([1.0, .3, 1e-2, 1e-4]).double()[even.group]
    start = torch.tensor([2.0, 1.0, .0, .0]).double()[even.group]
    found = [search.case(21), search.case(22, 2, 4, longest=6), search.case(23, spare=3),
             search.case(24, 3, 3, longest=8), search.case(25, 2, 6), search.case(26, 3, 8),
             search.case(28, 3, prompts=(3, 3), spare=0),
             even.with_reward(start + scale * even.reward), stretched(search.case(29), 1e-4),
             with_a_dead_group(search.case(27)), stretched(search.case(53, 2, 6), 40, -20),
             *one_is_another(search.case(51, 1, 200))]
    return found + [search.case(30, 3, 5, has_turns=True)] * search.asks_turns


class Credit:
    """The numbers measured of some pairs of batches, one for each answer, and the weights that
    COUNTS gives to their answers, in each of `ways`."""

    def __init__(self, search: Any):
        self.search, self.start = search, search.formula
        cases = rewarded(search)
        views = [view_of(case, self.start) for case in cases]
        lengths = [length for length in LENGTHS if not length or any(
            not torch.equal(view.lengths(length), view.lengths("")) for view in views)]
        self.ways = [(Setting(count, (1.0,) * ("{N}" in count)), length) for length in lengths
                     for count in COUNTS]
        self.plain = [way for way, (count, length) in enumerate(self.ways)
                      if count.code in PLAIN and not length]
        self.pairs = []  # of each pair: the two batches, their weights, the numbers
        for case in cases:
            other = with_other_reward(case)
            number = self.measured(case, other)
            if number is not None:
                norm = float(number.norm()) or 1.0
                sides = [(one.batch(), self.weights(one) / norm) for one in (case, other)]
                self.pairs.append((*sides, number / norm))
        one = search.case(34, 1, 8, equal_lengths=True)
        cases = [stretched(one, size) for size in SIZES]  # of one group, times the same weight
        found = [(case.batch(), self.measured(case, mirrored(case))) for case in cases]
        self.shrunk = [(batch, number) for batch, number in found if number is not None]

    def weights(self, case: Case) -> Tensor:
        """(ways, B) the weights of the answers that have a number."""
        view = view_of(case, self.start)
        found = [weights(view, count, view.lengths(length)) for count, length in self.ways]
        return torch.stack(found) * view.trained.any(1)

    def measured(self, case: Case, other: Case) -> Tensor | None:
        """(B,) the number of each answer, 0 where no token is trained; None if the loss refuses a
        batch."""
        push = self.search.tried(self.search.push, case, other)
        if push is None:
            return None
        push = push / self.search.unit(self.start, case)
        where = view_of(case, self.start).trained & torch.isfinite(push)
        return torch.where(where, push, 0.0).sum(1) / where.sum(1).clamp(min=1)

    def epsilon(self, formula: Formula, part: str) -> float:
        """The number of this part with which the advantage shrinks with its rewards as measured."""
        if len(self.shrunk) < 2:
            return 0.0
        (first, of_first), *others = self.shrunk
        row = int(of_first.abs().argmin())
        found = [(batch, float(number[row] / of_first[row])) for batch, number in others]
        batch, wanted = min(found, key=lambda one: abs(abs(one[1]) - .5))

        def shrinks_by(exponents: Tensor) -> Tensor:
            numbers = 10 ** exponents[:, None]
            made = formula.given(**{part: Setting(getattr(formula, part).code, (numbers,))})
            small, large = (advantage_of(one, made)[:, row] for one in (batch, first))
            return small / large

        low, high = -13.0, 2.0
        most, least = shrinks_by(torch.tensor([low, high]).double())
        if not math.isfinite(wanted) or not least < wanted < most - 1e-9:
            return 0.0
        for _ in range(4):
            exponents = torch.linspace(low, high, 1000, dtype=torch.float64)
            shrinks_less = shrinks_by(exponents) > wanted
            low = float(torch.where(shrinks_less, exponents, low).max())
            high = float(torch.where(shrinks_less, high, exponents).min())
        return tidy(10 ** low, 4, 1e-5)

    def advantages(self) -> Iterator[Formula]:
        """The advantages in the order in which they are tried: the usual ones first."""
        usual = [self.start.given(centre=centre, scale=scale) for centre, scale in USUAL]
        yield from map(self.with_epsilon, usual)
        for finish, formula in product([code for code in FINISHES if code], usual):
            made = formula.given(finish=finish)
            if finish.startswith("only"):
                yield self.with_epsilon(formula).given(finish=finish)
            elif formula.scale.code:
                for epsilon in COMMON:
                    yield made.given(scale=Setting(formula.scale.code, (epsilon,)),
                                     finish=Setting(finish, (1e-8,)))
            elif not (finish.startswith("whitened") and formula.centre.code == "raw"):
                yield made.given(finish=Setting(finish, (self.epsilon(made, "finish"),)))
        for centre, scale, groups in product(CENTRES, SCALES, GROUPS):
            yield self.with_epsilon(self.start.given(centre=centre, scale=scale, groups=groups))

    def with_epsilon(self, formula: Formula) -> Formula:
        code = formula.scale.code
        return formula.given(scale=Setting(code, (self.epsilon(formula, "scale"),))
                             ) if code else formula

    def fit(self, formula: Formula) -> tuple[Formula, float]:
        """The advantage with the first counting that leaves nothing over, or the one that leaves
        least, and the largest share of a pair that is left; on average, if it is not KNOWN."""
        columns = [advantage_of(first, formula) * of_first
                   - advantage_of(second, formula) * of_second               # (ways, B)
                   for (first, of_first), (second, of_second), _ in self.pairs]
        numbers = [number for _, _, number in self.pairs]
        along = sum(column @ number for column, number in zip(columns, numbers))
        factor = along / sum(column.square().sum(1) for column in columns).clamp(min=1e-300)
        left = torch.stack([(factor[:, None] * column - number).norm(dim=1)
                            for column, number in zip(columns, numbers)]).nan_to_num(1e9, 1e9)
        worst, mean = left.amax(0), left.mean(0)                              # (ways,)
        right = (worst < KNOWN).nonzero().flatten().tolist()
        way = right[0] if right else int(mean.argmin())
        plain = min(self.plain, key=mean.__getitem__)
        if not right and mean[way] > MUCH_BETTER * mean[plain]:
            way = plain
        share = float(worst[way]) if right else max(KNOWN, float(mean[way]))
        (count, length), factor = self.ways[way], tidy(float(factor[way]))
        if "{N}" in count.code and factor:  # its number is the factor
            count, factor = Setting(count.code, (abs(1 / factor),)), math.copysign(1.0, factor)
        return replace(formula, count=count, length=Setting(length), factor=factor,
                       is_reversed=factor < 0), share
