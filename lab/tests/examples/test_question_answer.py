"""A data set of one's own: what a line may hold, when an answer is right, what is trained on."""
import json
import sys
from fractions import Fraction

import pytest
from conftest import ROOT, refusal

from lab.countdown import Problem as Countdown
from lab.countdown import Task as CountdownTask
from lab.engine.tokens import ANSWER, NUMBER, OTHER, THINK
from examples import hackable
from examples.question_answer import (ASKS, final_answer, formula_of, label, number_of, parsed,
                                      plain_text)
from lab.harness.build import load_policy
from lab.harness.settings import make_settings
from lab.harness.tasks import load_task

Task = load_task("examples.question_answer")


def asked_in(problem):
    return problem["messages"][-1]["content"]


@pytest.fixture
def file(tmp_path):
    """A file of these rows; of 50 questions about numbers if there are none."""
    def write(*rows):
        rows = rows or [{"question": f"Is {i}?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}. "
                                                           f"#### {i + 1}"} for i in range(50)]
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)
    return write


@pytest.mark.parametrize("final, number", [
    ("42", 42), ("$1,250", 1250), ("-3", -3), ("7.00", 7), ("7.5", Fraction(15, 2)),
    ("forty", None), ("42.", 42), ("1,250.", 1250), ("3,4", None), ("12,", 12), ("36 rolls.", 36),
    ("1/2", None), ("**36**", 36), ("\\(36\\)", 36), ("\\$36", 36), ("1e+20", None), ("", None),
    ("1234567", 1234567), ("x = 3", None), ("7.005", Fraction(1401, 200)), ("42 eggs", 42),
    ("5%", 5), ("5 \\%.", 5), (".5", Fraction(1, 2)), ("+5", 5), ("\u22125", -5), ("5m", 5),
    ("36\\text{ cm}", 36), ("-$5", -5), ("36. So he has enough", 36), ("36 ####", 36),
    *((text, None) for text in (
        "12:45", "10-12", "3 1/2", "3\u00bd", "2\\sqrt{3}", "5 000", "1'000", "5^2", "5\u00b2",
        "7!", "0x10", "5\\pi", "2025-01-02", "7 or 8", "5e3", "3/4", "1,25", "5 + x", "5=5"))])
def test_the_number_of_an_answer(final, number):
    assert number_of(final) == number


@pytest.mark.parametrize("final, formula", [
    ("36", Fraction(36)), ("1,000", Fraction(1000)), ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("$\\left( 3, 4 \\right)$", "(3,4)"), ("x + 1", "x+1"), ("0.50", Fraction(1, 2)), (" ", None)])
def test_the_formula_of_a_box(final, formula):
    assert formula_of(final) == formula


def test_texts_are_compared_without_case_spaces_and_marks():
    assert plain_text(" **New  York**. ") == "new york" and plain_text("...") is None


@pytest.mark.parametrize("text, is_boxed, final", [
    ("so #### 42", False, "42"), ("#### 42 #### 43\nand more", False, "42 #### 43"),
    ("is \\boxed{\\frac{1}{2}} or", False, "\\frac{1}{2}"), ("\\boxed{1} \\boxed{2}", True, "2"),
    ("\\boxed{1} #### 2", True, "1"), ("\\boxed{1} #### 2", False, "2"), ("\\boxed{1", True, None),
    ("#### 2", True, "2"), ("42", False, None)])
def test_where_an_answer_ends(text, is_boxed, final):
    assert final_answer(text, is_boxed) == final


