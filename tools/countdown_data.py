"""Countdown problems: those that people bring, in a file or typed, and the solutions of any.

Solutions are found by trying everything. Every step of one has a whole positive result of at most
`max_result`. A model may take other steps, and is right with them: no answer is scored by this
file. countdown_task.py makes its problems with it, and lists right answers.
"""
import itertools
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from engine.errors import UserError
from harness.files import read_given

MAX_NUMBER = 999_999_999  # nine digits, as many as the score of the reasoning reads
MAX_NUMBERS = 30          # of a problem in a file
MOST_NUMBERS = 4          # five have too many expressions to list

Step = tuple[int, str, int, int]  # x, operator, y and the result


class Candidate(NamedTuple):
    """A way to make one number of all, and the steps that compute it."""
    value: int
    expression: str
    steps: tuple[Step, ...]


def read_problems(name: str) -> list[tuple[tuple[int, ...], int]]:
    """Read JSON lines {"nums": [3, 5, 7], "target": 22}: numbers and target of each."""
    problems = read_given(name, lambda file: [
        parse_problem(line.strip(), f"{name}, line {number}")
        for number, line in enumerate(file, 1) if line.strip()])
    if not problems:
        raise UserError(f"{name} holds no problems")
    return problems


def parse_problem(line: str, where: str) -> tuple[tuple[int, ...], int]:
    try:
        raw = json.loads(line)
        numbers, target = raw["nums"], raw["target"]
        has_form = (isinstance(numbers, list) and 0 < len(numbers) <= MAX_NUMBERS and
                    all(type(n) is int and 0 < n <= MAX_NUMBER for n in [*numbers, target]))
    except (ValueError, KeyError, TypeError, RecursionError):
        has_form = False
    if not has_form:
        raise UserError(f'{where}: expected {{"nums": [3, 5, 7], "target": 22}} with at most '
                        f"{MAX_NUMBERS} whole numbers from 1 to {MAX_NUMBER}, got {line[:80]!r}")
    return tuple(numbers), target


def read_numbers(words: list[str], least: int, expected: str) -> list[int]:
    """The whole positive numbers that somebody typed, `least` of them or more."""
    for word in words:
        if not re.fullmatch("[0-9]{1,9}", word) or int(word) == 0:
            raise UserError(f"{word[:20]!r} is not a whole positive number: expected {expected}")
    if len(words) < least:
        raise UserError(f"{' '.join(words)!r} is too short: expected {expected}")
    return [int(word) for word in words]


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...], max_result: int) -> frozenset[int]:
    """Every value that can be made from all of the (sorted) numbers."""
    if len(numbers) == 1:
        return frozenset(numbers)
    values = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        others = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for *_, result in legal_steps(a, b, max_result) + legal_steps(b, a, max_result):
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
    exceptions = {found.expression: sum(map(smaller_first, found.steps))
                  for found in expressions(numbers, max_result) if found.value == target}
    return sorted(exceptions, key=exceptions.get)


def smaller_first(step: Step) -> bool:
    """Whether a sum or a product names the smaller number first."""
    x, operator, y, _ = step
    return operator in "+*" and x < y


def expressions(numbers: tuple[int, ...], max_result: int) -> Iterator[Candidate]:
    """Every way to make one number of all."""
    yield from joined([(number, str(number)) for number in numbers], (), max_result)


def joined(items: list[tuple[int, str]], steps: tuple[Step, ...],
           max_result: int) -> Iterator[Candidate]:
    """Join two of the items, which are (value, expression), in every way, until one is left."""
    if len(items) == 1:
        yield Candidate(*items[0], steps)
        return
    for i, j in itertools.permutations(range(len(items)), 2):
        (x, left), (y, right) = items[i], items[j]
        others = [item for k, item in enumerate(items) if k not in (i, j)]
        for step in legal_steps(x, y, max_result):
            _, operator, _, result = step
            expression = f"{in_parentheses(left)} {operator} {in_parentheses(right)}"
            yield from joined([*others, (result, expression)], (*steps, step), max_result)


def in_parentheses(expression: str) -> str:
    """With parentheses around it, unless it is a number alone."""
    return f"( {expression} )" if " " in expression else expression


def legal_steps(x: int, y: int, max_result: int) -> list[Step]:
    """Those with this order of x and y and a result that is allowed."""
    steps = [(x, "*", y, x * y), (x, "+", y, x + y), (x, "-", y, x - y)]
    if x % y == 0:
        steps.append((x, "/", y, x // y))
    return [step for step in steps if 0 < step[3] <= max_result]
