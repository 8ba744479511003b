"""Trying a task: what is shown is what the training gets, the command trains so, and the verdict
follows from the rewards, by hand."""
import json
import re
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT, refusal
from lab.harness.settings import make_settings
from lab.tools import try_task
from lab.tools.prospects import (CANNOT, CHANCE, FORM, HOLE, LEARNS, Blind, Group, answer_by,
                                 paid_for_being_right, rule_of, verdict)
from lab_runs import run
from runs import lines

SMALL = ["--questions", "3", "--answers", "4", "--max_new_tokens", "48", "--threads", "1"]


def test_the_step_that_is_shown_is_the_first_of_the_training(capsys, tmp_path):
    assert try_task.main(["examples/own_reward.py", *SMALL, "--seed", "2", "--problems", "4"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    words = said.partition("To train: python -m lab train ")[2].split()
    run(*words, "--steps", 1, "--eval_every", 0, "--out", tmp_path / "run")
    step, *_ = lines(tmp_path / "run/metrics.jsonl")
    assert "of 4 groups of 4 answers the rewards differ" in said
    spread = 3 - round(3 * step["groups_without_spread"])
    assert f"in {spread} of 3 groups the rewards differ" in said
    assert f"The mean reward is {step['reward']:.2f}, and {step['finished']:.0%}" in said
    assert len(re.findall(r"Problem \d, as the model reads it: \| <\|im_start\|>user", said)) == 3
    assert said.count(" tokens: |") + said.count("cut off: |") == 3
    assert "HAS A HOLE: " in said and " / " in said  # any answer that divides is paid


def test_about_steps_leaves_the_checks_of_the_first_steps_out():
    """The third step took 3 s without an update, which took 2 s before: 5 s with two problems, and
    at most four times as much with eight."""
    first = {"groups_without_spread": 0.5, "reward": 0.5, "finished": 1.0, "seconds": 99.0}
    lines = [first | {"update_seconds": seconds} for seconds in (2.0, 1.0, 0.0)]
    lines[-1] |= {"seconds": 3.0, "peak_memory_bytes": 4.7e9}
    settings = SimpleNamespace(questions=8, answers=8, max_new_tokens=12, steps=48)
    said = " ".join(" ".join(try_task.about_steps(lines, settings, 2)).split())
    assert "in 1 of 2 groups" in said and "At most 4.7 GB" in said
    assert "takes about 5 to 20 s, so 48 steps take about 4 to 16 min" in said


def test_the_fields_of_a_script_for_trl_become_flags(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "learning_rate": 1e-5, "num_generations": 4, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3, "loss_type": "dr_grpo", "scale_rewards": False,
        "beta": 0.04, "mask_truncated_completions": True, "use_vllm": True, "foo": 1,
        "epsilon": 0.1, "epsilon_high": None, "max_steps": -1, "eval_steps": None}))
    flags = try_task.flags_of_config(path)
    said = capsys.readouterr().out
    s = make_settings(flags)
    assert (s.learning_rate, s.answers, s.questions, s.kl) == (1e-5, 4, 6, 0.04)
    assert (s.advantage, s.loss_norm, s.drop_unfinished) == ("dr_grpo", "constant", True)
    assert "use_vllm True: This program samples by itself" in said
    assert "epsilon_high 0.1: nothing is clipped in one pass" in said
    assert said.endswith("nothing here: foo\n\n") and "max_steps" not in said


@pytest.mark.parametrize("size, times, group, questions", [
    (16, 2, 4, 8), (4, None, None, 1), (None, 4, 8, 4), (8, 1, 0, 1)])
def test_problems_in_a_step_are_those_of_trl(size, times, group, questions):
    fields = {"per_device_train_batch_size": size, "gradient_accumulation_steps": times,
              "num_generations": group}
    assert try_task.problems_in_a_step(fields) == questions
    assert "should be whole numbers" in refusal(
        try_task.problems_in_a_step, {**fields, "num_generations": "8"})


def test_flags_of_config_says_of_each_field_what_the_page_says(capsys, tmp_path):
    page, path = (ROOT / "docs/reference/trl.md").read_text("utf-8"), tmp_path / "config.json"
    rows = re.findall(r"^\| (`\w+ .*) \| (.*) \|$", page, flags=re.M)
    assert len(rows) == 18
    for fields, here in rows:
        values = {name: json.loads(text.lower()) if text[0] in "0123456789T" else text
                  for name, text in re.findall(r"`(\w+) (\S+)`", fields)}
        path.write_text(json.dumps({"num_iterations": 2} | values))
        try_task.flags_of_config(path)
        name, value = [*values.items()][0]
        here = here.replace("`", "")
        said = f"{here}: {', '.join(values)}" if len(values) > 1 else f"{name} {value}: {here}"
        assert f"  {said}\n" in capsys.readouterr().out


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


def groups(count, reward, right=None, more=()):
    """So many equal groups of answers."""
    return [Group(np.array(reward, float), np.array(reward if right is None else right, float),
                  np.array(more, float).reshape(-1, 3))] * count


def test_how_much_of_the_rewards_being_right_explains():
    """Rewards 1, 0, 0, 0.5, of which the first alone is right. Around the mean 0.375 the squares
    add up to 0.6875, those of right or not to 0.75, and the products to 0.625."""
    assert paid_for_being_right(groups(3, [1, 0, 0, 0.5], [1, 0, 0, 0])) == pytest.approx(
        0.625 ** 2 / (0.6875 * 0.75))
    assert paid_for_being_right(groups(3, [1, 0], [0, 1])) == 0


