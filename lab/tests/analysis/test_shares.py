"""Shares and their intervals over problems, by hand."""
import numpy as np
import pytest

from lab.analysis.statistics import over_problems
from lab.analysis.token_table import TokenTable


def test_a_share_and_its_jackknife():
    """Sums 1, 2, 3 of 2, 2, 6 by problem: 6 / 10; without one of them 5/8, 4/8, 3/4. From three
    problems the interval reaches beyond 0 and 1, where it is cut."""
    problem = np.array([0, 0, 1, 2])
    part, whole = np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])
    uncut = over_problems(problem, [part, whole], lambda part, whole: part / whole)
    left = np.array([5 / 8, 4 / 8, 3 / 4])
    assert uncut.value == pytest.approx(0.6)
    error = np.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert (uncut.high - uncut.low) / 2 == pytest.approx(4.303 * error, rel=1e-3)  # t of 2
    assert uncut.low < 0 and uncut.high > 1
    assert cut_share(problem, part, whole).interval == (0, 1)


def cut_share(problem, part, whole):
    return TokenTable({"problem": problem}).share(part / whole, whole)


def test_problems_without_tokens_make_no_interval_narrower():
    """The same three problems, numbered among others of which no token is left: as many degrees of
    freedom, wherever the others stand."""
    part, whole = np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])
    alone = cut_share(np.array([0, 0, 1, 2]), part, whole)
    for problem in ([5, 5, 9, 14], [0, 0, 1, 14]):
        assert cut_share(np.array(problem), part, whole) == alone
