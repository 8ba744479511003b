"""The terms of a loss that do not depend on the reward: KL, entropy, a constant push.

They are what still has a gradient when all rewards are 0. A KL term is told from its derivative by
log p, with d = log-prob of the reference minus log p:

    k1 = -d              -> 1            the push is -weight, whatever d is
    k2 = d^2 / 2         -> -d
    k3 = exp(d) - d - 1  -> 1 - exp(d)
"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.helpers.formula_batches import Case
from tools.helpers.formula_counts import Count, Sizes, all_sizes
from tools.helpers.formula_ratio import actual_log_ratio

Derivative = Callable[[Tensor], Tensor]
KINDS: dict[str, tuple[str, Derivative]] = {  # the push of a term of weight 1, as a function of d
    "k2": ("d^2 / 2", lambda d: d),
    "k3": ("exp(d) - d - 1", lambda d: d.exp() - 1),
    "k3 exchanged": ("exp(-d) + d - 1, which is k3 with policy and reference exchanged",
                     lambda d: 1 - (-d).exp()),
    "absolute": ("|d|", lambda d: d.sign()),
    "exponential": ("exp(d), which is k3 without its second term", lambda d: d.exp())}


OF_ANSWER: dict[str, Callable[[Case], Tensor]] = {  # (B,), for terms that all its tokens share
    "length": lambda case: case.length.double(),
    "sum of k1": lambda case: -(difference(case, "reference") * case.mask).sum(1),
    "mean of k1": lambda case: -(difference(case, "reference") * case.mask).sum(1) / case.length}


@dataclass(frozen=True)
class Counted:
    """A number for each answer: factor * weights of a count * sizes."""
    count: Count
    sizes: Sizes
    factor: float

    def __call__(self, case: Case) -> Tensor:
        return self.factor * self.sizes.factor(case) * self.count.weights(case).double()

    def words(self) -> str:
        said = self.count.words
        return f"{said}, {self.sizes.words()}" if self.sizes.cost else said


@dataclass(frozen=True)
class Term:
    """A term of the loss without reward. `source` says with what log p is compared: the reference,
    the old log-probs, or nothing; `entropy` is that of the distribution."""
    kind: str
    source: str
    weight: Counted
    with_ratio: bool = False   # the term is multiplied by the ratio of new to old probability
    low: float = -math.inf     # it has no push where d lies outside of low and high
    high: float = math.inf

    def push(self, case: Case, tokens: Tensor) -> Tensor:
        push = self.weight(case)[:, None] * tokens * value_of(self.kind, self.source, case)
        if self.kind in KINDS:
            d = difference(case, self.source)
            push = push * ((d > self.low) & (d < self.high))
        return push * actual_log_ratio(case).exp() if self.with_ratio else push


def value_of(kind: str, source: str, case: Case) -> Tensor:
    """(B, L) the push of a term of weight 1."""
    if kind in KINDS:
        return KINDS[kind][1](difference(case, source))
    value = torch.ones(case.ids.shape, dtype=torch.float64)
    return value * OF_ANSWER[kind](case)[:, None] if kind in OF_ANSWER else value


def difference(case: Case, source: str) -> Tensor:
    """(B, L) log-prob of the reference minus log p, as the loss sees it."""
    if source == "reference":
        seen = case.mask | torch.tensor(case.fills_zeros)
        return torch.where(seen, case.log_reference, -case.log_prob)
    return -actual_log_ratio(case)


Table = list[tuple[Count, list[Tensor]]]  # each count with its weights (B,) in each case


def table_of(cases: list[Case], counts: list[Count]) -> Table:
    return [(count, [count.weights(case).double() for case in cases]) for count in counts]


def fit_counted(cases: list[Case], found: list[Tensor], table: Table,
                tolerance: float = 1e-6) -> list[Counted]:
    """The counts that explain a number for each answer of each case, with one factor for all
    cases. `found` has NaN where a number is not known. The simplest and roundest come first."""
    fits = []
    for count, by_case in table:
        quotients = []
        for weights, numbers in zip(by_case, found):
            known = torch.isfinite(numbers) & (weights != 0)
            quotients.append((numbers / weights)[known])
        if any(not len(q) or spread(q) > tolerance for q in quotients):
            continue
        for sizes in all_sizes():
            factors = torch.stack([q.mean() / sizes.factor(case)
                                   for q, case in zip(quotients, cases)])
            if spread(factors) <= tolerance:
                fits.append(Counted(count, sizes, float(factors.mean())))
    return sorted(fits, key=lambda fit: (fit.count.cost + fit.sizes.cost
                                         + 4 * (not is_round(fit.factor))))


def spread(values: Tensor) -> float:
    """The largest distance from the mean, relative to it."""
    if not len(values):
        return float("inf")
    mean = values.mean()
    if mean == 0:
        return float("inf") if values.any() else 0.0
    return float(((values - mean) / mean).abs().max())


def is_round(value: float) -> bool:
    return abs(float(f"{value:.2g}") - value) <= 1e-6 * abs(value)


def by_answer(value: Tensor, tokens: Tensor, tolerance: float = 1e-6) -> Tensor | None:
    """(B,) the number that all tokens of an answer have; None if they differ. NaN for an answer
    without tokens."""
    value = torch.where(tokens, value, 0.0)
    if not torch.isfinite(value).all():
        return None
    mean = value.sum(1) / tokens.sum(1)
    scale = mean.abs().nan_to_num()
    largest = ((value - mean[:, None]).abs() * tokens).nan_to_num().amax(1)
    if (largest > tolerance * scale + 1e-13 * scale.max()).any():
        return None
    return mean
