"""Solutions of a Countdown problem, found by trying everything: which targets can be reached, and
by which expressions.

Every step of a solution has a whole positive result of at most `max_result`. A model may take
other steps, and is right with them: no answer is scored by this file. countdown_task.py makes its
problems with it, and lists right answers for the weightings that ask for them.
"""
import itertools
from functools import lru_cache

from engine.errors import UserError

MOST_NUMBERS = 4  # five have too many expressions to list


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...], max_result: int) -> frozenset[int]:
    """Every value that can be made from all of the (sorted) numbers."""
    if len(numbers) == 1:
        return frozenset(numbers)
    values = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        others = [number for k, number in enumerate(numbers) if k not in (i, j)]
        steps = legal_steps(a, b, max_result) + legal_steps(b, a, max_result)
        for result in {result for *_, result in steps}:
            values |= reachable(tuple(sorted([*others, result])), max_result)
    return frozenset(values)


@lru_cache(maxsize=4096)
def right_expressions(numbers: tuple[int, ...], target: int, max_result: int) -> list[str]:
    """Expressions such as "( 3 * 5 ) + 7" that use all the numbers and equal the target.

    First come those that write the larger number first in every sum and product, then those with
    one exception, and so on.
    """
    if len(numbers) > MOST_NUMBERS:
        raise UserError(f"the right answers of {len(numbers)} numbers are not listed: four are the "
                        "most")
    exceptions = {}  # by expression: how many of its sums and products name the smaller one first

    def combine(items: list[tuple[int, str, int]]) -> None:
        """Join two of the items, which are (value, expression, exceptions), until one is left."""
        if len(items) == 1:
            value, expression, count = items[0]
            if value == target:
                exceptions[expression] = count
        for i, j in itertools.permutations(range(len(items)), 2):
            x, left, left_count = items[i]
            y, right, right_count = items[j]
            others = [item for k, item in enumerate(items) if k not in (i, j)]
            for _, operator, _, result in legal_steps(x, y, max_result):
                joined = f"{in_parentheses(left)} {operator} {in_parentheses(right)}"
                smaller_first = operator in "+*" and x < y
                combine([*others, (result, joined, left_count + right_count + smaller_first)])

    combine([(number, str(number), 0) for number in numbers])
    return sorted(exceptions, key=exceptions.get)


def in_parentheses(expression: str) -> str:
    """With parentheses around it, unless it is a number alone."""
    return f"( {expression} )" if " " in expression else expression


def legal_steps(x: int, y: int, max_result: int) -> list[tuple[int, str, int, int]]:
    """All (x, operator, y, result), in this order of x and y, with a result that is allowed."""
    steps = [(x, "*", y, x * y), (x, "+", y, x + y), (x, "-", y, x - y)]
    if x % y == 0:
        steps.append((x, "/", y, x // y))
    return [step for step in steps if 0 < step[3] <= max_result]
