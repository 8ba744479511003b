"""Asking a model: what is printed is what it answered, and nothing it wrote commands a terminal;
pass@k by hand, by enumeration, and of a run before its training and after it."""
import itertools
import re

import numpy as np
import pytest
from PIL import Image

from conftest import ROOT, refusal
from examples import own_reward
from lab.analysis import shading as terminal
from lab.countdown import Problem, Task
from lab.engine.policy import derived_seed
from lab.harness.build import load_policy
from lab.harness.record import checkpoint_folders
from lab.harness.settings import make_settings
from lab.tools import pass_at_k, sample
from lab.tools.pass_at_k import pass_at_k_table
from qwen2_model import UserError
from runs import everything, lines


TINY = str(ROOT / "models/tiny")


@pytest.fixture
def ask(capsys):
    """What is printed when this is typed."""
    def typed(*argv):
        sample.main(list(map(str, argv)))
        return capsys.readouterr().out
    return typed


def test_one_problem_before_and_after_training(recorded, ask):
    files = everything(recorded)
    printed = ask(recorded, 3, 5, 7, 22)
    titles = re.findall(r"^(\S.*)   [01] of 1 right\n\n  (?:right|wrong)   reward ", printed, re.M)
    assert titles == ["before training", "after step 3   "]
    assert printed.count("3 5 7 make 22") == 1 and "note:" not in printed
    assert files == everything(recorded)


def test_what_is_printed_is_what_the_model_answered(ask, monkeypatch):
    """The marks aside, all of each answer is there."""
    monkeypatch.setattr(sample, "MARKED_BELOW", 0)
    printed = ask(TINY, "3 5 7 22", "--answers", 6, "--seed", 1)
    policy = load_policy(make_settings({"model": TINY}))
    rollouts = policy.ask([Problem((3, 5, 7), 22)], 6, derived_seed("sample", 1))
    right = rollouts.scores["answer"] > 0
    assert 0 < right.sum() < 6 and f"   {right.sum()} of 6 right\n" in printed
    for b, answer in enumerate(rollouts.answers):
        assert "".join(answer.split()) in "".join(printed.split())
        assert (f"  {'right' if right[b] else 'wrong'}   reward {rollouts.reward[b]:.2f}   "
                f"{rollouts.length[b]} tokens\n") in printed


def test_of_a_reward_that_is_any_number_no_answer_is_called_right_or_wrong(ask, monkeypatch):
    monkeypatch.setattr(own_reward, "reward", lambda problem, text: 0.25)
    printed = ask(TINY, "3 5 7 22", "--task", "examples.own_reward")
    assert "   mean reward 0.25\n\n  reward 0.25   " in printed
    assert not re.search(r" of 1 right|  (right|wrong) ", printed)


def test_a_greedy_answer_is_the_same_with_every_seed(ask):
    """And of several there would be only one."""
    first, second = (ask(TINY, "3 5 7 22", "--greedy", "--seed", seed) for seed in (0, 1))
    assert first == second and "answers are greedy" in first
    assert "seed 1" in ask(TINY, "3 5 7 22", "--seed", 1)
    policy = load_policy(make_settings({"model": TINY}))
    [answer] = policy.ask([Problem((3, 5, 7), 22)], 1, 0, greedy=True).answers
    unmarked = re.sub(r"\[[<\d]+%\]", "", first)
    assert "".join(answer.split()) in "".join(unmarked.split())


def test_no_answer_commands_a_terminal(ask, monkeypatch):
    """Nor does a problem, as a task shows it."""
    monkeypatch.setattr("grpo.spelling", lambda tokenizer, token: "\x1b]0;x\x07")
    monkeypatch.setattr(Task, "show", lambda task, problem: "\x1b[2J")
    printed = ask(TINY, 3, 5, 7, 22)
    assert "?]0;x?" in printed and "?[2J" in printed
    assert "\x1b" not in printed and "\x07" not in printed


@pytest.mark.parametrize("text, probability, marked", [
    (" a", 0.5, " a"), (" a", 0.49, " a[49%]"), (" a", 0.005, " a[0%]"), (" a", 0.0049, " a[<1%]"),
    (".\n\n", 0.1, ".[10%]\n\n")])
def test_unsure_tokens_are_marked_without_colour(text, probability, marked):
    assert terminal.shaded([text], [probability], sample.SHADES, sample.percent) == marked


