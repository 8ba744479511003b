"""The crash-test dummy: one step of TRL as it is, and with a mistake in it."""
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, refusal

from engine.errors import UserError
from engine.model_folder import read_model_folder, write_model_folder
from qwen2_model import Qwen2

trl = pytest.importorskip("trl", reason="pip install -r lab/trl/requirements.txt")
from lab.trl.dummy import Dummy, main  # noqa: E402
from lab.trl.dummy_step import Step  # noqa: E402
from datasets import Dataset  # noqa: E402

TINY = ROOT / "models/tiny"
RATE = 0.5


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """An untrained model with the tiny one's tokenizer: the gradients of its answers are
    short."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("smaller") / "model")
    known = read_model_folder(TINY).config
    torch.manual_seed(0)
    write_model_folder(Qwen2(replace(known, hidden_size=32, intermediate_size=48, head_dim=16,
                                     num_hidden_layers=2, num_attention_heads=2,
                                     num_key_value_heads=1)), folder)
    return folder


def step(folder, tmp_path, patch=None, **changed):
    """What the dummy says of one step of TRL."""
    dummy = Dummy(folder)
    settings = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=32, num_generations=4, max_steps=1,
        optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0,
        max_completion_length=40, loss_type="grpo", use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", seed=1, top_k=0, disable_tqdm=True, gradient_checkpointing=False)
    trainer = trl.GRPOTrainer(
        model=str(folder), reward_funcs=dummy.reward, args=trl.GRPOConfig(**settings | changed),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in dummy.prompts]))
    if patch:
        patch(trainer)
    trainer.train()
    return "\n".join(dummy.report(trainer.model, RATE))


def test_a_step_of_trl(smaller, tmp_path):
    said = step(smaller, tmp_path)
    assert "Log-probs: at temperature 1." in said
    assert "the std of its group over n - 1 + 0.0001." in said
    assert "Counting: every answer counts the same." in said
    assert "Frozen" not in said and "Filtered" not in said


def mix_groups(trainer):
    """The rewards of a row go to a row of another problem."""
    usual = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: usual(*given).view(-1, 4, 1).transpose(
        0, 1).reshape(-1, 1)


def shuffle_within_groups(trainer):
    usual = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: usual(*given).view(-1, 4).roll(1, 1).reshape(-1, 1)


def leave_out(trainer):
    """Some answers are filtered after the baseline was computed."""
    usual = trainer._generate_and_score_completions

    def without(inputs):
        made = usual(inputs)
        made["advantages"][:5] = 0
        return made
    trainer._generate_and_score_completions = without


def break_lines(trainer):
    """A template: the reward function sees the prompts without it."""
    usual = trainer._generate
    trainer._generate = lambda prompts, *more, **named: usual(
        [prompt + "\n" for prompt in prompts], *more, **named)


def freeze(trainer):
    for name, parameter in trainer.model.named_parameters():
        if "mlp" in name:
            parameter.requires_grad_(False)


def halve(trainer):
    usual = trainer._compute_loss
    trainer._compute_loss = lambda *given: usual(*given) / 2


def take_another_part(trainer):
    """Advantages go to the accumulation step after theirs."""
    usual = trainer._generate_and_score_completions

    def of_another(inputs):
        made = usual(inputs)
        made["advantages"] = made["advantages"].roll(8, 0)
        return made
    trainer._generate_and_score_completions = of_another


def clip_the_gradient(trainer):
    trainer.args.max_grad_norm = 0.05


def reverse(trainer):
    usual = trainer._compute_loss
    trainer._compute_loss = lambda *given: -usual(*given)


def mask(place):
    """The loss leaves out an answer's first or its end token; attention still sees it."""
    def patch(trainer):
        usual = trainer._generate_and_score_completions

        def without(inputs):
            made = usual(inputs)
            is_end = made["completion_ids"] == trainer.processing_class.eos_token_id
            is_first = torch.arange(is_end.shape[1]) == 0
            made["tool_mask"] = (~(is_end if place == "end" else is_first.expand_as(is_end))).int()
            return made
        trainer._generate_and_score_completions = without
    return patch


def drop_out(trainer):
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = .1


