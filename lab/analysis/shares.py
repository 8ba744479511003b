"""Shares of a category: how much of a sum over tokens falls to the number tokens, for example.

    sizes = np.abs(tokens["change"])
    shares_by(tokens["kind"], sizes, len(KINDS))              # (7,) of each kind
    for name, inside in occurring(tokens["kind"], KINDS):
        share_of(tokens, inside, sizes)                       # of this kind, with its interval

A share is one of a sum of sizes, which have no sign. The intervals are over problems, because
problems vary independently and tokens do not.
"""
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lab.analysis.statistics import Estimate, Floats, jackknife, within
from lab.analysis.token_table import TokenTable

LEAST = 1e-300  # never 0, because it divides


def shares_by(category: np.ndarray, sizes: np.ndarray, categories: int) -> Floats:
    """(categories,) the share that the tokens of each category have in the sizes (n,)."""
    sums = np.bincount(category, sizes, categories).astype(float)
    return np.asarray(sums / max(sums.sum(), LEAST))


def occurring(category: np.ndarray, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The name of each category that occurs, with the mask (n,) of its tokens."""
    for code, name in enumerate(names):
        inside = category == code
        if inside.any():
            yield name, inside


def share_of(tokens: TokenTable, inside: np.ndarray, sizes: np.ndarray) -> Estimate:
    """The share that the tokens of a mask have in the sizes, with its interval over problems, cut
    at 0 and 1."""
    found = jackknife_of_sums(tokens["problem"], [sizes * inside, sizes],
                              lambda sums: float(sums[0] / sums[1]))
    return within(found, 0, 1)


def jackknife_of_sums(problem: np.ndarray, values: Sequence[np.ndarray],
                      statistic: Callable[[np.ndarray], float]) -> Estimate:
    """A statistic of the sums (values,) of some columns (n,) over the tokens; its interval from the
    values that it has without each problem. A problem without tokens does not count as one,
    whatever its number."""
    _, problem = np.unique(problem, return_inverse=True)
    of_problem = np.stack([np.bincount(problem, column) for column in values])
    problems = np.arange(of_problem.shape[1])
    return jackknife(lambda kept: statistic(of_problem[:, kept].sum(1)), problems)
