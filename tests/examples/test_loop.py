"""The page that repeats the step of GRPO: its steps are those of train.py."""
import re

import numpy as np
import pytest
import torch

import lab.engine.policy
from lab.engine.model_folder import read_model_folder
import lab.loop as train
from conftest import ROOT
from examples import loop
from lab.harness.step_lines import wilson_interval
from runs import gradients_of_steps, lines, program, program_here

HELD_OUT = 20  # problems: 500 take seconds
NUMBERS = re.compile(r"\d+(?:\.\d+)?")


def train_loop(steps, seed=0, problems=loop.PROBLEMS, answers=loop.ANSWERS):
    return loop.train(loop.FOLDER, steps, seed, problems, answers, HELD_OUT)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.numerics
def test_the_first_two_steps_are_those_of_training(tmp_path, monkeypatch, capsys):
    """To rounding, because both programs get the same answers. Whoever asks with the same prompts,
    seed and limits gets what was sampled before. After a step the parameters differ by rounding,
    so a CPU may draw another token, and one answer of 128 that differs changes 4% of a step. With
    an optimizer for each step the parameters would differ by 46% of what the two steps did."""
    sampled, generate, gradients = {}, lab.engine.policy.generate, gradients_of_steps(monkeypatch)

    def sampled_once(model, prompts, *, answers, seed, max_new_tokens, stop_ids, **rest):
        usual = dict(temperature=1.0, greedy=False, reply=None)
        assert rest.items() <= usual.items()
        asked = str((prompts, answers, seed, max_new_tokens, sorted(stop_ids)))
        if asked not in sampled:
            sampled[asked] = generate(model, prompts, answers=answers, seed=seed, stop_ids=stop_ids,
                                      max_new_tokens=max_new_tokens)
        return sampled[asked]

    monkeypatch.setattr(lab.engine.policy, "generate", sampled_once)
    monkeypatch.setattr(loop, "generate", sampled_once)
    run = tmp_path / "run"
    train.main(["--questions", str(loop.PROBLEMS), "--answers", str(loop.ANSWERS), "--steps", "2",
                "--eval_every", "0", "--out", str(run)])
    capsys.readouterr()
    assert len(sampled) == 2
    trained = parameters(train_loop(2))
    assert len(sampled) == 3  # only the held-out problems were asked for the first time
    for wanted, found in zip(gradients[:2], gradients[2:], strict=True):
        assert (wanted - found).norm() <= 1e-4 * wanted.norm()
    start = parameters(read_model_folder(loop.FOLDER))
    expected = parameters(read_model_folder(run / "checkpoints/step_000002"))
    assert (trained - expected).norm() <= 0.01 * (expected - start).norm()

    before, _, _, *steps, _, after = capsys.readouterr().out.splitlines()
    for number, (line, metrics) in enumerate(zip(steps, lines(run / "metrics.jsonl"), strict=True)):
        unequal = loop.PROBLEMS * (1 - metrics["groups_without_spread"])
        expected = [number + 1, metrics["reward"], 100 * metrics["success"], unequal, loop.PROBLEMS,
                    metrics["gradient_norm"], metrics["tokens"]]
        tolerance = [0, 0.001, 0.1, 0, 0, 0.001, 0]  # half of the last digit, and rounding
        found = [float(word) for word in NUMBERS.findall(line)]
        assert (np.abs(np.subtract(found, expected)) <= tolerance).all(), (found, expected)
    assert before.startswith("before: ") and after.startswith("after:  ")


def test_the_same_held_out_problems_are_asked_before_and_after(monkeypatch, capsys):
    """Without a step between them both answers are the same, and none of them is trained on."""
    asked, generate = [], loop.generate

    def noted(model, prompts, **given):
        asked.append((prompts, given["answers"], given["seed"]))
        return generate(model, prompts, **given)

    monkeypatch.setattr(loop, "generate", noted)
    train_loop(0)
    before, _, _, _, after = capsys.readouterr().out.splitlines()
    assert before.partition(":")[2].strip() == after.partition(":")[2].strip()
    train_loop(1, seed=1)
    assert asked[0] == asked[1] == asked[2] == asked[4]  # whatever the seed is
    prompts, answers, _ = asked[0]
    assert (len(prompts), answers) == (HELD_OUT, 1)
    assert not [prompt for prompt in asked[3][0] if prompt in prompts]


def test_a_step_without_differences_moves_nothing(monkeypatch):
    """Not even by what AdamW keeps of the first step. The model is asked before each of two steps,
    and held-out problems before and after them."""
    steps, z_score, models, generate = [], loop.group_z_score, [], loop.generate

    def equal_in_step_2(reward, group):
        steps.append(reward)
        return z_score(reward, group) if len(steps) == 1 else torch.zeros_like(reward)

    def noted(model, *given, **more):
        models.append(parameters(model))
        return generate(model, *given, **more)

    monkeypatch.setattr(loop, "group_z_score", equal_in_step_2)
    monkeypatch.setattr(loop, "generate", noted)
    train_loop(2, problems=4, answers=8)
    _, start, after_1, after_2 = models
    assert len(steps) == 2 and not torch.equal(start, after_1) and torch.equal(after_1, after_2)


@pytest.mark.parametrize("hits, count", [(0, 100), (23, 100), (113, 500), (20, 20)])
def test_the_interval_is_wilsons(hits, count):
    right = torch.tensor([1.0] * hits + [0.0] * (count - hits))
    low, high = wilson_interval(hits, count)
    assert loop.success(right) == (f"{hits / count:.1%} of {count} held-out problems (95% interval "
                                   f"{low:.1%} to {high:.1%})")


def test_any_model_is_trained_from_any_folder_and_saved(bare_model, tmp_path):
    """One that knows nothing solves nothing, so it stays as it is. A folder is not overwritten."""
    command = [ROOT / "examples/loop.py", bare_model, "--steps", 1, "--problems", 2, "--answers", 3,
               "--held_out", 4, "--save", tmp_path / "trained"]
    printed = program(tmp_path, *command)
    assert "of 4 held-out problems" in printed and "  0 of 2  " in printed
    start, trained = map(parameters, map(read_model_folder, (bare_model, tmp_path / "trained")))
    assert torch.equal(start, trained) and (tmp_path / "trained/tokenizer.json").exists()
    assert "exists already" in program_here(*command, expect=2)
    for wrong in (("--steps", -1), ("--answers", 1)):
        said = program_here(ROOT / "examples/loop.py", *wrong, expect=2)
        assert "should be at least 1, --answers at least 2" in said
    said = program_here(ROOT / "examples/loop.py", tmp_path / "none", expect=1)
    assert said.startswith("loop.py: ") and said.count("\n") == 1