@pytest.mark.parametrize("patch, said", [
    (mask("first"), "Tokens: the first token of an answer has no gradient.\n"),
    (mask("end"), "Tokens: the end token of an answer has no gradient.\n"),
    (drop_out, "Dropout: in training mode two passes over the same tokens differ."),
    (reverse, "Sign: good answers are made less probable"),
    (take_another_part, "those of the part before theirs, if the batch has 4 parts."),
    (clip_the_gradient, "Clipped: the step has a norm of 0.05,"),
    (freeze, "tensors have not changed, such as model.layers.0.mlp"),
    (halve, "times 0.5.\nIf the trainer adds up 2 batches for an update, it divides"),
    (mix_groups, "Rewards: they go to other answers, row by row where they were made column by"),
    (shuffle_within_groups, "Rewards: within each group they go to other answers."),
    (leave_out, "5 of 32 answers have had no effect."),
    (break_lines, "What it has trained on fits a line break after it.")])
def test_a_mistake_in_trl_is_named(smaller, tmp_path, patch, said):
    found = step(smaller, tmp_path, patch)
    assert said in found, found


def test_nothing_is_said_of_a_trainer_that_never_asked():
    dummy = Dummy(TINY)
    with pytest.raises(UserError, match="never called"):
        dummy.report(dummy.model, RATE)
    with pytest.raises(UserError, match="a template was put around it"):
        dummy.reward(["<|im_start|>" + dummy.prompts[0]], ["1"])


def test_a_trainer_in_another_process(tmp_path, capsys):
    """What the reward function saw stands in the dummy's folder, and the trained model in its
    own."""
    folder = tmp_path / "dummy"
    main(["write", str(folder)])
    assert len((folder / "step.jsonl").read_text().splitlines()) == 8
    dummy = Dummy(folder)
    prompts = [prompt for prompt in dummy.prompts[1:3] for _ in range(2)]
    rewards = dummy.reward(prompts, [" 1", " 2 3", " 4", " 5 6"])
    optimizer = torch.optim.SGD(dummy.model.parameters(), lr=RATE)
    step = Step(dummy.model, dummy.tokenizer, dummy.prompts, dummy.seen, dummy.model, RATE)
    mean = (rewards[0] + rewards[1]) / 2, (rewards[2] + rewards[3]) / 2
    loss = -sum((reward - mean[row // 2]) * step.log_probs(seen, 1.0)[0].sum()
                for row, (reward, seen) in enumerate(zip(rewards, dummy.seen)))
    loss.backward()
    optimizer.step()
    dummy.model.save_pretrained(tmp_path / "trained")
    capsys.readouterr()
    main(["step", str(folder), str(tmp_path / "trained"), "--learning_rate", str(RATE)])
    said = capsys.readouterr().out
    assert "Advantage: the reward minus the mean of its group.\nCounting: the plain sum" in said
    assert "exists already" in refusal(main, ["write", str(folder)])
    assert "--learning_rate" in refusal(main, ["step", str(folder)])


def count_twice(trainer):
    """The first eight answers are counted twice."""
    usual = trainer._generate_and_score_completions

    def doubled(inputs):
        made = usual(inputs)
        made["advantages"][:8] *= 2
        return made
    trainer._generate_and_score_completions = doubled


def cut_at(places):
    """The loss leaves out what comes after so many tokens; attention still sees it."""
    def patch(trainer):
        usual = trainer._generate_and_score_completions

        def without(inputs):
            made = usual(inputs)
            shape = made["completion_ids"].shape
            made["tool_mask"] = (torch.arange(shape[1]) < places).int().expand(shape)
            return made
        trainer._generate_and_score_completions = without
    return patch


def fast_embedding(trainer):
    trainer.model.get_input_embeddings().weight.register_hook(lambda grad: 2 * grad)


@pytest.mark.parametrize("patch, said", [
    (count_twice, "2.00 for 8 answers"),
    (cut_at(24), "the first 24 tokens of each answer alone explain the change"),
    (fast_embedding, "model.embed_tokens.weight: 2.00 times the step of the other tensors")])
def test_what_is_not_understood_is_located(smaller, tmp_path, patch, said):
    """Each number is over that of the nearest formula, so 1 is as it should be."""
    found = step(smaller, tmp_path, patch)
    assert "Not understood" in found and said in found, found


def test_a_step_that_trains_nothing():
    dummy = Dummy(TINY)
    dummy.reward(dummy.prompts[:1], ["1"])
    assert dummy.report(dummy.model, RATE) == [
        "No parameter has changed: this step trains nothing."]
    assert torch.isfinite(next(dummy.model.parameters())).all()


@pytest.mark.parametrize("typed, refusal", [
    (["--learning_rate", "1e-3"], "--learning_rate has no effect without the command step"),
    (["trained"], "write takes no trained model: leave out trained")])
def test_what_only_a_step_needs_is_refused_elsewhere(tmp_path, typed, refusal):
    with pytest.raises(UserError, match=refusal):
        main(["write", str(tmp_path / "dummy"), *typed])
    assert not (tmp_path / "dummy").exists()
