"""Countdown problems that people bring, in a file or typed."""
import json
import re
from functools import partial

from engine.errors import UserError
from harness.record import read_given

MAX_NUMBERS = 30  # of a problem in a file


def read_problems(name: str, most: int) -> list[tuple[tuple[int, ...], int]]:
    """Read JSON lines {"nums": [3, 5, 7], "target": 22}: numbers, up to `most`, and the target."""
    return read_given(name, "problems", partial(parse_problem, most=most))


def parse_problem(line: str, where: str, most: int) -> tuple[tuple[int, ...], int]:
    try:
        raw = json.loads(line)
        numbers, target = raw["nums"], raw["target"]
        has_form = (isinstance(numbers, list) and 0 < len(numbers) <= MAX_NUMBERS and
                    all(type(n) is int and 0 < n <= most for n in [*numbers, target]))
    except (ValueError, KeyError, TypeError, RecursionError):
        has_form = False
    if not has_form:
        raise UserError(f'{where}: expected {{"nums": [3, 5, 7], "target": 22}} with at most '
                        f"{MAX_NUMBERS} whole numbers from 1 to {most}, got {line[:80]!r}")
    return tuple(numbers), target


def read_numbers(words: list[str], least: int, expected: str) -> list[int]:
    """The whole positive numbers that somebody typed, `least` of them or more."""
    for word in words:
        if not re.fullmatch("[0-9]{1,9}", word) or int(word) == 0:
            raise UserError(f"{word[:20]!r} is not a whole positive number: expected {expected}")
    if len(words) < least:
        raise UserError(f"{' '.join(words)!r} is too short: expected {expected}")
    return [int(word) for word in words]
