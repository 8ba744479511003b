"""Find the formula of a loss: every part is fitted on some batches, and is believed only if the
whole formula gives the gradient of other batches.

The order is: temperature and shift; which tokens have a gradient; what is left without rewards
(KL, entropy); how the push differs within an answer; advantage and counting; the ratio. What the
new batches contradict is not named.
"""
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from tools.helpers.formula_batches import END, Case, make_case
from tools.helpers.formula_costs import find_cost
from tools.helpers.formula_counts import places, tokens_of
from tools.helpers.formula_decode import EXACT, Examined, Loss, LossFailed, LossNotFinite
from tools.helpers.formula_measured import KNOWN, TINY, Formula, Measured, far, right_or_wrong
from tools.helpers.formula_policy import (NO_REWARD, drop_refused_sizes, find_clip, find_limit,
                                          find_policy, look_for_short_advantages)
from tools.helpers.formula_rest import (UNKNOWN, find_bounds_of_terms, find_entropy, find_terms,
                                        look_at_equal_rewards)
from tools.helpers.formula_selected import find_selection

COARSE = ("bfloat16", "float16", "float32")


def find_formula(loss: Loss) -> Formula:
    measured = Measured(loss)
    formula, base = measured.formula, make_case(1)
    formula.digits = measured.examined.choose_dtype(base)
    refuse_random(measured.examined, base)
    if not any(measured.examined.raw(case).any() for case in (base, far(base))):
        formula.is_zero = not measured.examined.raw(right_or_wrong(base)).any()
        formula.unexplained = 0.0 if formula.is_zero else 1.0
        if not formula.is_zero:
            formula.not_understood.append("anything: answers have a gradient if their rewards are "
                                          "0 and 1, and none if they lie between")
        return formula
    if formula.digits.startswith(COARSE):
        formula.not_understood.append(
            f"anything: the gradient comes in {formula.digits}, and what tells formulas apart are "
            "the digits after that. Let the loss take float64")
        return formula
    note_casts(measured, base)
    look_at_equal_rewards(measured)
    find_lens(measured, base)
    if formula.temperature is not None:
        find_parts(measured)
        check_on_new_batches(measured)
        try_parts(measured)
        try_other_batches(measured)
    return formula


def find_parts(measured: Measured) -> None:
    formula = measured.formula
    cases = [measured.case(5, longest=60), measured.case(3), measured.case(4)]
    cases += [replace(case, reward=1 - case.reward) for case in cases]
    has_push = [tokens_with_push(measured, case) for case in cases]
    formula.kinds = kinds_of_tokens(cases, has_push)
    if "some" in formula.kinds.values():
        find_some(formula, cases, has_push)
    drop_refused_sizes(measured)
    find_terms(measured)
    find_entropy(measured)
    look_for_short_advantages(measured)
    is_known = measured.hidden == "length" and find_cost(measured)
    if not is_known:
        find_policy(measured)
        is_known = measured.hidden == "shared" and find_cost(measured)
    if measured.hidden and not is_known:
        formula.not_understood.append(UNKNOWN[measured.hidden])
    if formula.ratio is None and NO_REWARD not in formula.not_understood:
        find_clip(measured)


def refuse_random(examined: Examined, case: Case) -> None:
    first, second = examined.raw(case), examined.raw(case)
    if (first - second).abs().max() > 1e-9 * first.abs().max():
        raise LossFailed("it is random: two calls with the same batch give other gradients")


def note_casts(measured: Measured, base: Case) -> None:
    casts = measured.examined.casts(base)
    if casts and measured.examined.in_float64:
        measured.formula.notes.append(f"it casts to {' and '.join(casts)}. Here float64 took its "
                                      "place, so what rounding does in training is not seen")


