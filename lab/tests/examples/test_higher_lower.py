"""The task of several turns for a real model: prompts, replies and rewards by hand."""
import pytest

from lab.harness.tasks import CheckedTask, load_task


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
