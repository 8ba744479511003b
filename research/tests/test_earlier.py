"""The tables of an earlier experiment: its unit and its classes in plain loops, what it published."""
import statistics

import numpy as np
import pytest
from conftest import ROOT
from logs import bin_of, by_name, mean_of, plain_rows, random_log

import analyze
from engine.tokens import naive_class
from harness.metrics import wilson_interval
from research.earlier import (CLASSES, PUBLISHED, PUBLISHED_DISCOUNTED, TITLE, UNITS,
                              earlier_tables)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The tokens of a run and its tables."""
    folder, files = random_log(tmp_path_factory.mktemp("logs") / "run")
    rows = plain_rows(folder, files)
    for r in rows:
        r["contribution"] = r["advantage"] * r["log_prob"]
        r["abs contribution"], r["class"] = abs(r["contribution"]), naive_class(r["text"])
    return rows, by_name(earlier_tables(folder)[TITLE])


def test_contribution_statistics(log):
    rows, tables = log
    for column, unit in zip(("A lp", "A w s"), UNITS):
        values = [r[unit] for r in rows]
        assert [row[column] for row in tables["contribution"]] == pytest.approx(
            [statistics.fmean(values), statistics.stdev(values),
             statistics.fmean(map(abs, values)), min(values), max(values)], rel=1e-5)


def test_ten_position_bins(log):
    rows, tables = log
    for b, found in enumerate(tables["position"]):
        part = [r for r in rows if bin_of(r, rows, 10) == b]
        assert found["tokens"] == len(part)
        if len(part) > 1:
            assert [found[name] for name in ("A lp", "abs(A lp)", "log p", "spread")] == (
                pytest.approx([mean_of(part, name) for name in (
                    "contribution", "abs contribution", "log_prob")]
                    + [statistics.stdev(r["contribution"] for r in part)]))


def test_classes_and_classes_by_fifth(log):
    rows, tables = log
    for found in tables["classes"]:
        name, made_by = found["class"].rstrip(")").split(" (")
        if made_by == "regex":
            part = [r for r in rows if r["class"] == name]
            assert (found["tokens"], found["of all"]) == (len(part), len(part) / len(rows))
            names = {"log p": "log_prob", "A lp": "contribution", "abs(A lp)": "abs contribution",
                     "abs(A) w s": "abs gradient", "abs(A)": "abs advantage", "s": "s"}
            for key, measure in names.items():
                expected = mean_of(part, measure) if part else None
                assert found[key] == (expected and pytest.approx(expected, rel=1e-5))
    seen = 0
    for found in tables["class by position"]:
        part = [r for r in rows if r["class"] == found["class"]
                and bin_of(r, rows, 5) == int(found["part"].split("-")[0]) // 20]
        assert found["tokens"] == len(part)
        assert found["abs(A lp)"] == pytest.approx(mean_of(part, "abs contribution"))
        seen += len(part)
    assert seen == len(rows)
    filler, reasoning = ([r for r in rows if r["class"] == name] for name in CLASSES[:2])
    for found, unit in zip(tables["filler over reasoning"][1:], UNITS):
        expected = mean_of(filler, f"abs {unit}") / mean_of(reasoning, f"abs {unit}")
        assert found["crude"] == pytest.approx(expected, rel=1e-5)


def test_a_run_with_the_published_discount_has_its_published_figures_beside_it(tmp_path):
    """Of 0.75 the earlier experiment published the five bins, of other discounts it did not."""
    for discount, known in ((0.5, PUBLISHED), (0.75, PUBLISHED | PUBLISHED_DISCOUNTED)):
        folder, _ = random_log(tmp_path / str(discount), mitigation="outcome_conditional",
                               think_discount=discount)
        tables = by_name(earlier_tables(folder)[TITLE])
        for name in ("filler", "reasoning"):
            assert [row["pub.*"] for row in tables["class by position"]
                    if row["class"] == name] == list(known[f"{name} by fifth"])
        assert tables["filler over reasoning"][0]["crude"] == known["filler over reasoning"]
        sizes = {row["class"]: row["abs(A lp)"] for row in tables["classes"]}
        assert sizes["filler (pub.*)"] == known["classes"]["filler"][-1]


def test_the_page_has_what_follows_from_its_figures():
    """Intervals of 19, 15 and 0 of 128; ratios of the published sizes, as they are and with each
    fifth weighing the same."""
    page = (ROOT / "research/published_mistake.md").read_text()
    for right, published in ((19, "15%"), (15, "12%"), (0, "0% at step 60")):
        low, high = wilson_interval(right, 128)
        assert f"| {published} | {low:.1%} to {high:.1%} |" in page
    for figures in (PUBLISHED, PUBLISHED | PUBLISHED_DISCOUNTED):
        filler, reasoning = (size for *_, size in figures["classes"].values())
        like = np.mean(figures["filler by fifth"]) / np.mean(figures["reasoning by fifth"])
        crude = filler / reasoning
        assert f"| {filler}, {reasoning} | {crude:.2f} | {like:.2f} |" in page


@pytest.mark.usefixtures("undrawn")
def test_they_come_with_all_and_are_on_no_other_page(tmp_path, capsys):
    folder, _ = random_log(tmp_path / "run")
    analyze.main([str(folder)])
    plain = capsys.readouterr().out + (folder / "analysis/report.html").read_text()
    analyze.main([str(folder), "--all", "--json"])
    printed, page = capsys.readouterr().out, (folder / "analysis/report.html").read_text()
    numbers = (folder / "analysis/analysis.json").read_text()
    for of_the_earlier in ("old unit", "pub.*"):
        assert of_the_earlier in printed and of_the_earlier in page and of_the_earlier in numbers
        assert of_the_earlier not in plain