def find_lens(measured: Measured, base: Case) -> None:
    """From the whole gradient; or if that fails, from the part that depends on the reward."""
    formula, examined = measured.formula, measured.examined
    base = base if examined.raw(base).any() else far(base)
    rest = examined.find_lens(examined.raw(base), base)
    if rest > EXACT and measured.has_rest:
        measured.is_foreign = examined.find_lens(measured.policy_gradient(base), base) <= EXACT
    if rest > EXACT:
        formula.not_understood.append(
            f"{rest:.1%} of the gradient is not that of a log-prob of a sampled token, nor that of "
            "an entropy"
            + (". It does not depend on the reward" if measured.is_foreign else ""))
    if rest <= EXACT or measured.is_foreign:
        lens = examined.lens
        formula.temperature, formula.shift, formula.absent = (lens.temperature, lens.shift,
                                                              lens.absent)
    else:
        formula.unexplained = rest


def tokens_with_push(measured: Measured, case: Case) -> Tensor:
    """(B, L) bool"""
    push = measured.policy_push(case)
    if not push.any():
        push = measured.examined.push(case)
    return push.abs() > TINY * push.abs().max()


def kinds_of_tokens(cases: list[Case], has_push: list[Tensor]) -> dict[str, str]:
    """Which kinds of tokens have a gradient: all of a kind, none of them, or some."""
    found = {}
    for case, pushed in zip(cases, has_push):
        for name, where in places(case).items():
            if name != "unfinished":
                where = where & pushed.any(1, keepdim=True)
            has = pushed & where
            if not where.any():
                continue
            how = "none" if not has.any() else "all" if torch.equal(has, where) else "some"
            found[name] = how if found.get(name, how) == how else "some"
    if found["unfinished"] == "some":  # a whole answer may have an advantage of 0
        found["unfinished"] = "all"
    return found


def find_some(formula: Formula, cases: list[Case], has_push: list[Tensor]) -> None:
    """Where only some tokens of a kind have a gradient: which ones."""
    kinds = frozenset(kind for kind, how in formula.kinds.items() if how != "none")
    tokens = [tokens_of(case, kinds) & case.mask for case in cases]
    formula.selection = find_selection(cases, has_push, tokens)
    if formula.selection is not None:
        formula.kinds = {kind: "all" if how == "some" else how
                         for kind, how in formula.kinds.items()}


# ---------------------------------------------------------------------- the proof
def check_on_new_batches(measured: Measured) -> None:
    """Compare the whole formula with the gradient of batches that chose nothing."""
    formula = measured.formula
    if formula.advantage is None or formula.count is None:
        formula.terms = [term for term in formula.terms if term.kind not in ("constant", "k1")]
        return
    for name, cases in new_batches(measured):
        rest = largest_rest(measured, cases, measured.is_foreign)
        if rest > KNOWN and name in REPAIRS:
            REPAIRS[name](measured, cases)
            rest = largest_rest(measured, cases, measured.is_foreign)
        if rest > KNOWN:
            withdraw(formula, name, rest)
            return
    everything = [measured.everything(seed) for seed in (47, 48)]
    rest = largest_rest(measured, everything, measured.is_foreign)
    if rest > KNOWN and formula.terms:
        formula.terms = [replace(term, with_ratio=True) for term in formula.terms]
        rest = largest_rest(measured, everything)
        if rest > KNOWN:
            formula.terms = []
    if rest > KNOWN:
        withdraw(formula, "the ratio and the reference together", rest)
        return
    formula.unexplained = largest_rest(measured, everything)


REPAIRS = {"one right answer of 200": find_limit, "one wrong answer of 200": find_limit,
           "a reference far away": find_bounds_of_terms}


