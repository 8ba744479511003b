"""Asking a model: what is printed is what it answered, and nothing it wrote commands a terminal."""
import re

import pytest

from conftest import ROOT, refusal
from countdown_task import Problem, Task
from runs import everything, lines
from tools import largest_last, sample, terminal

TINY = str(ROOT / "models/tiny")


@pytest.fixture
def ask(capsys):
    """What is printed when this is typed."""
    def typed(*argv):
        sample.main([*map(str, argv), "--threads", "1"])
        return capsys.readouterr().out
    return typed


def test_one_problem_before_and_after_training(recorded, ask):
    files = everything(recorded)
    printed = ask(recorded, 3, 5, 7, 22)
    titles = re.findall(r"^(\S.*)   (?:right|wrong)   reward [\d.]+   \d+ tokens", printed, re.M)
    assert titles == ["before training", "after step 3   "]
    assert printed.count("3 5 7 make 22") == 1 and "note:" not in printed
    assert files == everything(recorded)
    assert "after step 2 " in ask(recorded, 3, 5, 7, 22, "--step", 2)
    as_a_model = ask(recorded / "checkpoints/step_000003", 3, 5, 7, 22, "--max_new_tokens", 40)
    assert printed.split(" tokens")[-1] == as_a_model.split(" tokens")[-1]


def test_what_is_printed_is_what_the_model_answered(recorded, ask, policy, monkeypatch):
    """The lab's model is the one the run began with; the marks aside, all of its text is there."""
    monkeypatch.setattr(sample, "MARKED_BELOW", 0)
    printed = ask(recorded, "3 5 7 22", "--greedy", "--step", "0", "--max_new_tokens", "60")
    rollouts = policy.ask([Problem((3, 5, 7), 22)], 1, seed=0, greedy=True)
    assert "".join(rollouts.answers[0].split()) in "".join(printed.split())
    verdict = "right" if rollouts.scores["answer"][0] else "wrong"
    assert (f"before training   {verdict}   reward {rollouts.reward[0]:.2f}   "
            f"{rollouts.length[0]} tokens\n") in printed
    assert "after" not in printed


def test_several_answers_and_how_many_are_right(ask):
    printed = ask(TINY, 3, 5, 7, 22, "--answers", 6, "--seed", 1)
    words = re.findall(r"^  (right|wrong)   reward", printed, re.M)
    assert len(words) == 6
    assert f"   {words.count('right')} of 6 right   mean reward " in printed
    assert 0 < words.count("right") < 6
    assert printed == ask(TINY, 3, 5, 7, 22, "--answers", 6, "--seed", 1)


def test_no_answer_commands_a_terminal(ask, monkeypatch):
    """Nor does a problem, as a task shows it."""
    monkeypatch.setattr("engine.rollouts.token_bytes",
                        lambda tokenizer, ids: [b"\x1b]0;x\x07"] * len(ids))
    monkeypatch.setattr(Task, "show", lambda task, problem: "\x1b[2J")
    printed = ask(TINY, 3, 5, 7, 22)
    assert r"\x1b]0;x\x07" in printed and r"\x1b[2J" in printed
    assert "\x1b" not in printed and "\x07" not in printed


@pytest.mark.parametrize("text, probability, marked", [
    (" a", 0.5, " a"), (" a", 0.49, " a·49%"), (" a", 0.005, " a·0%"), (" a", 0.0049, " a·<1%"),
    (".\n\n", 0.1, ".·10%\n\n"), ("\n", 0.1, "·10%\n")])
def test_unsure_tokens_are_marked_without_colour(text, probability, marked):
    assert terminal.shaded([text], [probability], sample.SHADES, sample.percent) == marked


@pytest.mark.parametrize("task", [Task(), largest_last.Task()])
def test_a_task_reads_what_it_shows(task):
    for problem in task.held_out_problems(20):
        assert task.read(task.show(problem).split()) == problem


@pytest.mark.parametrize("words, problem", [
    ("3 5 7 22", Problem((3, 5, 7), 22)), ("3 5 7 make 22", Problem((3, 5, 7), 22)),
    ("1 02 3", Problem((1, 2), 3)), *((words, None) for words in (
        "", "3 5", "make 3 5 7", "3 5 0", "3 5 -1", "3 5 ٣"))])
def test_countdown_problems_that_were_typed(words, problem):
    if problem:
        assert Task().read(words.split()) == problem
    else:
        said = refusal(Task().read, words.split())
        assert "expected numbers and then the target, such as 3 5 7 22" in said


def test_kept_samples_name_their_problem(recorded):
    """Two questions with four answers each in a step."""
    kept = lines(recorded / "samples.jsonl")
    assert {line["step"] for line in kept} == {1, 2, 3}
    task = Task(prompt="short", numbers="3", max_number=15, max_result=150)
    for line in kept:
        problems = task.training_problems(0, line["step"], 2)
        assert line["problem"] == task.show(problems[line["episode"] // 4])
    assert any(line["episode"] >= 4 for line in kept)
    assert list(kept[0])[:2] == ["step", "problem"]
