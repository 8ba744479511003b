"""analyze.py at the root: its sums are those of plain loops over the tokens, and its intervals are
worked out by hand."""
import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

import analyze
from conftest import credit_columns, refusal, write_lines, write_log
from logs import plain_rows, random_log, written
from qwen2_model import UserError

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
    degree of freedom is 12.706: half of the interval is 12.706 sqrt(2 * 2 * 9/49) / 14, so it would
    end beyond 0 and 1, where no share lies."""
    files = {step: credit_columns([4], [0], kind=[0, 0, 0, 2], weight=[1, 1, 1, weight],
                                  advantage=[1] * 4, change=[0.1, 0.1, 0.4, -0.6])
             for step, weight in ((1, 3), (2, 5))}
    run = analyze.Run(write_log(tmp_path / "run", files, metrics=[{"step": 1, "success": 0}]))
    title, headings, [word, number] = analyze.Tally(run).table("kind")
    assert 12.706 * (4 * 9 / 49) ** 0.5 / 14 > 4 / 7
    assert word == ["word", "75.0%", "42.9%", "0.0% to 100.0%",
                    "1.000", "0.707", word[6], "42.9%", "50.0%", "+0.2000"]
    assert (number[0], number[2], number[9]) == ("number", "57.1%", "-0.6000")
    assert len(headings) == 10 and "by kind" in title
    assert analyze.ratio(np.array([1.0, 3]), np.array([2.0, 4])) == pytest.approx(
        (4 / 6, 12.706 * 2 / 3 / 6))
    assert math.isnan(analyze.ratio(np.ones(1), np.ones(1))[1])


def test_what_an_environment_wrote_is_left_out(tmp_path):
    """The third of four tokens."""
    columns = credit_columns([4, 2], [0, 0], own=[1, 1, 0, 1, 1, 1])
    folder = write_log(tmp_path / "run", {1: columns}, metrics=[{"step": 1, "success": 0}])
    columns = analyze.columns_in(folder / "credit/step_000001.npz")
    tokens = analyze.tokens_of(columns)
    assert tokens["answer"].tolist() == [0, 0, 0, 1, 1] and "reward" not in tokens
    assert tokens["place"][:3].tolist() == [1, 5, 8]  # the middles are 1/6, 3/6 and 5/6
    assert tokens["position"].tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("freedom, t", [*zip(analyze.FREEDOM[1:], analyze.T[1:])])
def test_students_t_leaves_a_fortieth_beyond_it(freedom, t):
    """The density (1 + x^2 / n)^(-(n + 1) / 2), added up; x = tan(angle) has no end."""
    angle = (np.arange(400_000) + 0.5) * np.pi / 2 / 400_000
    x = np.tan(angle)
    density = (1 + x ** 2 / freedom) ** (-(freedom + 1) / 2) / np.cos(angle) ** 2
    assert density[x > t].sum() / density.sum() == pytest.approx(0.05, abs=2e-4)


def test_the_gain_of_a_run_by_hand(tmp_path):
    """Differences 1 0 0 0 1 0 0 0: mean 0.25, sample deviation 0.4629; t of seven is 2.3646. What
    was between start and end does not count."""
    ends = [[0, 1, 0, 1, 0, 0, 0, 0], [1] * 8, [1, 1, 0, 1, 1, 0, 0, 0]]
    run = written(tmp_path / "run", 0, ends, [0.5])
    _, _, [row] = analyze.gains(run)
    half = 2.3646 * (1.5 / 7) ** 0.5 / 8 ** 0.5
    assert row == ["sampled", "0 to 3", "8", "25.0%", "50.0%",
                   f"+25.0% ({0.25 - half:+.1%} to {0.25 + half:+.1%})", "12"]


def test_the_curve_has_training_and_held_out_success_with_its_intervals(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    run = written(tmp_path / "run", 1, [[0, 0], [1, 0]], [0.2, 0.4])
    analyze.learning_curve(run, tmp_path / "curve.png")
    [axis] = kept[0].axes
    drawn = [line.get_xydata().tolist() for line in axis.lines if line.get_linestyle() != "None"]
    assert drawn == [[[1, 0.2], [2, 0.4]], [[0, 0], [2, 0.5]]]
    [bars] = axis.collections
    ends = [(line["success_low"], line["success_high"]) for line in run.evaluations]
    assert np.array(bars.get_segments())[:, :, 1] == pytest.approx(np.array(ends))


def test_what_is_no_run_and_several_runs_are_refused(tmp_path):
    for words, said in ((["none"], "none is not the folder of a run"),
                        (["a", "b"], "`python -m lab compare` compares several")):
        assert said in refusal(analyze.main, words)
    folder = write_log(tmp_path / "x", {}, {"mitigation": None})
    assert "x is not the folder of a run" in refusal(analyze.Run, folder)


def test_a_damaged_credit_file_is_told_and_never_unpickled(tmp_path):
    """One in which a bit has turned, wherever it stands, and one that is something else."""
    path = write_log(tmp_path / "x", {1: credit_columns([2], [0])}) / "credit/step_000001.npz"
    whole, told = path.read_bytes(), 0
    for place in np.random.default_rng(0).integers(0, len(whole), 200):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1:])
        try:
            analyze.columns_in(path)
        except UserError:
            told += 1
    path.write_bytes(b"no numbers")
    said = refusal(analyze.columns_in, path)
    assert told > 20 and "npz cannot be read: BadZipFile(" in said and "pickle" not in said


def test_the_page_shades_an_answer_and_the_text_has_the_tables(folder, capsys):
    """Of the answer with the largest advantage; the largest push is as dark as can be."""
    folder, _ = folder
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    page = (folder / "analysis/report.html").read_text()
    assert all(f"by {name}: " in text for name in CELL_OF for text in (printed, page))
    assert page.count("<h1>run</h1>") == 1 and all(f"\n    {name} " in page for name in (
        "gradient", "push", "change"))
    tokens = analyze.tokens_of(analyze.columns_in(folder / "credit/step_000001.npz"))
    answer = tokens["answer"][tokens["advantage"].argmax()]
    shades = [float(one) for one in re.findall(r"rgb\([\d ]+/([\d.]+)\)", page)]
    expected = []
    for name in ("push", "change"):
        values = abs(tokens[name][tokens["answer"] == answer])
        expected += ((values / values.max()) ** 0.5).tolist()
    assert shades == pytest.approx(expected, abs=0.006)


def test_the_shaded_answer_is_of_the_first_step_that_has_an_advantage(tmp_path):
    """In the first step of a real model all rewards may be equal."""
    folder, files = random_log(tmp_path / "run", steps=2, groups=5)
    for step, columns in files.items():
        columns["change"] = np.full(len(columns["kind"]), 0.5)
        if step == 1:
            columns["advantage"] = 0 * columns["advantage"]
        np.savez_compressed(folder / f"credit/step_{step:06d}.npz", **columns)
    assert "of an answer in step_000002, from" in analyze.shaded_answer(analyze.Run(folder))
    (folder / "credit/step_000002.npz").unlink()
    assert analyze.shaded_answer(analyze.Run(folder)) == ""
