"""Which terms a loss has beside that of the reward: what is left where all rewards are equal.

It is a KL, an entropy, a constant push, or a reward that has a part of its own.
"""
import math
from dataclasses import replace

import torch
from torch import Tensor

from tools.helpers.formula_advantages import short
from tools.helpers.formula_batches import Case, noise_like
from tools.helpers.formula_counts import counts, places, tokens_of
from tools.helpers.formula_decode import LossFailed
from tools.helpers.formula_measured import TINY, Measured, far
from tools.helpers.formula_terms import (KINDS, OF_ANSWER, Counted, Term, by_answer, fit_counted,
                                         table_of, value_of)

SOURCES = {"reference": "log_reference", "old": "log_ratio"}  # and the column of a case
UNKNOWN = {
    "reference": "a push without reward depends on the reference log-probs, and is none of the "
                 "known kinds of KL",
    "old": "a push without reward depends on the old log-probs, and is none of the known kinds of "
           "KL",
    "ratio": "a push without reward depends on the ratio of new to old probability",
    "shared": "the reference's log-prob of one token changes the push of all tokens of its answer, "
              "as where the KL is taken off the reward, before the advantage",
    "length": "answers with equal rewards get a push if their lengths differ, and none if all have "
              "the same length: the length is a part of the reward, as with a penalty on long ones"}


def look_at_equal_rewards(measured: Measured) -> None:
    """What is left where all rewards are equal, so that each group is dead."""
    base = measured.case(2)
    try:
        rest = [measured.gradient_without_reward(case) for case in (base, far(base))]
    except LossFailed:
        measured.has_rest = False
        measured.formula.notes.append("a batch whose groups all have equal rewards gives a loss or "
                                      "a gradient that is not finite (0 / 0)")
        return
    if rest[0].any() and prefers_lengths(measured, rest[0]):
        measured.has_rest, measured.hidden = False, "length"
        return
    whole = measured.examined.raw(base)
    measured.has_rest = any(float(grad.abs().max()) > TINY * float(whole.abs().max())
                            for grad in rest)
    one = measured.examined.raw(replace(base, reward=torch.ones_like(base.reward)))
    change = one - rest[0]  # not 0 if there is no baseline
    if measured.has_rest and change.norm() > 1e-6 * whole.norm():
        look_for_a_constant_baseline(measured, rest[0], change, base)


def prefers_lengths(measured: Measured, rest: Tensor) -> bool:
    """Whether answers with equal rewards, which have a gradient `rest` where their lengths differ,
    have none where all lengths are the same."""
    even = far(measured.case(2, equal_lengths=True))
    return bool(measured.gradient_without_reward(even).norm() <= TINY * rest.norm())


def look_for_a_constant_baseline(measured: Measured, at_zero: Tensor, change: Tensor,
                                 base: Case) -> None:
    """If the gradient vanishes where all rewards are b, then b is taken off each reward."""
    b = -float((at_zero * change).sum() / change.square().sum())
    grad = measured.examined.raw(replace(base, reward=torch.full_like(base.reward, b)))
    if abs(b) > 1e-9 and grad.norm() < 1e-9 * change.norm() and not knows_reference(measured, base):
        measured.examined.zero_reward = measured.formula.constant_baseline = short(b)
        moved = replace(base, log_ratio=noise_like(base, 5, .1))
        rest = measured.gradient_without_reward(moved)
        measured.has_rest = bool(rest.norm() > 1e-9 * change.norm())


def knows_reference(measured: Measured, case: Case) -> bool:
    """Whether the value of the loss depends on the reference model."""
    moved = replace(case, log_reference=noise_like(case, 6, .3))
    values = [float(measured.examined.value_and_gradient(one)[0]) for one in (case, moved)]
    return abs(values[0] - values[1]) > 1e-12 * abs(values[0])


def find_terms(measured: Measured) -> None:
    """KL and other pushes that stay when all rewards are 0."""
    if not measured.has_rest or measured.is_foreign:
        return
    formula, push = measured.formula, measured.examined.push
    zero = [measured.examined.without_reward(case) for case in measured.designs()]
    still = [push(case) for case in zero]
    scale = max(float(push(case).abs().max()) for case in measured.designs()[:2])
    formula.term_kinds = kinds_with_push(measured, zero, scale)
    constant = next(filter(None, (
        fit_term(kind, "nothing", formula.term_kinds, zero, still, scale)
        for kind in ("constant", "length"))), None)
    for source, column in SOURCES.items():
        moved = [replace(case, **{column: noise_like(case, 7 + k, .8)})
                 for k, case in enumerate(zero)]
        change = [push(case) - before for case, before in zip(moved, still)]
        if max(float(part.abs().max()) for part in change) < TINY * scale:
            continue
        fits = [fit_term(kind, source, formula.term_kinds, moved, change, scale)
                for kind in (*KINDS, *OF_ANSWER)]
        term = next((fit for fit in fits if fit), None)
        if term is None and source == "reference" and shares_reference(measured, zero[0]):
            measured.has_rest, measured.hidden = False, "shared"
        elif term is None or (constant and source == "old"):
            formula.not_understood.append(UNKNOWN["ratio" if constant and source == "old" else
                                                  source])
            return
        else:
            formula.terms.append(term)
    if constant:
        is_k1 = knows_reference(measured, measured.designs()[0])
        is_k1 &= constant.kind == "constant" and not measured.hidden
        formula.terms.append(replace(constant, kind="k1") if is_k1 else constant)


