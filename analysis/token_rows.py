"""A row for every token of a run, for pandas, R or a spreadsheet: python analyze.py RUN --csv.

The columns are those of the credit files (docs/credit_files.md), and two of an earlier experiment:
the contribution A log p, and the reward normalised in its group. What is known of an answer stands
in the row of each of its tokens; prompts are left out.
"""
import csv
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from analysis.tally import lay_flat, text_of
from harness.credit_file import column_of
from harness.credit_reading import read_columns
from engine.errors import UserError
from harness.files import whole_file
from engine.tokens import KINDS, SECTIONS, load_tokenizer
from grpo import group_z_score

WORDS = {"section": SECTIONS, "kind": KINDS}  # of the codes in these columns


def write_token_rows(run: dict, path: Path, status=lambda text: None) -> None:
    """A step in memory at a time."""
    folder, steps = run["folder"], run["steps"]
    if not steps:
        raise UserError(f"{folder} has no credit files yet")
    text = cache(partial(quoted, load_tokenizer(folder)))
    with whole_file(path) as unfinished:
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for step in steps:
                status(f"{path.name}: step {step} of {steps[-1]}")
                table = table_of(read_columns(folder, step), step, text)
                if step == steps[0]:
                    writer.writerow(table)
                writer.writerows(zip(*table.values()))


def table_of(columns: dict[str, np.ndarray], step: int, text: Callable) -> dict[str, list]:
    """What has something to say of a token: a list for each column, one entry a token."""
    tokens = lay_flat(columns)
    episode = tokens["answer"]
    table = {"step": [step] * len(episode), "episode": episode.tolist(),
             "position": tokens["position"].tolist(),
             "text": list(map(text, columns["token_id"].tolist()))}
    for name, values in columns.items():
        per = column_of(name).per
        if name != "episode_start" and per in ("token", "answer"):
            table[name] = in_letters(name, values[episode] if per == "answer" else values)
    for name, values in (("contribution", tokens["advantage"] * tokens["log_prob"]),
                         ("normalised_reward", normalised_reward(tokens)[episode])):
        table[name] = in_letters(name, values.astype(np.float32))
    return table


def normalised_reward(tokens: dict[str, np.ndarray]) -> np.ndarray:
    """(answers,)"""
    reward, group = torch.from_numpy(tokens["reward"]), torch.from_numpy(tokens["group"])
    return group_z_score(reward, group).numpy()


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
