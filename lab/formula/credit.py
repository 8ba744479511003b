"""Which advantage and which counting have these pushes?

The push of an answer is advantage * weight, so the difference between two batches that differ in
their rewards alone is A c - A' c'. The advantages of the tables are tried one after the other, each
with all weights c at once.
"""
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from .batches import Case
from .ours import Formula, View, advantage_of, lengths, trained
from .reading import KNOWN, first_right
from .tables import CENTRES, COUNTS, EPSILONS, FINISHES, GROUPS, SCALES, WITHOUT_EPSILON

USUAL = (("mean", "n"), ("mean", "n-1"), ("mean", "none"), ("raw", "none"),
         ("leave one out", "none"))  # baselines and scales that are tried first


@dataclass(frozen=True)
class Measured:
    """One number for each answer: its push in a batch less that in another one, of which only the
    rewards differ. `views` are of the two, `known` are the answers that have a number."""
    views: tuple[View, View]
    number: Tensor
    known: Tensor

    @cached_property
    def scale(self) -> Tensor:
        """(B,) 0 at unknown answers, and so large elsewhere that all batches weigh the same, also
        those with large numbers."""
        size = float(torch.where(self.known, self.number, 0.0).norm())
        return self.known / (size or 1.0)  # the size is 0 where no reward counts


def best_fit(start: Formula, ordinary: list[Measured],
             extreme: list[Measured]) -> tuple[Formula, float]:
    """The first advantage, with its counting, that leaves nothing over of all batches, or else of
    the ordinary ones; or the nearest, and what it leaves over."""
    for measured in (ordinary + extreme, ordinary):
        pushes = Pushes(start, measured)
        advantage, left = first_right(advantages(start), lambda formula: pushes.fit(formula)[1])
        if left < KNOWN:
            break
    return pushes.fit(advantage or start)


def advantages(start: Formula) -> Iterator[Formula]:
    """The advantages in the order in which they are tried: the usual ones first. A reward that is
    whitened is not among them, because it is the z-score of the batch."""
    usual = scaled_by(start, USUAL)
    yield from usual
    for finish in FINISHES:
        for formula in usual:
            if finish and not (finish.startswith("whitened") and formula.centre == "raw"):
                yield replace(formula, finish=finish)
    for centre, scale, groups in product(CENTRES, SCALES, GROUPS):
        yield from scaled_by(replace(start, groups=groups), [(centre, scale)])


def scaled_by(start: Formula, ways: Iterable[tuple[str, str]]) -> list[Formula]:
    """The formula with each of these baselines and scales, and with each epsilon."""
    return [replace(start, centre=centre, scale=scale, epsilon=epsilon) for centre, scale in ways
            for epsilon in ((0.0,) if scale in WITHOUT_EPSILON else EPSILONS)]


class Pushes:
    """The numbers measured of some batches, end to end, and the weights that COUNTS gives to their
    answers."""

    def __init__(self, start: Formula, measured: list[Measured]):
        self.measured = measured
        self.number = torch.cat([one.scale * one.number for one in measured])         # (N,)
        batch = torch.cat([torch.full_like(one.number, i) for i, one in enumerate(measured)])
        self.of_batch = (batch[:, None] == torch.arange(len(measured))).double()   # (N, batches)
        is_whole = all(torch.equal(view.trained, view.batch.mask > 0)
                       for one in measured for view in one.views)
        self.ways = [(count, length) for count in COUNTS
                     for length in ("", "trained")[:1 if is_whole else 2]]
        self.weights = [torch.stack([self.weight(side, *way) for way in self.ways])
                        for side in (0, 1)]                                        # (ways, N) each
        self.known: list[list[dict]] = [[{} for _ in measured] for _ in (0, 1)]

    def weight(self, side: int, count: str, length: str) -> Tensor:
        views = [one.views[side] for one in self.measured]
        return torch.cat([COUNTS[count](lengths(view, length), view.batch) for view in views])

    def advantage(self, side: int, formula: Formula) -> Tensor:
        return torch.cat([one.scale * advantage_of(one.views[side].batch, formula, known)
                          for one, known in zip(self.measured, self.known[side])])

    def fit(self, formula: Formula) -> tuple[Formula, float]:
        """The advantage with the first counting that leaves nothing over, or the one that leaves
        least, and the largest share of a batch that is left."""
        columns = self.advantage(0, formula) * self.weights[0] \
            - self.advantage(1, formula) * self.weights[1]                         # (ways, N)
        factor = (columns @ self.number) / columns.square().sum(1).clamp(min=1e-300)
        off = (factor[:, None] * columns - self.number).square() @ self.of_batch
        left = off.amax(1).sqrt().nan_to_num(torch.inf, torch.inf)                 # (ways,)
        right = (left < KNOWN).nonzero().flatten().tolist()
        way = right[0] if right else int(left.argmin())
        count, length = self.ways[way]
        return replace(formula, count=count, length=length,
                       factor=tidy(float(factor[way]))), float(left[way])


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
