"""The sampler's copy of the model against the model itself."""
from dataclasses import replace

import pytest
import torch

from small import copied
from lab.gpu.fused import FusedQwen2
from lab.gpu.packing import PackedPrompts
from lab.engine.model import has_bfloat16
from lab.engine.model import Linear, Qwen2
from qwen2_model import ModelConfig

CONFIG = ModelConfig(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                     num_attention_heads=6, num_key_value_heads=2, head_dim=8, rms_norm_eps=0.1)
LENGTHS = [5, 3]
IDS = torch.tensor([7, 8, 9, 3, 4, 11, 12, 13])


def make_model(**changes):
    torch.manual_seed(0)
    model = Qwen2(replace(CONFIG, **changes))
    with torch.no_grad():
        for parameter in model.parameters():  # no norm of ones, no bias of zeros
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def logits_of(model, fused):
    """(8, V) twice: of the model, and of its copy."""
    packed = PackedPrompts(LENGTHS)
    with torch.no_grad():
        expected = model.logits(model.model(IDS, packed.positions, packed))
        hidden = fused.hidden(IDS, packed.positions,
                              lambda layer, q, kv: packed(layer, q, *kv.chunk(2, 1)).unflatten(
                                  1, (kv.shape[1] // 2, -1)))
        return expected, fused.logits(hidden)


@pytest.mark.parametrize("changes", [
    {}, {"tie_word_embeddings": True}, {"model_type": "qwen3"}, {"num_key_value_heads": 6}])
def test_it_computes_what_the_model_does(changes):
    model = make_model(**changes).double().compute_in(torch.float64)
    fused = FusedQwen2(model, longest=5)
    expected, logits = logits_of(model, fused)
    torch.testing.assert_close(logits, expected, atol=1e-12, rtol=1e-12)
    is_shared = fused.output.matrix.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert is_shared == model.config.tie_word_embeddings  # a tied matrix is not copied


def test_in_bfloat16_it_rounds_the_matrices_that_training_rounds(monkeypatch):
    """A change below half a digit of a matrix is seen by neither; one of a norm is by both."""
    if not has_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16, so the engine rounds less")
    monkeypatch.setattr("lab.gpu.fused.product_type", lambda dtype, device: torch.float32)
    model = make_model().compute_in(torch.bfloat16)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    with torch.no_grad():
        for linear in linears:
            linear.weight.copy_(linear.weight.bfloat16())
        trained, sampled = logits_of(model, FusedQwen2(model, longest=5))
        for linear in linears:
            linear.weight.mul_(1 + 2 ** -10)
        for before, after in zip((trained, sampled), logits_of(model, FusedQwen2(model, 5))):
            assert torch.equal(before, after)
        model.model.layers[0].input_layernorm.weight.mul_(1.1)
        for before, after in zip((trained, sampled), logits_of(model, FusedQwen2(model, 5))):
            assert not torch.equal(before, after)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_what_it_keeps_is_in_the_type_of_its_products(monkeypatch, kept, kind):
    """The trainer keeps matrices in float32 and multiplies in bfloat16; the digits are its."""
    if not has_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16, so the engine rounds less")
    monkeypatch.setattr("lab.gpu.fused.product_type", lambda dtype, device: kept)
    model = make_model(model_type=kind).compute_in(torch.bfloat16)
    fused = FusedQwen2(model, longest=5)
    layer = fused.layers[0]
    for matrix, *_ in (layer.qkv, layer.o, layer.gate_up, layer.down, fused.output):
        assert matrix.dtype == kept and not matrix.requires_grad
        assert torch.equal(matrix, matrix.bfloat16().to(kept))
    exact, logits = logits_of(copied(model).compute_in(torch.float32), fused)
    rounding = (logits_of(model, fused)[0] - exact).float().std()
    assert (logits - exact).std() < 1.5 * rounding  # it loses no more digits than the model
