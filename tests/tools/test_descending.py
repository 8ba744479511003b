"""The second task: its score by hand, its split, and a run that learns, resumes and is analysed."""
import itertools
import json
import random

import pytest

import train
from engine.errors import UserError
from conftest import ROOT
from harness import run_folder
from harness.command_line import read_flags
from harness.settings import make_settings
from engine.tokens import encode_prompt, load_tokenizer
from runs import assert_same_run, lines
from tools import preview
from tools.descending import Task, is_held_out

TINY = ROOT / "models" / "tiny"
SMALL = [
    "--task", "tools.descending", "--questions", "2", "--answers", "4", "--max_new_tokens", "40",
    "--threads", "1", "--steps", "2", "--eval_every", "2", "--eval_tasks", "6",
    "--checkpoint_every", "1", "--sample_every", "0"
]


def test_few_problems_are_not_looked_for_without_end(monkeypatch):
    draws = []
    draw = Task.draw
    monkeypatch.setattr(Task, "draw", lambda *more, **kind: draws.append(1) or draw(*more, **kind))
    monkeypatch.setattr("tools.descending.MAX_DRAWS", 500)
    assert len(Task(count=2, largest=5).held_out_problems(10 ** 6)) == 3
    assert len(draws) == 500
    assert len(Task().held_out_problems(20)) == 20 and len(draws) < 600  # no more than are needed


def parts(response, problem=(3, 12, 7)):
    score = Task().score(problem, response)
    return score["reward"], score["format"], score["answer"]


@pytest.mark.parametrize("response, reward, well_formed, in_order", [
    (" hmm.</think>\n<answer> ( 12 + 7 ) + 3</answer><|im_end|>", 1.1, 1, 1),
    (" hmm.</think>\n<answer>12, 7, 3</answer>", 1.1, 1, 1),
    (" hmm.</think>\n<answer> ( 12 + 3 ) + 7</answer><|im_end|>", 0.1, 1, 0),
    (" hmm.</think>\n<answer> 12 7</answer>", 0.1, 1, 0),             # one is missing
    (" hmm.</think>\n<answer> 12 7 7 3</answer>", 0.1, 1, 0),         # one too many
    (" hmm.</think>\n<answer> 127 3</answer>", 0.1, 1, 0),
    (" hmm.</think>\n<answer></answer>", 0.1, 1, 0),
    ("<answer>12 7 3</answer>", 1.0, 0, 1),                           # the thinking did not end
    ("<answer>12 7 3</answer></think>", 1.0, 0, 1),                   # or too late
    (" hmm.</think>\n<answer> 12 7 3", 0.0, 0, 0),                    # cut off
    (" hmm. 12 7 3", 0.0, 0, 0),
    ("", 0.0, 0, 0),
    ("</think><answer>12 7 3</answer><answer>3</answer>", 1.1, 1, 1),  # the first one counts
])
def test_the_score_by_hand(response, reward, well_formed, in_order):
    assert parts(response) == (pytest.approx(reward), well_formed, in_order)


def test_equal_numbers_are_in_order():
    assert parts("</think><answer>9 9 2</answer>", (9, 2, 9))[2] == 1
    assert parts("</think><answer>9 2</answer>", (9, 2, 9))[2] == 0


def test_any_string_gets_a_score():
    rng = random.Random(0)
    pieces = [
        "</think>", "<answer>", "</answer>", "\n", "12", " 7", "3", "<", "é", "\x00", "\ud83d",
        "9" * 5000, "٣", "<|im_end|>"
    ]
    for _ in range(2000):
        response = "".join(rng.choices(pieces, k=rng.randint(0, 10)))
        score = Task().score((3, 12, 7), response)
        assert set(score) == {"reward", "format", "answer", "reasoning"}
        assert score["format"] in (0, 1) and score["answer"] in (0, 1)
        assert score["reward"] == pytest.approx(score["answer"] + 0.1 * score["format"])


def test_nothing_held_out_is_ever_trained_on():
    task = Task()
    held_out = {tuple(sorted(problem)) for problem in task.held_out_problems(1000)}
    trained = {tuple(sorted(problem)) for step in range(300)
               for problem in task.training_problems(0, step, 16)}
    assert len(held_out) > 100 and len(trained) > 400 and not held_out & trained
    for order in itertools.permutations((3, 12, 7)):
        assert is_held_out(order) == is_held_out((3, 7, 12))


