"""Which tokens of the answers a loss trains, where it trains some of them: all but the first ones,
or those with the highest entropy or the lowest probability.

A `Selection` is one hypothesis. Its number is read off one batch, and it has to fit all of them.
"""
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.helpers.formula_batches import Case
from tools.helpers.formula_shapes import entropy_of, place_in_answer, places_left, surprise

SCORES = {"highest entropy": entropy_of, "lowest entropy": lambda case: -entropy_of(case),
          "lowest probability": surprise, "highest probability": lambda case: -surprise(case)}
LIMITED = {"entropy": entropy_of, "probability": lambda case: (-surprise(case)).exp()}
ROUNDED = {"by torch.quantile": None, "rounded down": torch.floor, "rounded up": torch.ceil,
           "rounded": torch.round}


@dataclass(frozen=True)
class Selection:
    code: str
    words: str
    chosen: Callable[[Case], Tensor]  # (B, L) bool, of the answers' tokens


def find_selection(cases: list[Case], trained: list[Tensor], tokens: list[Tensor],
                   ) -> Selection | None:
    """The selection that takes, of these tokens (B, L), those which are `trained`. Rows of which
    nothing is trained have no advantage, and are not compared."""
    for selection in selections(cases[0], trained[0]) if trained[0].any() else ():
        if all(torch.equal(selection.chosen(case) & of & has.any(1, keepdim=True), has)
               for case, has, of in zip(cases, trained, tokens)):
            return selection
    return None


def selections(case: Case, trained: Tensor) -> Iterator[Selection]:
    for side, place in (("first", place_in_answer), ("last", places_left)):
        least, most = int(place(case)[trained].min()), int(place(case)[trained].max())
        yield Selection(f"no {side} {least}", f"the {side} {least} tokens of an answer have none",
                        lambda case, place=place, n=least: place(case) >= n)
        yield Selection(f"only {side} {most + 1}",
                        f"only the {side} {most + 1} tokens of an answer have one",
                        lambda case, place=place, n=most: place(case) <= n)
    for (name, score), sign in itertools.product(LIMITED.items(), (1, -1)):
        yield from beyond_limit(name, score, sign, case, trained)
    for name, score in SCORES.items():
        for twentieths, rounding, whose in itertools.product(range(1, 20), ROUNDED,
                                                             ("batch", "answer")):
            share = twentieths / 20
            yield Selection(f"{name} {share:g} of {whose}", f"only those of the {name} have one, "
                            f"{share:.0%} of the tokens of {'the' if whose == 'batch' else 'each'} "
                            f"{whose}, their number {rounding}",
                            largest_share(score, share, ROUNDED[rounding], whose))


def beyond_limit(name: str, score: Callable[[Case], Tensor], sign: int, case: Case,
                 trained: Tensor) -> Iterator[Selection]:
    """The tokens whose score lies above a number, or below it if the sign is -1: the roundest
    number that is possible."""
    values, others = sign * score(case), case.mask & trained.any(1, keepdim=True) & ~trained
    if not others.any():
        return
    least, most = float(values[others].max()), float(values[trained].min())
    if least >= most:
        return
    middle = sign * (least + most) / 2
    limit = next(number for digits in range(1, 17) for number in [float(f"{middle:.{digits}g}")]
                 if least < sign * number < most or digits == 16)
    side = "above" if sign == 1 else "below"
    yield Selection(f"{name} {side} {limit:g}", f"only those whose {name} is {side} {limit:g} have "
                    "one", lambda case: sign * score(case) > sign * limit)


def largest_share(score: Callable[[Case], Tensor], share: float, rounding, whose: str):
    """The mask of the tokens with the largest scores, of the batch or of each answer."""
    def chosen(case: Case) -> Tensor:
        values, found = score(case), torch.zeros_like(case.mask)
        parts = [case.mask] if whose == "batch" else [
            case.mask & (torch.arange(len(case.ids)) == row)[:, None]
            for row in range(len(case.ids))]
        for part in parts:
            found |= part & (values >= lowest_of(values[part], share, rounding))
        return found & case.mask
    return chosen


def lowest_of(values: Tensor, share: float, rounding) -> Tensor:
    """The smallest of the values that are chosen."""
    if rounding is None:
        return torch.quantile(values, 1 - share)
    number = int(rounding(torch.tensor(share * len(values), dtype=torch.float64)))
    return values.sort(descending=True).values[max(number, 1) - 1]
