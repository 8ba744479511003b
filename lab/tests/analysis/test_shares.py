"""Shares of a category and their intervals over problems, by hand."""
import numpy as np
import pytest

from lab.analysis.shares import jackknife_of_sums, occurring, share_of, shares_by
from lab.analysis.token_table import TokenTable

# two problems; words have sizes 1 and 3, one number 4, and no tag occurs
TOKENS = TokenTable({"problem": np.array([0, 0, 1]), "kind": np.array([0, 1, 0])})
SIZES, NAMES = np.array([1.0, 4.0, 3.0]), ("word", "number", "tag")


def test_shares_of_the_kinds_by_hand():
    assert shares_by(TOKENS["kind"], SIZES, 3).tolist() == [0.5, 0.5, 0.0]
    no_gradient = np.float32(0 * SIZES)
    assert shares_by(TOKENS["kind"], no_gradient, 3).tolist() == [0, 0, 0]


def test_only_kinds_that_occur_have_a_row():
    masks = dict(occurring(TOKENS["kind"], NAMES))
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "word": [True, False, True], "number": [False, True, False]}
    assert share_of(TOKENS, masks["word"], SIZES).value == pytest.approx(0.5)


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
    assert cut_share(problem, part, whole).interval == (0, 1)


def cut_share(problem, part, whole):
    return share_of(TokenTable({"problem": problem}), part / whole, whole)


def test_problems_without_tokens_make_no_interval_narrower():
    """The same three problems, numbered among others of which no token is left: as many degrees of
    freedom, wherever the others stand."""
    part, whole = np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])
    alone = cut_share(np.array([0, 0, 1, 2]), part, whole)
    for problem in ([5, 5, 9, 14], [0, 0, 1, 14]):
        assert cut_share(np.array(problem), part, whole) == alone
