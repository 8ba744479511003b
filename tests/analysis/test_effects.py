"""Planted effects are seen, true nulls are called null, and shuffling keeps what it should keep."""
import numpy as np
import pytest
from conftest import credit_columns, write_log
from logs import by_name, planted, tables_of, tallied

import analyze
from analysis import earlier, position_tables, positions, sums
from analysis.ratio_and_size import ratio_tables
from analysis.regression import regression_tables
from analysis.sizes import UNITS


def test_a_class_with_twice_the_gradient_is_reported_so(tmp_path):
    tables = tables_of(planted(tmp_path / "run", np.random.default_rng(0), twice=2))
    rows = {row["kind"]: row for row in tables["gradient by kind"]}
    assert (
        rows["number"]["over rest"] == pytest.approx(2, rel=0.1)
        and rows["number"]["difference"] == "more"
    )
    low, high = rows["number"]["95%"]
    assert 1.5 < low < 2 < high < 2.5 and all(
        rows[kind]["difference"] == "less" for kind in ("word", "space", "operator")
    )
    like = {row["kind"]: row for row in tables["kinds at like position"]}
    assert "space" in like and like["number"]["20ths"] == pytest.approx(2, rel=0.1)
    terms = {row["term"]: row for row in tables["regression of gradient"]}
    assert (
        terms["number"]["difference"] == "more"
        and terms["operator"]["difference"] == terms["tenth 5"]["difference"] == "none seen"
    )
    assert (
        terms["constant"]["difference"] == terms["abs(A)"]["difference"] == ""
    )  # nobody asked about them


def test_a_trend_over_position_is_reported_so(tmp_path):
    """Size 1 + x: over the first and last fifth 1.1 and 1.9 (positions 0..5 and 24..29 of 30:
    1.083 and 1.883)."""
    tables = tables_of(planted(tmp_path / "run", np.random.default_rng(0), trend=1.0))
    row = tables["ends"][-1]
    assert (
        row["early over late"] == pytest.approx(1.083 / 1.883, rel=0.04)
        and row["difference"] == "late more"
    )
    terms = {row["term"]: row for row in tables["regression of gradient"]}
    assert terms["tenth 10"]["difference"] == terms["tenth 8"]["difference"] == "more" and {
        terms[kind]["difference"] for kind in ("space", "number", "operator")
    } == {"none seen"}


