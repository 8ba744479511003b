"""Countdown problems: those that people bring, in a file or typed, and what numbers can make.

What can be made is found by trying everything. Every step has a whole positive result of at most
`max_result`. A model may take other steps, and is right with them: no answer is scored by this
file. countdown_task.py makes its problems with it.
"""
import itertools
import json
import re
from functools import lru_cache

from engine.errors import UserError
from harness.record import read_given

MAX_NUMBER = 999_999_999  # nine digits, as many as the score of the reasoning reads
MAX_NUMBERS = 30          # of a problem in a file

Step = tuple[int, str, int, int]  # x, operator, y and the result


def read_problems(name: str) -> list[tuple[tuple[int, ...], int]]:
    """Read JSON lines {"nums": [3, 5, 7], "target": 22}: numbers and target of each."""
    return read_given(name, "problems", parse_problem)


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
    values: set[int] = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        others = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for *_, result in legal_steps(a, b, max_result) + legal_steps(b, a, max_result):
            values |= reachable(tuple(sorted([*others, result])), max_result)
    return frozenset(values)


def legal_steps(x: int, y: int, max_result: int) -> list[Step]:
    """Those with this order of x and y and a result that is allowed."""
    steps = [(x, "*", y, x * y), (x, "+", y, x + y), (x, "-", y, x - y)]
    if x % y == 0:
        steps.append((x, "/", y, x // y))
    return [step for step in steps if 0 < step[3] <= max_result]
