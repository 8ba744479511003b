"""The tokens of one step, end to end, and the two sizes that each of them has.

A is the advantage of a token, w its weight, p its probability. The gradient at the logits is
`A w (onehot - p)`, of size `abs(A) w s` with s = norm(onehot - p) (grpo.gradient_size). The
contribution `A log p` is what an earlier experiment took for it.
"""
from pathlib import Path

import numpy as np
import torch

from grpo import gradient_size
from harness.credit_reading import read_columns

UNITS = ("contribution", "gradient")
LABELS = {"contribution": "A lp", "gradient": "A w s"}  # lp: log p
SIZES = {"contribution": "abs(A lp)", "gradient": "abs(A) w s"}


def read_tokens(run: Path, step: int) -> dict[str, np.ndarray]:
    """What a run has on record of the tokens of a step."""
    return lay_flat(read_columns(run, int(step)))


def lay_flat(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A credit file's columns, with what follows from them, one value a token."""
    length = lengths(columns)
    answer = np.repeat(np.arange(len(length)), length)
    position = np.arange(len(answer)) - columns["episode_start"][answer]
    numbers = {"log_prob", "entropy", "collision", "weight", "advantage", "ratio"}
    floats = {name: columns[name].astype(np.float64) for name in numbers & columns.keys()}
    codes = {name: columns[name].astype(np.int64) for name in ("kind", "section", "group")}
    s = gradient_size(torch.from_numpy(floats["log_prob"]), torch.from_numpy(floats["collision"]))
    tokens = {**columns, **floats, **codes, "s": s.numpy(), "length": length, "answer": answer,
              "position": position, "relative": position / length[answer],
              "token_group": codes["group"][answer]}
    signed = {unit: tokens["advantage"] * factor for unit, factor in units(tokens).items()}
    return {**tokens, **signed}


def lengths(columns: dict[str, np.ndarray]) -> np.ndarray:
    """(answers,) tokens of each."""
    return np.diff(np.append(columns["episode_start"], len(columns["token_id"])))


def end_of(tokens: dict[str, np.ndarray]) -> np.ndarray:
    """0 where a token's middle stands in the first fifth of its answer, 2 in the last, 1 else."""
    middle = (tokens["position"] + 0.5) / tokens["length"][tokens["answer"]]
    return np.digitize(middle, (0.2, 0.8))


def units(tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is multiplied by the advantage in each unit."""
    return {"contribution": tokens["log_prob"], "gradient": tokens["weight"] * tokens["s"]}
