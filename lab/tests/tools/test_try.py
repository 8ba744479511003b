"""Trying a task: what is shown is what the training gets, and the command trains so."""
import json
import re

import pytest

from conftest import refusal
from lab.harness.settings import make_settings
from lab.tools import try_task
from lab_runs import run
from runs import lines

SMALL = ["--questions", "3", "--answers", "4", "--max_new_tokens", "48", "--threads", "1"]


def test_the_step_that_is_shown_is_the_first_of_the_training(capsys, tmp_path):
    try_task.main(["examples/own_reward.py", *SMALL, "--seed", "2"])
    said = " ".join(capsys.readouterr().out.split())
    words = said.partition("To train: python -m lab train ")[2].split()
    run(*words, "--steps", 1, "--eval_every", 0, "--out", tmp_path / "run")
    (step,) = lines(tmp_path / "run/metrics.jsonl")
    spread = 3 - round(3 * step["groups_without_spread"])
    assert f"in {spread} of 3 groups the rewards differ" in said
    assert f"The mean reward is {step['reward']:.2f}, and {step['finished']:.0%}" in said
    assert len(re.findall(r"Problem \d, as the model reads it: \| <\|im_start\|>user", said)) == 3
    assert said.count(" tokens: |") + said.count("cut off: |") == 3


def test_the_fields_of_a_script_for_trl_become_flags(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "learning_rate": 1e-5, "num_generations": 4, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3, "loss_type": "dr_grpo", "scale_rewards": False,
        "beta": 0.04, "mask_truncated_completions": True, "use_vllm": True, "foo": 1}))
    flags = try_task.flags_of_config(path)
    said = capsys.readouterr().out
    s = make_settings(flags)
    assert (s.learning_rate, s.answers, s.questions, s.kl) == (1e-5, 4, 6, 0.04)
    assert (s.advantage, s.loss_norm, s.drop_unfinished) == ("dr_grpo", "constant", True)
    assert "use_vllm True: This program samples by itself" in said
    assert "foo 1: has nothing here" in said


@pytest.mark.parametrize("given, words", [
    ("questions.csv", 'read from .jsonl, which has an object with "question"'),
    ("nowhere.jsonl", "there is no file nowhere.jsonl"), ("nowhere.py", "there is no such file"),
    ("examples/own_reward.py --resume runs/x", "--resume has no effect")])
def test_what_cannot_be_tried(given, words):
    assert words in refusal(try_task.main, given.split())


def test_a_model_without_words_names_one_that_has_them(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [json.dumps({"question": f"What is {n} and {n}?", "answer": 2 * n}) for n in range(20)]
    path.write_text("\n".join(rows))
    assert "--model takes one that knows words" in refusal(try_task.main, [str(path)])
