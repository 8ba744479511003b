"""A number that is not finite ends the run with a sentence, and no checkpoint is made of it."""
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo import policy_loss
from lab.engine.policy import Policy
from lab.credit.critic import Trained
from lab.engine.optimizer import AdamW
from lab_runs import run
from runs import assert_same_run


def spoil(monkeypatch, value, step):
    """After this update of AdamW, all parameters are this number."""
    original, calls = AdamW.step, []

    def update(self):
        original(self)
        calls.append(1)
        if len(calls) == step:
            with torch.no_grad():
                for parameter in self.parameters:
                    parameter.fill_(value)
    monkeypatch.setattr(AdamW, "step", update)


def saved(folder):
    return sorted(path.name for path in folder.glob("checkpoints/*"))


FLAGS = ["--steps", "4", "--eval_every", "0", "--checkpoint_every", "1"]


@pytest.fixture
def start(learner, tmp_path):
    """Start a run of four steps, which has to end with an error; returns what was said."""
    def start(*more):
        return run("--model", learner, "--out", tmp_path / "x", *FLAGS, *more, expect=1).stderr
    return start


@pytest.mark.parametrize("value, words", [
    (float("nan"), "after the update a parameter is not finite"),
    (1e30, "the model's logits are not finite")])
def test_a_broken_model_is_not_saved_and_the_last_good_one_goes_on(
        learner, start, tmp_path, monkeypatch, value, words):
    with monkeypatch.context() as patch:
        spoil(patch, value, step=3)
        said = start()
    assert said.startswith(f"train.py: {words}")
    assert "--learning_rate 0.001" in said and "step_000002" in said
    assert saved(tmp_path / "x") == ["step_000001", "step_000002"]
    run("--resume", tmp_path / "x")
    run("--model", learner, "--out", tmp_path / "whole", *FLAGS)
    assert_same_run(tmp_path / "x", tmp_path / "whole")


def test_what_never_was_saved_is_not_called_done(start, monkeypatch):
    spoil(monkeypatch, 1e30, step=4)
    assert "the model's logits are not finite" in start("--checkpoint_every", "0")


def test_a_model_that_is_broken_from_the_start_is_not_evaluated(learner, tmp_path):
    broken = shutil.copytree(learner, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file({name: torch.full_like(tensor, 1e30) for name, tensor in weights.items()},
              broken / "model.safetensors")
    said = run("--model", broken, "--out", tmp_path / "x", "--steps", 0, "--eval_every", 1,
               expect=1).stderr
    assert "the model's probabilities are not finite, in step 0; there is no checkpoint" in said
    assert not (tmp_path / "x").exists()


def test_a_gradient_that_is_not_finite_is_told(start, monkeypatch):
    ask = Policy.ask

    def uneven(policy, *given):
        rollouts = ask(policy, *given)
        rollouts.scores["reward"] = torch.tensor([1.1, 0.1, 0.0, 0.0] * 4)
        return rollouts

    monkeypatch.setattr("grpo.policy_loss", lambda *given: policy_loss(*given) * float("inf"))
    monkeypatch.setattr(Policy, "ask", uneven)
    said = start()
    assert "the gradient is not finite, in step 1 at --learning_rate 0.001; there is no" in said


def test_a_state_that_is_not_finite_is_not_saved(start, tmp_path, monkeypatch):
    """A number that counts may be whole."""
    state = {"count": torch.tensor(1), "square": torch.tensor(float("inf"))}
    monkeypatch.setattr(AdamW, "tensors", lambda *_: state)
    assert "the state that a resumed run would continue from is not finite, in step 1 " in start()
    assert saved(tmp_path / "x") == []


def test_a_critic_that_broke_is_not_kept(start, tmp_path, monkeypatch):
    original = Trained.gradient_step

    def break_down(self, loss):  # from the second step on
        return original(self, loss * (float("inf") if saved(tmp_path / "x") else 1.0))
    monkeypatch.setattr(Trained, "gradient_step", break_down)
    said = start("--advantage", "gae")
    assert "what is trained beside the policy is not finite" in said
    assert saved(tmp_path / "x") == ["step_000001"]
