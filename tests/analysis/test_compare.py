"""The tables of several runs, by hand."""

import json

import numpy as np
import pytest
from conftest import ROOT, credit_columns
from logs import comparison_of, ids_of, make, rows_of, write_run
from tokenizers import Tokenizer

import analyze
from analysis import compare
from analysis.differences import MEASURES
from engine.errors import UserError


def test_a_run_still_going_is_shown_and_not_compared(tmp_path, capsys):
    runs = make(tmp_path, {"base": (0.5, {}), "arm": (0.9, {"mitigation": "random"})}, seeds=2)
    config = tmp_path / "arm-s1/metrics.jsonl"
    config.write_text("".join(config.read_text().splitlines(True)[:4]))
    comparison = comparison_of(runs)
    assert rows_of(comparison)["random"]["seeds"] == 1
    assert compare.arms_table(comparison).to_json()["rows"][1]["seeds"] == "0 (1 still going)"
    assert [row["runs"] for row in compare.stability(comparison).to_json()["rows"]] == [2, 1]
    path = tmp_path / "arm-s0/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[:4]))
    assert [row["runs"] for row in compare.stability(comparison_of(runs)).to_json()["rows"]] == [
        2,
        2,
    ]  # none is finished: what there is


def test_stability_by_hand(tmp_path):
    """Norms 0.1 .. 1.0: first and last ten are all, mean 0.55, population std 0.2872, peak 1 /
    0.55; success 0.05 .. 0.5 of 0.5."""
    row = compare.stability(comparison_of([write_run(tmp_path / "a", 0.5)])).to_json()["rows"][0]
    assert (row["norm first"], row["spread"], row["peak"]) == pytest.approx(
        (0.55, 0.28723 / 0.55, 1 / 0.55), rel=1e-4
    )
    assert (row["best"], row["end"]) == pytest.approx((0.4, 0.4))


