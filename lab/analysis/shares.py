"""Shares of a category: how much of a sum over tokens falls to the number tokens, for example.

    sizes = np.abs(tokens["change"])
    shares_by(tokens["kind"], sizes, len(KINDS))              # (7,) of each kind
    for name, inside in occurring(tokens["kind"], KINDS):
        share_of(tokens, inside, sizes)                       # of this kind, with its interval

A share is one of a sum of sizes, which have no sign. The intervals are over problems, because
problems vary independently and tokens do not. A run's tokens are too many to be in memory at once,
so `Tally` (tally.py) sums them step by step, and `shares` divides its sums.
"""
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from lab.analysis.statistics import Estimate, Floats, jackknife, within
from lab.analysis.token_table import TokenTable

LEAST = 1e-300  # never 0, because it divides


def shares(sums: Floats) -> Floats:
    """Each sum as a share of all along the last axis; 0 where all are 0."""
    return np.asarray(sums / np.maximum(sums.sum(-1, keepdims=True), LEAST))


def shares_by(category: np.ndarray, sizes: np.ndarray, categories: int) -> Floats:
    """(categories,) the share that the tokens of each category have in the sizes (n,)."""
    return shares(np.bincount(category, sizes, categories).astype(float))


def over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The quotient part / whole, which is nan where the whole is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(part / whole)


def occurring(category: np.ndarray, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The name of each category that occurs, with the mask (n,) of its tokens."""
    for code, name in enumerate(names):
        inside = category == code
        if inside.any():
            yield name, inside


def share_of(tokens: TokenTable, inside: np.ndarray, sizes: np.ndarray) -> Estimate:
    """The share that the tokens of a mask have in the sizes, with its interval over problems."""
    return share_of_sums(tokens["problem"], sizes * inside, sizes)


def share_of_sums(problem: np.ndarray, part: np.ndarray, whole: np.ndarray) -> Estimate:
    """The sum of a part over the sum of the whole, with its interval over problems, cut at 0 and
    1."""
    return within(quotient_of_sums(problem, part, whole), 0, 1)


def quotient_of_sums(problem: np.ndarray, above: np.ndarray, below: np.ndarray) -> Estimate:
    """A sum over another, with its interval over problems."""
    return jackknife_of_sums(problem, [above, below], lambda sums: float(sums[0] / sums[1]))


def jackknife_of_sums(problem: np.ndarray, values: Sequence[np.ndarray],
                      statistic: Callable[[np.ndarray], float]) -> Estimate:
    """A statistic of the sums (values,) of some columns (n,) over the tokens; its interval from the
    values that it has without each problem. A problem without tokens does not count as one,
    whatever its number."""
    _, problem = np.unique(problem, return_inverse=True)
    of_problem = np.stack([np.bincount(problem, column) for column in values])
    problems = np.arange(of_problem.shape[1])
    return jackknife(lambda kept: statistic(of_problem[:, kept].sum(1)), problems)


def sums_by_problem(tokens: TokenTable, sizes: Mapping[str, np.ndarray],
                    masks: Collection[tuple[str, np.ndarray]]) -> dict[str, dict[str, list[float]]]:
    """What shares are made of, to be kept: for each name of a size and of a mask the sum in each
    problem. From these the intervals follow, and several runs can be pooled."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, size in sizes.items():
        found[name] = {}
        for category, inside in masks:
            found[name][category] = tokens.sums_by_problem(size * inside).tolist()
    return found