def test_a_moving_picture_of_a_run_has_every_checkpoint_below_its_curve(recorded, ask, tmp_path,
                                                                             monkeypatch):
    """A GIF with a picture of each step and one of the start. Equal ones are one that lasts."""
    path, steps = tmp_path / "film.gif", len(lines(recorded / "metrics.jsonl"))
    monkeypatch.setattr("lab.analysis.film.FRAMES", steps)
    monkeypatch.setattr("lab.analysis.film.STANDING", 2)
    printed = ask(recorded, 3, 5, 7, 22, "--answers", 2, "--film", path)
    titles = re.findall("^(?:before|after).* of 2 right", printed, re.M)
    assert len(titles) == 1 + len(checkpoint_folders(recorded))
    with Image.open(path) as film:
        assert film.n_frames == 1 + steps
    assert [one.name for one in tmp_path.iterdir()] == ["film.gif"]
    with pytest.raises(UserError, match="--film needs a run"):
        ask("models/tiny", 3, 5, 7, 22, "--film", path)
    monkeypatch.setattr("lab.tools.sample.policies_of", None)  # before any checkpoint answers
    with pytest.raises(UserError, match="the name should end with .gif"):
        ask(recorded, 3, 5, 7, 22, "--film", tmp_path / "film.mp4")


def test_a_problem_without_a_folder_is_told_what_comes_first():
    assert "the folder of a run or of a model comes first" in refusal(
        sample.main, ["2", "13", "9", "24"])


def test_a_task_reads_what_it_shows():
    task = Task()
    for problem in task.held_out_problems(20):
        assert task.read(task.show(problem).split()) == problem


@pytest.mark.parametrize("words, problem", [
    ("3 5 7 22", Problem((3, 5, 7), 22)), ("3 5 7 make 22", Problem((3, 5, 7), 22)),
    ("3 5", None), ("3 5 0", None), ("3 5 ٣", None)])
def test_countdown_problems_that_were_typed(words, problem):
    if problem:
        assert Task().read(words.split()) == problem
    else:
        said = refusal(Task().read, words.split())
        assert "expected numbers and then the target, such as 4 12 10 18" in said


@pytest.mark.parametrize("right, tries, k", [
    (0, 5, 3), (1, 5, 1), (1, 5, 3), (2, 5, 2), (3, 5, 3), (5, 5, 1), (4, 6, 5)])
def test_it_is_the_share_of_all_choices_of_k_tries_that_have_a_right_one(right, tries, k):
    choices = list(itertools.combinations([True] * right + [False] * (tries - right), k))
    assert pass_at_k.pass_at_k(right, tries, k) == pytest.approx(np.mean(list(map(any, choices))))


def test_a_table_by_hand():
    """Two problems, four tries. Before: 1 and 0 right, after: 2 and 0. With two tries the first
    problem has 3 / 6 = 50% and 1 - 1/6 = 83.3%, with four both models solve it."""
    table = pass_at_k_table({"before": [1, 0], "after": [2, 0]}, 4)
    by_k = {row[0]: [cell.value for cell in row[1:]] for row in table.rows}
    assert by_k == {1: pytest.approx([1 / 8, 2 / 8, 1 / 8]),
                    2: pytest.approx([1 / 4, 5 / 12, 1 / 6]),
                    4: pytest.approx([1 / 2, 1 / 2, 0])}
    [low] = {cell.low for cell in table.rows[0][1:2]}
    assert low == 0  # a share is not below 0
    assert [*pass_at_k_table({"one": [1, 2]}, 3).columns] == ["tries, k", "one"]
    assert [row[0] for row in pass_at_k_table({"one": [1, 2]}, 3).rows] == [1, 2, 3]
    # ten problems, five always and five never solved: the standard error is sqrt(0.25 / 9), and t
    # with nine degrees of freedom is 2.262
    table = pass_at_k_table({"one": [2] * 5 + [0] * 5}, 2)
    assert table.rows[0][1].low == pytest.approx(0.5 - 2.262 * (0.25 / 9) ** 0.5, abs=1e-3)


def test_a_run_is_asked_before_and_after_and_nothing_is_written(recorded, capsys):
    files = everything(recorded)
    pass_at_k.main([str(recorded), "--answers", "4", "--problems", "5", "--seed", "3"])
    printed = capsys.readouterr().out
    assert files == everything(recorded)
    assert "4 tries at each of 5 held-out problems" in printed
    policy = load_policy(make_settings({"config": f"{recorded}/config.json"}))
    settings, found = policy.settings, []
    at_once = max(1, settings.questions * settings.answers // 4)
    problems = policy.task.held_out_problems(5)
    for first in range(0, 5, at_once):
        batch = policy.ask(problems[first:first + at_once], 4, derived_seed("pass at k", 3, first))
        found += (batch.scores["answer"] > 0).float().tolist()
    row = re.search(r"^\| +1 \| +([\d.]+)% \(.*\| +([\d.]+)% \(.*\| +[-+][\d.]+ \(", printed, re.M)
    assert float(row[1]) == pytest.approx(100 * np.mean(found), abs=0.06)
    none = sum(not any(found[4 * i:4 * i + 4]) for i in range(5))
    assert f"before training: {none} problems were solved by none of 4 tries" in printed
