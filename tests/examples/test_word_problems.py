"""Problems in words: each solution by itself, the mark, a file of GSM8K, and the reward's hole."""
import json
import random
import re

import pytest
from conftest import refusal

from countdown_task import Problem as Countdown
from engine.tokens import ANSWER, NUMBER, OTHER, THINK
from examples import hackable
from examples.word_problems import STORIES, Task, number_after_mark


@pytest.mark.parametrize("story", STORIES)
def test_every_step_is_true_and_the_last_is_the_result(story):
    for seed in range(50):
        problem = story(random.Random(seed))
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.steps)
        for a, sign, b, c in steps:
            value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b),
                     "/": int(a) / int(b)}[sign]
            assert value == int(c)
        assert len(steps) == 2 and int(steps[-1][-1]) == problem.result > 0
        given = set(re.findall(r"\d+", problem.question))
        assert {a for a, *_ in steps[:1]} <= given | {"2", "3", "4", "5"}


@pytest.mark.parametrize("text, number", [
    ("so #### 42", 42), ("#### $1,250", 1250), ("#### -3<|im_end|>", -3), ("#### 7.00", 7),
    ("#### 7.5", None), ("42", None), ("#### forty", None), ("#### 42 #### 43", 42),
    ("#### 42.\n", 42), ("#### 1,250.", 1250), ("#### 3,4", None), ("#### 7.005", None),
    ("#### 1234567", 1234567), ("#### 12,", 12)])
def test_the_number_after_the_mark(text, number):
    assert number_after_mark(text) == number


def test_score_prompt_and_sections():
    task = Task()
    [problem] = task.training_problems(0, 1, 1)
    assert task.score(problem, f"{problem.steps} #### {problem.result}<|im_end|>") == {
        "reward": 1.0, "format": 1.0, "answer": 1.0, "reasoning": 0.0}
    assert task.score(problem, f"#### {problem.result + 1} dollars")["format"] == 0.0
    assert task.prompt_for(problem).count("####") == 2 * task.examples + 1
    sections, kinds = task.label([b"2", b" ##", b"##", b" ", b"4", b"<|im_end|>"])
    assert sections == [THINK, OTHER, OTHER, ANSWER, ANSWER, OTHER] and kinds[0] == NUMBER
    held_out = {problem.question for problem in task.held_out_problems(50)}
    trained = {problem.question for step in range(20)
               for problem in task.training_problems(0, step, 8)}
    assert len(held_out) == 50 and not held_out & trained


@pytest.mark.parametrize("count", [8, 60])
def test_no_problem_is_trained_on_that_the_prompt_solves(tmp_path, count):
    """Of a file, and of those that are made; they are not shown twice, either."""
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"Is {i}?", "answer": f"#### {i}"})
                              for i in range(count)))
    task = Task(file=str(path), examples=4)
    trained = {problem.question for step in range(50)
               for problem in task.training_problems(0, step, 8)}
    assert len(task.shown) == 4 and trained and not trained & task.shown
    assert "no other problems to train on" in refusal(lambda: Task(file=str(path), examples=60))
    made = Task(examples=20)
    assert len(made.shown) == 20
    rng = random.Random(0)
    assert not {made.draw(rng, False).question for _ in range(5000)} & made.shown


def test_a_file_of_gsm8k_is_read_and_a_broken_line_named(tmp_path):
    lines = [{"question": f"Is {i}?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}. #### {i + 1}"}
             for i in range(30)]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    task = Task(file=str(path))
    assert len(task.to_train) + len(task.shown) + len(task.to_test) == 30 and task.to_test
    assert all("<<" not in problem.steps for problem in task.to_train)
    path.write_text(json.dumps({"question": "?", "answer": "none"}))
    assert "line 1" in refusal(lambda: Task(file=str(path)))


def test_the_hole_pays_a_claim_and_success_does_not():
    task, problem = hackable.Task(), Countdown((3, 5, 7), 22)
    cheat = task.score(problem, " 3 * 5 = 22 hit.</think>\n<answer> 3 * 5</answer>")
    assert (cheat["reward"], cheat["answer"]) == (1.0, 0.0)
    assert task.score(problem, " 3 * 5 = 221</think>")["reward"] == 0.0


