"""The fields of an answer that another trainer wrote, and what each may hold.

A file is read line by line. A line that cannot be read ends the import in one sentence.
"""
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lab.engine.errors import UserError, parse_object

LARGEST = 3.4028234663852886e38  # of float32
PER_TOKEN = {  # the range of a column, rounding allowed for
    "log_prob": (-LARGEST, 1e-3),
    "entropy": (-1e-3, LARGEST),
    "collision": (0, 1.001),
    "weight": (0, LARGEST),
    "advantage": (-LARGEST, LARGEST)}


def is_number(value, low: float = -LARGEST, high: float = LARGEST) -> bool:
    return type(value) in (int, float) and low <= value <= high


def is_whole(value, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def is_bool(value) -> bool:
    return type(value) is bool


def is_name(value) -> bool:
    return type(value) in (int, str)


def is_message(value) -> bool:
    """Whether it has a role and a content. A message that calls tools may have no content."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str | None)


def is_text(value) -> bool:
    """Whether this is a text or a list of messages."""
    if isinstance(value, list):
        return all(is_message(one) for one in value)
    return isinstance(value, str)


def are_ids(value) -> bool:
    return isinstance(value, list) and all(is_whole(one, most=2 ** 24 - 1) for one in value)


def are_own(value) -> bool:
    return isinstance(value, list) and all(one in (0, 1) for one in value) and 1 in value


def are_parts(value) -> bool:
    return isinstance(value, dict) and all(is_number(one) for one in value.values())


def fits_column(value, low: float, high: float) -> bool:
    """Whether it is a number within the range, or a list of such numbers."""
    numbers = value if isinstance(value, list) else [value]
    return all(is_number(one, low, high) for one in numbers)


class Check(NamedTuple):
    """A test of a field's value, and in words what it has to be."""
    is_right: Callable[..., bool]
    words: str


FIELDS = {  # of a line; a null is as if the field were not there
    "step": Check(partial(is_whole, most=2 ** 30 - 1), "a whole number"),
    "group": Check(is_name, "a whole number or a text"),
    "prompt": Check(is_text, "a text or a list of messages"),
    "completion": Check(is_text, "a text or a list of messages"),
    "prompt_ids": Check(are_ids, "a list of token numbers"),
    "token_ids": Check(are_ids, "a list of token numbers"),
    "own": Check(are_own, "a list of 1 for each token that the model drew, and 0 for the others"),
    "reward": Check(is_number, "a number"),
    "parts": Check(are_parts, "numbers by name"),
    "finished": Check(is_bool, "true or false"),
    "solved": Check(is_bool, "true or false")}
for column, (lowest, highest) in PER_TOKEN.items():
    FIELDS[column] = Check(partial(fits_column, low=lowest, high=highest),
                           "a number, or one for each token, that this column can hold")


def checked(line: dict, where: str) -> dict:
    """The line without its nulls, each field tested."""
    line = {name: value for name, value in line.items() if value is not None}
    if line.keys().isdisjoint(("reward", "advantage")):
        raise UserError(f"{where} is no answer: it has neither a reward nor an advantage, "
                        f"but {', '.join(line):.80}")
    for name in line.keys() & FIELDS.keys():
        check = FIELDS[name]
        if not check.is_right(line[name]):
            raise UserError(f"{where}: its {name} should be {check.words}, "
                            f"not {line[name]!r:.80}")
    if "step" not in line:
        raise UserError(f"{where} has no step")
    return line


def lines_of(files: list[Path]) -> Iterator[tuple[str, dict]]:
    """Yield the lines of the files: the place of each, and its fields."""
    for path in files:
        if not path.is_file():
            raise UserError(f"cannot read {path}: there is no such file")
        same = [other for other in files if other.is_file() and path.samefile(other)]
        if len(same) > 1:
            raise UserError(f"{path} is named twice: its answers would count twice")
        if ".parquet" in path.suffixes:  # also one that somebody wrote as JSON lines since
            raise UserError(f"{path}: TRL's tables repeat batches and mix in evaluations, so they "
                            "are not read. lab/trl/your_own_run.md says how to record a run of TRL "
                            "while it trains; of another trainer write JSON lines")
        for where, row in read_lines(path):
            yield where, checked(row, where)


def read_lines(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield f"{path}, line {number}", parse_object(text, f"{path}, line {number}")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None