@pytest.mark.parametrize("sampled, knows_success, word, reason", [
    (groups(32, [0.0] * 4), True, CANNOT, "in 0 of 32 groups of 4 answers the rewards differ, which"
     " is 0.0 in a step of 8. In the other groups every advantage is 0. Larger groups"),
    (groups(1, [0, 1.0]) + groups(31, [1.0, 1.0]), True, CANNOT, "98% of the answers are right"),
    (groups(2, [0, 1.0]) + groups(30, [0, 0.0]), True, LEARNS, "0.5 in a step of 8, 0.5 of them"),
    (groups(16, [0.1, 0, 0.1, 0], [0, 0, 0, 0]), True, FORM, "but hardly ever because one answer"),
    (groups(16, [1, 0, 1, 0], [0, 1, 0, 1]), True, FORM, "or being right is not paid"),
    (groups(16, [1, 0, 1, 0], [1, 1, 0, 0]), True, FORM, "or being right is not paid"),
    (groups(16, [1, 0, 1, 0], [0, 0, 0, 0]), False, LEARNS, "does not say which answers are right"),
])
def test_the_word_of_a_task_and_the_reason_for_it(sampled, knows_success, word, reason):
    found, said = verdict(sampled, 8, knows_success)
    assert found == word and reason in said


def test_a_reward_that_a_blank_or_a_word_more_changes_pays_by_chance():
    """60 answers: the other reward follows from the first, whatever it is worth, or it does not. If
    one in sixty is paid beside a word, the word broke the others' form."""
    rewards = [float(n % 3 == 0) for n in range(60)]
    twice, chance = [2 * reward for reward in rewards], [float(n % 2) for n in range(60)]
    for blank, more, word in ((twice, twice, LEARNS), ([0.0] * 60, [0.0] * 60, LEARNS),
                              (twice, [0.0] * 59 + [1.0], LEARNS), (chance, twice, CHANCE),
                              (twice, chance, CHANCE)):
        found, said = verdict(groups(1, rewards, more=[*zip(rewards, blank, more)]), 8, True)
        assert found == word
    assert "(their correlation is +0.00)" in said


def test_a_hash_of_the_words_is_noise_whatever_blanks_are_between_them():
    """A reward of the last word is none."""
    for reward, word in ((lambda text: zlib.crc32("".join(text.split()).encode()) % 2, CHANCE),
                         (lambda text: text.split()[-1] in "1234", LEARNS)):
        policy = SimpleNamespace(task=SimpleNamespace(
            score=lambda problem, text: {"reward": float(reward(text))}))
        sampled = []
        for first in range(0, 200, 10):
            texts = [f"{n} makes {n % 9}" for n in range(first, first + 10)]
            paid = np.array([float(reward(text)) for text in texts])
            more = try_task.with_more(policy, "", texts, paid)
            assert all(one == blank for one, blank, _ in more)
            sampled += groups(1, paid, more=more)
        assert verdict(sampled, 8, True)[0] == word


@pytest.mark.parametrize("rewards, earned, word", [
    ([1, 0, 0, 0], 0.9, HOLE), ([1, 0, 0, 0], 0.84, LEARNS), ([1, 0, 0, 0], 1.0, HOLE),
    ([1, 0.9, 0.8, 0.8], 0.96, LEARNS),
    ([1, 0.9, 0.8, 0.8], 1.0, HOLE)])
def test_a_text_that_earns_most_whatever_the_problem_is_is_a_hole(rewards, earned, word):
    """The mean of the first rewards is 0.25 and their best 1: of the 0.75 between them the text has
    to earn 0.6."""
    sampled = groups(16, rewards, [1, 0, 0, 0])
    found, said = verdict(sampled, 8, True, Blind("it is 7", earned))
    assert found == word and ("'it is 7' as the answer to every" in said) == (word == HOLE)


def test_a_rule_has_the_places_of_numbers_and_their_letters_for_people():
    rule = rule_of("80, so 10 * 8 = 80 or 8", "10 8 2, target 60")
    assert Blind(rule, 1).in_letters == "80, so a * b = 80 or b"
    assert answer_by(rule, "3 12 7, target 11") == "80, so 3 * 12 = 80 or 12"
    assert answer_by(rule, "3") == "80, so 3 *  = 80 or "


def test_the_best_rule_is_judged_by_problems_that_did_not_choose_it():
    """Text a is right for the first half of the problems and b for all but one of them."""
    half = try_task.BLIND_PROBLEMS
    task = SimpleNamespace(
        training_problems=lambda seed, step, count: list(range(count)), show=str,
        score=lambda problem, text: {"reward": float(problem < half if text == "a" else
                                                     problem > 0)})
    assert try_task.best_blind({"a": 3.0, "b": 2.0}, task, 0) == Blind("a", 0.0)
    assert try_task.best_blind({"b": 2.0}, task, 0) == Blind("b", 1.0)


def test_a_file_beside_somebody_is_read_in_the_step_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps({"nums": [a, 5, 7], "target": a + 12}) + "\n" for a in range(1, 15))
    (tmp_path / "mine.jsonl").write_text(text)
    try_task.main(["--data", "mine.jsonl", *SMALL, "--problems", "4"])
    assert "One step of 3 problems" in capsys.readouterr().out


def test_a_reward_that_changes_from_one_scoring_to_the_next_is_not_judged(monkeypatch):
    monkeypatch.setattr(try_task, "score_again", lambda *_: False)
    assert "from one scoring to the next cannot" in refusal(try_task.main, SMALL)
