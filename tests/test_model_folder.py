"""Model folders that are damaged, foreign or silly: one sentence, before memory is taken."""
import json
import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import SMALL
from engine.errors import UserError
from qwen2_model import ModelConfig, Qwen2

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    """A model of 50 tokens, in one file."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=50, head_dim=16, tie_word_embeddings=True, **SMALL)
    Qwen2(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder, **changes):
    """Put other tensors in the place of some."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors | changes, path)


def refusal(folder) -> str:
    with pytest.raises(UserError) as error:
        Qwen2.from_pretrained(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize("changes, words", [
    ({"vocab_size": 10 ** 9}, "no sensible value for vocab_size 1000000000"),
    ({"vocab_size": 2 ** 24 + 1}, "no sensible value for vocab_size"),
    ({"num_hidden_layers": 10 ** 6}, "no sensible value for num_hidden_layers"),
    ({"hidden_size": 10 ** 8}, "no sensible value for hidden_size"),
    ({"intermediate_size": 10 ** 9}, "no sensible value for intermediate_size"),
    ({"num_attention_heads": 10 ** 6, "num_key_value_heads": 10 ** 6}, "num_attention_heads"),
    ({"head_dim": 15}, "head_dim 15 is not implemented"),
    ({"head_dim": None, "num_attention_heads": 100}, "head_dim 0 is not implemented"),
    ({"head_dim": 10 ** 6}, "no sensible value for head_dim"),
    ({"max_position_embeddings": 2 ** 31 - 1}, "max_position_embeddings 2147483647"),
    ({"rope_theta": 10 ** 400, "rope_parameters": None}, "no sensible value for rope_theta 1000"),
    ({"rope_parameters": {"rope_theta": 10 ** 400}}, "no sensible value for rope_theta 1000"),
    ({"rope_parameters": {"rope_theta": 1e-300}}, "no sensible value for rope_theta 1e-300"),
    ({"rope_parameters": [[]]}, "no sensible value for rope_parameters"),
    ({"rope_scaling": "yarn"}, "no sensible value for rope_parameters 'yarn'"),
    ({"rms_norm_eps": 10 ** 400}, "no sensible value for rms_norm_eps"),
    ({"layer_types": [[]]}, "layer_types [[]] is not implemented"),
    ({"pad_token_id": 50}, "pad_token_id 50 should hold a token number below vocab_size 50"),
    ({"bos_token_id": 50}, "bos_token_id 50 should hold a token number below"),
    ({"eos_token_id": [2, 50]}, "token number below vocab_size 50"),
    ({"eos_token_id": [None]}, "token number below vocab_size 50"),
    ({"model_type": "x" * 10_000}, "model_type 'xxx")])
def test_a_config_that_cannot_be_is_refused_before_a_model_is_made(folder, monkeypatch, changes,
                                                                    words):
    monkeypatch.setattr(Qwen2, "__init__", lambda *_: pytest.fail("a model was made"))
    edit(folder / "config.json", **changes)
    assert words in refusal(folder)


@pytest.mark.parametrize("changes, words", [
    ({"vocab_size": 2 ** 24}, "has shape (50, 64), config.json asks for (16777216, 64)"),
    ({"hidden_size": 2 ** 20}, "config.json asks for"),
    ({"tie_word_embeddings": False}, "lacks lm_head.weight"),
    ({"num_hidden_layers": 1}, "beyond what config.json asks for, model.layers.1.")])
def test_shapes_and_names_are_compared_before_memory_is_taken(folder, monkeypatch, changes, words):
    monkeypatch.setattr(Qwen2, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    edit(folder / "config.json", **changes)
    assert words in refusal(folder)


@pytest.mark.parametrize("kind, name", [
    (torch.int8, "I8"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3"),
    (torch.complex64, "C64"), (torch.int64, "I64")])
def test_weights_that_are_no_plain_numbers_are_refused(folder, kind, name):
    rewrite(folder, **{NORM: torch.ones(64).to(kind)})
    assert f"{NORM} holds {name}, only float64" in refusal(folder)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_the_four_kinds_of_numbers_are_read(folder, kind):
    rewrite(folder, **{NORM: torch.full((64,), 1.5, dtype=kind)})
    norm = Qwen2.from_pretrained(folder).model.norm.weight
    assert norm.dtype == torch.float32 and (norm == 1.5).all()


@pytest.mark.parametrize("value, kind", [
    (float("nan"), torch.float32), (float("-inf"), torch.float32), (1e300, torch.float64)])
def test_numbers_that_are_not_finite_as_float32_are_refused_with_their_name(folder, value, kind):
    weight = torch.ones(64, dtype=kind)
    weight[7] = value
    rewrite(folder, **{NORM: weight})
    assert f"{NORM} holds numbers that are not finite in torch.float32" in refusal(folder)


def in_two_files(folder, first: dict, second: dict) -> None:
    (folder / "model.safetensors").unlink()
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    file_of = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": file_of}))


def test_a_tensor_in_two_files_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    in_two_files(folder, tensors, {NORM: torch.zeros(64)})
    assert f"has {NORM} twice, in a.safetensors and in b.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "c.safetensors", "", "x" * 5000])
def test_an_index_names_files_beside_it(folder, name):
    in_two_files(folder, load_file(folder / "model.safetensors"), {"x": torch.zeros(1)})
    shutil.copy(folder / "a.safetensors", folder.parent)
    edit(folder / "model.safetensors.index.json", weight_map={NORM: name})
    assert "and no such file is beside it" in refusal(folder)


def test_saved_weights_may_be_read_by_whoever_may_read_other_new_files(tmp_path, small_model):
    before = os.umask(0o022)
    try:
        small_model.save_pretrained(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o644


def test_every_bound_leaves_room_for_the_largest_published_model(tmp_path):
    """Qwen2.5-72B, and a context of a million tokens."""
    raw = {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
           "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
           "max_position_embeddings": 1_010_000, "rope_theta": 1e7, "bos_token_id": 151643,
           "pad_token_id": None, "rms_norm_eps": 1e-6, "sliding_window": 131072,
           "max_window_layers": 80, "use_sliding_window": False, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_folder(tmp_path).head_dim == 128
