"""Problems, reward and labels. Nothing a model writes is executed, and every string gets a
score."""
import hashlib
import itertools
import json
import random
import re

import numpy as np
import pytest

from countdown_task import (PROMPTS, Problem, Task, Wording, annotate, evaluates_to, held_out,
                            joined)
from engine.errors import UserError
from engine.tokens import KINDS, SECTIONS, encode_prompt, load_tokenizer, token_bytes

TINY = dict(prompt="short", numbers="3", min_number=1, max_number=15, max_target=99, max_result=150)
WIDE = dict(numbers="3,4", min_number=1, max_number=99, max_target=99, max_result=10_000)
FOUR = dict(numbers="4", min_number=2, max_number=9, max_target=30, max_result=150)
GOOD = " 3 * 5 = 15, 15 + 7 = 22 yes</think>\n<answer> ( 3 * 5 ) + 7 </answer>"


PROBLEM = Problem((3, 5, 7), 22)


def score(text):
    return Task().score(PROBLEM, text)


@pytest.mark.parametrize("text, form, right", [
    (GOOD, 1.0, 1), ("<think>" + GOOD, 1.0, 1), ("", 0.0, 0), ("hm</think>", 0.1, 0),
    (GOOD + "<|im_end|>", 1.0, 1), (GOOD + "<|endoftext|>", 1.0, 1), (GOOD + "\n", 0.6, 1),
    (GOOD + "<|im_end|><|im_end|>", 0.6, 1), (GOOD.replace("</think>\n", "</think>"), 0.6, 1),
    ("<answer>3*5+7</answer>", 0.5, 1), ("</answer><answer>3*5+7</answer></think>", 0.6, 1),
    ("hm</think>\n<answer>3*5+7", 0.1, 0),  # never closed
    ("x</think>\n<answer>1</answer><answer>3*5+7</answer>", 0.6, 0),  # the first one counts
    ("hm</think>\n<answer>3*5+7</answer><answer>1</answer>", 0.6, 1)])
def test_format_and_answer(text, form, right):
    result = score(text)
    assert (result["format"], result["answer"]) == (form, right)
    assert result["reward"] == pytest.approx(0.1 * form + right)


@pytest.mark.parametrize("opening, text, form", [
    ("<think>", " hm</think>\n<answer>1</answer>", 1.0),
    ("", " hm</think>\n<answer>1</answer>", 0.5),   # nobody has opened the thinking
    ("", "<think> hm</think>\n<answer>1</answer>", 1.0),
    ("", "hm <think>x</think>\n<answer>1</answer>", 1.0)])
def test_a_prompt_of_ones_own_is_one_row_and_opens_the_thinking_or_does_not(
        monkeypatch, opening, text, form):
    wording = "Make {target} of {numbers}." + opening
    monkeypatch.setitem(PROMPTS, "mine", Wording(wording, " and ".join))
    task = Task(prompt="mine")
    assert task.prompt_for(PROBLEM) == "Make 22 of 3 and 5 and 7." + opening
    assert task.score(PROBLEM, text)["format"] == form


RIGHT = [
    ("(1+2)*3", 9), ("1+2*3", 7), ("8-3-2", 3), ("8/4/2", 1), ("2/3*6", 4), ("-3+5", 2),
    ("8/(3-8/3)", 24),  # exact thirds
    ("5--3", 8), ("-(3-5)", 2), ("-(1+2)*-3/9", 1), ("( 2-5 ) /3*4+7", 3), ("3*-5+20", 5),
    (" \t3\n+ 5\r", 8)]
WRONG_USE = [
    ("3+5", (3, 5, 2), 8), ("3+5+5", (3, 5), 13), ("3+5", (3, 6), 8), ("35", (3, 5), 35),
    ("3/(5-5)", (3, 5, 5), 0), ("3_0", (30,), 30), ("03", (3,), 3)]
NO_EXPRESSION = [
    "2**3", "7//2", "9**9**9", "3 5", "3+5=8", "3+5;", "3+", "(3+5", "3+5)", "()", "", "*3", "+3",
    "3(5)", "3.0+5", "3e0+5", "0x3+5", "int(3)+5", "__import__('os')", "a+3", "\u0663+5",
    "\uff13+5", "3\u00d75", "3\u00a0+5", "3\x00+5", "\ud800", "(" * 5000 + "3" + ")" * 5000,
    "-" * 5000 + "3", "(" * 50 + "3" + ")" * 50, "9" * 10_000, "1+" * 5000 + "1"]


