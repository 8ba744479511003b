"""The page of a run: what it writes and says, which tables and answers it has."""
import html
import json
import re

import numpy as np
import pytest
from conftest import credit_columns, evaluation, write_lines, write_log
from logs import plain_rows, random_log

import analyze as book
import lab.tools.page as analyze
from lab.analysis import answers, report
from lab.analysis.run_folders import Run

ONE = [{"step": 1, "success": 0.5}]


def page_of(folder):
    return (folder / "analysis/page.html").read_text()


def test_a_run_without_credit_files_has_its_gains_alone(tmp_path, capsys):
    lines = [evaluation(0, [0, 1, 0, 1, 0, 0, 0, 0]), evaluation(2, [1, 1, 0, 1, 1, 0, 0, 0])]
    folder = write_log(tmp_path / "run", {}, evaluations=lines)
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    assert "no credit files" in printed and "lab follow" not in printed
    page = page_of(folder)
    assert page.count("<table><thead>") == 1 and "<td class=n>50.0%</td>" in page
    assert analyze.LEGEND not in html.unescape(page)


def test_the_page_has_the_tables_that_analyze_prints(tmp_path, capsys):
    """A table of one row is left out: a task need not label tokens."""
    folder, _ = random_log(tmp_path / "run", steps=12, groups=4)
    write_lines(folder / "metrics.jsonl", ONE)
    analyze.main([str(folder), "--output_dir", str(tmp_path / "out")])
    page = html.unescape((tmp_path / "out/page.html").read_text())
    capsys.readouterr()
    book.main([str(folder)])
    titles = re.findall(r"^(.*):$", capsys.readouterr().out, re.M)
    assert len(titles) == 3 and all(f"<h3>{title}</h3>" in page for title in titles)
    assert page.count("<table><thead>") == 3 and page.count(analyze.LEGEND) == 1
    assert page.count("<figure") == len([*(tmp_path / "out").glob("*.png")]) == 0
    plain = write_log(tmp_path / "plain", {1: credit_columns([2], [0], kind=[2, 2])}, metrics=ONE)
    analyze.main([str(plain)])
    said = html.unescape(page_of(plain))
    assert "by kind:" not in said and "by place:" in said and "<figure" not in said


def test_a_screen_says_what_the_run_did_and_the_page_goes_from_there_to_tables(tmp_path, capsys):
    folder, _ = random_log(tmp_path / "run", steps=4, groups=4)
    line = {"success": 0.5, "entropy": 1.0, "finished": 0.9}
    write_lines(folder / "metrics.jsonl", [{"step": i, **line} for i in range(1, 4)])
    write_lines(folder / "evaluations.jsonl", [
        evaluation(0, [0, 1]), evaluation(0, [0, 1], "greedy"),
        {**evaluation(3, [1, 1]), "success_low": 0.3, "success_high": 0.954}])
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    assert "page.html" in printed and f"python -m lab follow {folder}" in printed
    page = (folder / "analysis/page.html").read_text()
    page = re.sub(r"data:image/png;base64,[^\"]*", "", page)
    said = ("not finished: step 3 of 4 so far",
            "Sampled answers solved 50.0% (95% interval 0.0% to 100.0%) of 2 held-out problems at "
            "step 0, and 100.0% (95% interval 30.0% to 95.4%) at step 3.")
    assert not [words for words in said
                for text in (" ".join(printed.split()), html.unescape(page)) if words not in text]
    places = [page.index(text) for text in (
        "<section id=watch", "<section id=answers", "<details><summary>")]
    assert places == sorted(places)


@pytest.mark.parametrize("columns", [
    credit_columns([3, 4], [0, 0], advantage=np.zeros(7)),
    credit_columns([1, 1], [0, 0], advantage=[1, -1]),
    credit_columns([2, 2], [0, 0], weight=np.zeros(4)),
    credit_columns([2, 3], [0, 0], log_prob=np.zeros(5), collision=np.ones(5))],
    ids=("no advantage", "one token an answer", "no weight", "sure of every token"))
def test_degenerate_logs_are_told_and_not_stumbled_over(tmp_path, capsys, columns):
    folder = write_log(tmp_path / "run", {1: columns}, metrics=ONE)
    analyze.main([str(folder)])
    body = page_of(folder)
    said = re.sub(r"data:image/png;base64,[^\"]*", "", body.partition("<script")[0])
    assert not re.search(r"\b(nan|inf)\b", capsys.readouterr().out + said)


def test_the_page_holds_the_answers_and_refers_to_nothing_outside(tmp_path, monkeypatch):
    folder, files = random_log(tmp_path / "run")
    write_lines(folder / "metrics.jsonl", ONE)
    monkeypatch.setattr(answers, "STEPS", 2)
    analyze.main([str(folder)])
    page = (folder / "analysis/page.html").read_text()
    words = re.sub(r"data:image/png;base64,[^\"]*", "", page)
    assert not re.search(r"\bsrc=.[^\"]", words)  # a picture would have its data
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
    assert report.title_of(Run(folder)) == said
