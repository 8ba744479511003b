"""analyze.py at the root: its sums are those of plain loops over the tokens, and its intervals and
comparisons are worked out by hand."""
import math
import re

import numpy as np
import pytest

import analyze
import train
from conftest import credit_columns, evaluation, refusal, write_lines, write_log
from lab.analysis.statistics import mean_over, student_quantile
from logs import plain_rows, random_log

CELL_OF = {"kind": lambda row: row["kind"], "section": lambda row: row["section"],
           "place": lambda row: int(10 * row["middle"])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with weights and several kinds, whose change was measured in the first of its steps; in
    the second an environment wrote some tokens."""
    folder, files = random_log(tmp_path_factory.mktemp("book") / "run", steps=4, groups=5)
    own = np.random.default_rng(1).random(len(files[2]["kind"])) < 0.7
    own[files[2]["episode_start"]] = True
    files[2]["own"] = own
    files[1]["change"] = np.random.default_rng(0).normal(size=len(files[1]["kind"]))
    for step in (1, 2):
        np.savez_compressed(folder / f"credit/step_{step:06d}.npz", **files[step])
    write_lines(folder / "metrics.jsonl", [{"step": step, "success": 0.5} for step in files])
    rows = plain_rows(folder, files)
    for step in (1, 2):  # in the order of the file
        of_step = [row for row in rows if row["step"] == step]
        for row, change, is_own in zip(of_step, files[step].get("change", [None] * len(of_step)),
                                       files[step].get("own", [True] * len(of_step))):
            row.update(change=change, own=is_own)
    own_rows = [row for row in rows if row.get("own", True)]
    for answer in {row["episode"] for row in own_rows}:  # places count what the model wrote alone
        of_answer = [row for row in own_rows if row["episode"] == answer]
        for place, row in enumerate(of_answer):
            row["middle"] = (place + 0.5) / len(of_answer)
    return folder, own_rows


@pytest.mark.parametrize("partition", CELL_OF)
def test_its_sums_are_those_of_plain_loops(folder, partition):
    folder, rows = folder
    tally = analyze.Tally(analyze.Run(folder))
    measured = [row for row in rows if row.get("change") is not None]
    total = sum(row["abs gradient"] for row in rows)
    for cell in range(len(tally.cells[partition])):
        part = [row for row in rows if CELL_OF[partition](row) == cell]
        of_change = [row for row in measured if CELL_OF[partition](row) == cell]
        expected = {"one": len(part), "measured": len(of_change),
                    "gradient": sum(row["abs gradient"] for row in part),
                    "abs advantage": sum(row["abs advantage"] for row in part),
                    "s": sum(row["s"] for row in part),
                    "entropy": sum(row["entropy"] for row in part),
                    "abs push": sum(abs(row["push"]) for row in of_change),
                    "abs change": sum(abs(row["change"]) for row in of_change),
                    "change": sum(row["change"] for row in of_change)}
        assert {*expected} == {*tally.QUANTITIES}
        for name, value in expected.items():
            found = tally.of(partition, name).sum(0)[cell]
            assert found == pytest.approx(value, rel=1e-5, abs=1e-9), name
        share = tally.share(partition, "gradient")[cell]
        assert share == pytest.approx(expected["gradient"] / total, rel=1e-5)


def test_a_row_of_a_table_by_hand(tmp_path):
    """Two steps of three words and a number each, of p = 1/2 of two, so s is 0.7071, and A = 1;
    weights 1, and the number's is 3 in the first step and 5 in the second. So words have 3 of 6
    and 3 of 8 times 0.7071: 6/14 in all. Their distances from that are 3/7 and -3/7, and t of one
    degree of freedom is 12.71: half of the interval is 12.71 sqrt(2 * 2 * 9/49) / 14."""
    files = {step: credit_columns([4], [0], kind=[0, 0, 0, 2], weight=[1, 1, 1, weight],
                                  advantage=[1] * 4, change=[0.1, 0.1, 0.4, -0.6])
             for step, weight in ((1, 3), (2, 5))}
    run = analyze.Run(write_log(tmp_path / "run", files, metrics=[{"step": 1, "success": 0}]))
    title, headings, [word, number] = analyze.Tally(run).table("kind")
    half = 12.71 * (4 * 9 / 49) ** 0.5 / 14
    assert word == ["word", "75.0%", "42.9%", f"{6 / 14 - half:.1%} to {6 / 14 + half:.1%}",
                    "1.000", "0.707", word[6], "42.9%", "50.0%", "+0.2000"]
    assert (number[0], number[2], number[9]) == ("number", "57.1%", "-0.6000")
    assert len(headings) == 10 and "by kind" in title
    assert analyze.ratio(np.array([1.0, 3]), np.array([2.0, 4])) == pytest.approx(
        (4 / 6, 12.71 * 2 / 3 / 6))
    assert math.isnan(analyze.ratio(np.ones(1), np.ones(1))[1])


def test_what_an_environment_wrote_is_left_out(tmp_path):
    """The third of four tokens, also of the columns that have one number an answer."""
    columns = credit_columns([4, 2], [0, 0], own=[1, 1, 0, 1, 1, 1])
    folder = write_log(tmp_path / "run", {1: columns}, metrics=[{"step": 1, "success": 0}])
    tokens = analyze.tokens_of(folder / "credit/step_000001.npz")
    assert tokens["answer"].tolist() == [0, 0, 0, 1, 1] and len(tokens["reward"]) == 2
    assert tokens["place"][:3].tolist() == [1 / 6, 3 / 6, 5 / 6]


def test_intervals_are_students_to_the_digits_of_a_table():
    for freedom in (*range(1, 31), 40, 60, 61, 500):
        exact = student_quantile(0.975, freedom)
        assert 0.975 * exact < analyze.percentile(freedom) < 1.05 * exact, freedom
    values = np.array([0.1, 0.4, 0.2, 0.7, 0.3])
    mean, half = analyze.mean_interval(values)
    known = mean_over(values)
    assert (mean, half) == pytest.approx((known.value, known.high - known.value), rel=2e-3)
    assert math.isnan(analyze.mean_interval(values[:1])[1])


def written(folder, seed, ends, trained, **config):
    """A run of these settings: right answers of the evaluations, success of the steps."""
    evaluations = [{**evaluation(step, answer), "length_mean": 9}
                   for step, answer in zip((0, 2, 3), ends)]
    metrics = [{"step": step, "success": one} for step, one in enumerate(trained, 1)]
    return analyze.Run(write_log(folder, {}, {"seed": seed, **config}, metrics, evaluations))


def test_the_gain_of_a_run_by_hand(tmp_path):
    """Differences 1 0 0 0 1 0 0 0: mean 0.25, sample deviation 0.4629; t of seven is 2.36."""
    run = written(tmp_path / "run", 0, [[0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0, 0, 0]], [0.5])
    _, _, [row] = analyze.gains(run)
    half = 2.36 * (1.5 / 7) ** 0.5 / 8 ** 0.5
    assert row == ["sampled", "8", "25.0%", "50.0%",
                   f"+25.0% ({0.25 - half:+.1%} to {0.25 + half:+.1%})", "9"]


def test_arms_are_compared_in_pairs_up_to_the_last_step_that_all_have(tmp_path):
    """One run has a third step, which does not count, nor does its third evaluation. In training
    the pairs differ by 0.1 and 0.3, held out by 0.5 and 0; t of one is 12.71. Seed 7 has no pair.
    """
    plain = [written(tmp_path / f"p{seed}", seed, [[0, 0], [1, 0], [1, 1]][:2 + seed], steps,
                     mitigation="none")
             for seed, steps in ((0, [0.1, 0.3]), (1, [0.2, 0.2, 0.9]))]
    other = [written(tmp_path / f"o{seed}", seed, [[0, 0], end], steps, mitigation="random",
                     made_of={"mitigations.py": seed, "x": seed, "grpo.py": "g"})
             for seed, end, steps in ((0, [1, 1], [0.2, 0.4]), (1, [1, 0], [0.4, 0.6]),
                                      (7, [0, 0], [0.9, 0.9]))]
    runs = [*other, *plain]
    names = analyze.names_of(runs)
    assert names == ["mitigation random"] * 3 + ["mitigation none"] * 2
    title, _, rows = analyze.comparison(runs, names)
    assert "up to step 2" in title and title.endswith("not all runs were made with the same x")
    held_out, training = (12.71 * spread / 2 for spread in (0.5, 0.2))
    assert rows == [
        ["mitigation random", "3", "50.0%", f"+25.0% ({0.25 - held_out:+.1%} to "
         f"{0.25 + held_out:+.1%})", "56.7%",
         f"+20.0% ({0.2 - training:+.1%} to {0.2 + training:+.1%})"],
        ["mitigation none", "2", "50.0%", "baseline", "20.0%", "baseline"]]
    twice = [*runs, written(tmp_path / "again", 1, [[0, 0]], [0.1, 0.1], mitigation="none")]
    assert "are one arm with one seed" in refusal(analyze.comparison, twice, [
        *names, "mitigation none"])
    title, _, rows = analyze.comparison([plain[0], other[1]], ["a", "b"])
    assert rows[1][3] == "no pairs" and title.endswith("in training")
    plain[0].evaluations = []
    assert analyze.comparison([plain[0], other[0]], ["a", "b"])[2][1][3] == "no pairs"


def test_the_curve_has_the_mean_of_an_arm_and_the_intervals_of_a_single_run(tmp_path, monkeypatch):
    """Thin lines are the training of each run."""
    kept = []
    monkeypatch.setattr(analyze.plt, "close", kept.append)
    runs = [written(tmp_path / f"{seed}", seed, [[0, 0], end], [0.2 * seed, 0.4])
            for seed, end in enumerate(([1, 1], [1, 0]))]
    analyze.learning_curve(runs, ["a", "a"], tmp_path / "curve.png")
    for run in runs:
        analyze.learning_curve([run], ["a"], tmp_path / "curve.png")
    drawn = [[line.get_xydata().tolist() for line in figure.axes[0].lines
              if line.get_linestyle() != "None"] for figure in kept]
    thin = [[[1, 0], [2, 0.4]], [[1, 0.2], [2, 0.4]]]
    assert drawn == [[*thin, [[0, 0], [2, 0.75]]], [thin[0], [[0, 0], [2, 1]]],
                     [thin[1], [[0, 0], [2, 0.5]]]]
    bars = [[bar.get_segments() for bar in figure.axes[0].collections] for figure in kept]
    ends = [(line["success_low"], line["success_high"]) for line in runs[1].evaluated()]
    assert bars[0] == [] and np.array(bars[2])[0, :, :, 1] == pytest.approx(np.array(ends))


def test_a_bar_that_rounding_leaves_below_0_is_drawn(tmp_path):
    """As that of four right answers of four, whose interval ends at 1 - 1e-16."""
    run = written(tmp_path / "run", 0, [[1, 1, 1, 1]] * 2, [0.5])
    for line in run.evaluations:
        line["success_low"], line["success_high"] = train.wilson_interval(4, 4)
    assert run.evaluations[0]["success_high"] < 1
    analyze.learning_curve([run], ["a"], tmp_path / "curve.png")


def test_of_several_folders_those_that_are_no_runs_are_left_out(tmp_path, capsys):
    """As of runs/*, in which there are also folders with runs, and models."""
    (tmp_path / "ideas").mkdir()
    (tmp_path / "player").mkdir()
    (tmp_path / "player/config.json").write_text("{}")
    for seed in (0, 1):
        written(tmp_path / f"{seed}", seed, [[0, 0], [1, 0]], [0.2, 0.4])
    analyze.main([str(path) for path in sorted(tmp_path.iterdir())])
    printed = capsys.readouterr().out
    assert printed.startswith(f"left out, because it is no run: {tmp_path / 'ideas'}\n"
                              f"left out, because it is no run: {tmp_path / 'player'}\n")
    assert (tmp_path / "comparison/report.html").exists()
    assert f"cannot read {tmp_path / 'none'}" in refusal(
        analyze.main, [str(tmp_path / "0"), str(tmp_path / "none")])


def test_the_page_shades_an_answer_and_the_text_has_the_tables(folder, capsys):
    """Of the answer with the largest advantage; the largest push is as dark as can be."""
    folder, _ = folder
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    page = (folder / "analysis/report.html").read_text()
    assert all(f"by {name}: " in text for name in CELL_OF for text in (printed, page))
    tokens = analyze.tokens_of(folder / "credit/step_000001.npz")
    answer = tokens["answer"][tokens["advantage"].argmax()]
    shades = [float(one) for one in re.findall(r"rgb\([\d ]+/([\d.]+)\)", page)]
    expected = []
    for name in ("push", "change"):
        values = abs(tokens[name][tokens["answer"] == answer])
        expected += ((values / values.max()) ** 0.5).tolist()
    assert shades == pytest.approx(expected, abs=0.006)
    assert "has no steps and no evaluations" in refusal(
        analyze.main, [str(write_log(folder.parent / "empty", {}))])
