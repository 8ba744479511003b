"""The two tasks of several turns for a real model: prompts, replies and rewards by hand."""
import pytest

from lab.countdown import Problem
from lab.harness.tasks import CheckedTask, load_task


def calculator(**flags):
    return CheckedTask(load_task("examples.calculator")(**flags))


@pytest.fixture(scope="module")
def game():
    return CheckedTask(load_task("examples.higher_lower")())


@pytest.mark.parametrize("turns, said, reward", [
    (["8"], "higher", 0), ([" 15.\n"], "lower", 0), (["8", "15", "12"], None, 1),
    (["I guess 12"], None, 0), (["12 or 13"], None, 0), ([""], None, 0),
    (["1", "2", "3", "4", "5"], None, 0), (["1", "2", "3", "4", "12"], None, 1)])
def test_a_number_is_higher_or_lower(game, turns, said, reward):
    problem = {"prompt": "x", "number": 12, "game": 3}
    reply = game.reply(problem, turns)
    assert (reply is None) if said is None else f"<|im_start|>user\n{said}<|im_end|>" in reply
    assert game.score(problem, turns)["reward"] == reward


def test_all_games_begin_alike_and_none_is_trained_on_and_held_out(game):
    held_out = game.held_out_problems(40)
    trained = game.training_problems(0, 1, 40)
    assert len({game.prompt_for(problem) for problem in (*held_out, *trained)}) == 1
    assert len({problem["number"] for problem in trained}) > 10


@pytest.mark.parametrize("turns, said, reward", [
    (["calculate 3 * 5"], "15", 0), (["calculate 1 / 3"], "1/3", 0),
    (["calculate 3 ** 9"], "no expression", 0), (["calculate"], "no expression", 0),
    (["calculate 3 * 5", "answer 3 * 5 + 7"], None, 1), (["answer 3 * 5 + 7"], None, 1),
    (["answer 3 * 5"], None, 0), (["3 * 5 + 7"], None, 0),
    (["calculate 1"] * 4, "1", 0), (["calculate 1"] * 5, None, 0)])
def test_a_calculator_answers(turns, said, reward):
    task, problem = calculator(), Problem((3, 5, 7), 22)
    reply = task.reply(problem, turns)
    if said is None:
        assert reply is None
    else:
        assert reply == f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert task.score(problem, turns)["reward"] == reward


def test_the_prompt_shows_the_form_with_and_without_the_tool():
    problem = Problem((3, 5), 15)
    shown = calculator().prompt_for(problem)
    assert shown.endswith("user\nMake 15 from 3 and 5.<|im_end|>\n<|im_start|>assistant\n")
    assert ("assistant\ncalculate 15 + 7<|im_end|>\n<|im_start|>user\n22<|im_end|>\n"
            "<|im_start|>assistant\nanswer 3 * 5 + 7<|im_end|>\n") in shown
    without = calculator(calculator="no")
    assert "calculate" not in without.prompt_for(problem)
    assert without.reply(problem, ["calculate 3 * 5"]) is None
