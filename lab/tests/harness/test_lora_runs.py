"""Runs with --lora: their folder, how they go on, and what is refused."""
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.engine.model_folder import read_model_folder
from lab.harness.build import load_policy
from lab.harness.settings import make_settings
from qwen2_model import MLP
from lab_runs import WHOLE, assert_goes_on_the_same, run
from runs import config_of

FLAGS = [*WHOLE, "--lora", "4"]


@pytest.fixture(scope="module")
def added(learner, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    printed = run("--model", learner, "--out", folder, *FLAGS).stdout
    assert "LoRA of rank 4 trains 0.0" in printed
    return folder


def test_every_checkpoint_is_an_ordinary_model_and_the_newest_two_keep_the_additions(added,
                                                                                   learner):
    folders = sorted((added / "checkpoints").iterdir())
    assert [(folder / "trainer").exists() for folder in folders] == [False, True, True]
    ids = torch.arange(2, 20)[None]
    logits = [read_model_folder(folder)(ids) for folder in (learner, *folders)]
    assert all((one - other).abs().max() > 1e-4 for one, other in pairwise(logits))
    assert config_of(added)["lora"] == 4
    for folder in folders:
        assert (folder / "recipe.json").read_bytes() == (learner / "recipe.json").read_bytes()
        assert (folder / "tokenizer.json").read_bytes() == (learner / "tokenizer.json").read_bytes()
    state = load_file(folders[-1] / "trainer/state.safetensors")
    kept = [tensor for name, tensor in state.items() if name.startswith("lora.")]
    assert config_of(added)["trained_parameters"] == sum(tensor.numel() for tensor in kept)
    assert {tensor.dtype for tensor in kept} == {torch.float32}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_mlps_keep_less_unless_whole_layers_do(learner, checkpointing):
    """With --checkpointing an MLP that kept gate and up would keep more than its layer does."""
    settings = make_settings({"model": str(learner), "lora": 2, "checkpointing": checkpointing})
    model = load_policy(settings).model
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    assert mlps and all(("forward" in vars(mlp)) != checkpointing for mlp in mlps)
    assert all(("forward" in vars(layer)) == checkpointing for layer in model.model.layers)


def test_stopped_and_resumed_is_as_if_never_stopped(added, tmp_path):
    assert_goes_on_the_same(added, tmp_path / "stopped")


def test_without_checkpoints_the_same_model_is_left(added, learner, tmp_path):
    run("--model", learner, "--out", tmp_path / "x", *FLAGS, "--checkpoint_every", 0)
    [last] = (tmp_path / "x/checkpoints").iterdir()
    assert not (last / "trainer").exists()
    path = added / "checkpoints/step_000006/model.safetensors"
    assert (last / "model.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("flags", [["--lora", 4], ["--lora", 2], []])
def test_a_checkpoint_begins_a_new_run(added, tmp_path, flags):
    """Whatever the rank is: its additions are new ones. It stands alone, so neither the folder that
    its run began with nor its trainer's state is needed. A tiny rate leaves the model as it is."""
    checkpoint = shutil.copytree(added / "checkpoints/step_000004", tmp_path / "alone")
    run("--model", checkpoint, "--steps", 1, "--eval_every", 0, *flags, "--learning_rate", 1e-9,
        "--out", tmp_path / "on")
    on = tmp_path / "on/checkpoints/step_000001"
    ids = torch.arange(2, 20)[None]
    torch.testing.assert_close(read_model_folder(on)(ids), read_model_folder(checkpoint)(ids),
                               atol=2e-5, rtol=0)


def test_a_resumed_run_needs_the_model_that_it_began_with(learner, tmp_path):
    """Its checkpoint has W + B A, and the run goes on from W, A and B."""
    model = shutil.copytree(learner, tmp_path / "model")
    folder = tmp_path / "x"
    run("--model", model, "--lora", 4, "--steps", 2, "--eval_every", 0, "--out", folder)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][-1] += 1
    (model / "model.safetensors").unlink()
    assert "has no model.safetensors" in run("--resume", folder, "--steps", 3, expect=1).stderr
    save_file(weights, model / "model.safetensors")
    said = run("--resume", folder, "--steps", 3).stdout
    assert f"changed since the 2 steps were made: {model / 'model.safetensors'}. So" in said


def test_a_run_that_has_learned_nothing_yet_goes_on(learner, tmp_path):
    """All answers to a problem have one token, and are wrong. So no step was made."""
    run("--model", learner, "--lora", 4, "--steps", 1, "--eval_every", 0, "--max_new_tokens", 1,
        "--out", tmp_path / "x")
    state = load_file(tmp_path / "x/checkpoints/step_000001/trainer/state.safetensors")
    assert {name.partition(".")[0] for name, value in state.items() if value.any()} == {"lora"}
    run("--resume", tmp_path / "x", "--steps", 2)


@pytest.mark.parametrize("flags, words", [
    (["--lora", -1], "--lora -1: should be at least 0"),
    (["--lora", 1000], "--lora 1000: the smallest side of this model's matrices is"),
    (["--lora", 4, "--advantage", "gae", "--critic", "trunk"], "--critic trunk copies")])
def test_what_cannot_work_is_refused(learner, tmp_path, flags, words):
    assert words in run("--model", learner, "--out", tmp_path / "x", *WHOLE, *flags,
                        expect=1).stderr
    assert not (tmp_path / "x").exists()


def test_its_rate_is_a_multiple_of_the_recipes_and_its_folder_is_named_after_the_rank(learner):
    s = make_settings({"model": str(learner), "lora": 4})
    assert s.learning_rate == 1e-3  # the most, and not 4 x 1e-3
    assert "-lora4-" in s.folder.name and "-lr" not in s.folder.name
    assert make_settings({"model": str(learner)}).learning_rate == 1e-3


def test_the_initial_model_of_a_kl_term_is_that_without_additions(learner):
    from lab.harness.build import initial_model
    s = make_settings({"model": str(learner), "lora": 4, "kl": 0.1})
    ids = torch.arange(2, 20)[None]
    assert torch.equal(initial_model(s)(ids), load_policy(s).model(ids))
    assert not any(p.requires_grad for p in initial_model(s).parameters())
