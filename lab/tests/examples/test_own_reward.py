"""Tasks of one's own in examples/: a file that has nothing but a reward is trained on and analysed;
a task of several turns; reasoning-gym."""
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from analyze import Run, gains
from conftest import ROOT, refusal
from lab.harness.tasks import CheckedTask, load_task
import lab.tools.page as analyze
from lab_runs import run
from runs import lines


@pytest.mark.parametrize("name", ["own_reward", "hackable", "question_answer",
                                  "higher_lower", "reasoning_gym_task"])
def test_an_example_that_is_no_program_says_how_it_is_started(name):
    """As a file it would not find the project's other files."""
    with pytest.raises(SystemExit, match="start it with: python -m lab train "):
        runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")


def test_no_table_has_a_column_for_a_format(tmp_path, capsys):
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


Task = load_task("examples.reasoning_gym_task")


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    for name, said in (("reasoning_gym", "reasoning-gym"), ("cellpylib", "cellpylib")):
        package = SimpleNamespace(find_spec=lambda wanted, *_: (_ for _ in ()).throw(
            ModuleNotFoundError(name=name)) if wanted == "reasoning_gym" else None)
        monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
        monkeypatch.setattr(sys, "meta_path", [package, *sys.meta_path])
        assert refusal(Task) == f"this task needs a package: pip install {said}"


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
