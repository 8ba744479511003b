"""Problems that people bring: a file of them, or one that was typed. Each number is checked, and
what is wrong with a line is said in one sentence."""
import json
import re
from typing import TextIO

from engine.errors import UserError
from harness.files import read_given

MAX_NUMBER = 999_999_999  # nine digits, as many as the score of the reasoning reads
MAX_NUMBERS = 30          # of a problem in a file
MAX_LINE = 10_000         # characters of a line in it


def read_problems(name: str) -> list[tuple[tuple[int, ...], int]]:
    """Read JSON lines {"nums": [3, 5, 7], "target": 22}: numbers and target of each."""
    problems = read_given(name, "--data", lambda file: parse_problems(file, name))
    if not problems:
        raise UserError(f"{name} holds no problems")
    return problems


def parse_problems(file: TextIO, name: str) -> list[tuple[tuple[int, ...], int]]:
    problems, number = [], 0
    while line := file.readline(MAX_LINE):  # a line without an end is not read to its end
        number += 1
        if line.strip():
            problems.append(parse_problem(line.strip(), f"{name}, line {number}"))
    return problems


def parse_problem(line: str, where: str) -> tuple[tuple[int, ...], int]:
    try:
        raw = json.loads(line)
        numbers, target = raw["nums"], raw["target"]
        has_form = isinstance(numbers, list) and 0 < len(numbers) <= MAX_NUMBERS
        has_form = has_form and all(is_number(number) for number in [*numbers, target])
    except (ValueError, KeyError, TypeError, RecursionError):
        has_form = False
    if not has_form:
        raise UserError(f'{where}: expected {{"nums": [3, 5, 7], "target": 22}} with at most '
                        f"{MAX_NUMBERS} whole numbers from 1 to {MAX_NUMBER}, got {line[:80]!r}")
    return tuple(numbers), target


def is_number(value) -> bool:
    return type(value) is int and 0 < value <= MAX_NUMBER


def read_numbers(words: list[str], least: int, expected: str) -> list[int]:
    """The whole positive numbers that somebody typed, `least` of them or more."""
    for word in words:
        if not re.fullmatch("[0-9]{1,9}", word) or int(word) == 0:
            raise UserError(f"{word[:20]!r} is not a whole positive number: expected {expected}")
    if len(words) < least:
        raise UserError(f"{' '.join(words)!r} is too short: expected {expected}")
    return [int(word) for word in words]
