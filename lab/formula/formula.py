"""The one loss whose settings are the tables: `ours(logits, batch, formula)`.

It is written as a user's loss is, from the logits and the batch, so its gradient comes from
autograd and needs no theory. A formula that was found is believed only where this function has the
gradient of the user's loss (search.py, `prove`).
"""
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from .batches import Batch, Case, Lens
from .terms import (ANSWER, CENTRES, CHOICES, COUNTS, FINISHES, GROUPS, LENGTHS, PLACES, RATIOS,
                     REFERENCES, SAMPLERS, SCALES, SHAPES, TERMS, kinds)

KNOWN = 1e-6  # a formula that leaves less of a gradient over is right, relative to its norm
Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Term:
    """A KL term or an entropy bonus: what it is, how its tokens count, where it stands, and how
    many times it is taken."""
    kind: str
    count: str
    place: str
    factor: float
    reference: str = ""
    counts_own: bool = False   # its own tokens are the length, and not those of the answer

    @property
    def is_entropy(self) -> bool:
        return self.kind == "entropy"


@dataclass(frozen=True)
class Formula:
    """The settings of `ours`: names of lines of the tables, and their numbers."""
    lens: Lens = Lens()
    kinds: frozenset[str] = ANSWER    # kinds of tokens that are trained
    choice: str = ""                  # of these, only where CHOICES says so
    share: float = 0.0                # the number of the choice
    groups: str = ""
    centre: str = "mean"
    scale: str = "none"
    epsilon: float = 0.0
    finish: str = ""
    finish_number: float = 1e-8
    count: str = "token"
    rows: int = 1                     # of a micro-batch, if the counting has one
    length: str = ""
    factor: float = 1.0
    shape: str = ""
    is_detached: bool = True
    late: int = 0                     # old log-probs are taken from so many places before
    ratio: str = "no ratio"
    bounds: tuple[float, ...] = ()
    sampler: str = ""
    limits: tuple[float, ...] = ()    # the bounds of the sampler's correction
    terms: tuple[Term, ...] = ()
    sure: frozenset[str] = field(default_factory=frozenset)  # questions that have an exact answer


class View(SimpleNamespace):
    """What a loss sees through its lens, per token (B, L), and which tokens a formula trains."""

    def __init__(self, logits: Tensor, batch: Batch, formula: Formula):
        self.batch, self.logits = batch, logits
        lens = formula.lens
        self.log_prob = lens.log_probs(logits, batch.ids)
        log_q = lens.distribution(logits)
        self.entropy = -(log_q.exp() * log_q).sum(-1)
        self.readable = lens.to_tokens(torch.ones(batch.ids.shape)) > 0
        self.place = torch.arange(batch.ids.shape[1])[None]
        self.trained = torch.zeros_like(batch.ids, dtype=torch.bool)
        for kind, where in kinds(self).items():
            if kind in formula.kinds:
                self.trained = self.trained | where
        if formula.choice:
            self.trained = self.trained & CHOICES[formula.choice](self, formula.share)

    def lengths(self, length: str) -> Tensor:
        """(B,) how many tokens of each row are counted."""
        return LENGTHS[length](self).sum(1).to(self.logits.dtype)


def view_of(case: Case, formula: Formula) -> View:
    return View(case.logits, case.batch(), formula)


def ours(logits: Tensor, batch: Batch, formula: Formula) -> Tensor:
    """The loss that has these settings."""
    view = View(logits, batch, formula)
    total = -policy(view, formula)
    for term in formula.terms:
        d = REFERENCES[term.reference](batch) - view.log_prob
        ratio = (view.log_prob - batch.old_log_prob).exp()
        value = TERMS[term.kind](d, ratio, view.entropy)
        total = total + (weight_of(view, term, formula) * value).sum()
    return total


def gradient_of(formula: Formula, case: Case) -> Tensor:
    """(B, L, V) the gradient of `ours` at the logits of a case."""
    logits = case.logits.clone().requires_grad_(True)
    value = ours(logits, case.batch(), formula)
    return torch.autograd.grad(value, logits)[0]


