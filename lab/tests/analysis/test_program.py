"""The command: what it writes and prints, which files and flags it refuses, and the page."""
import html
import json
import os
import re
import weakref

import numpy as np
import pytest
from conftest import credit_columns, evaluation, write_lines, write_log
from logs import plain_rows, random_log, rows_in, titles_in

import lab.analysis.program as analyze
from lab.analysis.arms import Comparison
from lab.analysis.compare import arms_overview
from lab.analysis.tally import OVER_REST, Tally
from lab.analysis import answers, report, token_table
from lab.analysis.run_folders import read_run
from run import whole


def test_one_step_at_a_time(tmp_path, monkeypatch):
    """What was read for one step is gone before the next is read."""
    alive, read_columns = [], token_table.read_columns

    def watched(*args):
        assert not any(reference() is not None for reference in alive)
        columns = read_columns(*args)
        alive.append(weakref.ref(columns["log_prob"]))
        return columns

    monkeypatch.setattr(token_table, "read_columns", watched)
    folder, _ = random_log(tmp_path / "run", steps=4)
    Tally(folder)
    assert len(alive) == 4


def test_a_run_without_credit_files_has_its_gains_paired_by_problem(tmp_path, capsys):
    """From the first evaluation to the last. Gains 1 0 0 0 1 0 0 0: mean 0.25, sample std
    sqrt(1.5/7) = 0.4629, half width 2.365 * 0.4629 / sqrt 8 = 0.387."""
    lines = [evaluation(0, [0, 1, 0, 1, 0, 0, 0, 0]), evaluation(1, [0] * 8),
             evaluation(2, [1, 1, 0, 1, 1, 0, 0, 0])]
    folder = write_log(tmp_path / "run", {}, evaluations=lines)
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    assert "no credit files" in printed
    assert "Held-out success, from the first evaluation to the last" in printed
    [row] = rows_in(analyze.held_out_gains(read_run(folder)))
    assert (row["start"], row["end"]) == (0.25, 0.5)
    assert list(row["gain"].values()) == pytest.approx([0.25, 0.25 - 0.387, 0.25 + 0.387], abs=1e-3)


def test_the_verdict_on_the_metrics_is_a_line(tmp_path, capsys):
    folder = write_log(tmp_path / "run", {}, evaluations=[evaluation(0, [0]), evaluation(1, [0])])
    write_lines(folder / "metrics.jsonl", [{"step": step, "reward": 0.1, "finished": 0.2}
                                           for step in range(1, 9)])
    analyze.main([str(folder)])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "lab diagnose" in line]
    assert line.startswith("Mistakes in the training: The limit of new tokens is too small")


