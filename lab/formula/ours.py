"""The one loss whose settings are the tables: `ours(logits, batch, formula)`.

It is written as a user's loss is, from the logits and the batch, so its gradient comes from
autograd and needs no theory. A formula that was found is believed only where this function has the
gradient of the user's loss (search.py, `prove`).
"""
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from .batches import Batch, Case, Lens
from .tables import (ANSWER, CENTRES, CHOICES, COUNTS, FINISHES, GATES, GROUPS, KLS, ORDERS, PLACES,
                     RATIOS, REFERENCES, REWARDS, SCALES, SHAPES, kinds)


@dataclass(frozen=True)
class Term:
    """A KL term or an entropy bonus: what it is, how its tokens count, where it stands."""
    kind: str
    count: str
    place: str
    factor: float
    reference: str = ""


@dataclass(frozen=True)
class Formula:
    """The settings of `ours`: names of lines of the tables, and their numbers."""
    lens: Lens = Lens()
    kinds: frozenset[str] = ANSWER    # kinds of tokens that are trained
    choice: str = ""                  # of these, only where CHOICES is at least
    least: float = 0.0
    reward: str = ""
    cost: str = ""                    # what is taken off the reward, and how much of it
    price: float = 0.0
    groups: str = ""
    centre: str = "mean"
    scale: str = "none"
    epsilon: float = 0.0
    finish: str = ""
    order: str = ""
    count: str = "token"
    length: str = ""                  # "trained": the tokens that are trained count as the length
    factor: float = 1.0
    shape: str = ""
    is_detached: bool = True
    late: int = 0                     # old log-probs are taken from so many places before
    ratio: str = "no ratio"
    bounds: tuple[float, ...] = ()
    gate: str = ""
    gate_bound: float = 0.0
    kls: tuple[Term, ...] = ()
    entropy: Term | None = None
    sure: frozenset[str] = field(default_factory=frozenset)  # questions that have an exact answer


class View(SimpleNamespace):
    """What a loss sees through its lens, per token (B, L)."""

    def __init__(self, logits: Tensor, batch: Batch, lens: Lens):
        self.batch, self.lens, self.logits = batch, lens, logits
        self.log_prob = lens.log_probs(logits, batch.ids)
        log_q = lens.distribution(logits, lens.entropy_temperature)
        self.entropy = -(log_q.exp() * log_q).sum(-1)
        self.readable = lens.to_tokens(torch.ones(batch.ids.shape)) > 0
        self.place = torch.arange(batch.ids.shape[1])[None]
        start = batch.prompt_length[:, None]
        self.from_start = (self.place - start).to(logits.dtype).expand_as(self.log_prob)
        length = (batch.mask > 0).sum(1, keepdim=True)
        self.from_end = (start + length - 1 - self.place).to(logits.dtype).expand_as(self.log_prob)


def ours(logits: Tensor, batch: Batch, formula: Formula) -> Tensor:
    """The loss that has these settings."""
    view = View(logits, batch, formula.lens)
    view.trained = trained(view, formula)
    total = -policy(view, formula)
    for term in formula.kls:
        old = REFERENCES[term.reference](batch)
        ratio = (view.log_prob - batch.old_log_prob).exp()
        value = KLS[term.kind](old - view.log_prob, ratio)
        total = total + (weight_of(view, term) * value).sum()
    if formula.entropy:
        total = total - (weight_of(view, formula.entropy) * view.entropy).sum()
    return total


def gradient_of(formula: Formula, case: Case) -> Tensor:
    """(B, L, V) the gradient of `ours` at the logits of a case."""
    logits = case.logits.clone().requires_grad_(True)
    value = ours(logits, case.batch(), formula)
    return torch.autograd.grad(value, logits)[0]


