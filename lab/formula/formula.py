"""The one loss whose settings are the rows of the table: `ours(view, formula)`.

It is written as a user's loss is, from the logits and the batch, which a `View` holds, so its
gradient comes from autograd and needs no theory. A formula that was found is believed only where
this function has the gradient of the user's loss (search.py, `prove`).
"""
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from .batches import Batch, Case, Lens
from .terms import (CENTRES, COUNTS, FINISHES, GROUPS, LENGTHS, OLDS, PLACES, RATIOS,
                    REFERENCES, SAMPLERS, SCALES, SHAPES, TERMS, TOKENS, UNFINISHED, Setting)

KNOWN = 1e-6  # a formula that leaves less of a gradient over is right, relative to its norm
MUCH_BETTER = 1 / 3  # of what plain settings leave over, an odd one may leave at most this
Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Term:
    """A KL term or an entropy bonus: what it is and how many times it is taken, how its tokens
    count, and where it stands."""
    setting: Setting
    count: Setting
    place: str
    reference: str = ""

    @property
    def name(self) -> str:
        return "entropy" if self.setting.code.startswith("entropy") else "kl"

    def times(self, factor: float) -> "Term":
        return replace(self, setting=Setting(self.setting.code, (factor,)))


@dataclass(frozen=True)
class Formula:
    """The settings of `ours`: rows of the table, with their numbers."""
    lens: Lens = Lens()
    odd: frozenset[str] = frozenset()  # kinds of TOKENS that are trained or not as they should not,
                                       # and perhaps UNFINISHED
    groups: Setting = Setting("")
    centre: Setting = Setting("mean")
    scale: Setting = Setting("")
    finish: Setting = Setting("")
    count: Setting = Setting("token")
    length: Setting = Setting("")
    factor: float = 1.0
    is_reversed: bool = False          # good answers are made less probable
    shape: Setting = Setting("")
    late: int = 0                      # old log-probs are taken from so many places before
    old: Setting = Setting("")
    ratio: Setting = Setting("no ratio")
    sampler: Setting = Setting("")
    terms: tuple[Term, ...] = ()
    guesses: tuple[Term, ...] = ()     # terms of the nearest formula that are not sure
    sure: frozenset[str] = field(default_factory=frozenset)  # questions that have an exact answer

    def given(self, **changed: object) -> "Formula":
        """The formula with other settings: a code, or a code and its numbers."""
        return replace(self, **{name: Setting(value) if isinstance(value, str) else value
                                for name, value in changed.items()})


class View:
    """What a loss sees through its lens, per token (B, L), and which tokens a formula trains."""

    def __init__(self, logits: Tensor, batch: Batch, lens: Lens, odd: frozenset[str]):
        self.batch, self.logits = batch, logits
        self.log_q = lens.distribution(logits)
        self.log_prob = self.log_q.gather(2, batch.ids[:, :, None]).squeeze(2)
        self.readable = lens.to_tokens(torch.ones(batch.ids.shape)) > 0
        self.see_places(batch)
        self.trained = torch.zeros_like(self.inside)
        for code, row in TOKENS.items():
            if code.startswith("no ") != (code in odd):
                self.trained = self.trained | row.function(self)
        if UNFINISHED in odd:
            self.trained = self.trained & self.has_end

    def see_places(self, batch: Batch) -> None:
        """The words of which TOKENS are made."""
        self.place = torch.arange(batch.ids.shape[1])[None]
        self.inside = batch.mask > 0
        self.start = batch.prompt_length[:, None]
        self.last = torch.where(self.inside, self.place, 0).amax(1, keepdim=True)
        self.has_end = batch.ids.gather(1, self.last) == batch.end_id
        self.span = (self.place >= self.start) & (self.place <= self.last)

    def lengths(self, length: str) -> Tensor:
        """(B,) how many tokens of each row are counted."""
        return LENGTHS[length].function(self).to(self.logits.dtype)


@lru_cache(maxsize=64)
def kept_view(case: Case, lens: Lens, odd: frozenset[str]) -> View:
    """A view whose logits have a gradient, for all formulas that read and train the same tokens."""
    return View(case.logits.clone().requires_grad_(True), case.batch(), lens, odd)


def view_of(case: Case, formula: Formula) -> View:
    return kept_view(case, formula.lens, formula.odd)


def ours(view: View, formula: Formula) -> Tensor:
    """The loss that has these settings."""
    batch, total = view.batch, -policy(view, formula)
    for term in (*formula.terms, *formula.guesses):
        [factor] = term.setting.numbers
        x = SimpleNamespace(d=REFERENCES[term.reference](batch) - view.log_prob,
                            ratio=(view.log_prob - batch.old_log_prob).exp(),
                            log_p=view.log_prob,
                            entropy=-(view.log_q.exp() * view.log_q).sum(-1))
        value = TERMS[term.setting.code].function(x)
        total = total + factor * (weight_of(view, term, formula) * value).sum()
    return total


