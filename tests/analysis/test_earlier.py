"""Every table against its definition, in plain loops over tokens."""
import statistics

import numpy as np
import pytest
from conftest import ROOT, credit_columns, write_log
from logs import by_name, ids_of, plain_rows, random_log, tables_of, tallied

import analyze
from analysis.earlier import PUBLISHED, PUBLISHED_DISCOUNTED
from analysis.sizes import UNITS
from analysis.statistics import wilson_interval
from analysis.uncertainty import forks
from engine.tokens import naive_class
from engine.labels import KINDS, SECTIONS


def cut(value, low, high, bins):
    """pandas.cut: bins of equal width, closed on the right. On an edge the last bit decides, so
    the edges are made as pandas makes them."""
    return next(b for b, edge in enumerate(np.linspace(low, high, bins + 1)[1:]) if value <= edge)


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
    chapters = analyze.run_chapters(run, tally)
    return plain_rows(folder, files), tally, by_name(sum(chapters.values(), []))


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
        if not part:  # of tags in pieces none is a whole tag
            assert name == "structure"
            continue
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
    """The gradient at the logits by definition: advantage, weight, and the norm of onehot - p."""
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
    for step, (found, old, shares) in enumerate(
        zip(tables["growth"], tables["growth in the old unit"], tables["growth of shares"],
            strict=True), 1
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
        assert (old["old"], found["new"], found["entropy"]) == pytest.approx(
            (mean_abs(part), gradient(part), mean_of(part, "entropy")), rel=1e-5
        )
        assert old["f/r old"] == pytest.approx(mean_abs(filler) / mean_abs(reasoning)) and old[
            "f/r new"
        ] == pytest.approx(gradient(filler) / gradient(reasoning), rel=1e-5)
        assert found["e/l"] == pytest.approx(gradient(early) / gradient(late), rel=1e-5)
        for k, kind in enumerate(KINDS):
            mine = [r for r in part if r["kind"] == k]
            assert shares[kind] == pytest.approx(
                (gradient(mine) or 0) * len(mine) / (gradient(part) * len(part)), rel=1e-5
            )


def test_the_end_of_an_answer_is_not_compared_at_like_position(log):
    """Nothing else stands there."""
    kinds = {row["kind"] for row in log[2]["kinds at like position"]}
    assert "word" in kinds and "end" not in kinds


def test_a_run_with_the_published_discount_has_its_published_figures_beside_it(tmp_path):
    """Of 0.75 the earlier experiment published the five bins, of other discounts it did not."""
    tables, published = {}, {}
    for discount in (0.5, 0.75):
        folder, _ = random_log(tmp_path / str(discount), mitigation="outcome_conditional",
                               think_discount=discount)
        tables[discount] = tables_of(folder)
        published[discount] = [row["pub.*"] for row in tables[discount]["class by position"]
                               if row["class"] != "structure"]
    assert published[0.5] == [0.3579, 0.3458, 0.3656, 0.2084, 0.3176, 0.2977, 0.3890, 0.2362,
                              0.2356, 0.2568]
    assert published[0.75] == [0.386, 0.244, 0.380, 0.190, 0.345, 0.357, 0.378, 0.242, 0.235,
                               0.237]
    ratios = [tables[discount]["like position"][0]["crude"] for discount in tables]
    assert ratios == [1.31, 1.41]
    sizes = {row["class"]: row["abs(A lp)"] for row in tables[0.75]["classes"]}
    assert (sizes["filler (pub.*)"], sizes["reasoning (pub.*)"]) == (0.348, 0.247)


def test_the_page_for_those_who_come_from_it_has_what_follows_from_its_figures():
    """Intervals of 19, 15 and 0 of 128; ratios of the published sizes, as they are and with each
    fifth weighing the same."""
    page = (ROOT / "docs/from_the_earlier_code.md").read_text()
    for right, published in ((19, "15%"), (15, "12%"), (0, "0% at step 60")):
        low, high = wilson_interval(right, 128)
        assert f"| {published} | {low:.1%} to {high:.1%} |" in page
    for figures in (PUBLISHED, PUBLISHED | PUBLISHED_DISCOUNTED):
        filler, reasoning = (size for *_, size in figures["classes"].values())
        like = np.mean(figures["filler by fifth"]) / np.mean(figures["reasoning by fifth"])
        crude = filler / reasoning
        assert f"| {filler}, {reasoning} | {crude:.2f} | {like:.2f} |" in page