def new_batches(measured: Measured) -> list[tuple[str, list[Case]]]:
    """What is tried, and the batches that try it."""
    return [
        ("on policy", [measured.case(41), measured.case(42, 3, spare=2)]),
        ("a dead group", [measured.with_a_dead_group(43)]),
        ("rows without padding", measured.without_padding(49)),
        ("rewards below 0 and above 1", [measured.with_large_rewards(50)]),
        ("rewards of 0 and 1", [right_or_wrong(measured.case(56))]),
        ("one right answer of 200", measured.one_of_200(51, 1.0)),
        ("one wrong answer of 200", measured.one_of_200(51, 0.0)),
        ("long answers", [measured.case(52, longest=longest) for longest in (20, 60, 200)]),
        ("the reference", [measured.off_policy(44, "log_reference", .8)]),
        ("a reference far away", [measured.far_reference(57, sign) for sign in (1, -1)]),
        ("the ratio", [measured.off_policy(45, "log_ratio", .1),
                       measured.off_policy(46, "log_ratio", 2.0)])]


def largest_rest(measured: Measured, cases: list[Case], only_policy: bool = False) -> float:
    return max((measured.unexplained(case, only_policy) for case in cases), default=0.0)


def withdraw(formula: Formula, name: str, rest: float) -> None:
    """Take back what a new batch contradicts."""
    formula.unexplained = min(rest, 1.0)
    if name == "on policy":
        formula.advantage = formula.count = formula.ratio = formula.entropy = None
        formula.terms = [term for term in formula.terms if term.kind not in ("constant", "k1")]
    if name == "the ratio":
        formula.ratio = None
    if name in ("the reference", "a reference far away"):
        formula.terms = []
    formula.not_understood.append(f"{min(rest, 1):.1%} of the gradient, in a batch that tries "
                                  f"{name}")


# ---------------------------------------------------------------------- more batches to look at
def try_parts(measured: Measured) -> None:
    """The same batch in parts of whole groups: is the sum of their gradients, or their mean, that
    of the whole?"""
    case, raw = measured.case(51), measured.examined.raw
    whole = raw(case)
    for parts in (2, 4):
        try:
            joined = torch.cat([raw(case.rows(part)) for part in torch.arange(16).chunk(parts)])
        except LossFailed:
            continue
        by_sum, by_mean = (float((factor * joined - whole).norm() / whole.norm())
                           for factor in (1.0, 1 / parts))
        measured.formula.parts[parts] = (by_sum, by_mean)


def try_other_batches(measured: Measured) -> None:
    """Rows in another order; padding that is the end token; dead and nearly dead groups."""
    case, formula, raw = measured.case(52), measured.formula, measured.examined.raw
    order = torch.arange(16).view(4, 4).T.flatten()  # the first answers of all groups first
    try:
        whole, other = raw(case), raw(case.rows(order))
        is_same = (whole[order] - other).norm() <= 1e-6 * whole.norm()
        formula.order = "same" if is_same else "other"
    except LossFailed:
        formula.order = "refused"
    formula.loses_end = formula.kinds.get("end") == "all" and loses_the_end(measured)
    formula.dead = push_of_group(measured, torch.full((4,), .1).double())
    formula.nearly_dead = push_of_group(measured, torch.tensor([.1, .1, .1, .1 + 1e-6]).double())


def loses_the_end(measured: Measured) -> bool:
    case = measured.case(53, pad_id=END)
    try:
        push = measured.policy_push(case)
    except LossFailed:
        return False
    end = places(case)["end"] & (push.abs() > 0).any(1, keepdim=True)
    return not push[end].any()


def push_of_group(measured: Measured, rewards: Tensor) -> float:
    """The largest push in a group with these rewards / the largest one in the others, in float32,
    as a trainer has them. NaN if it is not finite."""
    case = measured.case(54, equal_lengths=True)
    reward = case.reward.clone()
    reward[:4] = rewards
    case = replace(case, reward=reward)
    in_short = copy(measured)
    in_short.examined = copy(measured.examined)
    in_short.examined.dtype = torch.float32
    try:
        push = in_short.policy_push(case)
    except LossNotFinite:
        return float("nan")
    except LossFailed:  # it takes float64 alone
        push = measured.policy_push(case)
    return float(push[:4].abs().max() / push[4:].abs().max())
