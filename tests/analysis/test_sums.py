"""What a token is and where it stands, by hand: sizes, classes, bins, quantiles, t."""

import numpy as np
import pytest
import torch
from conftest import credit_columns

from analysis.earlier import PUBLISHED
from analysis.positions import t_statistics
from analysis.ratios import standardised
from analysis.sizes import lay_flat, units
from analysis.sums import cut_edges, position_quantile
from engine.tokens import naive_class


def test_the_size_of_the_gradient_is_that_of_autograd():
    logits = torch.tensor([2.0, 0.5, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    (1.5 * 0.7 * logits.log_softmax(0)[1]).backward()  # weight 1.5, advantage 0.7
    p = logits.detach().softmax(0)
    columns = lay_flat(
        credit_columns(
            [1], [0], log_prob=[p[1].log()], collision=[(p**2).sum()], weight=[1.5], advantage=[0.7]
        )
    )
    assert abs(0.7 * units(columns)["weighted gradient"][0]) == pytest.approx(
        logits.grad.norm().item(), rel=1e-6
    )


@pytest.mark.parametrize(
    "text, name",
    [
        ("<think>", "structure"),
        (" </answer> ", "structure"),
        ("</", "filler"),
        ("think", "filler"),
        (">\n", "filler"),
        (" 12", "reasoning"),
        ("x2", "reasoning"),
        ("+", "reasoning"),
        (" =", "reasoning"),
        ("()", "reasoning"),
        (" times", "reasoning"),
        ("Times", "filler"),
        ("", "filler"),
        (",", "filler"),
        ("2 + 3", "reasoning"),
        ("<think>a", "filler"),
        ("[", "filler"),
    ],
)
def test_the_earlier_classes(text, name):
    assert naive_class(text) == name


def test_published_tables_standardised_give_1_24():
    """The earlier classes by position, with their counts: crude 1.31, and 1.24 at like position."""
    counts = np.array(
        [[56173, 41634, 44111, 26507, 36985], [7016, 18880, 16635, 34007, 21094]], float
    )
    sizes = counts * [PUBLISHED["filler by fifth"], PUBLISHED["reasoning by fifth"]]
    above, below = (sizes[0], counts[0]), (sizes[1], counts[1])
    assert sizes[0].sum() / counts[0].sum() / (sizes[1].sum() / counts[1].sum()) == pytest.approx(
        1.31, abs=0.005
    )
    assert standardised(above, below, range(5)) == pytest.approx(1.24, abs=0.005)


def test_bins_are_those_of_pandas_cut():
    """pandas.cut([0, 0.25, 0.5, 0.75], 3, retbins=True) has the edges -0.00075, 0.25, 0.5, 0.75."""
    assert cut_edges(4, 3) == pytest.approx([-0.00075, 0.25, 0.5, 0.75])
    assert (np.searchsorted(cut_edges(4, 3), [0, 0.25, 0.26, 0.75]) - 1).tolist() == [0, 0, 1, 2]
    assert (np.searchsorted(cut_edges(1, 10), [0.0]) - 1 < 10).all()


def test_quantiles_of_positions_are_those_of_numpy():
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(1, 6, rng.integers(1, 12))
        for q in (0.2, 0.8, 0.5):
            assert position_quantile(counts, q) == pytest.approx(
                np.quantile(np.repeat(np.arange(len(counts)), counts), q)
            )


def test_t_by_hand():
    """1 and 3: mean 2, population std 1, t = 2 sqrt 2. Two equal values: 0. One value: no t."""
    x = [[1.0, 3.0], [0.7, 0.7], [9.0]]
    found = t_statistics(
        np.array([len(v) for v in x]),
        np.array([sum(v) for v in x]),
        np.array([sum(u * u for u in v) for v in x]),
    )
    assert found.tolist() == pytest.approx([2 * 2**0.5, 0.0])
