"""The model against `transformers`, and its types."""
import pytest
import torch

from conftest import INSTALL
from lab.engine.model_folder import read_model_folder, write_model_folder
from runs import edit_config

transformers = pytest.importorskip("transformers", reason=INSTALL)
pytestmark = pytest.mark.numerics
SHAPE = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256)
IDS = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))


def reference(kind: str, tied: bool, folder, shard_size="1GB", **more):
    """A random model of the other implementation, saved in the folder; its biases and norms are
    away from 0 and 1, for defaults hide mistakes."""
    torch.manual_seed(1)
    own = dict(head_dim=20) if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **own, **more},
                                               tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def assert_same_logits(folder, other, ids=IDS):
    with torch.no_grad():
        ours = read_model_folder(folder)(ids)
        torch.testing.assert_close(ours, other(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, tied, shard_size", [
    ("qwen2", True, "60KB"), ("qwen2", False, "1GB"), ("qwen3", True, "1GB"),
    ("qwen3", False, "60KB")])
def test_logits_agree_with_transformers(tmp_path, kind, tied, shard_size):
    other = reference(kind, tied, tmp_path, shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    assert_same_logits(tmp_path, other)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_what_we_save_transformers_opens(tmp_path, kind):
    rope = {"rope_type": "default", "rope_theta": 5e4}
    reference(kind, kind == "qwen2", tmp_path / "a", rope_parameters=rope)
    ours = read_model_folder(tmp_path / "a")
    write_model_folder(ours, tmp_path / "b")
    assert_same_logits(tmp_path / "b",
                       transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b"))
    with torch.no_grad():
        assert torch.equal(read_model_folder(tmp_path / "b")(IDS), ours(IDS))


ROPE = {"rope_type": "default", "rope_theta": 300.0}


@pytest.mark.parametrize("place", [
    {"rope_theta": 300.0, "dtype": KeyError, "torch_dtype": "float32", "layer_types": KeyError,
     "sliding_window": 64, "use_sliding_window": False},  # as older versions wrote it
    {"rope_scaling": ROPE}])
def test_rope_theta_stands_in_one_of_three_places(tmp_path, place):
    other = reference("qwen2", True, tmp_path, rope_parameters=ROPE)
    edit_config(tmp_path, rope_parameters=KeyError, **place)
    assert_same_logits(tmp_path, other)


def test_products_in_bfloat16_leave_parameters_and_the_residual_stream_in_float32(small_model):
    """From 64 tokens on, attention may take other products than for fewer (tests/conftest.py)."""
    ids, seen = torch.arange(70)[None] % 50, []
    exact = small_model(ids).detach()
    hook = small_model.model.layers[1].register_forward_hook(
        lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    try:
        logits = small_model.compute_in(torch.bfloat16)(ids)
    finally:
        small_model.compute_in(torch.float32)
        hook.remove()
    assert seen == [(torch.float32, torch.float32)] and logits.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in small_model.parameters())
    error = (logits.float() - exact).abs()
    assert 0 < error.max() < 0.05 * exact.abs().max()  # 8 bits of mantissa
