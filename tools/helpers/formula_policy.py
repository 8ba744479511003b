"""Which hypotheses of the term with the reward fit: how the push differs within an answer, then
advantage and counting together, and then the ratio.
"""
import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from tools.helpers.formula_advantages import (EPSILONS, ORDERS, Advantage, hypotheses,
                                              rows_in_order, short)
from tools.helpers.formula_batches import Case, noise_like
from tools.helpers.formula_counts import counts
from tools.helpers.formula_decode import LossFailed
from tools.helpers.formula_measured import KNOWN, Measured
from tools.helpers.formula_ratio import Ratio, Side, find_ratio
from tools.helpers.formula_shapes import Shape, rescaled, shapes
from tools.helpers.formula_terms import Counted, by_answer, fit_counted, spread, table_of

NO_REWARD = "no push depends on the reward"
FAR_BELOW = -4.0   # log-ratios at which ratio * advantage is below any bound


def drop_refused_sizes(measured: Measured) -> None:
    """Forget the sizes of groups that the loss cannot take."""
    kept = [4]
    for groups, answers in ((3, 3), (2, 6)):
        try:
            measured.examined.raw(measured.case(26, groups, answers))
            kept.append(answers)
        except LossFailed:
            measured.formula.notes.append(f"groups of {answers} answers are refused")
    measured.sizes = tuple(kept)


def look_for_short_advantages(measured: Measured) -> None:
    """Whether rewards or advantages are rounded to float32, as by numpy. Then a change of a reward
    by 1e-10 has no effect at all, or a far larger one."""
    case = measured.case(28)
    before = measured.policy_push(case)
    changes = []
    for size in (1e-10, 1e-3):
        reward = case.reward.clone()
        reward[0] += size
        change = measured.policy_push(replace(case, reward=reward)) - before
        changes.append(float(change.abs().max() / before.abs().max()))
    little, more = changes
    if more > 1e-8 and (little == 0 or little > 1e-3 * more):
        measured.tolerance = 1e-4
        measured.formula.notes.append("the advantage is computed from rewards in float32, so it "
                                      "was compared with known ones to 1e-4 and not to a millionth")


def find_policy(measured: Measured) -> None:
    """With groups of several sizes; or else of 4 alone, where the size stands in the code; or where
    all ratios are small, so that ratio times advantage reaches no upper bound."""
    formula, tried = measured.formula, measured.sizes
    known, failed_with = list(formula.not_understood), None
    tries = [(tried, 0.0)] + [((4,), 0.0)] * (tried != (4,)) + [(tried, FAR_BELOW)]
    for sizes, offset in tries:
        measured.sizes, formula.not_understood = sizes, list(known)
        if not offset:
            fit_policy(measured)
        elif is_moved_by(measured, offset):
            find_product(measured, offset)
        if formula.advantage is not None:
            break
        failed_with = failed_with or formula.not_understood
    else:
        measured.sizes, formula.not_understood = tried, failed_with
    if measured.sizes != tried:
        formula.notes.append("this holds for groups of 4 answers. In batches with groups of "
                             "another size the gradient is another one, as if the size 4 stood in "
                             "the code")


def is_moved_by(measured: Measured, offset: float) -> bool:
    """Whether an offset of all log-ratios changes anything."""
    case = measured.case(36)
    before = measured.policy_push(case)
    moved = measured.policy_push(replace(case, log_ratio=case.log_ratio + offset))
    return bool((moved - before).norm() > 1e-6 * before.norm())


def find_product(measured: Measured, offset: float) -> None:
    """Where it is ratio times advantage that is clipped, and not the ratio: the formula, read where
    all ratios are small, and then the bound."""
    formula = measured.formula
    measured.offset = offset
    fit_policy(measured)
    measured.offset = 0.0
    if formula.advantage is None:
        return
    formula.count = replace(formula.count, factor=formula.count.factor / math.exp(offset))
    side = Side(high=bound_of_product(measured))
    formula.ratio = Ratio("product", side, side)
    if measured.unexplained(measured.case(36)) > KNOWN:
        formula.advantage = formula.count = formula.ratio = None