def digits_in(text):
    return [int(run) for run in re.findall("[0-9]{1,4}", text)]


def test_the_expression_reader():
    for expression, target in RIGHT:
        assert evaluates_to(expression, digits_in(expression), target), expression
        assert not evaluates_to(expression, digits_in(expression), target + 1), expression
    for expression, numbers, target in WRONG_USE:
        assert not evaluates_to(expression, numbers, target), expression
    for expression in NO_EXPRESSION:
        for target in (0, 1, 3, 8, 15, 5001):
            assert not evaluates_to(expression, digits_in(expression), target), expression[:20]


def test_any_string_gets_a_score():
    rng = random.Random(1)
    parts = ["<think>", "</think>", "\n", "<answer>", "</answer>", "<|im_end|>", "3", "+", "(", ")",
             " 3 * 5 = 15", "\ud83d", "<", ">", "é", "\x00", "9" * 300, "-" * 300]
    for _ in range(3000):
        result = score("".join(rng.choices(parts, k=rng.randint(0, 12))))
        assert 0 <= result["format"] <= 1 and 0 <= result["reasoning"] <= 1
        assert result["answer"] in (0, 1)
    for huge in ("<answer>" * 100_000, "3 + 3 = " * 100_000, " " * 1_000_000,
                 "<think>" * 50_000 + "</answer>" * 50_000):
        score(huge)


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
    assert task.reward == words
    for text, reward, answer, reasoning in ((HALF_RIGHT, half_right, 1, 0.5), (WRONG, wrong, 0, 1)):
        expected = {"reward": reward, "format": 1, "answer": answer, "reasoning": reasoning}
        assert task.score(PROBLEM, text) == pytest.approx(expected)


@pytest.mark.parametrize("pieces, expected", [
    ([" 3", " *", " 5", " =", " 1", "5", ",", "</think>"], [5]),
    (["<think>", "3*5=1", "5,15+", "7=", "2", "2</think>"], [2, 5]),
    (["3 * 5 = 15 + 7 = 22", "</think>"], [0, 0]),
    (["3 * 5 = 16, 3 + 5 = 8", "</think>"], [0]),
    (["é", "3 * 5", "", " = 15", "", "</think>"], [3]),
    (["3 * 5 = 15"], []), ([], [])])
def test_right_steps_end_with_these_tokens(pieces, expected):
    pieces = [piece.encode() for piece in pieces]
    assert Task().right_steps(PROBLEM, pieces) == expected


@pytest.mark.parametrize("ranges", [TINY, WIDE, FOUR])
def test_every_problem_has_a_solution_and_keeps_to_its_ranges(ranges):
    made = Task(**ranges)
    for problem in made.training_problems(0, 1, 12):
        assert len(problem.numbers) in made.counts and 1 <= problem.target <= made.max_target
        assert all(made.min_number <= n <= made.max_number for n in problem.numbers)
        every = joined([(n, str(n)) for n in problem.numbers], (), made.max_result)
        found = next(one.expression for one in every if one.value == problem.target)
        assert made.score(problem, f"<answer>{found}</answer>")["answer"] == 1


def test_problems_follow_from_seed_and_step():
    drawn = [tuple(Task(**TINY).training_problems(seed, step, 8))
             for seed, step in ((0, 1), (0, 1), (1, 1), (1, 2))]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_which_fifth_is_held_out():
    """Another fifth would be problems that models/tiny was made with. README and the
    page of its run show these: four that were evaluated, two that were trained on."""
    kept = [((2, 13, 9), 24), ((6, 8, 14), 34), ((4, 12, 10), 18), ((12, 9, 3), 9)]
    assert all(held_out(Problem(*asked)) for asked in kept)
    assert not held_out(Problem((12, 12, 11), 12)) and not held_out(Problem((11, 3, 9), 96))


