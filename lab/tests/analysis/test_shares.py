"""Shares of a category and their intervals over problems, by hand."""
import numpy as np
import pytest

from lab.analysis.shares import (jackknife_of_sums, occurring, quotient_of_sums, share_of,
                                 share_of_sums, shares, shares_by, sums_by_problem)
from lab.analysis.token_table import TokenTable

# two problems; words have sizes 1 and 3, one number 4, and no tag occurs
TOKENS = TokenTable({"problem": np.array([0, 0, 1]), "kind": np.array([0, 1, 0])})
SIZES, NAMES = np.array([1.0, 4.0, 3.0]), ("word", "number", "tag")


def test_shares_of_the_kinds_by_hand():
    assert shares_by(TOKENS["kind"], SIZES, 3).tolist() == [0.5, 0.5, 0.0]
    assert shares(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist() == [[0.25, 0.75], [0.0, 0.0]]
    no_gradient = np.float32(0 * SIZES)
    assert shares_by(TOKENS["kind"], no_gradient, 3).tolist() == [0, 0, 0]


def test_only_kinds_that_occur_have_a_row():
    masks = dict(occurring(TOKENS["kind"], NAMES))
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "word": [True, False, True], "number": [False, True, False]}
    assert share_of(TOKENS, masks["word"], SIZES).value == pytest.approx(0.5)


def test_the_sums_that_are_kept_give_the_shares_again():
    kept = sums_by_problem(TOKENS, {"size": SIZES}, list(occurring(TOKENS["kind"], NAMES)))
    assert kept == {"size": {"word": [1, 3], "number": [4, 0]}}


def test_a_share_and_its_jackknife():
    """Sums 1, 2, 3 of 2, 2, 6 by problem: 6 / 10; without one of them 5/8, 4/8, 3/4. From three
    problems the interval reaches beyond 0 and 1, where it is cut."""
    problem = np.array([0, 0, 1, 2])
    part, whole = np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])
    uncut = jackknife_of_sums(problem, [part, whole], lambda sums: sums[0] / sums[1])
    left = np.array([5 / 8, 4 / 8, 3 / 4])
    assert uncut.value == pytest.approx(0.6)
    error = np.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert (uncut.high - uncut.low) / 2 == pytest.approx(4.303 * error, rel=1e-3)  # t of 2
    assert uncut.low < 0 and uncut.high > 1
    assert share_of_sums(problem, part, whole).interval == (0, 1)


def test_problems_without_tokens_make_no_interval_narrower():
    """The same three problems, numbered among others of which no token is left: as many degrees of
    freedom, wherever the others stand."""
    part, whole = np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])
    alone = share_of_sums(np.array([0, 0, 1, 2]), part, whole)
    for problem in ([5, 5, 9, 14], [0, 0, 1, 14]):
        assert share_of_sums(np.array(problem), part, whole) == alone


def test_a_ratio_of_sums_by_hand():
    """(1 + 3) / (2 + 4); without one 3 / 4, without the other 1 / 2; error |3/4 - 1/2| / 2."""
    found = quotient_of_sums(np.array([0, 1]), np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert found.value == pytest.approx(4 / 6)
    assert found.high - found.value == pytest.approx(12.7062 * 0.125, rel=1e-4)
