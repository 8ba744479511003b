"""What analyze.py says of one run: the earlier tables by their own definitions against plain
loops, planted effects, true nulls, the page."""

import json
import re
import statistics
import weakref
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import ROOT, credit_columns, evaluation, write_log
from tokenizers import Tokenizer

import analyze
from analysis import earlier, positions, sums
from analysis import tally as tally_file
from analysis.regression import regression_tables
from analysis.sizes import UNITS
from analysis.tally import Tally
from analysis.uncertainty import forks
from analysis.vocabulary import naive_class
from countdown_task import KINDS, SECTIONS
from engine.errors import UserError
from engine.tokens import load_tokenizer


def tallied(folder):
    tally = Tally(folder)
    tally.read()
    return tally


def ids_of(text):
    return Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json")).encode(text).ids


def random_log(folder, steps=3, groups=3, answers=4, longest=9, weights=True, seed=0, **config):
    """Any tokens, any numbers: what the definitions are checked on."""
    rng, files, G = np.random.default_rng(seed), {}, groups * answers
    for step in range(1, steps + 1):
        lengths, group = rng.integers(1, longest + 1, G).tolist(), np.repeat(
            np.arange(groups), answers
        )
        n, reward = sum(lengths), rng.choice([0.0, 0.1, 1.1], G)
        reward[group == 0] = 0.1  # one group without spread
        z = np.concatenate(
            [
                (r - r.mean()) / (r.std() + 1e-4) if r.std() > 1e-8 else 0 * r
                for r in reward.reshape(groups, answers)
            ]
        )
        p = rng.uniform(0.01, 0.99, n)
        files[step] = credit_columns(
            lengths,
            group,
            token_id=rng.integers(0, 200, n),
            log_prob=np.log(p),
            collision=p**2 + (1 - p) ** 2 / 2,
            entropy=rng.uniform(0, 2, n),
            weight=rng.gamma(1, 1, n) if weights else np.ones(n),
            advantage=np.repeat(z, lengths),
            section=rng.integers(0, 3, n),
            kind=rng.integers(0, 7, n),
            reward=reward,
            reward_answer=reward > 1,
        )
    return write_log(folder, files, config), files


def plain_rows(folder, files):
    """The same log as a list of dictionaries, one a token, as the earlier experiment kept it."""
    tokenizer, rows = load_tokenizer(folder), []
    for step, c in files.items():
        ends = [*c["episode_start"][1:].tolist(), len(c["token_id"])]
        for b, (start, end) in enumerate(zip(c["episode_start"].tolist(), ends)):
            for i in range(start, end):
                row = {
                    name: float(c[name][i])
                    for name in ("log_prob", "advantage", "weight", "entropy", "collision")
                }
                rows.append(
                    row
                    | {
                        "step": step,
                        "episode": (step, b),
                        "position": i - start,
                        "length": end - start,
                        "kind": int(c["kind"][i]),
                        "section": int(c["section"][i]),
                        "id": int(c["token_id"][i]),
                        "text": tokenizer.decode(
                            [int(c["token_id"][i])], skip_special_tokens=False
                        ),
                        "contribution": row["advantage"] * row["log_prob"],
                        "group": (step, int(c["group"][b])),
                    }
                )
    return rows


def cut(value, low, high, bins):
    """pandas.cut: bins of equal width, closed on the right. On an edge the last bit decides, so
    the edges are made as pandas makes them."""
    return next(b for b, edge in enumerate(np.linspace(low, high, bins + 1)[1:]) if value <= edge)


def by_name(tables):
    return {table.name: table.to_json()["rows"] for table in tables}


def mean_abs(rows):
    return statistics.fmean(abs(r["contribution"]) for r in rows)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder, files = random_log(tmp_path_factory.mktemp("logs") / "run")
    run = {
        "folder": folder,
        "config": {"mitigation": "none", "steps": 3},
        "metrics": [],
        "evaluations": [],
    }
    tally = tallied(folder)
    return plain_rows(folder, files), tally, by_name(analyze.run_tables(run, tally))


