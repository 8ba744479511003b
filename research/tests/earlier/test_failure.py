"""The signs of a run that fails: from lines by hand, and its problems by an own arithmetic; and the
answer to every problem that solves the most of them by luck."""
import json
from types import SimpleNamespace

import pytest
from conftest import evaluation, write_log

from analysis.runs import read_run
from countdown_task import Problem, Task
from engine.errors import UserError
from research.__main__ import main
from research.earlier import failure
from research.earlier.failure import (best_blind_answer, blind_answer, blind_table, held_out_of,
                                     measure, operator_of)

TASK = {"task": "countdown_task", "numbers": "2", "prompt": "expression", "eval_tasks": 40}


def line(step, success, entropy, without_spread, skipped=None):
    return {"step": step, "success": success, "entropy": entropy, "skipped": skipped,
            "groups_without_spread": without_spread}


def is_sum(problem):
    return sum(problem.numbers) == problem.target


def test_the_signs_and_the_operators(tmp_path):
    learns = write_log(tmp_path / "learns", {}, TASK, [line(1, 0.1, 0.5, 0.5)],
                       [evaluation(0, [0.0] * 40), evaluation(1, [1.0] * 40)])
    problems = held_out_of(read_run(learns))
    assert len(problems) == 40 and any(map(is_sum, problems))
    only_sums = [float(is_sum(problem)) for problem in problems]
    write_log(tmp_path / "fails", {}, TASK,
              [line(1, 0.2, 0.4, 0.25), line(2, 0.3, 0.009, 0.75), line(3, 0.4, 0.001, 1, "equal")],
              [evaluation(0, [0.0] * 40), evaluation(3, only_sums)])
    main(["failure", "--run", str(tmp_path / "fails"), "--beside", str(tmp_path / "learns"),
          "--out", str(tmp_path / "out")])
    numbers = json.loads((tmp_path / "out/numbers.json").read_text())
    signs, operators, blind = (table["rows"] for table in numbers["tables"])
    assert blind[0]["solved by it"] >= sum(only_sums)  # the answer a + b is one of those tried
    assert blind[0]["after"] == sum(only_sums)
    fails, learned = signs
    assert (fails["certain"], fails["skipped"], fails["success at the end"]) == (2, 1, 0.4)
    assert (learned["certain"], learned["skipped"]) == (None, 0)
    assert numbers["values"]["fails"]["entropy"] == [0.4, 0.009, 0.001]

    assert sum(row["problems"] for row in operators) == 40
    for row in operators:
        assert row["learns, before"] == 0 and row["learns, after"] == row["problems"]
        if row["operator"] == "+":
            assert row["fails, after"] == row["problems"]
        elif row["operator"] != "several":  # 2 + 2 is 2 * 2
            assert row["fails, after"] == 0


@pytest.mark.parametrize("numbers, target, operator", [
    ((3, 5), 8, "+"), ((3, 5), 2, "-"), ((5, 3), 15, "*"), ((3, 15), 5, "/"),
    ((2, 2), 4, "several"), ((4, 2), 2, "several")])
def test_the_operator_that_a_problem_needs(numbers, target, operator):
    assert operator_of(Problem(numbers, target)) == operator