def bound_of_product(measured: Measured) -> float:
    """The largest ratio times advantage that has a push, from the answer with the largest one."""
    case = measured.case(36)
    advantage = measured.formula.advantage(case)
    row = int(advantage.argmax())
    low, high = FAR_BELOW, -FAR_BELOW
    while high - low > 1e-10:
        middle = (low + high) / 2
        push = measured.policy_push(replace(case, log_ratio=case.log_ratio + middle))
        low, high = (middle, high) if push[row].any() else (low, middle)
    return float(f"{float(advantage[row]) * math.exp(low):.6g}")


def fit_policy(measured: Measured) -> None:
    formula, cases = measured.formula, measured.designs()
    pushes = [measured.policy_push(case) for case in cases]
    if not any(push.any() for push in pushes):
        formula.not_understood.append(NO_REWARD)
        return
    some = [kind for kind, how in formula.kinds.items() if how == "some"]
    if some:
        formula.not_understood.append(f"only some tokens of the kind {' and '.join(some)} have a "
                                      "gradient")
        return
    candidates = shapes_that_fit(measured, cases, pushes)
    if not candidates:
        formula.not_understood.append("the push differs between the tokens of an answer in a way "
                                      "that is not known")
        return
    for shape in candidates:
        if fit_advantage_and_count(measured, shape, cases):
            return
    formula.shape = candidates[0] if len(candidates) == 1 else None
    fit_one_by_one(measured, candidates[0])


def shapes_that_fit(measured: Measured, cases: list[Case], pushes: list[Tensor]) -> list[Shape]:
    found = []
    for shape in shapes(cases[0], pushes[0], measured.answer_tokens(cases[0])):
        for variant in rescaled(shape, measured.answer_tokens):
            values = [by_answer(push / variant.value(case), measured.answer_tokens(case))
                      for case, push in zip(cases, pushes)]
            if all(value is not None for value in values):
                found.append(variant)
        if found and not shape.code.startswith("discount"):  # two of them, from either end
            break
    return found


# ---------------------------------------------------------------------- advantage and counting
def fit_advantage_and_count(measured: Measured, shape: Shape, cases: list[Case]) -> bool:
    formula = measured.formula
    numbers = [measured.per_answer(shape, case) for case in cases]
    table = table_of(cases, counts(formula.tokens))
    grouping = grouping_of(measured, shape)
    for batches in (3, 1):  # one alone, where the factor differs between batches of equal size
        fits = []
        for advantage in advantages_that_fit(measured, shape, grouping, batches):
            quotients = [divided(number, advantage(case)) for number, case in zip(numbers, cases)]
            fits += [(advantage, count) for count in
                     fit_counted(cases, quotients, table, measured.tolerance)]
        if fits:
            break
    else:
        return False
    dead = [measured.with_a_dead_group(27, reward) for reward in (.5, 0.0)]
    right = [fit for fit in fits if all(holds_for(measured, case, shape, *fit) for case in dead)]
    best = min(right or fits, key=cost_of)
    if shape.detached and not gradient_is_derivative(measured, cases[0]):
        shape = replace(shape, code=shape.code.replace("undetached", "as if undetached"),
                        words=shape.detached)
    formula.shape, (formula.advantage, formula.count) = shape, best
    return True


def cost_of(fit: tuple[Advantage, Counted]) -> int:
    advantage, count = fit
    return (advantage.complexity + count.count.cost + count.sizes.cost
            + 4 * (abs(abs(count.factor) - 1) > 1e-6))


def gradient_is_derivative(measured: Measured, case: Case) -> bool:
    """Whether the gradient is the derivative of the loss's value, as it is where nothing was
    detached."""
    step = 1e-5 * noise_like(case, 71, 1.0)[..., None] * case.logits
    values = [measured.examined.value_and_gradient(
        replace(case, logits=case.logits + sign * step))[0] for sign in (1, -1)]
    expected = float((measured.examined.raw(case) * step).sum())
    return abs(float(values[0] - values[1]) / 2 - expected) < 1e-4 * abs(expected)


