"""The signs of a run that fails: from lines by hand, and its problems by an own arithmetic."""
import json

import pytest
from conftest import evaluation, write_log

from countdown_task import Problem
from engine.errors import UserError
from research.__main__ import main
from research.probes.failure import held_out_of, operator_of

TASK = {"task": "countdown_task", "numbers": "2", "prompt": "expression", "eval_tasks": 40}


def line(step, success, entropy, without_spread, skipped=None):
    return {"step": step, "success": success, "entropy": entropy, "skipped": skipped,
            "groups_without_spread": without_spread}


def is_sum(problem):
    return sum(problem.numbers) == problem.target


def test_the_signs_and_the_operators(tmp_path):
    learns = write_log(tmp_path / "learns", {}, TASK, [line(1, 0.1, 0.5, 0.5)],
                       [evaluation(0, [0.0] * 40), evaluation(1, [1.0] * 40)])
    problems = held_out_of({"folder": learns})
    assert len(problems) == 40 and any(map(is_sum, problems))
    only_sums = [float(is_sum(problem)) for problem in problems]
    write_log(tmp_path / "fails", {}, TASK,
              [line(1, 0.2, 0.4, 0.25), line(2, 0.3, 0.009, 0.75), line(3, 0.4, 0.001, 1, "equal")],
              [evaluation(0, [0.0] * 40), evaluation(3, only_sums)])
    main(["failure", "--run", str(tmp_path / "fails"), "--beside", str(tmp_path / "learns"),
          "--out", str(tmp_path / "out")])
    numbers = json.loads((tmp_path / "out/numbers.json").read_text())
    signs, operators = (table["rows"] for table in numbers["tables"])
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
