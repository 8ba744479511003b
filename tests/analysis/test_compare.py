"""The tables of several runs, by hand."""

import json

import numpy as np
import pytest
from conftest import credit_columns
from logs import comparison_of, ids_of, make, rows_of, write_run

import analyze
from analysis import compare
from analysis.compare import MEASURES
from engine.errors import UserError


def rows(table):
    return table.to_json()["rows"]


def shorten(path, lines):
    path.write_text("".join(path.read_text().splitlines(True)[:lines]))


def test_a_run_still_going_is_shown_and_not_compared(tmp_path):
    runs = make(tmp_path, {"base": (0.5, {}), "arm": (0.9, {"mitigation": "random"})}, seeds=2)
    shorten(tmp_path / "arm-s1/metrics.jsonl", 4)
    comparison = comparison_of(runs)
    assert rows_of(comparison)["random"]["seeds"] == 1
    assert rows(compare.arms_table(comparison))[1]["seeds"] == "1 (1 still going)"
    assert [row["runs"] for row in rows(compare.stability(comparison))] == [2, 1]
    shorten(tmp_path / "arm-s0/metrics.jsonl", 4)  # none is finished: what there is
    assert [row["runs"] for row in rows(compare.stability(comparison_of(runs)))] == [2, 2]


def test_an_arm_is_what_its_runs_solved_at_the_end(tmp_path):
    """And not what they solved at the start."""
    comparison = comparison_of([write_run(tmp_path / f"a{seed}", 0.5, seed) for seed in range(2)])
    ends = [run["evaluations"][-1]["success"] for run in comparison.shown("none")]
    [row] = rows(compare.arms_table(comparison))
    assert row["sampled"] == row["greedy"] == pytest.approx(sum(ends) / 2)
    low, high = row["95% over seeds"]
    reach = 12.706 * abs(ends[0] - ends[1]) / 2
    assert (low, high) == pytest.approx((sum(ends) / 2 - reach, sum(ends) / 2 + reach), rel=1e-3)


def test_stability_by_hand(tmp_path):
    """30 steps, norms 0.1 .. 3: first ten 0.55, last ten 2.55; entropy falls from 3 to 0.1."""
    run = write_run(tmp_path / "a", 0.5, steps=30)
    lines = [{"step": i, "success": 0.9 if 5 < i < 11 else 0.2, "entropy": 3.1 - 0.1 * i,
              "gradient_norm": 0.1 * i, "seconds": i} for i in range(1, 31)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [row] = rows(compare.stability(comparison_of([run])))
    assert row == {"arm": "none", "runs": 1} | {name: pytest.approx(value) for name, value in {
        "norm first": 0.55, "last": 2.55, "peak": 3 / 1.55, "entropy": 2.55, "to": 0.55,
        "best": 0.9, "end": 0.2, "seconds": 15.5}.items()}


def test_means_over_seeds_have_students_interval():
    """0.1 0.2 0.6: mean 0.3, sample std 0.2646, over sqrt 3 0.1528, times 4.303."""
    mean, interval = compare.over_seeds([0.1, 0.2, 0.6])
    reach = 4.303 * 0.15275
    assert mean == pytest.approx(0.3)
    assert interval == pytest.approx((0.3 - reach, 0.3 + reach), rel=1e-3)
    assert compare.over_seeds([0.0, 0.0, 0.0]) == (0.0, None)
    assert compare.over_seeds([0.4]) == (0.4, None) and compare.over_seeds([])[1] is None


def test_the_ratios_of_an_arm_and_what_was_published_of_one_like_it(tmp_path):
    """Filler " and" with p = 1/2 and advantage 2; reasoning " 7" with p = 1/4, advantage -1 and
    weight 3. With sum p^2 = p^2 their s is 1 - p: 1 over 2.25, and 2 log 2 over log 4 in the old
    unit. The filler is the early token."""
    runs = []
    for seed in range(2):
        run = write_run(tmp_path / f"a{seed}", 0.5, seed, mitigation="outcome_conditional")
        p = np.array([0.5, 0.25])
        np.savez(run / "credit/step_000001.npz", **credit_columns(
            [2], [0], token_id=ids_of(" and")[:1] + ids_of(" 7")[:1], log_prob=np.log(p),
            collision=p ** 2, advantage=[2, -1], weight=[1, 3]))
        runs.append(run)
    table = compare.credit_tables(comparison_of(runs))[1]
    [row] = rows(table)
    assert row["runs"] == 2 and row["old filler/reasoning"] == pytest.approx(1, rel=1e-5)
    # of two tokens, the middles stand at a quarter and three: neither is at an end
    assert row["filler/reasoning"] == pytest.approx(1 / 2.25, rel=1e-5)
    assert row["early/late"] is None and any("published" in note for note in table.notes)
    plain = compare.credit_tables(comparison_of([write_run(tmp_path / "b", 0.5)]))[1]
    assert not any("published" in note for note in plain.notes)


def test_shares_are_of_the_weighted_gradient_and_ends_are_fifths(tmp_path):
    """Ten tokens, six words of weight 1 and four numbers of 3; two early of 3, two late of 1."""
    run = write_run(tmp_path / "a", 0.5)
    np.savez(run / "credit/step_000001.npz", **credit_columns(
        [10], [0], weight=[3] * 4 + [1] * 6, kind=[2] * 4 + [0] * 6))
    shares, ratios = (rows(table)[0] for table in compare.credit_tables(comparison_of([run])))
    assert shares["word"] == pytest.approx(1 / 3) and shares["number"] == pytest.approx(2 / 3)
    assert ratios["early/late"] == pytest.approx(3)


def test_many_runs_on_one_page(tmp_path, capsys):
    arms = {"base": (0.5, {}),
            "arm": (0.9, {"mitigation": "outcome_conditional", "think_discount": 0.25}),
            "placebo": (0.5, {"mitigation": "outcome_conditional", "placebo": "weights"})}
    runs = make(tmp_path, arms, seeds=2)
    (tmp_path / "notes").mkdir()
    analyze.main([*runs, str(tmp_path / "notes"), "--json"])
    out = capsys.readouterr()
    assert "passed over: " in out.err and "notes is not a run folder" in out.err
    assert max(len(line) for line in out.out.splitlines() if str(tmp_path) not in line) <= 100
    assert len(out.out.splitlines()) <= 40 and "of an earlier experiment" not in out.out
    folder = tmp_path / "comparison"
    assert sorted(path.name for path in folder.iterdir()) == [
        "analysis.json", "learning_curves.png", "report.html"]
    tables = [table["name"] for table in json.loads((folder / "analysis.json").read_text())]
    assert tables == ["arms", *MEASURES, "stability", "credit by class", "credit over seeds"]
    page = (folder / "report.html").read_text()
    places = [page.index(text) for text in ("The arms", "each arm minus none", "<details",
                                            "Learning speed", "Stability and cost", "Share of")]
    assert places == sorted(places)
    for flags in (["--steps", "1"], ["--csv"]):
        with pytest.raises(UserError, match=f"{flags[0]} .* one run: give one run only"):
            analyze.main([*runs, *flags])
    with pytest.raises(UserError, match="does not exist"):
        analyze.main([*runs, str(tmp_path / "typo")])