def test_contribution_statistics(log):
    rows, _, tables = log
    c = [r["contribution"] for r in rows]
    found = {row[""]: row["A lp"] for row in tables["contribution"]}
    expected = {
        "mean": statistics.fmean(c),
        "spread": statistics.stdev(c),
        "mean size": statistics.fmean(map(abs, c)),
        "smallest": min(c),
        "largest": max(c),
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_ten_position_bins(log):
    rows, _, tables = log
    top = max(r["position"] / r["length"] for r in rows)
    for b, found in enumerate(tables["position"]):
        part = [r for r in rows if cut(r["position"] / r["length"], 0, top, 10) == b]
        assert found["tokens"] == len(part)
        if part:
            assert found["A lp"] == pytest.approx(
                statistics.fmean(r["contribution"] for r in part)
            )
            assert found["abs(A lp)"] == pytest.approx(mean_abs(part)) and found[
                "log p"
            ] == pytest.approx(statistics.fmean(r["log_prob"] for r in part))
            assert found["spread"] is None or found["spread"] == pytest.approx(
                statistics.stdev(r["contribution"] for r in part)
            )


def test_early_over_late_by_both_definitions(log):
    rows, _, tables = log
    found = {row["size"]: row for row in tables["ends"]}["abs(A lp)"]
    low, high = np.quantile([r["position"] for r in rows], [0.2, 0.8])
    naive = mean_abs([r for r in rows if r["position"] < low]) / mean_abs(
        [r for r in rows if r["position"] > high]
    )
    ours = mean_abs([r for r in rows if (r["position"] + 0.5) / r["length"] < 0.2]) / mean_abs(
        [r for r in rows if (r["position"] + 0.5) / r["length"] >= 0.8]
    )
    assert found["by absolute position"] == pytest.approx(naive) and found[
        "early over late"
    ] == pytest.approx(ours)


def test_signs(log):
    rows, tally, tables = log
    found = {row["with"]: row for row in tables["signs"]}
    for name, holds in (
        ("A > 0", lambda a: a > 0),
        ("A = 0", lambda a: a == 0),
        ("A < 0", lambda a: a < 0),
        ("z > 0", lambda a: a > 0),
        ("z <= 0", lambda a: a <= 0),
    ):
        part = [r for r in rows if holds(r["advantage"])]
        assert found[name]["tokens"] == len(part) and found[name]["A lp"] == pytest.approx(
            statistics.fmean(r["contribution"] for r in part)
        )
        if name[0] == "z":
            assert found[name]["answers"] == len({r["episode"] for r in part})


def test_classes_and_classes_by_fifth(log):
    rows, _, tables = log
    top, seen = max(r["position"] / r["length"] for r in rows), 0
    for found in tables["classes"]:
        name, words = found["class"].split(" (")
        if words == "regex)":
            part = [r for r in rows if naive_class(r["text"]) == name]
        elif words == "span)":
            part = [r for r in rows if KINDS[r["kind"]] == name]
        else:
            continue
        assert found["tokens"] == len(part) and found["of all"] == pytest.approx(
            len(part) / len(rows)
        )
        assert found["abs(A lp)"] == pytest.approx(mean_abs(part)) and found[
            "A lp"
        ] == pytest.approx(statistics.fmean(r["contribution"] for r in part))
    b = -1
    for found in tables["class by position"]:
        b += found["part"] != ""
        part = [
            r
            for r in rows
            if naive_class(r["text"]) == found["class"]
            and cut(r["position"] / r["length"], 0, top, 5) == b
        ]
        assert found["tokens"] == len(part) and found["abs(A lp)"] == pytest.approx(
            mean_abs(part)
        )
        seen += len(part)
    assert seen == len(rows)


def test_one_t_per_position(log):
    rows, _, tables = log
    t = []
    for position in {r["position"] for r in rows}:
        c = [r["contribution"] for r in rows if r["position"] == position]
        if len(c) > 1:
            spread = statistics.pstdev(c)
            t.append(abs(statistics.fmean(c) / (spread / len(c) ** 0.5)) if spread else 0.0)
    found = {row["unit"]: row for row in tables["t"]}["A lp"]
    assert (found["over 3"], found["under 1.5"], found["mean"]) == pytest.approx(
        (np.mean(np.array(t) > 3), np.mean(np.array(t) < 1.5), np.mean(t))
    )


def test_both_units_weighted_and_not(log):
    """The gradient at the logits from its definition: advantage, weight, and the norm of onehot - p."""
    rows, tally, tables = log
    size = [(1 - 2 * np.exp(r["log_prob"]) + r["collision"]) ** 0.5 for r in rows]
    expected = {
        "contribution": [r["contribution"] for r in rows],
        "weighted contribution": [r["contribution"] * r["weight"] for r in rows],
        "gradient": [r["advantage"] * s for r, s in zip(rows, size)],
        "weighted gradient": [r["advantage"] * r["weight"] * s for r, s in zip(rows, size)],
    }
    for unit in UNITS:
        assert tally.total("all", unit)[0] == pytest.approx(sum(expected[unit]), rel=1e-5)
        assert tally.total("all", f"abs {unit}")[0] == pytest.approx(
            sum(map(abs, expected[unit])), rel=1e-5
        )
        assert tally.total("all", f"squared {unit}")[0] == pytest.approx(
            sum(x * x for x in expected[unit]), rel=1e-5
        )
    counted = tally.histograms.by_entropy.sum(1)
    assert counted == pytest.approx(
        [len(rows), sum(s * s for s in size), sum(1 - r["collision"] for r in rows)], rel=1e-5
    )
    assert (
        tally.histograms.log_prob_and_s.sum()
        == tally.histograms.entropy_and_s.sum()
        == tally.histograms.log_prob_and_advantage.sum()
        == len(rows)
    )
    assert all(
        tally.histograms.sizes[unit].sum() + tally.histograms.zeros[unit] == len(rows)
        for unit in UNITS
    )
    last = tables["contribution"][2]
    assert [last[key] for key in ("A lp", "A w lp", "A s", "A w s")] == pytest.approx(
        [np.mean(np.abs(expected[unit])) for unit in UNITS], rel=1e-5
    )


def gradient(rows):
    """Mean abs(A) w s."""
    return (
        statistics.fmean(
            abs(r["advantage"])
            * r["weight"]
            * (1 - 2 * np.exp(r["log_prob"]) + r["collision"]) ** 0.5
            for r in rows
        )
        if rows
        else None
    )


def mean_of(rows, name):
    return statistics.fmean(r[name] for r in rows)


def test_entropy_weight_and_gradient_by_section_and_kind(log):
    rows, tally, tables = log
    total, seen = gradient(rows) * len(rows), 0
    for found in tables["sections"]:
        part = [
            r
            for r in rows
            if SECTIONS[r["section"]] == found["section"] and KINDS[r["kind"]] == found["kind"]
        ]
        seen += len(part)
        assert (
            found["tokens"] == len(part)
            and found["entropy"] == pytest.approx(mean_of(part, "entropy"))
            and found["weight"] == pytest.approx(mean_of(part, "weight"))
        )
        assert found["abs(A) w s"] == pytest.approx(gradient(part), rel=1e-5) and found[
            "gradient"
        ] == pytest.approx(gradient(part) * len(part) / total, rel=1e-5)
    assert seen == len(rows)
    for found in tables["regex"]:
        part = [r for r in rows if naive_class(r["text"]) == found["by regex"]]
        assert [found[kind] for kind in KINDS] == pytest.approx(
            [sum(KINDS[r["kind"]] == kind for r in part) / max(len(part), 1) for kind in KINDS]
        )


def test_forking_and_following_tokens(tmp_path):
    """Three tokens, ten times each, one of them only nine times."""
    ids = [ids_of(text)[0] for text in (" and", " 7", "\n", " +")]
    token_id, entropy = np.repeat(ids, [10, 10, 10, 9]), np.repeat(
        [0.5, 2.0, 0.1, 9.0], [10, 10, 10, 9]
    )
    columns = credit_columns(
        [39],
        [0],
        token_id=token_id,
        entropy=entropy,
        weight=np.full(39, 3.0),
        kind=np.repeat([0, 2, 1, 3], [10, 10, 10, 9]),
    )
    tally = tallied(write_log(tmp_path / "run", {1: columns}))
    rows = forks(tally).to_json()["rows"]
    assert [row["token"] for row in rows if row[""] == "forking"] == ["' 7'", "' and'", "'\\n'"]
    assert [row["token"] for row in rows if row[""] == "following"] == ["'\\n'", "' and'", "' 7'"]
    assert (
        rows[0]["entropy"] == pytest.approx(2.0)
        and rows[0]["count"] == 10
        and rows[0]["kind"] == "number"
        and rows[0]["abs(A) w s"] == pytest.approx(3 * 0.5**0.5)
    )


def test_growth_over_training(log):
    rows, tally, tables = log  # three steps, so each row is one
    for step, (found, shares) in enumerate(
        zip(tables["growth"], tables["growth of shares"], strict=True), 1
    ):
        part = [r for r in rows if r["step"] == step]
        episodes, flat = len({r["episode"] for r in part}), len(
            {r["episode"] for r in part if r["group"][1] == 0}
        )
        filler, reasoning = (
            [r for r in part if naive_class(r["text"]) == name] for name in ("filler", "reasoning")
        )
        early, late = (
            [r for r in part if keep((r["position"] + 0.5) / r["length"])]
            for keep in (lambda x: x < 0.2, lambda x: x >= 0.8)
        )
        assert (found["steps"], found["length"], found["flat"]) == (
            str(step),
            pytest.approx(len(part) / episodes),
            pytest.approx(flat / episodes),
        )
        assert (found["old"], found["new"], found["entropy"]) == pytest.approx(
            (mean_abs(part), gradient(part), mean_of(part, "entropy")), rel=1e-5
        )
        assert found["f/r old"] == pytest.approx(mean_abs(filler) / mean_abs(reasoning)) and found[
            "f/r new"
        ] == pytest.approx(gradient(filler) / gradient(reasoning), rel=1e-5)
        assert found["e/l"] == pytest.approx(gradient(early) / gradient(late), rel=1e-5)
        for k, kind in enumerate(KINDS):
            mine = [r for r in part if r["kind"] == k]
            assert shares[kind] == pytest.approx(
                (gradient(mine) or 0) * len(mine) / (gradient(part) * len(part)), rel=1e-5
            )


def planted(folder, rng, steps=10, groups=6, answers=6, length=30, twice=None, trend=0.0):
    """Tokens of two kinds in random places; p is drawn alike for all, but `twice` a kind's
    gradient and a trend over position."""
    files = {}
    for step in range(1, steps + 1):
        B = groups * answers
        lengths, group = [length] * B, np.repeat(np.arange(groups), answers)
        n, position = B * length, np.tile(np.arange(length) / length, B)
        kind, advantage = rng.integers(0, 4, n), np.repeat(
            rng.normal(size=(groups, answers)) * rng.gamma(2, 1, (groups, 1)), length
        )
        p = rng.uniform(0.3, 0.9, n)
        s = 0.3 * (1 - p) * np.where(kind == twice, 2.0, 1.0) * (1 + trend * position)
        p = 1 - s / 2**0.5  # with the rest on one token s = sqrt 2 (1 - p)
        ids = np.array([ids_of(t)[0] for t in (" and", "\n", " 7", " +")])[kind]
        files[step] = credit_columns(
            lengths,
            group,
            token_id=ids,
            log_prob=np.log(p),
            collision=p**2 + (1 - p) ** 2,
            advantage=advantage.ravel(),
            kind=kind,
            reward=advantage.reshape(B, length)[:, 0],
        )
    return write_log(folder, files)


def tables_of(folder):
    tally = tallied(folder)
    return by_name(
        analyze.run_tables(
            {"folder": folder, "config": {"steps": 1}, "metrics": [], "evaluations": []}, tally
        )
    )


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
    like = {row["ratio"]: row for row in tables["like position"]}
    assert "space/rest (A s)" in like and like["number/rest (A s)"]["20ths"] == pytest.approx(
        2, rel=0.1
    )
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


def test_the_end_of_an_answer_is_not_compared_at_like_position(log):
    """Nothing else stands there."""
    assert "word/rest (A w s)" in {row["ratio"] for row in log[2]["like position"]} and not any(
        "end/" in row["ratio"] for row in log[2]["like position"]
    )


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
    row = {row["ratio"]: row for row in tables["like position"]}["number/rest (A s)"]
    assert {row["term"]: row for row in tables["regression of gradient"]}["number"][
        "difference"
    ] == "none seen"
    assert (
        row["crude"] > 1.4
        and row["20ths"] == pytest.approx(1, abs=0.06)
        and row["fifths"] is None
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
        "like position": 0,
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
                analyze.like_positions(tally),
                earlier.t_table(tally),
            ]
        )
        for name in ("gradient by kind", "ends", "regression of gradient", "like position"):
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
    """Three groups with a spread of rewards among sixty: nothing is said, whatever the sizes are."""
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