@pytest.mark.usefixtures("undrawn")
def test_every_table_is_printed_and_fits_a_terminal(tmp_path, capsys):
    folder, _ = random_log(tmp_path / "run", steps=12, groups=4)
    analyze.main([str(folder), "--all", "--output_dir", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
    page = (tmp_path / "out/report.html").read_text()
    run, tally = read_run(folder), Tally(folder)
    tables = sum(analyze.run_chapters(run, tally).values(), [])
    titles = [table.title for table in tables]
    assert titles_in(printed) == titles and page.count("<table><thead>") == len(titles)
    for text in (" ".join(printed.split()), html.unescape(page)):  # a note stands once
        assert [text.count(note) for note in (OVER_REST, analyze.ABOUT_FACTORS)] == [1, 1]
    assert {"growth", "rewards", "gradient by kind", "gradient by section", "gradient by position",
            "forks"} <= {table.name for table in tables}
    assert page.count("<figure") == len([*(tmp_path / "out").glob("*.png")]) > 0


@pytest.mark.usefixtures("undrawn")
def test_a_screen_says_what_the_run_did_and_the_page_goes_from_there_to_tables(tmp_path, capsys):
    folder, _ = random_log(tmp_path / "run", steps=4, groups=4)
    line = {"success": 0.5, "entropy": 1.0, "finished": 0.9}
    write_lines(folder / "metrics.jsonl", [{"step": i, **line} for i in range(1, 4)])
    write_lines(folder / "evaluations.jsonl", [
        evaluation(0, [0, 1]), evaluation(0, [0, 1], "greedy"),
        {**evaluation(3, [1, 1]), "success_low": 0.3, "success_high": 0.954}])
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    assert "report.html" in printed and f"python -m lab follow {folder}" in printed
    page = (folder / "analysis/report.html").read_text()
    page = re.sub(r"data:image/png;base64,[^\"]*", "", page)
    said = ("not finished: step 3 of 4 so far",
            "Sampled answers solved 50.0% (95% interval 0.0% to 100.0%) of 2 held-out problems at "
            "step 0, and 100.0% (95% interval 30.0% to 95.4%) at step 3.")
    assert not [words for words in said
                for text in (" ".join(printed.split()), html.unescape(page)) if words not in text]
    places = [page.index(text) for text in (
        "<section id=watch", "<section id=answers", "Each kind of token", "<details id=")]
    assert places == sorted(places)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("score", [0.0, 0.5])
def test_a_task_without_a_format_has_no_column_for_it(tmp_path, score):
    """Nor for the reasoning. Its answers all have 0 there, and may all be wrong besides."""
    parts = {"reward_answer": [0.0, 0.0], "reward_format": [0.0, score],
             "reward_reasoning": [0.0, 0.0]}
    ends = [{**evaluation(step, [0, 1]), "format_mean": score} for step in (0, 1)]
    folder = write_log(tmp_path / "run", {1: credit_columns([2, 2], [0, 0], **parts)},
                       {"steps": 1}, evaluations=ends)
    run = read_run(folder)
    assert ("format" in analyze.held_out_gains(run).columns) == (score > 0)
    named = {row[0] for row in analyze.rewards(Tally(folder)).rows}
    assert "answer" in named and "reasoning" not in named and ("format" in named) == (score > 0)
    arms = arms_overview(Comparison([run], None))
    assert ("format" in arms.columns) == (score > 0)


@pytest.mark.parametrize("columns", [
    credit_columns([3, 4], [0, 0], advantage=np.zeros(7)),
    credit_columns([1, 1], [0, 0], advantage=[1, -1]),
    credit_columns([2, 2], [0, 0], weight=np.zeros(4)),
    credit_columns([2, 3], [0, 0], log_prob=np.zeros(5), collision=np.ones(5))],
    ids=("no advantage", "one token an answer", "no weight", "sure of every token"))
def test_degenerate_logs_are_told_and_not_stumbled_over(tmp_path, capsys, columns):
    analyze.main([str(write_log(tmp_path / "run", {1: columns})), "--all"])
    assert not re.search(r"\b(nan|inf)\b", capsys.readouterr().out)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_killed_analysis_left_behind_is_removed_by_the_next(tmp_path, count):
    """One run, or several. What is being written at this moment stays, and so does what another
    program has put there."""
    folders = [random_log(tmp_path / f"run{n}", seed=n)[0] for n in range(count)]
    for folder in folders:
        write_lines(folder / "metrics.jsonl", [{"step": step, "success": 0.5, "seconds": 1.0}
                                               for step in (1, 2, 3)])
    output = tmp_path / "output"
    output.mkdir()
    with pytest.raises(ZeroDivisionError), whole(output / "report.html") as unfinished:
        1 / 0
    left, mine = unfinished, unfinished.with_name(".page.0123abcd.tmp")
    others = output / ".notes.tmp", output / "x.0123abcd.tmp"
    for path in (left, mine, *others):
        path.write_text("half")
    for path in (left, *others):
        os.utime(path, (0, 0))
    analyze.main([*map(str, folders), "--output_dir", str(output)])
    assert (output / "report.html").exists() and not left.exists()
    assert all(path.exists() for path in (mine, *others))


@pytest.mark.usefixtures("undrawn")
def test_the_page_holds_the_answers_and_refers_to_nothing_outside(tmp_path, monkeypatch):
    folder, files = random_log(tmp_path / "run")
    monkeypatch.setattr(answers, "STEPS", 2)
    analyze.main([str(folder)])
    page = (folder / "analysis/report.html").read_text()
    words = re.sub(r"data:image/png;base64,[^\"]*", "", page)
    assert set(re.findall(r"\bsrc=..", words)) == {'src=""'}  # pictures, without their data
    assert not re.search(r"<(link|iframe|object|embed|base|form)\b", words)
    assert not re.search(r"\b(href|action|srcset|poster)\s*=", words)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|import\s*\(|https?://", words)
    data = r'<script type="application/json" id="data">(.*?)</script>'
    episodes = json.loads(re.search(data, page, re.S)[1])["answers"]
    assert {e["step"] for e in episodes} == {1, 3} and len(episodes) == 24
    rows = plain_rows(folder, files)
    for e in episodes:
        tokens = [row for row in rows if row["episode"] == (e["step"], e["episode"])]
        assert [(row["kind"], row["section"], row["text"]) for row in tokens] == [
            *zip(e["kind"], e["section"], e["texts"])]
        assert e["reward"] == pytest.approx(files[e["step"]]["reward"][e["episode"]])
        for shown, name in {"gradient size": "abs gradient", "log-prob": "log_prob",
                            "advantage": "advantage", "weight": "weight",
                            "entropy": "entropy", "push": "push"}.items():
            expected = [row[name] for row in tokens]
            assert e["values"].pop(shown) == pytest.approx(expected, rel=2e-3, abs=1e-6)
        assert not e["values"]  # no true credit


@pytest.mark.parametrize("known, steps, said", [
    ({}, 100, "Plain GRPO on Countdown, 100 steps, seed 0"),
    ({"seed": 3, "task": "my_task"}, 40, "Plain GRPO on My, 40 of 100 steps, seed 3"),
    ({"mitigation": "random", "advantage": "rloo"}, 100,
     "Weighting random, advantage rloo on Countdown, 100 steps, seed 0"),
    ({"placebo": "weights"}, 100, "Placebo weights on Countdown, 100 steps, seed 0"),
    ({"task": None, "mitigation": "mine"}, 100, "Weighting mine, 100 steps, seed 0")])
def test_the_heading_says_what_the_run_is(tmp_path, known, steps, said):
    folder = write_log(tmp_path / "run", {}, {"steps": 100, "eval_every": 0, **known},
                       [{"step": steps}])
    assert report.title_of(read_run(folder)) == said


@pytest.mark.parametrize("known, said", [
    ({}, ""),
    ({"temperature": 0.8}, "at temperature 0.8, but log p, entropy and s were computed at "
                           "temperature 1."),
    ({"temperature": 0.8, "columns_temperature": 0.8}, "0.8, and log p, entropy and s were "
     "computed at temperature 0.8.")])
def test_the_temperature_is_that_which_the_columns_are_at(known, said):
    """Whoever writes a record says it; without a word it is 1."""
    text = report.describe({"folder": "x", "config": {"mitigation": "none", **known}}, None)
    assert text.endswith(said) and ("temperature" in text) == bool(said)
