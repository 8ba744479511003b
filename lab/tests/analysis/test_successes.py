"""Where the success comes from: answers by hand, and a real run read in another way."""
import html
import operator
import re
from collections import Counter

import numpy as np
import pytest

from conftest import credit_columns, write_log
from countdown_task import Problem
from lab.analysis.run_folders import Run, read_credit, read_tokenizer
from lab.analysis.successes import (SHARES, YES, facts_in, facts_of, problem_of,
                                    successes)
from lab.analysis.statistics import mean_over
from lab.analysis.tables import shown
from lab.countdown import PROMPTS, Task
from lab.tools import page
from lab.tools.demonstrations import HIT, MISS
from known_runs import recorded
from lab_runs import SHORT, run
from runs import edit_config

HIT_15 = " 3 + 5 = 8, 8 + 7 = 15"
HIT_22 = " 3 * 5 = 15, 15 + 7 = 22"
RIGHT = "( 3 * 5 ) + 7"


@pytest.mark.parametrize("think, answer, first, again, later, said, copied, right", [
    (f"{HIT_22} yes!", RIGHT, 1, 0, 0, 1, 1, 1),
    (f"{HIT_22} yes!", "7 + 3 * 5", 1, 0, 0, 1, 0, 1),        # 7 + 15 is another step
    (f"{HIT_22} yes!", "3 + 5 + 7", 1, 0, 0, 1, 0, 0),
    (f"{HIT_22} no.", RIGHT, 1, 0, 0, 0, 0, 1),
    (f"{HIT_22} no.{HIT_22} yes!", RIGHT, 1, 0, 0, 0, 0, 1),  # the first hit was not said
    (f"{HIT_15} no. last{HIT_22}. Good, that is it", "(3*5) + 7", 0, 1, 1, 1, 1, 1),
    (f"{HIT_15} yes!", RIGHT, 0, 0, 0, 0, 0, 1),
    (f"{HIT_15} no.{HIT_15} no.", RIGHT, 0, 1, 0, 0, 0, 1),
    (" 3 * 5 = 15, 15 + 8 = 22 yes!", RIGHT, 0, 0, 0, 0, 0, 1),        # wrong arithmetic
    (" 3 * 5 = 15, 15 + 3 = 18, 18 + 4 = 22 yes!", RIGHT, 0, 0, 0, 0, 0, 1),  # no chain
    (f" 7 - 3 = 4{HIT_22} yes!", RIGHT, 1, 0, 0, 1, 1, 1),    # what was left is no try
    (" 22", None, 0, 0, 0, 0, 0, 0)])
def test_an_answer_by_hand(think, answer, first, again, later, said, copied, right):
    text = f"{think}</think>\n<answer> {answer}</answer><|im_end|>" if answer else think
    assert facts_of(Problem((3, 5, 7), 22), text) == [first, again, later, said, copied, right]


def test_the_problem_is_read_from_every_prompt():
    problem = Problem((3, 15, 7, 4), 22)
    for task in (*map(Task, PROMPTS), Task("brief", examples=1)):
        assert problem_of(task.prompt_for(problem)) == problem


def test_the_words_are_those_of_the_teacher():
    first = {text.split()[0].strip("!,.") for text in HIT}
    assert first == {*YES} and not first & {text.split()[0].strip(".") for text in MISS}


STEP = r"(\d+) ([-+*/]) (\d+) = (\d+)"
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def read_otherwise(problem, text):
    """Of the tiny model's answers to three numbers: whether the first try hits, whether there is
    another, whether that hits, is said, is copied."""
    found = []
    for a, o, b, c, x, p, y, z, word in re.findall(rf"{STEP}(?:,| and| so) {STEP}\W+(\w+)", text):
        rest = Counter(map(str, problem.numbers)) - Counter([a, b]) + Counter([c])
        is_try = Counter([x, y]) == rest and SIGNS[o](int(a), int(b)) == int(c)
        if is_try and SIGNS[p](int(x), int(y)) == int(z):
            inner = [f"({a}{o}{b}){p}{y}"] * (x == c) + [f"{x}{p}({a}{o}{b})"] * (y == c)
            is_copied = any(f"<answer>{one}</answer>" in text.replace(" ", "") for one in inner)
            found.append((int(z) == problem.target, word in YES, is_copied))
    hits = [one for one in found if one[0]] or [(False, False, False)]
    first = bool(found) and found[0][0]
    is_said = hits[0][1]
    return [first, len(found) > 1 and not first, hits[0][0] and not first, is_said,
            is_said and hits[0][2]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(*SHORT, "--steps", "1", "--questions", "8", "--answers", "8", "--out", folder)
    return folder


def test_the_shares_of_a_real_run_add_up_to_its_success(trained):
    batch, found = read_credit(trained, 1, read_tokenizer(trained)), []
    problems = Task("short", "3", 1, 15, 99, 150).training_problems(0, 1, 8)
    for group, text in zip(batch.group.tolist(), batch.answers):
        found.append(facts_of(problems[group], text))
        if "</think>" in text:
            assert found[-1][:5] == read_otherwise(problems[group], text)
    assert [facts[5] for facts in found] == batch.scores["answer"].tolist()
    first, again, later, said, copied, right = np.sum(found, 0)
    n, hits = len(found), first + later
    shares = [first / n, again / (n - first), later / again, said / hits, copied / said,
              (right - copied) / n, right / n]
    assert [[title, cell.split()[0]] for title, cell, _ in successes(Run(trained)).rows] == [
        [title, f"{share:.1%}"] for title, share in zip(SHARES, shares)]
    p, q, r, s, t, others, success = shares
    assert (p + (1 - p) * q * r) * s * t + others == pytest.approx(success)
    assert {*facts_in(Run(trained), [1, 1])[:, 0]} == {*range(16)}
    of_problems = mean_over(batch.scores["answer"].view(8, 8).mean(1).tolist())
    assert successes(Run(trained)).rows[-1][1] == shown(of_problems, ".1%")


def test_the_first_ten_steps_stand_beside_the_last_ten(monkeypatch):
    asked = []
    monkeypatch.setattr("lab.analysis.successes.facts_in",
                        lambda run, steps: asked.append(steps) or np.array([[0, 1, 0, 0, 1, 1, 1],
                                                                         [1, 1, 0, 0, 1, 1, 1]]))
    for count in (25, 7):
        run = recorded(config={"numbers": "3"}, credit=dict.fromkeys(range(1, 1 + count)))
        assert successes(run).rows[0][1:] == ["100.0% (100.0% to 100.0%)"] * 2
    assert asked == [[*range(1, 11)], [*range(16, 26)], [1, 2, 3], [5, 6, 7]]


def test_the_table_is_printed_and_stands_on_the_page_of_countdown(trained, tmp_path, capsys):
    """It does not for another task, without credit files, and where no hit is said."""
    page.main([str(trained)])
    table, printed = successes(Run(trained)), capsys.readouterr().out
    said = html.unescape((trained / "analysis/page.html").read_text())
    assert table.as_text() in printed and f"<h3>{table.title}</h3>" in said
    edit_config(trained, task="divide")
    silent = write_log(tmp_path / "silent", {1: credit_columns([2], [0])})
    for folder in (trained, silent, write_log(tmp_path / "empty", {})):
        assert not successes(Run(folder)).rows
