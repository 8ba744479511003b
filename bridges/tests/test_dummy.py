"""The crash-test dummy: one step of TRL as it is, and with a mistake in it."""
import pytest
import torch
from conftest import ROOT

from engine.errors import UserError

trl = pytest.importorskip("trl", reason="pip install -r bridges/requirements.txt")
from bridges.dummy import Dummy  # noqa: E402
from datasets import Dataset  # noqa: E402

TINY = str(ROOT / "models/tiny")
RATE = 0.5


def step(tmp_path, patch=None, **changed):
    """What the dummy says of one step of TRL."""
    dummy = Dummy(TINY)
    settings = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=32, num_generations=4, max_steps=1,
        optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0,
        max_completion_length=80, loss_type="grpo", use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", seed=1, top_k=0, disable_tqdm=True, gradient_checkpointing=False)
    trainer = trl.GRPOTrainer(
        model=TINY, reward_funcs=dummy.reward, args=trl.GRPOConfig(**settings | changed),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in dummy.prompts]))
    if patch:
        patch(trainer)
    trainer.train()
    return "\n".join(dummy.report(trainer.model, RATE))


def test_a_step_of_trl(tmp_path):
    said = step(tmp_path)
    assert "Log-probs: at temperature 1." in said
    assert "the std of its group over n - 1" in said
    assert "Counting: every answer counts the same." in said
    assert "Frozen" not in said and "Filtered" not in said


def mix_groups(trainer):
    """The rewards of a row go to a row of another problem."""
    usual = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: usual(*given).view(-1, 4, 1).transpose(
        0, 1).reshape(-1, 1)


def freeze(trainer):
    for name, parameter in trainer.model.named_parameters():
        if "mlp" in name:
            parameter.requires_grad_(False)


def halve(trainer):
    usual = trainer._compute_loss
    trainer._compute_loss = lambda *given: usual(*given) / 2


@pytest.mark.parametrize("patch, said", [
    (freeze, "tensors have not changed, such as model.layers.0.mlp"),
    (halve, "every answer counts the same, times 0.5.\nStd over n and over n - 1 differ"),
    (mix_groups, "Not understood: advantage and counting")])
def test_a_mistake_in_trl_is_named(tmp_path, patch, said):
    found = step(tmp_path, patch)
    assert said in found, found


def test_nothing_is_said_of_a_trainer_that_never_asked():
    dummy = Dummy(TINY)
    with pytest.raises(UserError, match="never called"):
        dummy.report(dummy.model, RATE)
    with pytest.raises(UserError, match="a template was put around it"):
        dummy.reward(["<|im_start|>" + dummy.prompts[0]], ["1"])


def test_a_step_that_trains_nothing():
    dummy = Dummy(TINY)
    dummy.reward(dummy.prompts[:1], ["1"])
    assert dummy.report(dummy.model, RATE) == [
        "No parameter has changed: this step trains nothing."]
    assert torch.isfinite(next(dummy.model.parameters())).all()
