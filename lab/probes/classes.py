"""The notes' classes of tokens, filler, reasoning and structure, and their t at each position.

Both are defined as in the earlier experiment (github.com/Ja-Crispy/GRPO-Zero).
"""
import re

import numpy as np
from tokenizers import Tokenizer

from lab.analysis.statistics import Floats

CLASSES = FILLER, REASONING, STRUCTURE = "filler", "reasoning", "structure"
SPELLED = ("equals", "plus", "minus", "times", "divided")


def class_of(text: str) -> str:
    """The class of a token, by the published regular expressions. A piece of a tag that the
    tokenizer cuts is filler."""
    text = text.strip()
    if text in ("<think>", "</think>", "<answer>", "</answer>"):
        return STRUCTURE
    is_reasoning = re.fullmatch(r"[0-9+\-*/()=]+", text) or re.search("[0-9]", text)
    return REASONING if is_reasoning or text in SPELLED else FILLER


def class_codes(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """(n,) the number of each token's class in CLASSES."""
    distinct, which = np.unique(ids, return_inverse=True)
    codes = []
    for token in distinct.tolist():
        text = tokenizer.decode([token], skip_special_tokens=False)
        codes.append(CLASSES.index(class_of(text)))
    return np.array(codes)[which]


def t_of_positions(position: np.ndarray, values: np.ndarray) -> Floats:
    """(positions,) the t of each position that several answers have: the mean over its tokens,
    divided by the standard error of this mean. It is 0 where all values are equal."""
    n = np.bincount(position).astype(float)
    several = n > 1
    n, total, square = (np.bincount(position, column)[several] for column in (
        np.ones_like(values), values, values ** 2))
    mean = total / n
    variance = (square / n - mean ** 2) * n / (n - 1)
    has_spread = variance > 1e-14 * square / n  # less is rounding
    return np.where(has_spread, mean / np.sqrt(np.where(has_spread, variance, 1) / n), 0)
