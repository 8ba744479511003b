"""Model folders that are damaged, foreign or silly: one sentence, before memory is taken."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import SMALL, refusal
from lab.engine.model_folder import read_config, read_model_folder, write_model_folder
from lab.engine.model import ModelConfig, Qwen2
from runs import edit_config

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    """A model of 50 tokens, in one file."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=50, head_dim=16, tie_word_embeddings=True, **SMALL)
    write_model_folder(Qwen2(config), tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder, **changes):
    """Put other tensors in the place of some."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors | changes, path)


def refused(folder) -> str:
    return refusal(read_model_folder, folder)


@pytest.mark.parametrize("changes, words", [
    ({"vocab_size": 10 ** 9}, "no sensible value for vocab_size 1000000000"),
    ({"num_attention_heads": 0}, "no sensible value for num_attention_heads 0"),
    ({"head_dim": 15}, "head_dim 15 is not implemented"),
    ({"head_dim": None, "num_attention_heads": 100}, "no sensible value for head_dim 0"),
    ({"rope_theta": 10 ** 400, "rope_parameters": None}, "no sensible value for rope_theta 1000"),
    ({"layer_types": [[]]}, "layer_types [[]] is not implemented"),
    ({"eos_token_id": [2, 50]}, "token number below vocab_size 50"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_bias": True, "model_type": "qwen3"}, "attention_bias"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 is not implemented"),
    ({"num_hidden_layers": 10 ** 7}, "lacks model.layers.9999999: config.json asks for 10000000"),
    ({"model_type": "x" * 10_000}, "model_type 'xxx")])
def test_a_config_that_cannot_be_is_refused_before_a_model_is_made(folder, monkeypatch, changes,
                                                                    words):
    monkeypatch.setattr(Qwen2, "__init__", lambda *_: pytest.fail("a model was made"))
    edit_config(folder, **changes)
    assert words in refused(folder)


@pytest.mark.parametrize("changes, words", [
    ({"vocab_size": 2 ** 24}, "has shape (50, 64), config.json asks for (16777216, 64)"),
    ({"tie_word_embeddings": False}, "lacks lm_head.weight"),
    ({"num_hidden_layers": 1}, "that config.json does not ask for: model.layers.1.")])
def test_shapes_and_names_are_compared_before_memory_is_taken(folder, monkeypatch, changes, words):
    monkeypatch.setattr(Qwen2, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    edit_config(folder, **changes)
    assert words in refused(folder)


@pytest.mark.parametrize("model_type, head_dim", [("qwen2", 16), ("qwen3", 128)])
def test_a_config_without_a_head_dim_has_that_of_transformers(folder, model_type, head_dim):
    """64 units by 4 heads; and 128, whatever the units are. The least is 2."""
    edit_config(folder, model_type=model_type, head_dim=None)
    assert read_config(folder).head_dim == head_dim
    edit_config(folder, head_dim=2)
    assert read_config(folder).head_dim == 2


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_the_four_kinds_of_numbers_are_read(folder, kind):
    rewrite(folder, **{NORM: torch.full((64,), 1.5, dtype=kind)})
    norm = read_model_folder(folder).model.norm.weight
    assert norm.dtype == torch.float32 and (norm == 1.5).all()


NOT_FINITE = "numbers that are not finite in torch.float32"


@pytest.mark.parametrize("value, kind, words", [
    (1, torch.int8, "I8, only float64"), (1, torch.complex64, "C64, only"),
    (float("nan"), torch.float32, NOT_FINITE), (float("-inf"), torch.float32, NOT_FINITE),
    (1e300, torch.float64, NOT_FINITE)])
def test_weights_that_are_no_plain_finite_numbers_are_refused(folder, value, kind, words):
    weight = torch.ones(64).to(kind)
    weight[7] = value
    rewrite(folder, **{NORM: weight})
    assert f"{NORM} holds {words}" in refused(folder)


def test_files_of_weights_that_are_cut_off_or_missing_are_named(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:len(whole) // 2], b""):
        path.write_bytes(content)
        assert "model.safetensors cannot be read: " in refused(folder)
    path.unlink()
    assert "has neither model.safetensors nor" in refused(folder)
    path.symlink_to("/dev/zero")  # it would be read for ever, as a pipe would be
    assert "model.safetensors: it is no regular file" in refused(folder)
    path.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: "c.safetensors"}}))
    assert "c.safetensors cannot be read" in refused(folder)
    index.write_text(json.dumps({"weight_map": {NORM: "../c.safetensors"}}))
    assert "names '../c.safetensors', which is not in its folder" in refused(folder)
    (folder.parent / "several").mkdir()
    shutil.copytree(folder, folder.parent / "several/a")
    assert refused(folder.parent / "several").endswith("Model folders in it: "
                                                       f"{folder.parent / 'several/a'}")
    assert "there is no model folder" in refused(folder / "elsewhere")
    near = folder.with_name(folder.name + "x")
    near.with_name(near.name + "y").write_text("")  # a file is no folder
    assert f"there is no model folder {near}: did you mean {folder}?" in refused(near)


def test_a_model_in_parts_may_have_its_tied_output_matrix_in_one_of_its_own(folder):
    """If it is the embeddings. A model saved over the parts is not shadowed by their index."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    weight_map = {NORM: "a.safetensors", "lm_head.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    embeddings = load_file(folder / "a.safetensors")["model.embed_tokens.weight"]
    save_file({"lm_head.weight": embeddings.clone()}, folder / "b.safetensors")
    model = read_model_folder(folder)
    save_file({"lm_head.weight": embeddings + 1}, folder / "b.safetensors")
    assert "lm_head.weight, which differs from the embeddings" in refused(folder)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    write_model_folder(model, folder)
    assert torch.equal(read_model_folder(folder).model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("config, generation, stop", [
    (5, {}, (5, 0)), ([5, 6], {}, (5, 6, 0)), (5, {"eos_token_id": [7, 8]}, (7, 8, 0)),
    (None, {"eos_token_id": 9}, (9, 0))])
def test_stop_tokens_come_from_the_generation_config_first(folder, config, generation, stop):
    edit_config(folder, eos_token_id=config, pad_token_id=0)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = read_model_folder(folder)
    assert model.config.stop_ids == stop
    write_model_folder(model, folder.parent / "again")
    assert read_config(folder.parent / "again").stop_ids == stop


def test_every_bound_leaves_room_for_the_largest_published_model(tmp_path):
    """Qwen2.5-72B, and a context of a million tokens."""
    raw = {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192,
           "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
           "num_key_value_heads": 8, "max_position_embeddings": 1_010_000, "rope_theta": 1e7,
           "pad_token_id": None, "rms_norm_eps": 1e-6, "sliding_window": 131072,
           "max_window_layers": 80, "use_sliding_window": False, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).head_dim == 128


def test_the_name_of_a_model_on_a_hub_gets_its_download_line():
    said = refusal(read_config, Path("Somebody/Some-Model"))
    assert "hf download Somebody/Some-Model --local-dir models/Some-Model" in said