@pytest.mark.parametrize("match, answer, text, score", [
    ("number", "42", "14 + 28 #### 42<|im_end|>", (1, 1)), ("number", 42, "#### 42 eggs.", (1, 1)),
    ("number", "x #### 36", "so \\boxed{36}", (1, 1)), ("number", "36", "36", (0, 0)),
    ("number", "36", "#### 36 #### 36", (1, 0)), ("number", "36", "#### 37", (0, 1)),
    ("number", "36", "#### many", (0, 0)), ("number", 0.5, "#### .5", (1, 1)),
    ("number", "12", "#### 12:30", (0, 0)),
    ("exact", "Paris", "It is #### paris.", (1, 1)), ("exact", "Paris", "#### London", (0, 1)),
    ("exact", "Paris", "Paris", (0, 0)),
    ("boxed", "\\frac{1}{2}", "\\boxed{\\dfrac{1}{2}}", (1, 1)),
    ("boxed", 36, "\\boxed{36.0}", (1, 1)),
    ("boxed", "so \\boxed{36}", "#### 36", (1, 1)), ("boxed", "36", "\\boxed{}", (0, 0))])
def test_when_an_answer_is_right(file, match, answer, text, score):
    task = Task(data=file({"prompt": "a", "answer": answer}, {"prompt": "b", "answer": answer}),
                match=match)
    found = task.score(task.to_train[0], text)
    assert (found["answer"], found["format"]) == score and found["reward"] == found["answer"]


def test_a_question_is_told_how_to_answer_and_a_prompt_is_asked_as_it_is(file):
    task = Task(data=file({"question": " a ", "answer": 1}, {"prompt": "b", "answer": 1},
                          {"question": "c", "answer": 1}))
    asked = {asked_in(problem) for problem in task.to_train + task.to_test}
    assert asked == {f"a {ASKS['number']}", "b", f"c {ASKS['number']}"}
    shown = {task.show(problem) for problem in task.to_train + task.to_test}
    assert shown == {"a", "b", "c"} and asked_in(task.read(["b"])) == "b"
    assert "d is none of the problems of" in refusal(task.read, ["d"])


def test_twins_are_one_question_and_on_one_side_of_the_split(file):
    """Those with other white space, and a prompt that is a question."""
    rows = [{kind: text, "answer": i} for i in range(50) for kind, text in (
        ("question", f"Is {i}?"), ("question", f"Is\n {i}? "), ("prompt", f"Is  {i}?"))]
    task = Task(data=file(*rows))
    sides = [{task.show(problem) for problem in side} for side in (task.to_test, task.to_train)]
    assert list(map(len, sides)) == [10, 40] and not sides[0] & sides[1]
    assert len(task.to_test + task.to_train) == 50


def test_solved_questions_are_earlier_turns_and_are_not_trained_on(file):
    path = file()
    task = Task(data=path, examples=4)
    assert (len(task.to_test), len(task.to_train)) == (10, 36)
    plain = [asked_in(problem) for problem in Task(data=path).held_out_problems(10)]
    assert [asked_in(problem) for problem in task.held_out_problems(10)] == plain
    problem = task.held_out_problems(3)[2]
    *turns, question, end = task.prompt_for(problem).split("<|im_start|>")
    assert question == f"user\n{asked_in(problem)}<|im_end|>\n" and end == "assistant\n"
    shown = {*turns[1::2]}
    number = int(turns[1].split("Is ")[1].split("?")[0]) + 1
    assert turns[2] == f"assistant\nIt is {number}. #### {number}<|im_end|>\n" and len(turns) == 9
    every = {f"user\n{asked_in(one)}<|im_end|>\n" for one in task.to_train + task.to_test}
    assert len(shown) == 4 and not shown & every and len(every) == 46
    assert task.training_problems(1, 2, 8) == Task(data=path, examples=4).training_problems(1, 2, 8)


@pytest.mark.parametrize("rows, flags, said", [
    ([{"question": "a", "answer": "so #### ✓ 1"}] * 2, {},
     "line 1: --match number finds no answer at the start of '✓ 1'"),
    ([{"q": "a"}], {}, 'line 1: expected {"question": "...", "answer": "..."}'),
    (["text"], {}, "line 1: expected"), ([{"question": "", "answer": 1}], {}, "line 1: expected"),
    ([{"question": "a", "answer": True}], {}, "line 1: expected"),
    ([{"question": "a", "answer": 1}, {"question": "a", "answer": 2}], {},
     "has two answers to 'a'"),
    ([{"question": "a", "answer": 1}] * 3, {}, "has 1 different questions, of which --examples"),
    ([{"question": str(i), "answer": i} for i in range(5)], {"examples": 4},
     "One is needed to train on")])