# ------------------------------------------------------------------ the parts of the policy loss
def policy(view: View, formula: Formula) -> Tensor:
    """The sum over tokens of weight * shape * objective."""
    if not formula.factor:
        return (view.logits * 0).sum()
    batch = view.batch
    cost = cost_of(view, formula) if formula.cost else None
    advantage = advantage_of(batch, formula, cost)[:, None]
    n = lengths(view, formula.length)
    weight = (formula.factor * COUNTS[formula.count](n, batch))[:, None]
    x = seen_by_ratio(view, formula, advantage)
    objective = RATIOS[formula.ratio](x, *formula.bounds)
    shape = SHAPES[formula.shape](view)
    shape = shape.detach() if formula.is_detached else shape
    gate = GATES[formula.gate](x, formula.gate_bound).detach()
    # where nothing is trained stands 0, and not 0 times what may be infinite there
    return torch.where(view.trained, weight * gate * shape * objective, 0.0).sum()


def trained(view: View, formula: Formula) -> Tensor:
    """(B, L) bool: the tokens that the policy loss trains."""
    found = torch.zeros_like(view.batch.ids, dtype=torch.bool)
    for kind, where in kinds(view).items():
        if kind in formula.kinds:
            found = found | where
    if formula.choice:
        found = found & (CHOICES[formula.choice](view).detach() >= formula.least)
    return found


def trained_in(case: Case, formula: Formula) -> Tensor:
    return trained(View(case.logits, case.batch(), formula.lens), formula)


def lengths(view: View, length: str) -> Tensor:
    """(B,) how many tokens of each row are counted."""
    counted = view.trained if length else view.batch.mask > 0
    return counted.sum(1).to(view.logits.dtype)


def cost_of(view: View, formula: Formula) -> Tensor:
    """(B,) what is taken off the reward: a KL of the answer, or its length."""
    inside = view.batch.mask > 0
    n = inside.sum(1).to(view.logits.dtype)
    d = torch.where(inside, view.batch.reference_log_prob - view.log_prob, 0.0).detach()
    kind, _, beyond = formula.cost.partition(" beyond ")
    values = {"": 0 * n, "length": (n - float(beyond or 0)).clamp(min=0),
              "kl k1": -d.sum(1), "kl k1 mean": -d.sum(1) / n,
              "kl k3": KLS["k3"](d, d).sum(1), "kl k3 mean": KLS["k3"](d, d).sum(1) / n}
    return formula.price * values[kind]


def advantage_of(batch: Batch, formula: Formula, cost: Tensor | None = None) -> Tensor:
    """(B,) the advantage. Where it is 0 / 0 stands 0."""
    n = (batch.mask > 0).sum(1).to(batch.reward.dtype)
    reward = REWARDS[formula.reward](batch.reward, batch)
    if cost is not None:
        reward = reward - cost
    label = GROUPS[formula.groups](batch)
    value = reward - CENTRES[formula.centre](reward, label, n)
    value = value / SCALES[formula.scale](reward, label, formula.epsilon)
    return ORDERS[formula.order](FINISHES[formula.finish](value.nan_to_num(0.0), n)).nan_to_num(0.0)


def seen_by_ratio(view: View, formula: Formula, advantage: Tensor) -> SimpleNamespace:
    """The names that RATIOS use."""
    inside = view.batch.mask > 0
    old = view.batch.old_log_prob.roll(formula.late, 1)
    d = view.log_prob - old
    n = inside.sum(1, keepdim=True).to(d.dtype)

    def mean_of(value: Tensor) -> Tensor:
        return torch.where(inside, value, 0.0).sum(1, keepdim=True) / n

    return SimpleNamespace(d=d, mean=mean_of(d), sum=n * mean_of(d), n=n, mean_of=mean_of,
                           log_p=view.log_prob, p=view.log_prob.exp(), old_p=old.exp(),
                           A=advantage)


def weight_of(view: View, term: Term) -> Tensor:
    """(B, L) the weight of each token in a KL term or an entropy bonus."""
    where = PLACES[term.place](view).expand(view.log_prob.shape)
    n = where.sum(1) if term.count.endswith(" of its own") else (view.batch.mask > 0).sum(1)
    weight = COUNTS[term.count.removesuffix(" of its own")](n.to(view.logits.dtype), view.batch)
    return term.factor * weight[:, None] * where