def left_of(wanted: Tensor, explained: Tensor) -> float:
    """The share of what is wanted that is not explained; infinite if it is no number."""
    share = float((wanted - explained).norm() / wanted.norm().clamp(min=1e-12))
    return math.inf if math.isnan(share) else share


def left_by(formula: Formula, changes: list[tuple[Case, Case, Tensor]]) -> float:
    """The largest share that the policy loss of the formula leaves over of the change between two
    cases, of which only the rewards differ; or the first one that is too large."""
    plain, worst = replace(formula, terms=()), 0.0
    for case, other, gradient in changes:
        explained = gradient_of(plain, case) - gradient_of(plain, other)
        worst = max(worst, left_of(gradient, explained))
        if worst > KNOWN:
            break
    return worst


def policy(view: View, formula: Formula) -> Tensor:
    """The sum over tokens of weight * shape * sampler * objective."""
    if not formula.factor:
        return (view.logits * 0).sum()
    batch = view.batch
    n = view.lengths(formula.length)
    weight = (formula.factor * COUNTS[formula.count](n, batch, formula.rows))[:, None]
    x = seen_by_ratio(view, formula, advantage_of(batch, formula)[:, None])
    objective = RATIOS[formula.ratio](x, *formula.bounds) * SAMPLERS[formula.sampler](
        x, *formula.limits)
    shape = SHAPES[formula.shape](view)
    shape = shape.detach() if formula.is_detached else shape
    # where nothing is trained stands 0, and not 0 times what may be infinite there
    return torch.where(view.trained, weight * shape * objective, 0.0).sum()


def advantage_of(batch: Batch, formula: Formula) -> Tensor:
    """(B,) the advantage. Where it is 0 / 0 stands 0."""
    reward, n = batch.reward, (batch.mask > 0).sum(1).to(batch.reward.dtype)
    label, copies = GROUPS[formula.groups](batch)
    row = torch.arange(len(reward))
    row = row if copies is None else row.repeat_interleave(copies)
    r, label = reward[row], label[row]
    centred = r - CENTRES[formula.centre](r, label, n[row])
    value = (centred / SCALES[formula.scale](r, label, formula.epsilon)).nan_to_num(0.0)
    value = torch.empty_like(reward).index_copy(0, row, value)
    return FINISHES[formula.finish](value, n, formula.finish_number).nan_to_num(0.0)


def seen_by_ratio(view: View, formula: Formula, advantage: Tensor) -> SimpleNamespace:
    """The names that RATIOS and SAMPLERS use."""
    batch, inside = view.batch, view.batch.mask > 0
    old = batch.old_log_prob.roll(formula.late, 1)
    d = view.log_prob - (batch.sampler_log_prob if formula.sampler == "sampler for old" else old)
    n = inside.sum(1, keepdim=True).to(d.dtype)

    def mean_of(value: Tensor) -> Tensor:
        return torch.where(inside, value, 0.0).sum(1, keepdim=True) / n

    w = old - batch.sampler_log_prob
    return SimpleNamespace(d=d, mean=mean_of(d), sum=n * mean_of(d), n=n, mean_of=mean_of,
                           log_p=view.log_prob, A=advantage, w=w.exp(), w_mean=mean_of(w).exp(),
                           w_sum=(n * mean_of(w)).exp())


def weight_of(view: View, term: Term, formula: Formula) -> Tensor:
    """(B, L) the weight of each token in a KL term or an entropy bonus."""
    where = PLACES[term.place](view).expand(view.log_prob.shape)
    n = where.sum(1).to(view.logits.dtype) if term.counts_own else view.lengths("")
    weight = COUNTS[term.count](n, view.batch, formula.rows)
    return term.factor * weight[:, None] * where


def first_right(candidates: Iterable[Candidate], left_over: Callable[[Candidate], float]
                ) -> Candidate | None:
    """The first candidate that leaves less than KNOWN over; None if there is none."""
    for candidate in candidates:
        if left_over(candidate) < KNOWN:
            return candidate
    return None


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
