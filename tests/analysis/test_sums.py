"""What a token is and where it stands, by hand: sizes, classes, bins, quantiles, t."""

import numpy as np
import pytest
import torch
from conftest import credit_columns

from analysis.earlier_sums import t_statistics
from analysis.tally import cut_edges, lay_flat
from engine.tokens import naive_class


def test_the_size_of_the_gradient_is_that_of_autograd():
    logits = torch.tensor([2.0, 0.5, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    (1.5 * 0.7 * logits.log_softmax(0)[1]).backward()  # weight 1.5, advantage 0.7
    p = logits.detach().softmax(0)
    columns = lay_flat(credit_columns([1], [0], log_prob=[p[1].log()], collision=[(p**2).sum()],
                                      weight=[1.5], advantage=[0.7]))
    assert abs(columns["gradient"][0]) == pytest.approx(logits.grad.norm().item(), rel=1e-6)


@pytest.mark.parametrize("name, texts", [
    ("structure", ("<think>", " </answer> ")),
    ("filler", ("</", "think", ">\n", "Times", "", ",", "<think>a", "[")),
    ("reasoning", (" 12", "x2", "+", " =", "()", " times", "2 + 3"))])
def test_the_earlier_classes(name, texts):
    assert {naive_class(text) for text in texts} == {name}


def test_bins_are_those_of_pandas_cut():
    """pandas.cut([0, 0.25, 0.5, 0.75], 3, retbins=True) has the edges -0.00075, 0.25, 0.5, 0.75."""
    assert cut_edges(4, 3) == pytest.approx([-0.00075, 0.25, 0.5, 0.75])
    assert (np.searchsorted(cut_edges(4, 3), [0, 0.25, 0.26, 0.75]) - 1).tolist() == [0, 0, 1, 2]
    assert (np.searchsorted(cut_edges(1, 10), [0.0]) - 1 < 10).all()


def test_t_by_hand():
    """1 and 3: mean 2, population std 1, t = 2 sqrt 2. Two equal values: 0. One value: no t."""
    found = t_statistics(np.array([2, 2, 1]), np.array([1.0 + 3.0, 0.7 + 0.7, 9.0]),
                         np.array([1.0 + 9.0, 0.49 + 0.49, 81.0]))
    assert found.tolist() == pytest.approx([2 * 2**0.5, 0.0])