def test_what_is_refused(file, rows, flags, said):
    assert said in refusal(lambda: Task(data=file(*rows), **flags))


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "Is 3?"}]


@pytest.mark.parametrize("row, match, asked", [
    ({"problem": "Is 3?", "solution": "so \\boxed{4}"}, "boxed", f"Is 3? {ASKS['boxed']}"),
    ({"question": "Is 3?", "answer": 4, "solution": "many"}, "number", f"Is 3? {ASKS['number']}"),
    ({"prompt": MESSAGES, "answer": "4"}, "number", "Is 3?"),
    ({"prompt": MESSAGES, "reward_model": {"ground_truth": "4"}}, "number", "Is 3?")])
def test_other_names_of_columns_and_messages(row, match, asked):
    found = parsed(row, "row 1", match)
    assert asked_in(found) == asked and found["answer"] == "4"
    assert found["messages"] == row.get("prompt", [{"role": "user", "content": asked}])


def test_a_parquet_file_holds_the_same_rows(file, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines, path = file(), tmp_path / "rows.parquet"
    with open(lines) as read:
        rows = list(map(json.loads, read))
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    assert Task(data=str(path)).to_train == Task(data=lines).to_train
    path.write_bytes(path.read_bytes()[:-9])
    for name in (path, tmp_path / "nowhere.parquet"):
        assert f"cannot read {name}: " in refusal(lambda: Task(data=str(name)))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refusal(lambda: Task(data=str(path))).endswith("pip install pyarrow")


def test_without_a_file_and_with_another_task_it_is_said_what_to_type(file):
    assert "needs --data FILE" in refusal(Task)
    assert "--task examples.question_answer reads questions with answers" in refusal(
        lambda: CountdownTask(data=file()))


def test_the_prompt_is_that_of_the_models_chat_template(file, tmp_path):
    """Of the model that is loaded. models/tiny has none."""
    path = file({"prompt": " 3 5 7", "answer": 1}, {"prompt": " 5 7", "answer": 1})
    flags = {"task": "examples.question_answer", "data": path}
    tiny = load_policy(make_settings({**flags, "model": str(ROOT / "models/tiny")})).task
    [problem] = tiny.to_train
    assert tiny.prompt_for(problem) == (f"<|im_start|>user\n{asked_in(problem)}<|im_end|>\n"
                                        "<|im_start|>assistant\n")
    folder = tmp_path / "model"
    folder.mkdir()
    for one in (ROOT / "models/tiny").iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}<think>")
    task = load_policy(make_settings({**flags, "model": str(folder)})).task
    assert task.prompt_for(problem) == (f"<|im_start|>user\n{asked_in(problem)}<|im_end|>\n"
                                        "<think>")


def test_sections_of_an_answer():
    sections, kinds = label(["2", " ##", "##", " ", "4", "<|im_end|>"])
    assert sections == [THINK, OTHER, OTHER, ANSWER, ANSWER, OTHER] and kinds[0] == NUMBER
    sections, _ = label(["so", " \\", "boxed", "{", "4", "}"])
    assert sections == [THINK, THINK, OTHER, THINK, ANSWER, ANSWER]


def test_the_hole_pays_a_claim_and_success_does_not():
    task, problem = hackable.Task(), Countdown((3, 5, 7), 22)
    cheat = task.score(problem, " 3 * 5 = 22 hit.</think>\n<answer> 3 * 5</answer>")
    assert (cheat["reward"], cheat["answer"]) == (1.0, 0.0)
    assert task.score(problem, " 3 * 5 = 221</think>")["reward"] == 0.0