def test_a_class_ahead_for_its_place_only_is_told_so(tmp_path):
    """Numbers stand late, where everything is larger: ahead crude, not at like position."""
    rng, files = np.random.default_rng(3), {}
    for step in range(1, 7):
        position = np.tile(np.arange(25) // 5, 24)
        kind = np.where(rng.random(600) < (position + 0.5) / 5, 2, 0)
        p = 1 - rng.uniform(0.1, 0.2, 600) * (1 + position) / 2**0.5
        advantage = np.repeat(rng.choice([-1.0, 1.0], 24), 25)
        files[step] = credit_columns(
            [25] * 24,
            np.repeat(np.arange(6), 4),
            log_prob=np.log(p),
            collision=p**2 + (1 - p) ** 2,
            kind=kind,
            advantage=advantage,
        )
    tables = tables_of(write_log(tmp_path / "run", files))
    row = {row["kind"]: row for row in tables["kinds at like position"]}["number"]
    assert {row["term"]: row for row in tables["regression of gradient"]}["number"][
        "difference"
    ] == "none seen"
    assert (
        row["crude"] > 1.4
        and row["20ths"] == pytest.approx(1, abs=0.06)
        and row["difference"] == "none seen"
    )


def test_a_true_null_is_called_null(tmp_path, monkeypatch):
    """100 logs without any effect of kind or place: the table of kinds and the table of ends say
    nothing in at least 90, and the t of shuffled advantages are those of the log in at least
    90."""
    monkeypatch.setattr(sums, "DRAWS", 200)
    monkeypatch.setattr(positions, "SHUFFLES", 60)
    wrong = {
        "gradient by kind": 0,
        "ends": 0,
        "regression of gradient": 0,
        "t": 0,
        "kinds at like position": 0,
    }
    for seed in range(100):
        tally = tallied(
            planted(
                tmp_path / f"run{seed}",
                np.random.default_rng(seed),
                steps=4,
                groups=5,
                answers=4,
                length=20,
            )
        )
        tables = by_name(
            [
                analyze.class_gradients(tally, "kind"),
                earlier.ends(tally),
                *regression_tables(tally),
                position_tables.kinds_at_like_position(tally),
                earlier.t_table(tally),
            ]
        )
        for name in ("gradient by kind", "ends", "regression of gradient",
                     "kinds at like position"):
            wrong[name] += any(row["difference"] not in ("none seen", "") for row in tables[name])
        wrong["t"] += tables["t"][-1]["over 3?"] != "as shuffled"
    assert all(count <= 10 for count in wrong.values()), wrong


def test_shuffling_shows_credit_that_goes_with_the_answer(tmp_path):
    """Where p depends on whether the answer is right, t is far beyond shuffling; shuffled, it is
    as without effect."""
    rng, files = np.random.default_rng(0), {}
    for step in range(1, 6):
        right = rng.integers(0, 2, 24)
        p = np.repeat(np.where(right, 0.8, 0.4), 10) * rng.uniform(0.9, 1.1, 240)
        files[step] = credit_columns(
            [10] * 24,
            np.repeat(np.arange(6), 4),
            log_prob=np.log(p),
            collision=p**2,
            advantage=np.repeat(right - 0.5, 10),
            reward=right,
        )
    row = tables_of(write_log(tmp_path / "run", files))["t"][-2]
    assert row["over 3"] == 1 and row["shuffled"] < 0.1 and row["over 3?"] == "more"


def test_advantages_that_differ_within_an_answer_move_with_their_answer(tmp_path):
    """Two answers of 2 and 4 tokens with advantages 1 2 and 3 4 5 6. Exchanged, the short one
    reads 3 5 and the long one 1 1 2 2."""
    columns = credit_columns([2, 4], [0, 0], advantage=[1, 2, 3, 4, 5, 6], log_prob=[-1] * 6)
    found = -tallied(write_log(tmp_path / "run", {1: columns})).positions.shuffled["contribution"][
        0
    ]
    stayed, exchanged = [1 + 3, 2 + 4, 5, 6], [3 + 1, 5 + 1, 2, 2]
    assert {tuple(row) for row in found.tolist()} == {
        tuple(map(float, stayed)),
        tuple(map(float, exchanged)),
    }


def test_groups_without_advantages_do_not_make_intervals_narrower(tmp_path):
    """Three groups with a spread of rewards among sixty: nothing is said, whatever the sizes."""
    rng = np.random.default_rng(0)
    advantage = np.repeat(np.where(np.arange(120) < 6, rng.choice([-1.0, 1.0], 120), 0.0), 10)
    p, kind = rng.uniform(0.1, 0.9, 1200), rng.integers(0, 3, 1200)
    columns = credit_columns(
        [10] * 120,
        np.repeat(np.arange(60), 2),
        advantage=advantage,
        log_prob=np.log(p),
        collision=p**2 + (1 - p) ** 2,
        kind=kind,
    )
    tables = tables_of(write_log(tmp_path / "run", {1: columns}))
    for name in (
        "gradient by kind",
        "gradient by position",
        "ends",
        "like position",
        "kinds at like position",
        "first and last fifth",
        "regression of gradient",
    ):
        assert {row["difference"] for row in tables[name]} <= {"too few", ""}, name


def test_shuffling_equal_advantages_changes_nothing(tmp_path):
    """So the sums of the shuffled log are those of the log, in every unit, weights and steps with
    and without them included."""
    rng = np.random.default_rng(0)
    files = {
        step: credit_columns(
            [3, 5, 2, 4],
            [0, 0, 1, 1],
            advantage=np.repeat([1.5, -0.5], [8, 6]),
            log_prob=np.log(rng.uniform(0.1, 0.9, 14)),
            weight=rng.gamma(1, 1, 14) if step > 1 else np.ones(14),
        )
        for step in (1, 2, 3)
    }
    positions = tallied(write_log(tmp_path / "run", files)).positions
    for unit in UNITS:
        for k in (0, 57):
            assert positions.shuffled[unit][:, k] == pytest.approx(positions.sums[unit].sum(1))


def test_the_far_ends_leave_out_the_quantiles_themselves(tmp_path):
    """One answer of six tokens: the 20% and 80% quantiles of 0..5 are 1 and 4, so 0 is early and
    5 is late."""
    tally = tallied(
        write_log(
            tmp_path / "run", {1: credit_columns([6], [0], log_prob=[-1, -2, -3, -4, -5, -6])}
        )
    )
    assert tally.count("far ends").tolist() == [1, 4, 1] and tally.total(
        "far ends", "log_prob"
    ).tolist() == [-1, -14, -6]


def test_the_spread_of_the_ratio_beside_that_of_s_by_hand(tmp_path):
    """Two words, two numbers, and a number that was not trained on. r of the numbers is 0.5 and
    1.5: a mean of 1, a spread of 50%. With p a half of two, s is sqrt(1/2)."""
    columns = credit_columns([5], [0], kind=[0, 0, 2, 2, 2], ratio=[1, 1, 0.5, 1.5, 9],
                             advantage=[1, 1, 1, 1, 0])
    [table] = ratio_tables(tallied(write_log(tmp_path / "x", {1: columns})))
    numbers = dict(zip(table.columns, table.rows[1]))
    assert numbers.pop("mean s") == pytest.approx(0.5 ** 0.5)
    assert numbers == {"kind": "number", "tokens": 2, "mean r": 1, "spread of r": 0.5,
                       "spread of s": pytest.approx(0, abs=1e-6)}
    assert table.rows[2][1:4] == (4, 1, pytest.approx(0.125 ** 0.5))
    assert ratio_tables(tallied(write_log(tmp_path / "y", {1: credit_columns([5], [0])}))) == []
