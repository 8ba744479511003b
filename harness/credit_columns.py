"""The columns of a credit file: what each holds, and the check that it does.

A damaged file, or one of another program, ends in one sentence that names the file and the column.
docs/credit_files.md says what the columns mean.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.errors import UserError
from engine.labels import KINDS, SECTIONS

LARGEST = float(np.finfo(np.float32).max)
MOST = 2 ** 31 - 1
WORDS = {"i": "whole numbers", "f": "floating point numbers", "b": "yes or no"}  # by kind of dtype


class Column(NamedTuple):
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
OTHERS = {  # columns that not every file has
    "ratio": Column("token", np.float32, low=0),           # where a batch had several updates
    "true_credit": Column("token", np.float32),            # where a probe measured it
    "true_credit_se": Column("token", np.float32, low=0),
    "run_id": Column("byte of run_id", np.uint8, 0, 255),  # these three: where a file belongs
    "step": Column("file", np.int32, 0, MOST),
    "process": Column("rank and count", np.int32, 0, MOST)}
ORIGIN = ("run_id", "step", "process")
OF_FILE = {"byte of run_id": 8, "file": 1, "rank and count": 2}  # Column.per -> how many values
COUNTED_BY = {  # Column.per -> the column that has one entry for each of them
    "token": "token_id", "answer": "group", "question": "prompt_start",
    "prompt token": "prompt_ids"}
COUNTS = {  # a column that counts from 0 -> whose entries it counts; how far it rises each time
    "episode_start": ("token_id", 1, MOST), "prompt_start": ("prompt_ids", 1, MOST),
    "group": ("prompt_start", 0, 1)}


def column_of(name: str) -> Column:
    return {**COLUMNS, **OTHERS}.get(name, Column("token", np.float32))


def checked(path: Path, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of a file in the types that they are written in, if all is as it should be."""
    for name in COLUMNS:
        if name not in columns:
            raise UserError(f"{path} is not a credit file of this program: it has no column {name}")
    sizes = {per: columns[name].size for per, name in COUNTED_BY.items()} | OF_FILE
    for name, values in columns.items():
        flaw = flaw_of(column_of(name), values, sizes)
        if not flaw and name in COUNTS:
            counted, least, most = COUNTS[name]
            rises = np.diff(values.astype(np.int64), append=columns[counted].size)
            fits = (values.size and values[0] == 0 and rises[-1] >= 1
                    and rises.min() >= least and rises.max() <= most)
            flaw = "" if fits else "does not fit the other columns"
        if flaw:
            raise UserError(f"{path} is broken: its {name} {flaw}")
    return {name: values.astype(column_of(name).dtype, copy=False)
            for name, values in columns.items()}


def flaw_of(column: Column, values: np.ndarray, sizes: dict[str, int]) -> str:
    """What is wrong with a column by itself; empty if nothing is. Its numbers may have another size
    than they are written with."""
    kind = np.dtype(column.dtype).kind.replace("u", "i")
    if values.dtype.kind.replace("u", "i") != kind or values.dtype.itemsize > 8:
        return f"should hold {WORDS[kind]}, and holds {values.dtype}"
    if values.shape != (sizes[column.per],):
        return "does not fit the other columns"
    is_right = (values >= column.low) & (values <= column.high)  # NaN fails both comparisons
    return "" if is_right.all() else f"has the value {values[~is_right][0]}"