def holds_for(measured: Measured, case: Case, shape: Shape, advantage: Advantage,
              count: Counted) -> bool:
    """Whether these give the push of a case."""
    try:
        push = measured.policy_push(case)
    except LossFailed:  # a dead group is refused, and so says nothing about counting
        return True
    tokens = measured.answer_tokens(case)
    wanted = (count(case) * advantage(case))[:, None] * shape.value(case) * tokens
    return bool(((push - wanted) * tokens).norm() <= KNOWN * push.norm())


def grouping_of(measured: Measured, shape: Shape) -> str:
    """Which rows are a group: those whose advantage changes with a row's reward."""
    case = measured.case(31, equal_lengths=True)
    before = measured.per_answer(shape, case, 1e-5)
    B = len(case.group)
    linked = torch.eye(B, dtype=torch.bool)
    for row in range(B):
        reward = case.reward.clone()
        reward[row] += .01
        after = measured.per_answer(shape, replace(case, reward=reward), 1e-5)
        change = (after - before).abs()
        measured.is_permuted |= bool(change[row] < 1e-8 * before.abs().max())
        linked[row] |= change > 1e-8 * before.abs().max()
    linked = linked | linked.T
    for _ in range(4):
        linked = (linked.double() @ linked.double()) > 0
    rows = torch.arange(B)
    for name, label in (("group", case.group), ("mixed", rows % 4), ("rows 2", rows // 2),
                        ("rows 8", rows // 8)):
        if torch.equal(linked, label[:, None] == label[None]):
            return name
    return "group"  # all rows are linked, or none is: the hypotheses know both


def advantages_that_fit(measured: Measured, shape: Shape, grouping: str,
                        batches: int = 3) -> list[Advantage]:
    """Those that explain, up to a factor, batches whose answers all have the same length. Some of
    their groups have nearly equal rewards."""
    cases = advantage_cases(measured, grouping)[:batches]
    found = [measured.per_answer(shape, case, 1e-5) for case in cases]
    if any(numbers is None for numbers in found):
        return []
    for order in ("", *(ORDERS if measured.is_permuted else ())):
        fits = advantages_in_order(measured, order, cases, found, grouping)
        if fits:
            return fits
    return [limited for limited in with_limit(cases, found, grouping)
            if matches(limited, cases, found, measured.tolerance)]


def advantage_cases(measured: Measured, grouping: str) -> list[Case]:
    case = measured.case(32, equal_lengths=True)
    label = torch.arange(16) % 4 if grouping == "mixed" else case.group
    scale = torch.tensor([1.0, .3, 1e-2, 1e-5]).double()[label]
    start = torch.tensor([2.0, 1.0, .0, .0]).double()[label]
    return [replace(case, reward=start + scale * case.reward),
            replace(case, reward=1e-4 * case.reward), case]


def advantages_in_order(measured: Measured, order: str, cases: list[Case], found: list[Tensor],
                        grouping: str) -> list[Advantage]:
    fits = []
    straight = [numbers[rows_in_order(len(numbers), order).argsort()] for numbers in found]
    for advantage in hypotheses(cases, straight, grouping):
        advantage = replace(advantage, constant=measured.formula.constant_baseline, order=order)
        for variant in variants(advantage, cases, found):
            if matches(variant, cases, found, measured.tolerance):
                fits.append(variant)
                break
    return fits


def fit_one_by_one(measured: Measured, shape: Shape) -> None:
    """Where no advantage and count fit together: what each of them is by itself."""
    alone = advantages_that_fit(measured, shape, grouping_of(measured, shape))
    names = {advantage.code for advantage in alone}
    measured.formula.not_understood.append(
        "advantage and counting: no pair of known ones gives the push of each answer"
        + (f". Where all answers have the same length, the advantage fits {alone[0].code}"
           if len(names) == 1 else ""))


def variants(advantage: Advantage, cases: list[Case], found: list[Tensor]) -> list[Advantage]:
    """The advantage as it is, and with another weight for negative ones."""
    wanted, numbers = side_by_side(advantage, cases, found)
    result = [advantage]
    if advantage.scale == "none" and advantage.baseline == "none":
        return result
    quotient = numbers / torch.where(wanted == 0, 1.0, wanted)
    positive, negative = quotient[wanted > 0], quotient[wanted < 0]
    if len(positive) > 2 and not positive.any():
        result.append(replace(advantage, positive=0.0))
    elif len(positive) > 2 and len(negative) > 2 and spread(positive) < 1e-6:
        rate = float(negative.mean() / positive.mean())
        if abs(rate - 1) > 1e-6 and (rate > -1e-9 or abs(rate + 1) < 1e-6):
            result.append(replace(advantage, negative=round(rate, 6)))
    return result


def with_limit(cases: list[Case], found: list[Tensor], grouping: str) -> list[Advantage]:
    """Advantages that are clamped, at the largest and the least of the numbers."""
    result = []
    for scale, epsilon in itertools.product(("none", "std n", "std n-1"), EPSILONS):
        plain = Advantage("mean", scale, "plus", epsilon, grouping=grouping)
        wanted, numbers = side_by_side(plain, cases, found)
        small = (wanted.abs() < wanted.abs().median()) & (wanted != 0)
        quotient = (numbers / wanted)[small]
        if spread(quotient) < 1e-6:
            result.append(clamped(plain, wanted, numbers / quotient.mean()))
    return result


def clamped(advantage: Advantage, wanted: Tensor, found: Tensor) -> Advantage:
    """With bounds at the largest and the least of what was found, where more was wanted."""
    beyond = 1 + 1e-6
    if wanted.max() > beyond * found.max():
        advantage = replace(advantage, most=short(float(found.max())))
    if wanted.min() < beyond * found.min():
        advantage = replace(advantage, least=short(float(found.min())))
    return advantage


def matches(advantage: Advantage, cases: list[Case], found: list[Tensor],
            tolerance: float = 1e-6) -> bool:
    wanted, numbers = side_by_side(advantage, cases, found)
    if not wanted.any() or not torch.isfinite(wanted).all():
        return False
    factor = (numbers * wanted).sum() / wanted.square().sum()
    error = (numbers - factor * wanted).abs()
    rounding = 1e-4 * tolerance * numbers.abs().max()
    return bool((error <= tolerance * (factor * wanted).abs() + rounding).all())


def side_by_side(advantage: Advantage, cases: list[Case],
                 found: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(its numbers, those found) of all answers that have a trained token."""
    wanted, numbers = torch.cat([advantage(case) for case in cases]), torch.cat(found)
    known = torch.isfinite(numbers)
    return wanted[known], numbers[known]


def divided(number: Tensor, advantage: Tensor) -> Tensor:
    """The quotient (B,), NaN where the advantage is 0."""
    return torch.where(advantage.abs() > 1e-9 * advantage.abs().max(),
                       number / torch.where(advantage == 0, 1.0, advantage), torch.nan)


def find_limit(measured: Measured, cases: list[Case]) -> None:
    """A clamp of the advantage that only the large ones of these batches reach."""
    formula, [case] = measured.formula, cases
    found = divided(measured.per_answer(formula.shape, case), formula.count(case))
    wanted, found = side_by_side(formula.advantage, [case], [found])
    formula.advantage = clamped(formula.advantage, wanted, found)


# ---------------------------------------------------------------------- the ratio
def find_clip(measured: Measured) -> None:
    formula = measured.formula
    if "some" in formula.kinds.values():
        return
    case = measured.case(33)
    found = find_ratio(measured.examined, case, measured.answer_tokens(case), measured.has_rest,
                       formula.advantage)
    if isinstance(found, str) and found.startswith("misplaced"):
        formula.misplaced = int(found.split()[1])
        formula.not_understood.append("what follows from a ratio of two different tokens")
    elif isinstance(found, str):
        formula.not_understood.append(found)
    else:
        formula.ratio = found
        if formula.count is not None:  # it was read where the ratio is 1
            at_one = float(found.good(torch.ones((), dtype=torch.float64)))
            count = formula.count
            formula.count = replace(count, factor=count.factor / at_one)