def test_two_runs_are_needed(tmp_path):
    run = write_log(tmp_path / "run", {}, TASK, [line(1, 0.1, 0.5, 0.5)])
    with pytest.raises(UserError, match="are both"):
        main(["failure", "--run", str(run), "--beside", str(run), "--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match="no finished step"):
        main(["failure", "--run", str(write_log(tmp_path / "new", {}, TASK)), "--beside", str(run),
              "--out", str(tmp_path / "out")])


def test_two_runs_of_one_name_are_two_runs(tmp_path):
    """As the runs of two arms with the same seed."""
    for arm, success in (("a", 0.1), ("b", 0.2)):
        write_log(tmp_path / arm / "s0", {}, TASK, [line(1, success, 0.5, 0.5)])
    found = measure(SimpleNamespace(run=str(tmp_path / "a/s0"), beside=str(tmp_path / "b/s0")),
                    tmp_path)
    assert [row[:3] for row in found.tables[0].rows] == [
        (str(tmp_path / "a/s0"), 1, 0.1), (str(tmp_path / "b/s0"), 1, 0.2)]


def test_what_another_trainer_does_not_say_is_not_known(tmp_path):
    own = write_log(tmp_path / "own", {}, {}, [line(1, 0.1, 0.5, 0.5)])
    other = write_log(tmp_path / "other", {}, {"trainer": "trl"}, [{"step": 1, "reward": 0.5}])
    [table] = measure(SimpleNamespace(run=str(other), beside=str(own)), tmp_path).tables
    assert table.rows[0] == ("other", 1, *[None] * 8)
    assert table.finding == "own: 0 of 1 steps made no update."


@pytest.mark.parametrize("change", ["another", "gone", "fewer", None])
def test_problems_that_have_changed_since_the_run_are_not_counted(tmp_path, change):
    """The file has as many problems as before; the evaluations recorded one of the old ones."""
    def write(first):
        lines = [json.dumps({"nums": [3, number], "target": 3 + number})
                 for number in range(first, first + 40)]
        path.write_text("\n".join(lines))

    path = tmp_path / "problems.jsonl"
    write(1)
    config = {"task": "countdown_task", "data": str(path), "eval_tasks": 3}
    task = Task(data=str(path))
    shown = [{"problem": task.show(problem)} for problem in task.held_out_problems(3)]
    lines = [evaluation(step, [0, 0, 1]) | {"shown": shown} for step in (0, 1)]
    for name in ("a", "b"):
        write_log(tmp_path / name, {}, config, [line(1, 0.1, 0.5, 0.5)], lines)
    if change == "another":
        write(41)
    elif change == "gone":
        path.unlink()
    elif change == "fewer":
        path.write_text("\n".join(path.read_text().split("\n")[:8]))
    found = measure(SimpleNamespace(run=str(tmp_path / "a"), beside=str(tmp_path / "b")), tmp_path)
    assert ("is not known: " in " ".join(found.intro)) == (change is not None)
    assert len(found.tables) == (1 if change else 3)


def test_an_evaluation_before_training_says_nothing_about_after_it(tmp_path):
    """A run that was stopped before its second evaluation."""
    for name in ("a", "b"):
        write_log(tmp_path / name, {}, TASK, [line(1, 0.1, 0.5, 0.5)],
                  [evaluation(0, [0.0] * 40), evaluation(0, [0.0] * 40, "greedy")])
    found = measure(SimpleNamespace(run=str(tmp_path / "a"), beside=str(tmp_path / "b")), tmp_path)
    assert [table.name for table in found.tables] == ["signs"]


PROBLEMS = [Problem((4, 9), 13), Problem((9, 4), 5), Problem((4, 9), 36), Problem((2, 3, 5), 0),
            Problem((2, 3, 4), 3), Problem((7, 2, 1), 4)]


def test_the_best_blind_answer_is_found():
    """a - b + c solves 5 = 9 - 4 and 3 = 2 - 3 + 4, and a - b - c 5 and 4 = 7 - 2 - 1; a + b - c
    solves 13 and 0 alone. The first of the best is taken."""
    solved = [True, False, False, True, False, False]
    assert best_blind_answer(PROBLEMS) == ("a + b - c", solved)


@pytest.mark.parametrize("numbers, written", [
    ((2, 3, 5, 7), "2 - 3 * 5 + 7"), ((2, 3, 5), "2 - 3 * 5"), ("ab", "a - b")])
def test_a_problem_of_fewer_numbers_takes_the_first_operators(numbers, written):
    assert blind_answer(numbers, "-*+") == written


def test_what_a_model_solves_is_compared_with_it(monkeypatch):
    """Before, the model solves one problem of another kind. After, it solves what a + b - c
    solves, and one more."""
    monkeypatch.setattr(failure, "held_out_of", lambda run: PROBLEMS)
    lines = [{"step": step, "mode": "sampled", "answer": answer}
             for step, answer in ((0, [0, 1, 0, 0, 0, 0]), (9, [1, 1, 0, 1, 0, 0]))]
    table = blind_table({"x": {"evaluations": lines}})
    assert table.rows == [("x", "a + b - c", 6, 2, 1, 3, 5)]


@pytest.mark.parametrize("nums, tables", [
    ([3, 5, 7], ["signs", "operators", "blind"]), ([5], ["signs"]), ([1] * 5, ["signs"]),
    ([1] * 30, ["signs"])])
def test_problems_of_which_not_all_expressions_can_be_tried_get_no_table(tmp_path, nums, tables):
    """A number alone has no operator, and 30 numbers have 4 ** 29 blind answers."""
    lines = [json.dumps({"nums": nums, "target": target}) for target in range(1, 60)]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    config = {"task": "countdown_task", "data": str(tmp_path / "problems.jsonl"), "eval_tasks": 3}
    step = {"step": 1, "success": 0.5, "entropy": 0.4, "groups_without_spread": 0.5,
            "skipped": None}
    evaluations = [evaluation(0, [0, 0, 1]), evaluation(1, [0, 1, 1])]
    for name in ("a", "b"):
        write_log(tmp_path / name, {}, config, [step], evaluations)
    args = SimpleNamespace(run=str(tmp_path / "a"), beside=str(tmp_path / "b"))
    findings = measure(args, tmp_path)
    assert [table.name for table in findings.tables] == tables
    assert ("too many expressions" in " ".join(findings.intro)) == (len(tables) == 1)
