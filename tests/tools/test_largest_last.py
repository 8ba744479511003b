"""The second task: its score by hand, its split, and a run that is analysed."""
import itertools
import json

import pytest

import analyze
import train
from conftest import ROOT
from engine.tokens import encode_prompt, load_tokenizer
from runs import SHORT
from tools.largest_last import Task, is_held_out

TINY = ROOT / "models" / "tiny"


def parts(response, problem=(3, 12, 7)):
    score = Task().score(problem, response)
    return score["reward"], score["format"], score["answer"]


@pytest.mark.parametrize("response, reward, well_formed, right", [
    (" hmm.</think>\n<answer> ( 7 - 3 ) + 12</answer><|im_end|>", 1.1, 1, 1),
    (" hmm.</think>\n<answer>3, 7, 12</answer>", 1.1, 1, 1),
    (" hmm.</think>\n<answer> ( 12 + 3 ) + 7</answer><|im_end|>", 0.1, 1, 0),
    (" hmm.</think>\n<answer> 7 12</answer>", 0.1, 1, 0),             # one is missing
    (" hmm.</think>\n<answer> 3 7 7 12</answer>", 0.1, 1, 0),         # one too many
    (" hmm.</think>\n<answer> 37 12</answer>", 0.1, 1, 0),
    (" hmm.</think>\n<answer></answer>", 0.1, 1, 0),
    ("<answer>3 7 12</answer>", 1.0, 0, 1),                           # the thinking did not end
    ("<answer>3 7 12</answer></think>", 1.0, 0, 1),                   # or too late
    (" hmm.</think>\n<answer> 3 7 12", 0.0, 0, 0),                    # cut off
    ("", 0.0, 0, 0),
    ("</think><answer>3 7 12</answer><answer>3</answer>", 1.1, 1, 1),  # the first one counts
    ("\x00é\ud83d<answer>" + "9" * 5000, 0.0, 0, 0),
])
def test_the_score_by_hand(response, reward, well_formed, right):
    assert parts(response) == (pytest.approx(reward), well_formed, right)


def test_nothing_held_out_is_ever_trained_on():
    task = Task()
    held_out = {tuple(sorted(problem)) for problem in task.held_out_problems(1000)}
    trained = {tuple(sorted(problem)) for step in range(300)
               for problem in task.training_problems(0, step, 16)}
    assert len(held_out) > 50 and len(trained) > 300 and not held_out & trained
    assert all(len(set(problem)) == 3 for problem in held_out | trained)
    for order in itertools.permutations((3, 12, 7)):
        assert is_held_out(order) == is_held_out((3, 7, 12))


def test_problems_follow_from_seed_and_step_and_the_held_out_ones_from_nothing():
    first = Task().training_problems(0, 5, 8)
    assert first == Task().training_problems(0, 5, 8)
    assert first not in (Task().training_problems(0, 6, 8), Task().training_problems(1, 5, 8))
    assert Task().held_out_problems(20) == Task().held_out_problems(40)[:20]
    assert len(set(Task().held_out_problems(200))) == 200


@pytest.mark.parametrize("flags", [{}, {"count": 2, "largest": 75}, {"count": 5, "largest": 30}])
def test_the_tiny_model_can_spell_every_prompt(flags):
    task, tokenizer = Task(**flags), load_tokenizer(TINY)
    for problem in [*task.extreme_problems(), *task.training_problems(0, 1, 50)]:
        assert len(problem) == task.count
        assert encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
    assert task.prompt_for((3, 12, 7)[:task.count]).endswith("<think>")


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_on_record_and_analysed(tmp_path, capsys):
    """It can be told from one of Countdown, whose labels it has."""
    train.main([*SHORT, "--task", "tools.largest_last", "--steps", "1", "--eval_every", "1",
                "--eval_tasks", "6", "--out", str(tmp_path / "run")])
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["task"] == "tools.largest_last" and config["reward"].startswith("largest last")
    assert config["count"] == 3 and "max_target" not in config
    analyze.main([str(tmp_path / "run")])
    assert "held-out" in capsys.readouterr().out.lower()
    sections, kinds = Task().label([b" hmm", b"</think>", b"\n", b"<answer>", b" 12", b"</answer>"])
    assert sections == [1, 0, 0, 0, 2, 0] and kinds == [0, 5, 1, 5, 2, 5]
