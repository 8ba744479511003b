"""Problems, reward and labels. Nothing a model writes is executed, and every string gets a
score."""
import hashlib
import itertools
import json
import re

import numpy as np
import pytest

import countdown_task
from countdown_task import Problem, is_held_out
from lab.countdown import WORDINGS, Task, Wording
from lab.engine.errors import UserError
from lab.harness.solved_problems import solutions_of
from conftest import write_lines
from test_countdown_task import PROBLEM, TINY
from properties import any_strings, cuts, draw, given, in_words

WIDE = dict(numbers="3,4", min_number=1, max_number=99, max_target=99, max_result=10_000)
FOUR = dict(numbers="4", min_number=2, max_number=9, max_target=30, max_result=150)


def score(text):
    return Task().score(PROBLEM, text)


@pytest.mark.parametrize("opening, text, form", [
    ("<think>", " hm</think>\n<answer>1</answer>", 1.0),
    ("", " hm</think>\n<answer>1</answer>", 0.5),   # nobody has opened the thinking
    ("", "<think> hm</think>\n<answer>1</answer>", 1.0),
    ("", "hm <think>x</think>\n<answer>1</answer>", 1.0)])
def test_a_prompt_of_ones_own_is_one_row_and_opens_the_thinking_or_does_not(
        monkeypatch, opening, text, form):
    wording = "Make {target} of {numbers}." + opening
    monkeypatch.setitem(WORDINGS, "mine", Wording(wording, " and ".join))
    task = Task(prompt="mine")
    assert task.prompt_for(PROBLEM) == "Make 22 of 3 and 5 and 7." + opening
    assert task.score(PROBLEM, text)["format"] == form


def test_any_string_gets_a_score_of_its_reasoning():
    assert all(0 <= score(text)["reasoning"] <= 1 for text in any_strings())


@pytest.mark.parametrize("think, share", [
    ("3 * 5 = 15, 15 + 7 = 22", 1), ("3 * 5 = 16, 16 + 7 = 23", 0.5), ("3 * 4 = 12", 0),
    ("3 + 3 = 6", 0), ("7 - 3 = 4 and 4 + 4 = 8", 1), ("15 / 5 = 3", 0),
    ("3 * 5 = 15 + 7 = 22", 1), ("3 - 5 = -2", 1), ("5 / 0 = 5", 0), ("nothing", 0), ("7/3=2", 0)])
def test_reasoning_is_the_share_of_right_steps_with_available_numbers(think, share):
    for opening in ("", "<think>"):
        assert score(f"{opening}{think}</think>\n<answer>1</answer>")["reasoning"] == share


HALF_RIGHT = " 3 * 5 = 15, 15 + 7 = 23 yes</think>\n<answer> ( 3 * 5 ) + 7 </answer>"
WRONG = " 3 * 5 = 15, 15 - 7 = 8</think>\n<answer> ( 3 * 5 ) - 7 </answer>"


@pytest.mark.parametrize("flags, words, half_right, wrong", [
    ({}, "answer + 0.1 format", 1.1, 0.1),
    ({"reward_form": "right"}, "answer", 1, 0),
    ({"reward_form": "signed"}, "2 answer - 1", 1, -1),
    ({"reasoning_weight": 0.5}, "answer + 0.1 format + 0.5 reasoning", 1.35, 0.6),
    ({"reward_form": "signed", "reasoning_weight": 2.0}, "2 answer - 1 + 2 reasoning", 2, 1)])
def test_forms_of_the_reward(flags, words, half_right, wrong):
    """Half of one answer's steps are right, all of the other's; only the reward is another."""
    task = Task(**flags)
    assert task.rewarded == words
    for text, reward, answer, reasoning in ((HALF_RIGHT, half_right, 1, 0.5), (WRONG, wrong, 0, 1)):
        expected = {"reward": reward, "format": 1, "answer": answer, "reasoning": reasoning}
        assert task.score(PROBLEM, text) == pytest.approx(expected)


STEPS = {  # of the numbers 3 5 7, and whether they are right wherever they stand
    "3 * 5 = 15": True, "7-3=4": True, "5 - 7 = -2": True, "3 * 5 = 16": False, "3 + 3 = 6": False,
    "7 / 3 = 2": False}


@given(draw.lists(draw.tuples(draw.sampled_from([*STEPS]), draw.sampled_from([", ", " é ", "\n"])),
                  max_size=4), draw.booleans(), draw.data())
def test_right_steps_end_with_the_tokens_of_their_last_digit(steps, is_closed, data):
    """However the text is cut. A thinking that is not closed has no steps."""
    text, ends = "", []
    for step, between in steps:
        text += step
        if STEPS[step]:
            ends.append(len(text))
        text += between
    if is_closed:
        text += "</think> 3 + 5 = 8"
    pieces = cuts(text, data.draw)
    found = Task().right_steps(PROBLEM, pieces)
    assert len(found) == (len(ends) if is_closed else 0)
    for token, end in zip(found, ends):
        before = sum(map(len, pieces[:token]))
        assert before < end <= before + len(pieces[token])