def test_nothing_evaluated_was_ever_trained_on():
    problems = Task(**TINY)
    trained = {p for step in range(50) for p in problems.training_problems(0, step, 16)}
    evaluated = problems.held_out_problems(300)
    assert not any(map(held_out, trained)) and all(map(held_out, evaluated))
    assert len({(tuple(sorted(p.numbers)), p.target) for p in evaluated}) == 300
    assert evaluated == Task(**TINY).held_out_problems(300)


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
    assert not any(map(held_out, task.to_train))


def test_fewer_problems_than_asked_for_are_no_endless_search():
    assert len(Task(prompt="short", numbers="3", max_number=2).held_out_problems(20)) == 3


def labels(pieces):
    """Such as "think word" for each token."""
    section, kind = annotate(pieces)
    return [f"{SECTIONS[s]} {KINDS[k]}" for s, k in zip(section, kind)]


@pytest.mark.parametrize("pieces, expected", [
    ([b" try", b" 3", b" *", b" =", b"</think>", b"\n", b"<answer>", b" (", b" 3", b"</answer>",
      b"<|im_end|>"],
     ["think word", "think number", "think operator", "think bracket", "other tag", "other space",
      "other tag", "answer bracket", "answer number", "other tag", "other end"]),
    # tags in pieces, as Qwen's tokenizer has them, or glued to their neighbours: the token that
    # closes the opening tag and the one that opens the closing tag are outside of the section
    ([b"so", b"</", b"think", b">\n", b"<", b"answer", b">", b"3", b"+", b"</", b"answer", b">"],
     ["think word", *["other tag"] * 6, "answer number", "answer operator", *["other tag"] * 3]),
    ([b"x</think>\n<answer", b">3", b"+", b"5<", b"/answer>"],
     ["other tag", "other tag", "answer operator", "other tag", "other tag"]),
    ([b"a", b"b"], ["think word"] * 2), ([], []),
    ([b"a", b"<answer>", b"3"], ["think word", "other tag", "answer number"]),
    ([b"<answer>", b"3", b"</answer>", b" so", b"<answer>", b"4"],  # only the first is one
     ["other tag", "answer number", "other tag", "other word", "other tag", "other number"]),
    ([b"<think>", b"a", b"</think>", b"b"],
     ["other tag", "think word", "other tag", "other word"])])
def test_sections_and_kinds(pieces, expected):
    assert labels(pieces) == expected


def test_prompts_end_with_an_opened_think_and_are_chatml(learner):
    for form in ("short", "original", "full"):
        text = Task(prompt=form).prompt_for(PROBLEM)
        assert text.startswith("<|im_start|>") and text.endswith("<think>")
        assert "<|im_end|>\n<|im_start|>assistant\n" in text and "22" in text
    for word in ("3, 5, 7", "+", "-", "*", "/", "exactly once", "<answer>", "</answer>",
                 "</think>"):
        assert word in text
    tiny, text = load_tokenizer(learner), Task(prompt="short").prompt_for(PROBLEM)
    assert b"".join(token_bytes(tiny, encode_prompt(tiny, text, ""))).decode() == text


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
        assert not held_out(problem)
        if form != "expression":
            assert score["reasoning"] == 1  # what is tried first is computed rightly, too


def test_worked_examples_are_the_same_in_every_run_and_are_not_trained_on():
    task, again = Task(prompt="brief", **TWO), Task(prompt="brief", **TWO)
    assert task.head == again.head and task.head in task.prompt_for(Problem((4, 19), 76))
    trained = {(tuple(sorted(p.numbers)), p.target)
               for step in range(60) for p in task.training_problems(0, step, 50)}
    assert len(trained) > 500 and not trained & task.shown
    assert Task(prompt="brief", **TWO | {"examples": 0}).head == ""


@pytest.mark.parametrize("numbers", ["2", "3"])
def test_differences_and_quotients_are_shown_with_their_numbers_in_another_order(numbers):
    """Than that of the question: a model that only copies the order cannot solve half of them."""
    task = Task(prompt="expression", **TWO | {"numbers": numbers, "examples": 8})
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
    task = Task(prompt=form, examples=3)
    text = task.prompt_for(PROBLEM)
    assert text.count("<|im_start|>system") == system and text.count("<|im_start|>user") == 4
    assert text.startswith("<|im_start|>" + ("system" if system else "user"))
    alone = Task(prompt=form).prompt_for(PROBLEM)
    assert text.endswith(alone[alone.index("<|im_start|>user"):])


