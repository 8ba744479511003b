"""How a run fails: the answer to every problem that solves the most of them by luck."""
import pytest

from countdown_task import Problem
from research.probes import failure
from research.probes.failure import best_blind_answer, blind_answer, blind_table

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