def shares_reference(measured: Measured, case: Case) -> bool:
    """Whether the reference of a single token changes the rest of its answer, too: then the
    reference is part of the advantage."""
    row = int(case.length.argmax())
    token = int(case.prompt_length[row]) + 1
    moved = case.log_reference.clone()
    moved[row, token] += .5
    before = measured.examined.push(case)
    change = measured.examined.push(replace(case, log_reference=moved)) - before
    change[row, token] = 0
    return bool(change[row].abs().max() > 1e-6 * before.abs().max())


def kinds_with_push(measured: Measured, zero: list[Case], scale: float) -> frozenset[str]:
    found = None
    for case in zero:
        moved = replace(case, log_reference=noise_like(case, 9, .8),
                        log_ratio=noise_like(case, 8, .3))
        has = measured.examined.push(moved).abs() > TINY * scale
        kinds = {name for name, where in places(case).items()
                 if not where.any() or torch.equal(has & where, where)}
        found = kinds if found is None else found & kinds
    return frozenset(found)


def fit_term(kind: str, source: str, kinds: frozenset[str], cases: list[Case],
             pushes: list[Tensor], scale: float) -> Term | None:
    if max(float(push.abs().max()) for push in pushes) < TINY * scale:
        return None
    numbers = []
    for case, push in zip(cases, pushes):
        shape = value_of(kind, source, case)
        quotient = push / torch.where(shape == 0, 1.0, shape)
        number = by_answer(quotient, tokens_of(case, kinds) & case.mask)
        if number is None:
            return None
        numbers.append(number)
    table = table_of(cases, counts(lambda case: tokens_of(case, kinds)))
    fits = fit_counted(cases, numbers, table)
    return Term(kind, source, fits[0]) if fits else None


def find_bounds_of_terms(measured: Measured, cases: list[Case]) -> None:
    """Beyond which differences of the log-probs a KL has no push, because it is clamped."""
    formula = measured.formula
    for index, term in enumerate(formula.terms):
        if term.source == "reference" and term.kind in KINDS:
            low, high = (bound_of_term(measured, cases[0], term, sign) for sign in (-1, 1))
            formula.terms[index] = replace(term, low=low, high=high)


def bound_of_term(measured: Measured, case: Case, term: Term, sign: int) -> float:
    """Where the push of a term ends if the reference moves away, to one side."""
    formula, tokens = measured.formula, case.mask & tokens_of(case, measured.formula.term_kinds)
    least, most = 0.0, 24.0
    while most - least > 1e-9 * most:
        tries = torch.linspace(least, most, int(tokens.sum()) + 2, dtype=torch.float64)
        moved = replace(case, log_reference=torch.zeros_like(case.log_reference))
        moved.log_reference[tokens] = sign * tries[1:-1]
        push = measured.examined.push(moved) - formula.policy_push(moved)
        ended = (push[tokens].abs() < 1e-6 * term.push(moved, tokens)[tokens].abs()).tolist()
        if not any(ended):
            return sign * math.inf
        least, most = float(tries[ended.index(True)]), float(tries[ended.index(True) + 1])
    return sign * short(most)


def find_entropy(measured: Measured) -> None:
    """A term with the entropy of the distribution; or a weight by entropy, not detached."""
    if measured.is_foreign:
        return
    formula, examined, cases = measured.formula, measured.examined, measured.designs()
    readings = [examined.read(case) for case in cases]
    scale = max(float(reading.push.abs().max()) for reading in readings)
    entropies = [reading.entropy for reading in readings]
    rest = [torch.zeros_like(entropy) for entropy in entropies]
    if largest(entropies) < 1e-8 * scale:
        return
    if measured.has_rest:
        cases = [examined.without_reward(case) for case in cases]
        rest = [examined.read(case).entropy for case in cases]
    if largest([entropy - still for entropy, still in zip(entropies, rest)]) > 1e-8 * scale:
        formula.weighs_by_entropy = True
        return
    kinds = [frozenset(name for name, where in places(case).items() if where.any()
                       and bool((still.abs() > 1e-9 * scale)[where].all()))
             for case, still in zip(cases, rest)]
    formula.entropy_kinds = frozenset.union(*kinds)
    formula.entropy = fit_entropy(cases, rest, formula.entropy_kinds)
    if formula.entropy is None:
        formula.not_understood.append("an entropy term, averaged in a way that is not known")


def fit_entropy(cases: list[Case], entropies: list[Tensor],
                kinds: frozenset[str]) -> Counted | None:
    numbers = [by_answer(entropy, tokens_of(case, kinds))
               for case, entropy in zip(cases, entropies)]
    if any(number is None for number in numbers):
        return None
    fits = fit_counted(cases, numbers, table_of(cases, counts(lambda case: tokens_of(case, kinds))))
    return fits[0] if fits else None


def largest(columns: list[Tensor]) -> float:
    return max(float(column.abs().max()) for column in columns)