def test_first_and_last_steps_are_not_the_same(tmp_path):
    """30 steps, norms 0.1 .. 3: first ten 0.55, last ten 2.55; entropy falls from 3 to 0.1."""
    run = write_run(tmp_path / "a", 0.5, steps=30)
    lines = [
        {
            "step": i,
            "success": 0.9 if 5 < i < 11 else 0.2,
            "entropy": 3.1 - 0.1 * i,
            "gradient_norm": 0.1 * i,
        }
        for i in range(1, 31)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = compare.stability(comparison_of([run])).to_json()["rows"][0]
    assert (
        row["norm first"],
        row["last"],
        row["entropy"],
        row["to"],
        row["best"],
        row["end"],
    ) == pytest.approx((0.55, 2.55, 2.55, 0.55, 0.9, 0.2))
    assert row["peak"] == pytest.approx(3.0 / 1.55)


def test_means_over_seeds_have_students_interval():
    """0.1 0.2 0.6: mean 0.3, sample std 0.2646, over sqrt 3 0.1528, times 4.303."""
    mean, (low, high) = compare.over_seeds([0.1, 0.2, 0.6])
    assert (mean, high - mean, mean - low) == pytest.approx(
        (0.3, 4.303 * 0.15275, 4.303 * 0.15275), rel=1e-3
    )
    assert (
        compare.over_seeds([0.0, 0.0, 0.0]) == (0.0, None)
        and compare.over_seeds([0.4]) == (0.4, None)
        and compare.over_seeds([]) == (None, None)
    )


def test_ratios_over_seeds(tmp_path):
    """Ten tokens: two early, of weight 3, two late, of weight 1; filler in the even places, with
    twice the advantage of the rest."""
    words = Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json"))
    ids = [words.encode(" and").ids[0], words.encode(" 7").ids[0]] * 5
    for seed in range(2):
        run = write_run(tmp_path / f"a{seed}", 0.5, seed)
        columns = credit_columns(
            [10], [0], token_id=ids, weight=[3, 3, 1, 1, 1, 1, 1, 1, 1, 1], advantage=[2, 1] * 5
        )
        np.savez(run / "credit/step_000001.npz", **columns)
    row = compare.credit_by_class(
        comparison_of([tmp_path / "a0", tmp_path / "a1"]), lambda text: None
    )[1].to_json()["rows"][0]
    assert (
        row["filler/reasoning"] == pytest.approx(2.0)
        and row["early/late"] == pytest.approx(3.0)
        and row["runs"] == 2
    )


def test_filler_and_reasoning_in_both_units_beside_what_was_published(tmp_path):
    """Filler " and" with p = 1/2 and advantage 2; reasoning " 7" with p = 1/4, advantage -1 and
    weight 3. With sum p^2 = p^2 their s is 1 - p."""
    ids = ids_of(" and")[:1] + ids_of(" 7")[:1]
    p = np.array([0.5, 0.25])
    run = write_run(tmp_path / "a", 0.5, mitigation="outcome_conditional", think_discount=0.75)
    np.savez(run / "credit/step_000001.npz", **credit_columns(
        [2], [0], token_id=ids, log_prob=np.log(p), collision=p ** 2, advantage=[2, -1],
        weight=[1, 3]))
    row, *published = compare.credit_by_class(comparison_of([run]))[2].to_json()["rows"]
    assert row["success"] == pytest.approx(0.5, abs=0.1)
    columns = ("filler", "reasoning", "ratio", "filler s", "reasoning s", "ratio s")
    assert [row[name] for name in columns] == pytest.approx(
        [2 * np.log(2), np.log(4), 1, 1, 2.25, 1 / 2.25], rel=1e-5)
    found = {line["arm"]: [line[name] for name in columns[:3]] for line in published}
    assert found["none*"] == pytest.approx([0.333, 0.254, 1.311], abs=1e-3)
    assert found["outcome_conditional, discount 0.75*"] == pytest.approx([0.348, 0.247, 1.409],
                                                                         abs=1e-3)
    assert found["outcome_conditional, discount 0.5*"] == [None] * 3


def test_nothing_published_stands_beside_arms_that_are_not_alike(tmp_path):
    comparison = comparison_of([write_run(tmp_path / "a", 0.5)])
    assert len(compare.credit_by_class(comparison)[2].rows) == 1


def test_credit_by_class_is_of_the_weighted_gradient(tmp_path):
    """Two kinds, three tokens to one, the weight of the one three times as large: half of the
    gradient each."""
    run = write_run(tmp_path / "a", 0.5)
    np.savez(
        run / "credit/step_000001.npz",
        **credit_columns([4], [0], weight=[1, 1, 1, 3], kind=[0, 0, 0, 2]),
    )
    row = compare.credit_by_class(comparison_of([run]), lambda text: None)[0].to_json()["rows"][0]
    assert row["word"] == pytest.approx(0.5) and row["number"] == pytest.approx(0.5)


def test_many_runs_on_one_page(tmp_path, capsys):
    arms = {
        "base": (0.5, {}),
        "arm": (0.9, {"mitigation": "outcome_conditional", "think_discount": 0.25}),
        "placebo": (0.5, {"mitigation": "outcome_conditional", "placebo": "weights"}),
    }
    runs = make(tmp_path, arms, seeds=2)
    (tmp_path / "notes").mkdir()
    analyze.main([*runs, str(tmp_path / "notes"), "--json"])
    out = capsys.readouterr()
    assert "passed over: " in out.err and "notes is not a run folder" in out.err
    assert max(len(line) for line in out.out.splitlines() if str(tmp_path) not in line) <= 100
    folder = tmp_path / "comparison"
    assert sorted(p.name for p in folder.iterdir()) == [
        "analysis.json",
        "credit_by_class.png",
        "differences.png",
        "gradient_norm.png",
        "learning_curves.png",
        "report.html",
    ]
    assert [t["name"] for t in json.loads((folder / "analysis.json").read_text())] == [
        "arms",
        "runs",
        *MEASURES,
        "stability",
        "credit by class",
        "credit over seeds",
        "class sizes",
    ]
    for flags in (["--steps", "1"], ["--earlier"]):
        with pytest.raises(UserError, match=f"{flags[0]} .* one run: give one run only"):
            analyze.main([*runs, *flags])
    assert len(out.out.splitlines()) <= 40 and "of an earlier experiment" not in out.out
    page = (folder / "report.html").read_text()
    places = [page.index(text) for text in ("The arms", "each arm minus none", "<details",
                                            "Other measures", "Final success, greedy")]
    assert places == sorted(places)
    with pytest.raises(UserError, match="does not exist"):
        analyze.main([*runs, str(tmp_path / "typo")])
