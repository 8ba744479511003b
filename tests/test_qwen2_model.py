"""The model against `transformers`."""
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen2_model import Qwen2

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.numerics
SHAPE = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=256)


def reference(kind: str, tied: bool, folder, shard_size="1GB", **more):
    """A random model of the other implementation, with biases and norms away from 0 and 1 (defaults hide mistakes)."""
    torch.manual_seed(1)
    own = dict(head_dim=20) if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **own, **more}, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


IDS = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is KeyError else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_logits_agree_with_transformers(tmp_path, kind, tied, shard_size):
    other = reference(kind, tied, tmp_path, shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    ours = Qwen2.from_pretrained(tmp_path, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), other(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_what_we_save_transformers_opens(tmp_path, kind):
    reference(kind, kind == "qwen2", tmp_path / "a", rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    ours = Qwen2.from_pretrained(tmp_path / "a")
    ours.save_pretrained(tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, ours(IDS), atol=1e-4, rtol=0)
        assert torch.equal(Qwen2.from_pretrained(tmp_path / "b")(IDS), ours(IDS))


def test_rope_theta_of_older_configs(tmp_path):
    other = reference("qwen2", True, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    edit_config(tmp_path, rope_parameters=KeyError, rope_theta=300.0, dtype=KeyError, torch_dtype="float32",
                layer_types=KeyError, sliding_window=64, use_sliding_window=False)
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(IDS), other(IDS).logits, atol=1e-4, rtol=0)


def test_rope_theta_in_the_place_of_scaling(tmp_path):
    other = reference("qwen2", True, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    edit_config(tmp_path, rope_parameters=KeyError, rope_scaling={"rope_type": "default", "rope_theta": 300.0})
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(IDS), other(IDS).logits, atol=1e-4, rtol=0)


def test_a_tied_output_matrix_may_stand_in_another_shard(tmp_path):
    other = reference("qwen3", True, tmp_path)
    tensors = {k: v.clone() for k, v in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    second = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(second, tmp_path / "b.safetensors")
    index = {"weight_map": {**{name: "a.safetensors" for name in tensors}, "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(IDS), other(IDS).logits, atol=1e-4, rtol=0)


def test_saving_over_a_sharded_model_is_not_shadowed_by_its_index(tmp_path):
    reference("qwen2", True, tmp_path, "60KB")
    model = Qwen2.from_pretrained(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(tmp_path)
    assert torch.equal(Qwen2.from_pretrained(tmp_path).model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("config, generation, stop", [(5, None, (5, 0)), ([5, 6], None, (5, 6, 0)), (5, [7, 8], (7, 8, 0)), (None, 9, (9, 0))])
def test_stop_tokens_come_from_the_generation_config_first(tmp_path, config, generation, stop):
    reference("qwen2", True, tmp_path)
    edit_config(tmp_path, eos_token_id=config, pad_token_id=0)
    (tmp_path / "generation_config.json").write_text(json.dumps({} if generation is None else {"eos_token_id": generation}))
    model = Qwen2.from_pretrained(tmp_path)
    assert model.config.stop_ids == stop
    model.save_pretrained(tmp_path / "again")
    assert Qwen2.from_pretrained(tmp_path / "again").config.stop_ids == stop


@pytest.mark.skipif(not os.environ.get("REAL_SHAPES"), reason="takes minutes and 5 GB: REAL_SHAPES=1 python -m pytest -k real")
def test_the_real_shapes_of_qwen2_5_0_5b(tmp_path):
    shape = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, max_position_embeddings=32_768)
    other = reference("qwen2", True, tmp_path, "500MB", **shape, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    ids = torch.randint(0, 151_936, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(ids), other(ids).logits, atol=1e-4, rtol=1e-4)


def test_dtype_is_the_one_asked_for(tmp_path):
    reference("qwen2", True, tmp_path)
    assert {p.dtype for p in Qwen2.from_pretrained(tmp_path, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("changes, named", [
    (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}), "rope_parameters"),
    (dict(use_sliding_window=True, sliding_window=16, max_window_layers=1, layer_types=KeyError), "use_sliding_window"),
    (dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types"),
    (dict(model_type="llama"), "model_type 'llama'"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    (dict(quantization_config={"bits": 4}), "quantization_config"),
    (dict(num_hidden_layers=2), "layers.2."),
    (dict(num_hidden_layers=4), "layers.3."),
    (dict(intermediate_size=81), "shape"),
    (dict(hidden_size=KeyError), "hidden_size"), (dict(rope_theta="abc", rope_parameters=KeyError), "rope_theta"), (dict(rms_norm_eps=None), "rms_norm_eps"),
    (dict(head_dim="16"), "head_dim"), (dict(layer_types=5), "layer_types"), (dict(vocab_size=10 ** 15), "vocab_size"),
    (dict(eos_token_id="1"), "eos_token_id"), (dict(pad_token_id="0"), "pad_token_id"), (dict(tie_word_embeddings=None), "tie_word"),
    (dict(max_position_embeddings=None), "max_position"), (dict(rope_parameters={"rope_theta": None}), "rope_theta"),
    (dict(num_attention_heads=0), "num_attention_heads"),
    (dict(num_key_value_heads=4), "num_key_value_heads"),
])
def test_what_is_not_implemented_is_refused_by_name(tmp_path, changes, named):
    reference("qwen2", True, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=named):
        Qwen2.from_pretrained(tmp_path)


def test_qwen3_with_biases_is_refused(tmp_path):
    reference("qwen3", True, tmp_path, attention_bias=True)
    with pytest.raises(ValueError, match="attention_bias"):
        Qwen2.from_pretrained(tmp_path)


def test_damaged_files_are_refused_by_name(tmp_path):
    reference("qwen2", False, tmp_path)
    path = tmp_path / "model.safetensors"
    whole, tensors = path.read_bytes(), {k: v.clone() for k, v in load_file(path).items()}
    for content in (whole[:len(whole) // 2], whole[:5], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors"):
            Qwen2.from_pretrained(tmp_path)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, path)
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        Qwen2.from_pretrained(tmp_path)
    save_file({**tensors, "model.extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="model.extra"):
        Qwen2.from_pretrained(tmp_path)
    save_file(tensors, path)
    edit_config(tmp_path, tie_word_embeddings=True)  # the file's own output matrix would be dropped silently
    with pytest.raises(ValueError, match="lm_head.weight"):
        Qwen2.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        Qwen2.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no model folder"):
        Qwen2.from_pretrained(tmp_path / "elsewhere")


def test_products_in_bfloat16_leave_parameters_and_the_residual_stream_in_float32(small_model):
    ids, exact, seen = torch.arange(3, 33)[None], small_model(torch.arange(3, 33)[None]).detach(), []
    hook = small_model.model.layers[1].register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    try:
        logits = small_model.compute_in(torch.bfloat16)(ids)
    finally:
        small_model.compute_in(torch.float32)
        hook.remove()
    assert seen == [(torch.float32, torch.float32)] and logits.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in small_model.parameters())
    error = (logits.float() - exact).abs()
    assert 0 < error.max() < 0.05 * exact.abs().max()  # 8 bits of mantissa
    assert torch.equal(small_model(ids), exact)