def test_every_other_example_tries_something_that_misses_first():
    task = Task(prompt="brief", **TWO | {"examples": 6})
    thoughts = re.findall("<think>(.+?)</think>", task.head)
    assert [" no, " in thought for thought in thoughts] == [True, False] * 3
    assert all(thought.endswith(" yes") for thought in thoughts)


@pytest.mark.parametrize("text, form, right", [
    ("4*19", 1, 1), ("4*19<|im_end|>", 1, 1), ("19 * 4<|im_end|>", 1, 1), ("4+19", 1, 0),
    ("76", 1, 0), ("4*19=76", 0, 0), ("4*19\n<|im_end|><|im_end|>", 0, 0), ("", 0, 0),
    ("<answer>4*19</answer>", 0, 0), ("4*19*1", 1, 0), ("4**19", 0, 0), ("4/0", 0, 0)])
def test_an_expression_alone_is_an_answer(text, form, right):
    task = Task(prompt="expression", reward_form="right", **TWO)
    expected = {"reward": right, "format": form, "answer": right, "reasoning": 0}
    assert task.score(Problem((4, 19), 76), text) == expected


def test_all_of_an_expression_is_in_the_answer_section():
    pieces = [b"4", b"*", b" ", b"1", b"(", b"so", b"<|im_end|>"]
    section, kind = Task(prompt="expression", **TWO).label(pieces)
    assert [SECTIONS[code] for code in section] == ["answer"] * 6 + ["other"]
    assert [KINDS[code] for code in kind] == [
        "number", "operator", "space", "number", "bracket", "word", "end"]


def test_examples_of_a_file_come_from_its_training_problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    made = Task(**TWO).training_problems(0, 1, 200) + Task(**TWO).held_out_problems(20)
    path.write_text("".join(json.dumps({"nums": p.numbers, "target": p.target}) + "\n"
                            for p in made))
    task = Task(data=str(path), prompt="expression", examples=4)
    trained = {(tuple(sorted(p.numbers)), p.target) for p in made if not held_out(p)}
    assert len(task.shown) == 4 and task.shown <= trained
    assert not task.shown & {(tuple(sorted(p.numbers)), p.target) for p in task.to_train}


def test_examples_have_few_numbers_also_where_problems_have_many(tmp_path):
    """Of thirty numbers not all expressions can be tried."""
    path = tmp_path / "problems.jsonl"
    many = [{"nums": [1] * 30, "target": target} for target in range(1, 200)]
    few = [{"nums": [a, b], "target": a + b} for a in range(2, 9) for b in range(2, 9)]
    path.write_text("".join(json.dumps(one) + "\n" for one in [*many, *few]))
    [(numbers, target)] = Task(data=str(path), prompt="expression", examples=1).shown
    assert len(numbers) == 2 and sum(numbers) == target


def test_an_operator_that_no_problem_needs_has_no_example():
    """Of 16 and 16 only sum, product and quotient are positive, and the quotient stays as given."""
    task = Task(prompt="expression", **TWO | {"min_number": 16, "max_number": 16})
    assert re.findall(r"\n16 (.) 16<", task.head) == ["+", "*"]


def test_examples_that_cannot_be_found_are_told(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"nums": [1] * 30, "target": t}) + "\n"
                            for t in range(1, 99)))
    with pytest.raises(UserError, match="--examples 2: none of 1,000 .* --examples 0 asks without"):
        Task(data=str(path), prompt="expression", examples=2)
    sums = [{"nums": [a, 40], "target": a + 40} for a in range(2, 12)]
    kept = [one for one in sums if held_out(Problem(tuple(one["nums"]), one["target"]))]
    [trained, *_] = [one for one in sums if one not in kept]
    path.write_text("".join(json.dumps(one) + "\n" for one in [*kept, trained]))
    assert kept
    with pytest.raises(UserError, match="--examples 1: .* has no other problems to train on"):
        Task(data=str(path), prompt="expression", examples=1)
