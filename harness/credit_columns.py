"""The columns of a credit file: what each holds, and the checks that it does.

A damaged file, or one of another program, ends in one sentence that names the file and the column.
docs/credit_files.md says what the columns mean.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.labels import KINDS, SECTIONS
from engine.errors import UserError

LARGEST = float(np.finfo(np.float32).max)
MOST = 2 ** 31 - 1
WORDS = {"i": "whole numbers", "f": "floating point numbers", "b": "yes or no"}  # by kind of dtype


@dataclass(frozen=True)
class Column:
    per: str                  # what it has one value of: token, answer, question, prompt token
    dtype: type               # as it is written
    low: float = -LARGEST     # the range of its values, rounding allowed for
    high: float = LARGEST


COLUMNS = {
    "token_id": Column("token", np.int32, 0, 2 ** 24),
    "log_prob": Column("token", np.float32, high=1e-3),
    "entropy": Column("token", np.float32, low=-1e-3),
    "collision": Column("token", np.float32, 0, 1.001),
    "weight": Column("token", np.float32, low=0),
    "advantage": Column("token", np.float32),
    "section": Column("token", np.uint8, 0, len(SECTIONS) - 1),
    "kind": Column("token", np.uint8, 0, len(KINDS) - 1),
    "episode_start": Column("answer", np.int32, 0, MOST),
    "group": Column("answer", np.int32, 0, MOST),
    "finished": Column("answer", np.bool_, 0, 1),
    "reward": Column("answer", np.float32),
    "reward_format": Column("answer", np.float32),
    "reward_answer": Column("answer", np.float32),
    "reward_reasoning": Column("answer", np.float32),
    "prompt_ids": Column("prompt token", np.int32, 0, 2 ** 24),
    "prompt_start": Column("question", np.int32, 0, MOST)}
SOMETIMES = {  # columns that not every file has
    "ratio": Column("token", np.float32, low=0),           # where a batch had several updates
    "true_credit": Column("token", np.float32),            # where a probe measured it
    "true_credit_se": Column("token", np.float32, low=0)}
ORIGIN = {  # where a file belongs; not in the files of older runs
    "run_id": Column("byte of run_id", np.uint8, 0, 255),
    "step": Column("file", np.int32, 0, MOST),
    "process": Column("rank and count", np.int32, 0, MOST)}
FURTHER = Column("token", np.float32)  # any other name
COUNTED_BY = {  # Column.per -> the column that has one entry for each of them
    "token": "token_id", "answer": "group", "question": "prompt_start",
    "prompt token": "prompt_ids"}
OF_FILE = {"byte of run_id": 8, "file": 1, "rank and count": 2}  # Column.per -> how many values


def column_of(name: str) -> Column:
    return {**COLUMNS, **SOMETIMES, **ORIGIN}.get(name, FURTHER)


def checked(path: Path, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of a file in the types that they are written in, if all is as it should be."""
    for name in COLUMNS:
        if name not in columns:
            raise UserError(f"{path} is not a credit file of this program: it has no column {name}")
    for name, values in columns.items():
        check_type(path, name, values)
    check_sizes(path, columns)
    for name, values in columns.items():
        check_range(path, name, values)
    check_order(path, columns)
    return {name: values.astype(column_of(name).dtype, copy=False)
            for name, values in columns.items()}


def check_type(path: Path, name: str, values: np.ndarray) -> None:
    """Refuse another kind of number than the column is written with. Its size may be another."""
    wanted = np.dtype(column_of(name).dtype).kind.replace("u", "i")
    if values.dtype.kind.replace("u", "i") != wanted or values.dtype.itemsize > 8:
        raise UserError(f"{path} is broken: its {name} should hold {WORDS[wanted]}, and holds "
                        f"{values.dtype}")


def check_sizes(path: Path, columns: dict[str, np.ndarray]) -> None:
    sizes = {per: columns[name].size for per, name in COUNTED_BY.items()}
    sizes |= OF_FILE
    for name, values in columns.items():
        if values.shape != (sizes[column_of(name).per],):
            raise UserError(f"{path} is broken: its {name} does not fit the other columns")


def check_range(path: Path, name: str, values: np.ndarray) -> None:
    column = column_of(name)
    if not values.size or column.low <= values.min() and values.max() <= column.high:
        return  # NaN fails both comparisons
    wrong = values[~((values >= column.low) & (values <= column.high))]
    raise UserError(f"{path} is broken: its {name} has the value {wrong[0]}")


def check_order(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Answers and prompts stand end to end, none of them empty; groups come one after another."""
    episode_start = columns["episode_start"].astype(np.int64)
    prompt_start = columns["prompt_start"].astype(np.int64)
    group = columns["group"].astype(np.int64)
    checks = {"episode_start": are_starts(episode_start, columns["token_id"].size),
              "prompt_start": are_starts(prompt_start, columns["prompt_ids"].size),
              "group": are_groups(group, prompt_start.size)}
    for name, is_right in checks.items():
        if not is_right:
            raise UserError(f"{path} is broken: its {name} does not fit the other columns")


def are_starts(starts: np.ndarray, count: int) -> bool:
    """Whether parts that begin at these places fill `count` places, none of them empty."""
    return bool(len(starts) and starts[0] == 0 and (np.diff(starts, append=count) > 0).all())


def are_groups(group: np.ndarray, questions: int) -> bool:
    """Whether these are 0, 0, ..., 1, 1, ...: every problem has answers, in order."""
    rises = np.diff(group)
    return bool(len(group) and group[0] == 0 and group[-1] == questions - 1
                and ((rises == 0) | (rises == 1)).all())
