"""A task of reasoning-gym: what is asked, and how an answer is scored."""
import sys

import pytest
from conftest import refusal

from lab.harness.tasks import CheckedTask, load_task

Task = load_task("examples.reasoning_gym_task")


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert refusal(Task) == "this task needs a package: pip install reasoning-gym"


@pytest.mark.parametrize("partial, near", [(False, 0), (True, 0.5)])
def test_a_task_of_the_package(partial, near):
    pytest.importorskip("reasoning_gym")
    task, again = (CheckedTask(Task(name="simple_equations", size=54, partial=partial))
                   for _ in range(2))
    assert (len(task.to_test), len(task.to_train)) == (10, 40)  # four are shown
    problem = task.held_out_problems(3)[2]
    assert problem == again.held_out_problems(3)[2]
    *turns, last = task.prompt_for(problem).split("<|im_start|>user\n")[1:]
    assert last.endswith("</answer>.<|im_end|>\n<|im_start|>assistant\n") and len(turns) == 4
    shown = {turn.split("<|im_end|>")[0] for turn in turns}
    every = {task.show(one) for one in task.to_test + task.to_train}
    assert all("assistant\n<answer>" in turn for turn in turns)
    assert not {" ".join(text.split()) for text in shown} & every
    assert task.read(task.show(problem).split()) == problem
    right = problem["entry"]["answer"]
    scores = [task.score(problem, text)["reward"] for text in (
        f"so <answer> {right} </answer><|im_end|>", f"<answer>{right}{'1' * len(right)}</answer>",
        right, "<answer></answer>")]
    assert scores == [1, near, 0, 0]


@pytest.mark.parametrize("flags, said", [
    ({"name": "simple_equation"}, "Did you mean simple_equations?"),
    ({"name": "simple_equations", "options": '{"min_terms": 9}'}, "--options"),
    ({"options": "{"}, "--options"),
    # one draws from Python's own random numbers, the other from the order of a set
    ({"name": "list_functions"}, "another process makes other problems of the same seed"),
    ({"name": "ransom_note"}, "another process makes other problems of the same seed")])
def test_what_is_refused(flags, said):
    pytest.importorskip("reasoning_gym")
    assert said in refusal(lambda: Task(**flags))


def test_an_answer_on_which_the_package_fails_earns_nothing():
    pytest.importorskip("reasoning_gym")
    task = Task(name="prime_factorization", size=9)
    assert task.score(task.to_test[0], "<answer>I do not know</answer>")["reward"] == 0
