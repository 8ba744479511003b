"""Tasks of one's own in examples/: a file that has nothing but a reward is trained on and analysed;
a task of several turns."""
import runpy

import numpy as np
import pytest

from analyze import Run, gains
from conftest import ROOT
from lab.harness.tasks import CheckedTask, load_task
import lab.tools.page as analyze
from lab_runs import run
from runs import lines


@pytest.mark.parametrize("name", ["own_reward", "hackable", "question_answer",
                                  "higher_lower"])
def test_an_example_that_is_no_program_says_how_it_is_started(name):
    """As a file it would not find the project's other files."""
    with pytest.raises(SystemExit, match="start it with: python -m lab train "):
        runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")


def test_no_table_has_a_column_for_a_format(tmp_path, capsys, undrawn):
    folder = tmp_path / "run"
    run("--task", "examples.own_reward", "--questions", "2", "--answers", "4", "--steps", "1",
        "--eval_tasks", "8", "--out", folder)
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    assert "solved" in printed and "format" not in printed
    assert ">format<" not in (folder / "analysis/page.html").read_text()


def test_a_reward_of_any_number_is_evaluated_shown_and_resumed(tmp_path):
    """It never reaches 1. So no answer is called right, and the held-out reward takes the place of
    success: on the screen, in the record, in the table of a run, also after --resume."""
    short = ["--task", "lab.tests.pays_any_number", "--questions", "2", "--answers", "2",
             "--eval_tasks", "6", "--max_new_tokens", "30", "--threads", "1"]
    printed = run(*short, "--steps", "2", "--out", tmp_path / "run").stdout
    assert "0.0%)" not in printed and "  right  " not in printed and "  wrong  " not in printed
    record = Run(tmp_path / "run")
    assert record.measure == "reward" and {line["success"] for line in record.metrics} == {None}
    first, *_ = record.evaluations
    mean, spread = np.mean(first["reward"]), np.std(first["reward"], ddof=1)
    assert first["reward_mean"] == pytest.approx(mean)
    assert first["reward_high"] == pytest.approx(mean + 1.959964 * spread / 6 ** 0.5)
    assert f"reward {mean:.3f} (95% interval {first['reward_low']:.3f} to" in printed
    [row, _] = gains(record).rows
    assert gains(record).title.startswith("Held-out reward") and row[3] == f"{mean:.3f}"
    run("--resume", tmp_path / "run", "--steps", "3")
    assert [line["success"] for line in lines(tmp_path / "run/metrics.jsonl")] == [None] * 3


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