@pytest.mark.parametrize("ranges", [TINY, WIDE, FOUR])
def test_every_problem_has_a_solution_and_keeps_to_its_ranges(ranges):
    made = Task(**ranges)
    for problem in made.training_problems(0, 1, 12):
        assert len(problem.numbers) in made.counts and 1 <= problem.target <= made.max_target
        assert all(made.min_number <= n <= made.max_number for n in problem.numbers)
        every = solutions_of(problem.numbers, made.legal_steps)
        found = next(one.expression for one in every if one.value == problem.target)
        assert made.score(problem, f"<answer>{found}</answer>")["answer"] == 1


@pytest.mark.parametrize("line", [
    '{"nums": [], "target": 3}', '{"nums": [1, "2"], "target": 3}', "[1]", "no json",
    '{"nums": [3, 5, 7], "target": 1' + "0" * 5000 + "}", '{"nums": [1000000000], "target": 3}',
    '{"nums": [1' + ", 1" * 30 + '], "target": 3}', "[" * 9000])
def test_a_line_that_is_no_problem_is_named_without_being_repeated(tmp_path, line):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"nums": [1, 2], "target": 3}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2: expected .* whole numbers from 1 to") as error:
        Task(data=str(path))
    assert len(str(error.value)) < 400


def test_a_file_is_split_by_the_same_rule_and_a_held_out_problem_counts_once(tmp_path):
    """In whatever order its numbers stand."""
    first = Task(**TINY).held_out_problems(4)
    trained = Task(**TINY).training_problems(0, 0, 4)
    lines = []
    for problem in (*first, *trained):
        for numbers in itertools.permutations(problem.numbers):
            lines.append(json.dumps({"nums": numbers, "target": problem.target}))
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(lines))
    task = Task(data=str(path))
    assert sorted(task.to_test, key=first.index) == first
    assert len(task.to_train) == len(lines) - 4 * 6  # those count as often as they are there
    assert set(task.training_problems(0, 1, 500)) == set(task.to_train)
    assert set(task.held_out_problems(500)) == set(task.to_test)
    assert not any(map(is_held_out, task.to_train))


def test_an_expression_alone_is_in_the_answer_section_up_to_its_end():
    """A token that has one of the two bytes of a letter is spelt so, and is a word."""
    assert in_words(Task().label(["\ufffd", "\ufffd"])) == ["think word", "think word"]
    found = Task(prompt="expression").label([" 3", "*", "(", "so", "</think>", "<|im_end|>"])
    kinds = ("number", "operator", "bracket", "word", "word")
    assert in_words(found) == [*(f"answer {kind}" for kind in kinds), "other end"]


def test_the_original_prompt_is_the_one_of_the_earlier_experiment():
    """Qwen2.5's chat form of its two messages, and the numbers as numpy prints an array."""
    text = Task(prompt="original").prompt_for(Problem((3, 44, 19), 60))
    assert hashlib.sha256(text.encode()).hexdigest().startswith("efdd68679ad1de99")
    for numbers in ((3, 5, 7), (3, 44, 119, 5)):
        assert f"numbers {np.array(numbers)}, create" in Task(prompt="original").prompt_for(
            Problem(numbers, 22))


TWO = dict(numbers="2", min_number=2, max_number=30, max_target=900, examples=4)


@pytest.mark.parametrize("form", ["brief", "expression", "short"])
@pytest.mark.parametrize("numbers", ["2", "3"])
def test_worked_examples_are_right_one_for_each_operator_and_none_is_held_out(form, numbers):
    """Where there is thinking, every other one tries something first that misses."""
    task = Task(**TWO | {"numbers": numbers, "prompt": form})
    turns = task.head.split("<|im_start|>user\n")[1:]
    assert len(turns) == 4 == len(task.shown)
    for turn, sign in zip(turns, "+*-/"):
        question, _, answer = turn.partition("assistant\n")
        found = sorted(map(int, re.findall("[0-9]+", question)))
        (numbers_shown, target), = [one for one in task.shown
                                    if sorted([*one[0], one[1]]) == found]
        problem = Problem(numbers_shown, target)
        answer = answer.removeprefix("<think>").removesuffix("\n")
        score = task.score(problem, answer)
        assert score["format"] == score["answer"] == 1 and sign in answer
        assert not is_held_out(problem)
        if form != "expression":
            assert score["reasoning"] == 1  # what is tried first is computed rightly, too
            assert (" no, " in answer) == (sign in "+-") and " yes</think>" in answer


def test_worked_examples_are_the_same_in_every_run_and_are_not_trained_on():
    task, again = Task(prompt="brief", **TWO), Task(prompt="brief", **TWO)
    assert task.head == again.head and task.head in task.prompt_for(Problem((4, 19), 76))
    trained = {(tuple(sorted(p.numbers)), p.target)
               for step in range(60) for p in task.training_problems(0, step, 50)}
    assert len(trained) > 500 and not trained & task.shown
    assert Task(prompt="brief", **TWO | {"examples": 0}).head == ""


