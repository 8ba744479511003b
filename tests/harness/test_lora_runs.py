"""Runs with --lora: their folder, how they go on, and what is refused."""
import multiprocessing
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from engine.lora import ThriftyMLP
from harness.load import load_policy, read_folder
from harness.settings import LORA_RATE, make_settings
from qwen2_model import MLP
from runs import (WHOLE, after_credit_of, assert_same_run, config_of, everything, run)

FLAGS = [*WHOLE, "--lora", "4"]


@pytest.fixture(scope="module")
def added(learner, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    printed = run("--model", learner, "--out", folder, *FLAGS).stdout
    assert "(LoRA of rank 4 trains 0.0" in printed and "million of them)" in printed
    return folder


def test_a_checkpoint_has_the_additions_and_the_last_one_a_whole_model(added, learner):
    tensors = load_file(added / "checkpoints/step_000002/adapter_model.safetensors")
    assert config_of(added)["lora"] == 4
    assert config_of(added)["trained_parameters"] == sum(t.numel() for t in tensors.values())
    folders = sorted((added / "checkpoints").iterdir())
    assert [(folder / "merged").exists() for folder in folders] == [False, False, True]
    assert not any((folder / "model.safetensors").exists() for folder in folders)
    last = folders[-1]
    trained, merged = read_folder(last), read_folder(last / "merged")
    ids = torch.arange(2, 20)[None]
    torch.testing.assert_close(merged(ids), trained(ids), atol=2e-5, rtol=0)
    first = read_folder(learner)
    assert (merged(ids) - first(ids)).abs().max() > 1e-3
    for name in ("tokenizer.json", "recipe.json"):
        assert (last / "merged" / name).read_bytes() == (last / name).read_bytes()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_mlps_keep_less_unless_whole_layers_do(learner, checkpointing):
    """With --checkpointing an MLP that kept gate and up would keep more than its layer does."""
    settings = make_settings({"model": str(learner), "lora": 2, "checkpointing": checkpointing})
    mlps = [module for module in load_policy(settings).model.modules() if isinstance(module, MLP)]
    assert mlps and all(isinstance(mlp, ThriftyMLP) != checkpointing for mlp in mlps)


def test_killed_and_resumed_is_as_if_never_stopped(added, learner, tmp_path, monkeypatch):
    """Between two checkpoints."""
    folder = tmp_path / "killed"
    argv = ["--model", str(learner), "--out", str(folder), *FLAGS]
    with monkeypatch.context() as patch:
        after_credit_of(3, patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        process = multiprocessing.get_context("fork").Process(target=train.main, args=[argv])
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    run("--resume", folder)
    assert_same_run(added, folder)


def test_without_checkpoints_the_additions_and_the_whole_model_are_left(added, learner, tmp_path):
    run("--model", learner, "--out", tmp_path / "x", *FLAGS, "--checkpoint_every", 0)
    [last] = (tmp_path / "x/checkpoints").iterdir()
    assert not (last / "trainer").exists()
    for name in ("adapter_model.safetensors", "merged/model.safetensors"):
        path = added / "checkpoints/step_000006" / name
        assert (last / name).read_bytes() == path.read_bytes()


def test_a_checkpoint_begins_a_new_run(added, learner, tmp_path):
    """With the same rank its additions are trained on, of the same base; with --lora 0 they become
    part of the matrices."""
    checkpoint = added / "checkpoints/step_000004"
    short = ["--model", checkpoint, "--steps", 1, "--eval_every", 0]
    run(*short, "--lora", 4, "--out", tmp_path / "on")
    on = tmp_path / "on/checkpoints/step_000001"
    assert config_of(on)["model_type"] == "qwen2"
    read_folder(on)
    shutil.rmtree(tmp_path / "on")
    run(*short, "--learning_rate", 1e-9, "--out", tmp_path / "all")
    model = read_folder(tmp_path / "all/checkpoints/step_000001")
    ids = torch.arange(2, 20)[None]
    torch.testing.assert_close(model(ids), read_folder(checkpoint)(ids), atol=2e-5, rtol=0)
    assert "has additions of rank 4" in run(*short, "--lora", 2, "--out", tmp_path / "x",
                                            expect=1).stderr


@pytest.mark.parametrize("given_as", ["model", "checkpoint"])
def test_the_base_has_to_stay_as_it_was(learner, tmp_path, given_as):
    """Also that of a run which began with the checkpoint of another one."""
    model = shutil.copytree(learner, tmp_path / "model")
    short = ["--lora", 4, "--steps", 2, "--eval_every", 0]
    run("--model", model, *short, "--out", tmp_path / "x")
    if given_as == "checkpoint":
        first = tmp_path / "x/checkpoints/step_000002"
        run("--model", first, *short, "--out", tmp_path / "y")
    folder = tmp_path / ("x" if given_as == "model" else "y")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][-1] += 1
    (model / "model.safetensors").unlink()
    assert "model.safetensors is gone" in run("--resume", folder, "--steps", 3, expect=1).stderr
    save_file(weights, model / "model.safetensors")
    assert "model.safetensors has changed" in run("--resume", folder, "--steps", 3,
                                                  expect=1).stderr


@pytest.mark.parametrize("flags, words", [
    (["--lora", -1], "--lora -1 should be at least 0"),
    (["--lora", 1.5], "--lora"),
    (["--lora", 1000], "--lora 1000: the smallest side of this model's matrices is"),
    (["--lora", 4, "--advantage", "gae", "--critic", "trunk"], "--critic trunk copies")])
def test_what_cannot_work_is_refused(learner, tmp_path, flags, words, capsys):
    try:
        said = run("--model", learner, "--out", tmp_path / "x", *FLAGS[:-2], *flags,
                   expect=1).stderr
    except SystemExit:
        said = capsys.readouterr().err
    assert words in said
    assert not (tmp_path / "x").exists()


def test_a_resumed_run_keeps_its_rank(added):
    before = everything(added)
    assert "--lora cannot be changed" in run("--resume", added, "--lora", 2, expect=1).stderr
    assert everything(added) == before


def test_its_rate_is_a_multiple_of_the_recipes_and_its_folder_is_named_after_the_rank(learner):
    s = make_settings({"model": str(learner), "lora": 4})
    assert s.learning_rate == LORA_RATE * 1e-3
    assert "-lora4-" in s.folder.name and "-lr" not in s.folder.name
    typed = make_settings({"model": str(learner), "lora": 4, "learning_rate": 0.5})
    assert typed.learning_rate == 0.5
    assert make_settings({"model": str(learner)}).learning_rate == 1e-3


def test_the_initial_model_of_a_kl_term_is_that_without_additions(learner):
    from harness.load import initial_model
    s = make_settings({"model": str(learner), "lora": 4, "kl": 0.1})
    ids = torch.arange(2, 20)[None]
    assert torch.equal(initial_model(s)(ids), load_policy(s).model(ids))
    assert not any(p.requires_grad for p in initial_model(s).parameters())