def test_one_step_at_a_time(tmp_path, monkeypatch):
    """What was read for one step is gone before the next is read."""
    folder, _ = random_log(tmp_path / "run", steps=4)
    alive, read = [], tally_file.read_columns

    def watched(*args):
        assert not any(ref() is not None for ref in alive)
        columns = read(*args)
        alive.append(weakref.ref(columns["log_prob"]))
        return columns

    monkeypatch.setattr(tally_file, "read_columns", watched)
    tallied(folder)
    assert len(alive) == 8  # lengths first, then everything


def test_what_a_run_in_training_has_so_far(tmp_path, capsys):
    folder, files = random_log(tmp_path / "run", steps=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "steps": 9}))
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "success": 0.1, "entropy": 0.5, "length": 4}\n{"step": 2, "suc'
    )
    analyze.main([str(folder)])
    assert (
        "step 1 of 9 so far" in capsys.readouterr().out
        and (folder / "analysis/report.html").exists()
    )


def test_gains_are_paired_by_problem(tmp_path):
    """Gains 1 0 0 0 1 0 0 0: mean 0.25, sample std sqrt(1.5/7) = 0.4629, half width 2.365 *
    0.4629 / sqrt 8 = 0.387."""
    lines = [evaluation(0, [0, 1, 0, 1, 0, 0, 0, 0]), evaluation(2, [1, 1, 0, 1, 1, 0, 0, 0])]
    table = analyze.gains({"evaluations": lines})
    row = table.to_json()["rows"][0]
    assert (row["start"], row["end"], row["gain"]) == (0.25, 0.5, 0.25) and row[
        "95% interval"
    ] == pytest.approx([0.25 - 0.387, 0.25 + 0.387], abs=0.02)
    assert "did not clearly change" in table.finding