def test_differences_and_quotients_are_shown_with_their_numbers_in_another_order():
    """Than that of the question: a model that only copies the order cannot solve half of them."""
    task = Task(prompt="expression", **TWO | {"examples": 8})
    turns = task.head.split("<|im_start|>user\n")[1:]
    for number, turn in enumerate(turns):
        question, _, answer = turn.partition("assistant\n")
        asked, used = (re.findall("[0-9]+", text.partition(" from ")[2] or text)
                       for text in (question, answer))
        assert sorted(asked) == sorted(used)
        if number % 4 >= 2:
            assert asked != used


@pytest.mark.parametrize("form, system", [("full", 1), ("original", 1), ("brief", 0)])
def test_what_the_system_is_told_stands_once_before_all_turns(form, system):
    text = Task(prompt=form, examples=3, numbers="2").prompt_for(PROBLEM)
    assert text.count("<|im_start|>system") == system and text.count("<|im_start|>user") == 4
    assert text.startswith("<|im_start|>" + ("system" if system else "user"))
    alone = Task(prompt=form).prompt_for(PROBLEM)
    assert text.endswith(alone[alone.index("<|im_start|>user"):])


@pytest.mark.parametrize("text, form, right", [
    ("4*19", 1, 1), ("4*19<|im_end|>", 1, 1), ("19 * 4<|im_end|>", 1, 1), ("4+19", 1, 0),
    ("76", 1, 0), ("4*19=76", 0, 0), ("4*19\n<|im_end|><|im_end|>", 0, 0), ("", 0, 0),
    ("<answer>4*19</answer>", 0, 0), ("4*19*1", 1, 0), ("4**19", 0, 0), ("4/0", 0, 0)])
def test_an_expression_alone_is_an_answer(text, form, right):
    task = Task(prompt="expression", reward_form="right", **TWO)
    expected = {"reward": right, "format": form, "answer": right, "reasoning": 0}
    assert task.score(Problem((4, 19), 76), text) == expected


def test_an_operator_that_no_problem_needs_has_no_example():
    """Of 16 and 16 only sum, product and quotient are positive, and the quotient stays as given."""
    task = Task(prompt="expression", **TWO | {"min_number": 16, "max_number": 16})
    assert re.findall(r"\n16 (.) 16<", task.head) == ["+", "*"]


MANY = [{"nums": [1] * 30, "target": target} for target in range(1, 99)]


def test_examples_of_a_file_are_of_its_training_problems_and_have_few_numbers(tmp_path):
    """Of thirty numbers not all expressions can be tried."""
    path = tmp_path / "problems.jsonl"
    made = Task(**TWO).training_problems(0, 1, 200) + Task(**TWO).held_out_problems(20)
    write_lines(path, MANY + [{"nums": p.numbers, "target": p.target} for p in made])
    task = Task(data=str(path), prompt="expression", examples=4)
    trained = {(tuple(sorted(p.numbers)), p.target) for p in made if not is_held_out(p)}
    assert len(task.shown) == 4 and task.shown <= trained
    assert not task.shown & {(tuple(sorted(p.numbers)), p.target) for p in task.to_train}


SUMS = [Problem((a, 40), a + 40) for a in range(2, 12)]
ONE_TO_TRAIN = [{"nums": p.numbers, "target": p.target} for p in (
    *filter(is_held_out, SUMS), next(p for p in SUMS if not is_held_out(p)))]


@pytest.mark.parametrize("problems, examples, said", [
    (MANY, 2, "none of 1,000 .* --examples 0 asks without"),
    (ONE_TO_TRAIN, 1, ".* has no other problems to train on"),
    # of 6 and 6 are made 12 and 36, which the prompt would show, and 1, which is held out
    (None, 4, "no problem was found but those that")])
def test_examples_that_leave_no_problem_are_told(tmp_path, problems, examples, said):
    flags = TWO | {"min_number": 6, "max_number": 6}
    if problems:
        write_lines(tmp_path / "problems.jsonl", problems)
        flags = {"data": str(tmp_path / "problems.jsonl")}
    with pytest.raises(UserError, match=f"--examples {examples}: {said}"):
        Task(prompt="expression", **flags | {"examples": examples})


@pytest.mark.parametrize("prompt, text", [
    *((one, "</think>\n<answer>3 * 5 + 7</answer>") for one in ("full", "original", "brief")),
    ("expression", "3 * 5 + 7")])
def test_every_prompt_pays_by_the_book(monkeypatch, prompt, text):
    """Whoever edits the reward of countdown_task.py edits it for all of them."""
    assert Task(prompt=prompt).score(PROBLEM, text)["reward"] == pytest.approx(1.1)
    monkeypatch.setattr(countdown_task, "FORMAT_WEIGHT", 3.0)
    assert Task(prompt=prompt).score(PROBLEM, text)["reward"] == 4.0
