"""What a loss may take off the reward of an answer, before it makes advantages of the rewards: a KL
to the reference model, or a penalty on the answer's length.

With the rate k, the advantage is that of reward - k * cost. It is found by Newton's method, since
all else is known of the advantage by then.
"""
import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from tools.helpers.formula_advantages import Advantage, Cost, per_group
from tools.helpers.formula_batches import Case, noise_like
from tools.helpers.formula_counts import counts
from tools.helpers.formula_measured import Measured
from tools.helpers.formula_policy import advantages_that_fit, divided, shapes_that_fit
from tools.helpers.formula_shapes import Shape
from tools.helpers.formula_terms import difference, fit_counted, table_of

VALUES = {"k1": lambda d: -d, "k2": lambda d: d.square() / 2, "k3": lambda d: d.exp() - d - 1}
LARGE = 1e3  # times the rewards, beside which a penalty is small


def costs_of_kl() -> Iterator[Cost]:
    for kind, value in VALUES.items():
        def total(case: Case, value=value) -> Tensor:
            return (value(difference(case, "reference")) * case.mask).sum(1)

        yield Cost(f"kl {kind}", f"the sum of {kind} over its tokens", total)
        yield Cost(f"mean kl {kind}", f"the mean of {kind} over its tokens",
                   lambda case, total=total: total(case) / case.length)


def costs_of_length() -> Iterator[Cost]:
    def within_group(case: Case) -> Tensor:
        length = case.length.double()
        least, most = (per_group(length, case.group, way) for way in ("amin", "amax"))
        return (length - least) / (most - least).clamp(min=1)

    yield Cost("length", "its number of tokens", lambda case: case.length.double())
    yield Cost("length over longest", "its number of tokens / that of the longest answer",
               lambda case: case.length / case.length.max())
    yield Cost("length within group", "its length, from 0 for the shortest answer of its group to "
               "1 for the longest", within_group)
    for start in range(1, 10):
        yield Cost(f"length beyond {start}", f"its tokens beyond the first {start}",
                   lambda case, start=start: (case.length - start).clamp(min=0).double())


def find_cost(measured: Measured) -> bool:
    """Whether what is taken off the reward is known. `measured.hidden` says of which kind it is."""
    formula, cases = measured.formula, measured.designs()
    if measured.hidden == "shared":
        cases = [replace(case, log_reference=noise_like(case, 75, .1) * case.mask)
                 for case in cases]
        shape, known = formula.shape, [formula.advantage] if formula.advantage else []
        costs = list(costs_of_kl())
    else:
        found = shapes_that_fit(measured, cases, [measured.policy_push(case) for case in cases])
        shape = found[0] if found else None
        known = advantages_that_fit(measured, shape, "group") if found else []
        costs = list(costs_of_length())
    cases = [replace(cases[0], reward=LARGE * cases[0].reward), *cases]
    numbers = [measured.per_answer(shape, case) for case in cases] if known else [None]
    if any(number is None for number in numbers):
        return False
    simple = sorted(known, key=lambda advantage: advantage.complexity)[:6]
    return any(fit_cost(measured, shape, replace(advantage, cost=cost), cases, numbers)
               for advantage, cost in itertools.product(simple, costs))


def fit_cost(measured: Measured, shape: Shape, advantage: Advantage, cases: list[Case],
             numbers: list[Tensor]) -> bool:
    """Whether this cost explains the numbers of all answers. The first case has large rewards."""
    formula, length = measured.formula, cases[0].length.double()
    for weights in (1.0, 1 / length):  # most counts are one of these
        rate, rest = best_rate(advantage, cases[0], numbers[0] / weights)
        if rest > 1e-6 or not rate:
            continue
        tried = replace(advantage, rate=rate)
        cases, numbers = cases[1:], numbers[1:]
        quotients = [divided(number, tried(case)) for number, case in zip(numbers, cases)]
        table = table_of(cases, counts(formula.tokens))
        fits = fit_counted(cases, quotients, table, measured.tolerance)
        if fits:
            formula.shape, formula.advantage, formula.count = shape, tried, fits[0]
            return True
    return False


def best_rate(advantage: Advantage, case: Case, found: Tensor) -> tuple[float, float]:
    """(the rate at which the advantages of the case are nearest to a multiple of what was found,
    what that leaves over)."""
    def rest(rate: float) -> Tensor:
        value = replace(advantage, rate=rate)(case)
        return found - (found * value).sum() / value.square().sum().clamp(min=1e-300) * value

    rate = 0.0
    for _ in range(12):
        here = rest(rate)
        slope = (rest(rate + 1e-2) - here) / 1e-2
        rate -= float((slope * here).sum() / slope.square().sum().clamp(min=1e-300))
    rate = float(f"{rate:.6g}")
    return rate, float(rest(rate).norm() / found.norm())