def test_problems_follow_from_seed_and_step_and_the_held_out_ones_from_nothing():
    task = Task()
    assert task.training_problems(0, 5, 8) == Task().training_problems(0, 5, 8)
    assert task.training_problems(0, 5, 8) != task.training_problems(0, 6, 8)
    assert task.training_problems(0, 5, 8) != task.training_problems(1, 5, 8)
    assert task.held_out_problems(20) == Task().held_out_problems(40)[:20]
    assert len(set(task.held_out_problems(200))) == 200


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_even_the_smallest_range_has_problems_of_both_kinds(count):
    """Otherwise drawing one would never end."""
    sets = itertools.combinations_with_replacement(range(1, 6), count)
    assert len({is_held_out(numbers) for numbers in sets}) == 2
    assert Task(count=count, largest=5).held_out_problems(1)


@pytest.mark.parametrize("flags", [{}, {"count": 2, "largest": 75}, {"count": 5, "largest": 30}])
def test_the_tiny_model_can_spell_every_prompt(flags):
    task, tokenizer = Task(**flags), load_tokenizer(TINY)
    for problem in [*task.extreme_problems(), *task.training_problems(0, 1, 50)]:
        assert len(problem) == task.count
        assert encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
    assert task.prompt_for((3, 12, 7)[:task.count]).endswith("<think>")


def test_numbers_that_the_tiny_model_cannot_spell_are_refused(tmp_path):
    with pytest.raises(UserError,
                       match="cannot spell the prompt of the problem 31 31 31 31 31"):
        train.main([*SMALL, "--count", "5", "--largest", "31", "--out", str(tmp_path / "x")])


def test_the_tiny_model_learns_it_in_a_few_steps(tmp_path):
    """With its recipe's learning rate, from 54% to 69% of the held-out problems when this was
    written."""
    train.main(["--task", "tools.descending", "--questions", "8", "--answers", "8", "--steps", "8",
                "--max_new_tokens", "80", "--threads", "1", "--seed", "1", "--eval_every", "8",
                "--eval_tasks", "100", "--checkpoint_every", "0", "--out", str(tmp_path / "x")])
    sampled = [line["success"] for line in lines(tmp_path / "x/evaluations.jsonl")
               if line["mode"] == "sampled"]
    assert sampled[1] > sampled[0] + 0.05


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was never stopped, named by itself."""
    place = tmp_path_factory.mktemp("descending")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        train.main(SMALL)
    [folder] = place.glob("runs/descending-none-grpo-*-s0")
    return folder


def test_the_run_is_on_record_and_can_be_told_from_one_of_countdown(run):
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == "tools.descending" and config["reward"].startswith("descending order")
    assert config["count"] == 3 and "max_target" not in config
    assert len(lines(run / "metrics.jsonl")) == 2 and len(lines(run / "evaluations.jsonl")) == 4
    assert read_flags(["--config", str(run / "config.json"), "--count", "2"])["count"] == 2


def test_flags_of_another_task_are_refused():
    with pytest.raises(UserError, match="--max_target is no flag of --task tools.descending"):
        read_flags(["--task", "tools.descending", "--max_target", "9"])
    with pytest.raises(UserError, match="--largest is no flag of --task countdown_task"):
        read_flags(["--largest", "9"])
    with pytest.raises(UserError, match="--largest 4 should be at least 5"):
        make_settings(read_flags(["--task", "tools.descending", "--largest", "4"]))


def test_stopped_and_resumed_is_as_if_never_stopped(run, tmp_path, monkeypatch):
    write_credit = run_folder.write_credit

    def stop_at_second(path, *args):
        write_credit(path, *args)
        if path.stem == "step_000002":
            raise KeyboardInterrupt
    monkeypatch.setattr(run_folder, "write_credit", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        train.main([*SMALL, "--out", str(tmp_path / "stopped")])
    monkeypatch.undo()
    train.main(["--resume", str(tmp_path / "stopped")])
    assert_same_run(run, tmp_path / "stopped")


def test_the_tables_of_a_run(run, capsys):
    import analyze
    analyze.main([str(run)])
    assert (run / "analysis/report.html").exists() and "held-out" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("name", ["entropy_weighted", "attention_credit", "oracle"])
def test_weights_can_be_seen_on_its_tokens(run, name, capsys):
    """One that needs the columns only, one that looks at the model, one that samples answers."""
    fewer = ["--oracle_k", "1"] if name == "oracle" else []
    preview.main([str(run), "--mitigation", name, *fewer, "--show", "1"])
    printed = capsys.readouterr().out
    assert "step 2: 8 answers" in printed and f"; {name}" in printed and "make" in printed


def test_a_response_gets_countdowns_labels():
    sections, kinds = Task().label([b" hmm", b"</think>", b"\n", b"<answer>", b" 12", b"</answer>"])
    assert sections == [1, 0, 0, 0, 2, 0] and kinds == [0, 5, 1, 5, 2, 5]
