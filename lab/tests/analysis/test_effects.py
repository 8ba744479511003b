"""Intervals against a bootstrap, and where little is known nothing is said."""
import numpy as np
import pytest
from conftest import credit_columns, write_log
from logs import tables_of

from lab.analysis.tally import Tally
from lab.analysis.statistics import student_quantile


def test_intervals_are_those_of_groups_that_are_drawn_again(tmp_path):
    """Against a bootstrap: of 60 groups with one answer each of 10 tokens, a third of them numbers,
    as many are drawn 4,000 times."""
    rng = np.random.default_rng(0)
    kind, p = rng.integers(0, 3, (60, 10)), rng.uniform(0.1, 0.9, (60, 10))
    advantage = np.repeat(rng.normal(size=60), 10).reshape(60, 10)
    size = np.abs(advantage) * (1 - p)  # with sum p^2 = p^2
    folder = write_log(tmp_path / "run", {1: credit_columns(
        [10] * 60, np.arange(60), kind=kind.ravel(), log_prob=np.log(p.ravel()),
        collision=p.ravel() ** 2, advantage=advantage.ravel())})
    tally = Tally(folder)
    found = tally.over("kind", np.eye(7)[2], 1 - np.eye(7)[2])

    def logarithm(groups):
        is_number, drawn = kind[groups] == 2, size[groups]
        return np.log(drawn[is_number].mean() / drawn[~is_number].mean())

    draws = np.std([logarithm(rng.integers(0, 60, 60)) for _ in range(4000)])
    assert np.log(found.value) == pytest.approx(logarithm(np.arange(60)), rel=1e-4)
    reach = student_quantile(0.975, 59) * (60 / 59) ** 0.5
    assert np.log(found.high / found.value) == pytest.approx(reach * draws, rel=0.05)
    number = {row["kind"]: row for row in tables_of(folder)["gradient by kind"]}["number"]
    assert list(number["over rest"].values()) == [found.value, *found.interval]


def test_of_a_rare_kind_nothing_is_said(tmp_path):
    """Of 8,000 tokens 7 are spaces and 8, 0.1%, are brackets: one in each of these answers."""
    kind = np.zeros((80, 100), int)
    kind[:7, 0], kind[:8, 1] = 1, 4
    folder = write_log(tmp_path / "run", {1: credit_columns(
        [100] * 80, np.arange(80) // 2, kind=kind.ravel(), advantage=np.tile([1.0, -1.0], 4000))})
    rows = {row["kind"]: row for row in tables_of(folder)["gradient by kind"]}
    assert rows["space"]["over rest"]["value"] is None
    assert rows["space"]["difference"] == "too few"
    assert rows["bracket"]["over rest"]["value"] == pytest.approx(1)


def test_the_share_of_the_squares_by_hand(tmp_path):
    """Two words of weight 1 and a number of weight 2, s alike: sizes 1 + 1 and 2, squares 1 + 1
    and 4."""
    columns = credit_columns([3], [0], kind=[0, 0, 2], weight=[1, 1, 2])
    word, number = tables_of(write_log(tmp_path / "x", {1: columns}))["gradient by kind"]
    assert (word["gradient"], number["gradient"]) == pytest.approx((1 / 2, 1 / 2))
    assert (word["squares"], number["squares"]) == pytest.approx((1 / 3, 2 / 3))