def test_a_run_without_credit_files_has_its_gains(tmp_path, capsys):
    folder = write_log(
        tmp_path / "run", {}, evaluations=[evaluation(0, [0, 1]), evaluation(5, [1, 1])]
    )
    analyze.main([str(folder), "--json"])
    printed = capsys.readouterr().out
    assert "no credit files" in printed and [
        t["name"] for t in json.loads((folder / "analysis/analysis.json").read_text())
    ] == ["gains"]


@pytest.mark.parametrize("weights", (True, False))
def test_tables_fit_a_terminal_and_all_numbers_are_in_the_json(tmp_path, capsys, weights):
    folder, _ = random_log(tmp_path / "run", steps=12, groups=4, weights=weights)
    analyze.main([str(folder), "--json", "--output_dir", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
    tables = json.loads((tmp_path / "out/analysis.json").read_text())
    assert len(tables) == printed.count("\n## ") and all(
        table["rows"] and table["finding"] for table in tables
    )
    bare = re.compile(r"[-|: \\]")  # what lining up and Markdown add
    text = bare.sub("", printed)
    for table in tables:
        assert table["title"] in printed
        for row in table["rows"]:
            for value in row.values():
                if isinstance(value, str):
                    assert bare.sub("", value) in text
    assert (
        sorted(p.suffix for p in (tmp_path / "out").iterdir()) == [".html", ".json"] + [".png"] * 9
    )


def test_degenerate_logs_are_told_and_not_stumbled_over(tmp_path, capsys):
    """No advantage at all; one token an answer; a single answer kind; one step."""
    for name, columns in (
        ("flat", credit_columns([3, 4], [0, 0], advantage=np.zeros(7))),
        ("short", credit_columns([1, 1], [0, 0], advantage=[1, -1])),
        ("silent", credit_columns([2, 2], [0, 0], weight=np.zeros(4))),
        ("sure", credit_columns([2, 3], [0, 0], log_prob=np.zeros(5), collision=np.ones(5))),
    ):
        analyze.main([str(write_log(tmp_path / name, {1: columns})), "--json"])
        printed = capsys.readouterr().out
        assert "nan" not in printed.replace("tenant", "") and "inf" not in re.sub(
            r"[a-z]*inf[a-z]+", "", printed
        ), printed


@pytest.mark.parametrize(
    "damage, said",
    [
        (
            lambda f: (f / "credit/step_000002.npz").write_bytes(b"PK nothing"),
            "step_000002.npz is not a credit file of this program",
        ),
        (
            lambda f: np.savez(f / "credit/step_000002.npz", x=np.ones(3)),
            "step_000002.npz is not a credit file of this program: it has no column token_id",
        ),
        (
            lambda f: np.savez(
                f / "credit/step_000002.npz",
                **{**credit_columns([2, 2], [0, 0]), "entropy": np.ones(3)},
            ),
            "step_000002.npz is broken: its entropy",
        ),
        (
            lambda f: np.savez(
                f / "credit/step_000002.npz",
                **{**credit_columns([2, 2], [0, 0]), "kind": np.full(4, 9)},
            ),
            "step_000002.npz is broken: its kind",
        ),
        (
            lambda f: np.savez(
                f / "credit/step_000002.npz",
                **{**credit_columns([2, 2], [0, 0]), "log_prob": np.array([-1, np.nan, -1, -1])},
            ),
            "its log_prob has the value nan",
        ),
        (
            lambda f: np.savez(
                f / "credit/step_000002.npz",
                **{**credit_columns([2, 2], [0, 0]), "weight": np.array([1, -2, 1, 1])},
            ),
            "its weight has the value -2",
        ),
        (
            lambda f: np.savez(
                f / "credit/step_000002.npz",
                **{**credit_columns([2, 2], [0, 0]), "token_id": np.array([1, 2**30, 1, 1])},
            ),
            "its token_id has the value",
        ),
        (
            lambda f: (f / "evaluations.jsonl").write_text(
                json.dumps(evaluation(0, [1, 0])) + "\n" + json.dumps(evaluation(1, [1])) + "\n"
            ),
            "evaluations.jsonl, line 2 has 1 answers, line 1 has 2",
        ),
        (
            lambda f: (f / "evaluations.jsonl").write_text(
                '{"step": 1, "mode": "sampled", "success": null, "answer": []}\n'
            ),
            "evaluations.jsonl, line 1 is not of this program",
        ),
        (
            lambda f: (f / "config.json").write_text('{"mitigation": "none"}'),
            "says nothing of steps",
        ),
        (lambda f: (f / "config.json").write_text("{}"), "is not a run folder"),
        (lambda f: (f / "config.json").write_text("{nope"), "config.json"),
        (
            lambda f: (f / "metrics.jsonl").write_text('{"a": 1}\n'),
            "metrics.jsonl, line 1 is not of this program: its step is None",
        ),
        (
            lambda f: (f / "metrics.jsonl").write_text('not json\n{"step": 1}\n'),
            "metrics.jsonl, line 1 is not JSON",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "config.json").unlink(), "is not a run folder"),
    ],
)
def test_broken_files_are_named_in_one_line(tmp_path, damage, said):
    folder, _ = random_log(tmp_path / "run")
    damage(folder)
    with pytest.raises(UserError) as error:
        analyze.main([str(folder)])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_wrong_flags_and_folders(tmp_path):
    folder, _ = random_log(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    for argv, said in (
        ([], "RUN"),
        ([str(tmp_path / "none")], "does not exist"),
        ([str(folder), "--steps", "7"], "--steps 7"),
        ([str(folder), "--baseline", "x"], "--baseline"),
        ([str(folder), "--outputdir", "x"], "outputdir"),
        ([str(folder), "--output_dir", str(tmp_path / "file")], "cannot write"),
        ([str(tmp_path / "file")], "not a run folder"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            analyze.main(argv)


class Outside(HTMLParser):
    """Everything in a page that could be fetched."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found += [
            (tag, name, value)
            for name, value in attributes
            if name in ("src", "href", "action", "data", "srcset", "poster")
        ]
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")


def test_the_page_holds_the_answers_and_refers_to_nothing_outside(tmp_path):
    folder, files = random_log(tmp_path / "run")
    analyze.main([str(folder), "--steps", "1", "3"])
    page = (folder / "analysis/report.html").read_text()
    assert all(
        value.startswith("data:image/png") or value.startswith("#")
        for _, _, value in Outside(page).found
    )
    assert not re.search(
        r"url\(|@import|fetch\(|XMLHttp|import\s*\(|https?://",
        re.sub(r"data:image/png;base64,[^\"]*", "", page),
    )
    episodes = json.loads(
        re.search(r'<script type="application/json" id="episodes">(.*?)</script>', page, re.S)[1]
    )
    assert {e["step"] for e in episodes} == {1, 3} and len(episodes) == 24
    tokenizer = load_tokenizer(folder)
    for e in episodes:
        c = files[e["step"]]
        start, n = c["episode_start"][e["episode"]], len(e["texts"])
        part = slice(start, start + n)
        assert (
            e["reward"] == pytest.approx(float(c["reward"][e["episode"]]))
            and e["kind"] == c["kind"][part].tolist()
            and e["section"] == c["section"][part].tolist()
        )
        assert "".join(e["texts"]) == tokenizer.decode(
            c["token_id"][part].tolist(), skip_special_tokens=False
        )
        p = np.exp(c["log_prob"][part].astype(float))
        s = np.sqrt(1 - 2 * p + c["collision"][part])
        for name, values in {
            "advantage": c["advantage"][part],
            "weight": c["weight"][part],
            "entropy": c["entropy"][part],
            "log-prob": c["log_prob"][part],
            "contribution": c["advantage"][part] * c["weight"][part] * c["log_prob"][part],
            "gradient size": np.abs(c["advantage"][part]) * c["weight"][part] * s,
        }.items():
            assert e["values"][name] == pytest.approx(values.tolist(), rel=2e-3, abs=1e-6)
    assert "true credit" not in episodes[0]["values"]
