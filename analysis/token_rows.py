"""A row for every token of a run, for pandas, R or a spreadsheet: python analyze.py RUN --csv.

The columns are those of the credit files (docs/credit_files.md). What is known of an answer stands
in the row of each of its tokens; prompts are left out.
"""
import csv
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from analysis.sizes import lengths
from analysis.vocabulary import text_of
from engine.labels import KINDS, SECTIONS
from harness.credit_columns import column_of
from harness.credit_file import credit_path, read_columns
from engine.errors import UserError
from harness.files import whole_file
from engine.tokens import load_tokenizer

WORDS = {"section": SECTIONS, "kind": KINDS}  # of the codes in these columns


def write_token_rows(run: dict, path: Path, status=lambda text: None) -> None:
    """A step in memory at a time."""
    folder, steps = run["folder"], run["steps"]
    if not steps:
        raise UserError(f"{folder} has no credit files yet")
    names = names_of(read_columns(folder, steps[0]))
    text = cache(partial(quoted, load_tokenizer(folder)))
    with whole_file(path) as unfinished:
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "episode", "position", "text", *names])
            for step in steps:
                status(f"{path.name}: step {step} of {steps[-1]}")
                writer.writerows(rows_of(folder, step, names, text))


def names_of(columns: dict[str, np.ndarray]) -> list[str]:
    """Those that have something to say of a token."""
    names = [name for name in columns if name != "episode_start"]
    return [name for name in names if column_of(name).per in ("token", "answer")]


def rows_of(folder: Path, step: int, names: list[str], text: Callable) -> Iterator[tuple]:
    """One tuple a token."""
    columns = read_columns(folder, step)
    if names_of(columns) != names:
        raise UserError(f"{credit_path(folder, step)} has other columns than the first step: one "
                        "table cannot hold both")
    length = lengths(columns)
    episode = np.repeat(np.arange(len(length)), length)
    position = np.arange(len(episode)) - columns["episode_start"][episode]
    values = []
    for name in names:
        of_answer = column_of(name).per == "answer"
        value = columns[name][episode] if of_answer else columns[name]
        values.append(in_letters(name, value))
    texts = map(text, columns["token_id"].tolist())
    return zip([step] * len(episode), episode.tolist(), position.tolist(), texts, *values)


def in_letters(name: str, values: np.ndarray) -> list:
    """Codes as words, yes or no as 1 or 0, numbers with the digits that they have."""
    if name in WORDS:
        return [WORDS[name][code] for code in values.tolist()]
    if values.dtype == np.bool_:
        return values.astype(int).tolist()
    return values.astype(str).tolist()


def quoted(tokenizer: Tokenizer, token: int) -> str:
    """A token's text as JSON has it: so it takes one line, and no spreadsheet takes "=" for a
    formula."""
    return json.dumps(text_of(tokenizer, token), ensure_ascii=False)
