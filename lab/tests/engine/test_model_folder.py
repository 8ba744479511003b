"""Model folders that are damaged, foreign or not computed here: one sentence each."""
import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from conftest import refusal
from lab.engine.model_folder import read_model_folder, write_model_folder
from lab.engine.optimizer import trained_parameters
from lab.tools.sample import is_run
from qwen2_model import load_model
from runs import edit_config
from test_qwen2_model import NORM, OUTPUT

EMBEDDINGS = "model.embed_tokens.weight"


def test_what_people_take_for_a_models_folder_is_called_what_it_is(folder, tmp_path):
    weights, said = folder / "model.safetensors", lambda: refusal(read_model_folder, folder)
    assert refusal(read_model_folder, weights) == (
        f"{weights} is a file: --model takes its folder, {folder}")
    whole = weights.read_bytes()
    for content in (whole[:-1], whole[:len(whole) // 2], whole[:20], b""):
        weights.write_bytes(content)
        assert f"{weights} is damaged, or its download was cut: download it again (" in said()
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert f"{weights} is a Git LFS pointer and not the file itself" in said()
    weights.unlink()
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    (folder / names[1]).write_bytes(whole)
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": dict(zip("abc", names))}))
    assert f"{folder} lacks 2 of the 3 files that model.safetensors.index.json names, such as " \
        f"{names[0]}" in said()
    (folder / names[1]).unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").touch()
    assert "has its weights as pytorch_model.bin, which is a pickle" in said()
    edit_config(folder, quantization_config={"bits": 4})
    assert f"{folder} is quantised" in said()
    (folder / "model-q4.gguf").touch()
    assert f"{folder} is GGUF" in said()
    assert "is GGUF" in refusal(read_model_folder, folder / "model-q4.gguf")
    (tmp_path / "adapter_config.json").touch()
    assert f"{tmp_path} is an adapter of PEFT" in refusal(read_model_folder, tmp_path)


def test_a_runs_folder_names_its_newest_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"mitigation": "none"}')
    assert refusal(read_model_folder, tmp_path).endswith("It has no checkpoint")
    for step in (2, 10):
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert refusal(read_model_folder, folder).endswith("checkpoints/step_000010")
    assert refusal(is_run, tmp_path / "checkpoints").endswith("checkpoints/step_000010")


def test_a_tied_output_matrix_may_be_stored_again_and_a_model_be_saved_over_its_parts(folder):
    """Nothing of what is computed lies in the file that is written."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    embeddings = load_file(folder / "model-00001-of-00002.safetensors")[EMBEDDINGS]
    save_file({OUTPUT: embeddings}, folder / "model-00002-of-00002.safetensors")
    shutil.copy(folder / "model-00002-of-00002.safetensors", folder / "model_old.safetensors")
    model = read_model_folder(folder)
    before = model.model.norm.weight.detach().clone()
    for _ in range(2):
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        write_model_folder(model, folder)
        model = read_model_folder(folder)
        model.logits(torch.ones(1, 64))
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))  # as by another program
    torch.testing.assert_close(model.model.norm.weight, before + 2)


def test_write_model_folder_writes_layers_that_are_not_trained(folder):
    model = read_model_folder(folder)
    model.model.embed_tokens.requires_grad_(False)
    before = load_file(folder / "model.safetensors")[EMBEDDINGS]
    write_model_folder(model, folder, trained_parameters(model))
    assert torch.equal(load_file(folder / "model.safetensors")[EMBEDDINGS], before)
    load_model(folder)


def test_a_tensor_that_two_files_have_is_refused(folder):
    """A file left over from another download would win silently, or lose."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    save_file({NORM: torch.ones(64)}, folder / "model-00009-of-00009.safetensors")
    said = refusal(load_model, folder)
    assert f"model-00009-of-00009.safetensors has {NORM} a second time" in said
