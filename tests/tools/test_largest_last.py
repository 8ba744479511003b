"""The second task: its score by hand, its split, and a run that learns, resumes and is analysed."""
import itertools
import json

import pytest

import analyze
import train
from engine.errors import UserError
from conftest import ROOT
from harness.command_line import read_flags
from harness.settings import make_settings
from engine.tokens import encode_prompt, load_tokenizer
from runs import lines
from tools.largest_last import Task, is_held_out

TINY = ROOT / "models" / "tiny"
SMALL = [
    "--task", "tools.largest_last", "--questions", "2", "--answers", "4", "--max_new_tokens", "40",
    "--threads", "1", "--steps", "2", "--eval_every", "2", "--eval_tasks", "6",
    "--checkpoint_every", "1", "--sample_every", "0"
]


def parts(text, problem=(3, 12, 7)):
    score = Task().score(problem, text)
    return score["reward"], score["format"], score["answer"]


@pytest.mark.parametrize("text, reward, well_formed, right", [
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
    (" hmm. 3 7 12", 0.0, 0, 0),
    ("", 0.0, 0, 0),
    ("</think><answer>3 7 12</answer><answer>3</answer>", 1.1, 1, 1),  # the first one counts
    ("\x00é\ud83d<answer>" + "9" * 5000, 0.0, 0, 0),
])
def test_the_score_by_hand(text, reward, well_formed, right):
    assert parts(text) == (pytest.approx(reward), well_formed, right)


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
    task = Task()
    assert task.training_problems(0, 5, 8) == Task().training_problems(0, 5, 8)
    assert task.training_problems(0, 5, 8) != task.training_problems(0, 6, 8)
    assert task.training_problems(0, 5, 8) != task.training_problems(1, 5, 8)
    assert task.held_out_problems(20) == Task().held_out_problems(40)[:20]
    assert len(set(task.held_out_problems(200))) == 200


@pytest.mark.parametrize("flags", [{}, {"count": 2, "largest": 75}, {"count": 5, "largest": 30}])
def test_the_tiny_model_can_spell_every_prompt(flags):
    task, tokenizer = Task(**flags), load_tokenizer(TINY)
    for problem in [*task.extreme_problems(), *task.training_problems(0, 1, 50)]:
        assert len(problem) == task.count
        assert encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
    assert task.prompt_for((3, 12, 7)[:task.count]).endswith("<think>")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was never stopped, named by itself."""
    place = tmp_path_factory.mktemp("largest_last")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        train.main(SMALL)
    [folder] = place.glob("runs/largest_last-none-grpo-*-s0")
    return folder


def test_the_run_is_on_record_and_can_be_told_from_one_of_countdown(run):
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == "tools.largest_last" and config["reward"].startswith("largest last")
    assert config["count"] == 3 and "max_target" not in config
    assert len(lines(run / "metrics.jsonl")) == 2 and len(lines(run / "evaluations.jsonl")) == 4
    assert read_flags(["--config", str(run / "config.json"), "--count", "2"])["count"] == 2


def test_flags_of_another_task_are_refused():
    with pytest.raises(UserError, match="unknown argument --max_target"):
        read_flags(["--task", "tools.largest_last", "--max_target", "9"])
    with pytest.raises(UserError, match="--largest 4 should be at least 5"):
        make_settings(read_flags(["--task", "tools.largest_last", "--largest", "4"]))


@pytest.mark.usefixtures("undrawn")
def test_the_tables_of_a_run(run, capsys):
    analyze.main([str(run)])
    assert (run / "analysis/report.html").exists() and "held-out" in capsys.readouterr().out.lower()


def test_a_response_gets_countdowns_labels():
    sections, kinds = Task().label([b" hmm", b"</think>", b"\n", b"<answer>", b" 12", b"</answer>"])
    assert sections == [1, 0, 0, 0, 2, 0] and kinds == [0, 5, 1, 5, 2, 5]