def gradient_of(formula: Formula, case: Case) -> Tensor:
    """(B, L, V) the gradient of `ours` at the logits of a case."""
    view = view_of(case, formula)
    return torch.autograd.grad(ours(view, formula), view.logits, retain_graph=True)[0]


def left_of(wanted: Tensor, explained: Tensor) -> float:
    """The share of what is wanted that is not explained; infinite if it is no number."""
    share = float((wanted - explained).norm() / wanted.norm().clamp(min=1e-12))
    return math.inf if math.isnan(share) else share


def policy(view: View, formula: Formula) -> Tensor:
    """The sum over tokens of weight * shape * sampler * objective."""
    if not formula.factor:
        return (view.logits * 0).sum()
    weight = formula.factor * weights(view, formula.count, view.lengths(formula.length.code))
    x = seen_by_ratio(view, formula, advantage_of(view.batch, formula)[:, None])
    objective = RATIOS[formula.ratio.code].function(x, *formula.ratio.numbers)
    correction = SAMPLERS[formula.sampler.code].function(x, *formula.sampler.numbers)
    shape = SHAPES[formula.shape.code].function(view).detach()
    # where nothing is trained stands 0, and not 0 times what may be infinite there
    return torch.where(view.trained, weight[:, None] * shape * correction * objective, 0.0).sum()


def weights(view: View, count: Setting, n: Tensor) -> Tensor:
    """(B,) the weight of a token of each answer."""
    return COUNTS[count.code].function(n, view.batch, *(count.numbers or (1.0,)))


def advantage_of(batch: Batch, formula: Formula) -> Tensor:
    """(B,) the advantage. Where it is 0 / 0 stands 0."""
    reward, n = batch.reward, batch.mask.sum(1)
    label = GROUPS[formula.groups.code].function(batch)
    scale, finish = formula.scale, formula.finish
    centred = reward - CENTRES[formula.centre.code].function(reward, label, n)
    value = centred / SCALES[scale.code].function(reward, label, *(scale.numbers or (0.0,)))
    value = value.nan_to_num(0.0)
    return FINISHES[finish.code].function(value, n, *(finish.numbers or (0.0,))).nan_to_num(0.0)


def seen_by_ratio(view: View, formula: Formula, advantage: Tensor) -> SimpleNamespace:
    """The names that RATIOS and SAMPLERS use."""
    batch, inside = view.batch, view.inside
    d = view.log_prob - OLDS[formula.old.code].function(batch).roll(formula.late, 1)
    n = inside.sum(1, keepdim=True).to(d.dtype)

    def mean_of(value: Tensor) -> Tensor:
        return torch.where(inside, value, 0.0).sum(1, keepdim=True) / n

    w = batch.old_log_prob.roll(formula.late, 1) - batch.sampler_log_prob
    return SimpleNamespace(d=d, mean=mean_of(d), sum=n * mean_of(d), n=n, mean_of=mean_of,
                           log_p=view.log_prob, A=advantage, w=w.exp(), w_mean=mean_of(w).exp(),
                           w_sum=(n * mean_of(w)).exp())


def weight_of(view: View, term: Term, formula: Formula) -> Tensor:
    """(B, L) the weight of each token in a KL term or an entropy bonus."""
    where = PLACES[term.place](view).expand(view.log_prob.shape)
    counts_trained = formula.length.code == " (trained)"
    n = where.sum(1).to(view.logits.dtype) if counts_trained else view.lengths("")
    return weights(view, term.count, n)[:, None] * where


def best_of(candidates: Iterable[Candidate], left_over: Callable[[Candidate], float],
            plain: int = 0) -> tuple[Candidate | None, float]:
    """The first candidate that leaves less than KNOWN over, or that which leaves least, and what it
    leaves; None if each leaves infinitely much. Where none is right, one that is not among the
    first, `plain` ones has to be much better than these, because whoever reads its name takes it
    for the reason."""
    best, least = None, math.inf
    plainest = best, least
    for number, candidate in enumerate(candidates, 1):
        left = left_over(candidate)
        if left < least:
            best, least = candidate, left
        if least < KNOWN:
            return best, least
        if number == plain:
            plainest = best, least
    return plainest if least > MUCH_BETTER * plainest[1] else (best, least)


def tidy(number: float, digits: int = 6, within: float = 3e-7) -> float:
    """The number, or one with few digits, or the inverse of one, that is as good as equal to it."""
    for count in range(1, digits + 1 if number else 0):
        short = float(f"{number:.{count}g}")
        inverse = 1 / float(f"{1 / number:.{count}g}")
        for near in (short, inverse):
            if abs(near / number - 1) < within:
                return near
    return number
