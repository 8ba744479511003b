"""An expectation is written in clauses, and a clause names a code of the table (terms.py).

    z n-1 1e-4, token, clip 0.2 0.28, kl k3 with ratio 0.04

A clause has the words of a code and its numbers. The words may stand in another order, as long as
only one code has them. A number belongs to the word before it, or else to the first place that has
none. Numbers that are left out may be any.
"""
import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from itertools import product

from .mistakes import UNUSUAL, WRONG
from .terms import (CENTRES, COUNTS, FINISHES, GROUPS, LENGTHS, OLDS, RATIOS, REFERENCES,
                    SAMPLERS, SCALES, SHAPES, TERMS, TOKENS, UNFINISHED)

USUAL = frozenset({"end", "no kl", "no entropy", "temperature 1", "shift 1", "understood"})
Numbers = tuple[float | None, ...]  # None where a number is left out


def with_z(parts: Iterable[str]) -> str:
    """The words of an advantage. Minus the mean and over a std is called `z`."""
    return re.sub(r"mean over (batch )?n(?!\w)", r"z \1n", " ".join(filter(None, parts)))


@cache
def codes_of_table() -> list[str]:
    """All codes of settings that can be printed."""
    made = [with_z(parts) for parts in product(GROUPS, CENTRES, SCALES, FINISHES)]
    made += [count + length for count, length in product(COUNTS, LENGTHS)]
    for codes in (TOKENS, (UNFINISHED,), SHAPES, OLDS, RATIOS, SAMPLERS):
        made += filter(None, codes)
    return made + ["".join(parts) for parts in product(
        TERMS, REFERENCES, ("", *(f" {count}" for count in COUNTS)), ("", " on answers"))]


@cache
def known() -> dict[str, str]:
    """The words of all clauses, and the code that has these words."""
    names = *WRONG, *UNUSUAL, *USUAL, "not understood", "temperature {T}"
    return {words_of(code): code for code in (*codes_of_table(), *names)}


@cache
def in_any_order() -> dict[tuple[str, ...], list[str]]:
    """The codes that have the same words."""
    found: dict[tuple[str, ...], list[str]] = {}
    for words in known():
        found.setdefault(tuple(sorted(words.split())), []).append(words)
    return found


def number_in(word: str) -> float | None:
    """The number that a word is, if it is one; `none` is a bound that is not there."""
    try:
        return math.inf if word == "none" else None if word == "nan" else float(word)
    except ValueError:
        return None


def words_of(code: str) -> str:
    """A code without its numbers and their names in braces."""
    return " ".join(word for word in code.split()
                    if number_in(word) is None and not word.startswith("{"))


def words_before_numbers(code: str) -> list[str]:
    """For each number of a code the word that stands before it."""
    found, before = [], ""
    for word in code.split():
        if number_in(word) is None and not word.startswith("{"):
            before = word
        else:
            found.append(before)
    return found


@cache
def parsed(said: str) -> tuple[str, Numbers]:
    """The words of a code or a clause in the order of the table, and its numbers."""
    words = words_of(said)
    same = in_any_order().get(tuple(sorted(words.split())), [])
    if words not in known() and len(same) == 1:
        words = same[0]
    values = [value for value in map(number_in, said.split()) if value is not None]
    places = words_before_numbers(known().get(words, said))
    numbers: list[float | None] = [None] * len(places)
    rest = []
    for before, value in zip(words_before_numbers(said), values):
        own = [k for k, word in enumerate(places) if word == before and numbers[k] is None]
        if own:
            numbers[own[0]] = value
        else:
            rest.append(value)
    for value in rest:
        if None in numbers:
            numbers[numbers.index(None)] = value
    if known().get(words) in SAMPLERS and len(values) == 1 and len(places) == 2:
        numbers = [math.inf, *values]  # without a lower bound
    return words, tuple(numbers)


def clauses_of(expected: str) -> list[str]:
    """The clauses of an expectation, which has commas between them. What is no clause is refused
    with those near it."""
    found = []
    for said in expected.split(","):
        clause = " ".join(re.sub(r"\b(eps|epsilon)\b|=", " ", said).split())
        clause = with_z([clause.removeprefix("minus ")])
        if clause:
            refuse_unknown(clause)
            found.append(clause)
    if not found:
        raise ValueError("the expectation names no clause, such as: z n-1 1e-4, token, "
                         "clip 0.2 0.28")
    return found


def refuse_unknown(clause: str) -> None:
    words, numbers = parsed(clause)
    if words in known():
        if len(words_before_numbers(clause)) > len(numbers):
            raise ValueError(f"{clause!r} has more numbers than the clause `{known()[words]}`")
        return
    vocabulary = {word for code in known() for word in code.split()}
    strange = [word for word in words.split() if word not in vocabulary]
    said = f"has the word {strange[0]!r}" if strange else f"is called {clause!r}"
    codes = {words_of(code): code for code in codes_of_table()}
    longer = sorted((one for one in codes if {*words.split()} <= {*one.split()}), key=len)
    alike = get_close_matches(words, codes, 1, 0.8) + longer
    near = [codes[one] for one in dict.fromkeys(alike)][:3]
    raise ValueError(f"no clause {said}. " + (f"Near it: {'; '.join(near)}" if near else
                                              "--help lists all clauses"))


def is_said(code: str, clause: str) -> bool:
    """Whether a clause has this code."""
    (words, numbers), (wanted, given) = parsed(code), parsed(clause)
    return words == wanted and agree(numbers, given)


def agree(numbers: Numbers, given: Numbers) -> bool:
    return len(numbers) == len(given) and all(
        other is None or one == other or math.isclose(one or 0.0, other, rel_tol=1e-4)
        for one, other in zip(numbers, given))
