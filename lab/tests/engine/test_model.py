"""The lab's model against `transformers`, and its types."""
import pytest
import torch

from conftest import INSTALL
from lab.engine.model_folder import read_model_folder, write_model_folder
from test_qwen2_model import IDS, reference

pytestmark = pytest.mark.numerics


@pytest.mark.parametrize("kind, tied", [
    ("qwen2", True), ("qwen2", False), ("qwen3", True), ("qwen3", False)])
def test_logits_agree_with_transformers_before_and_after_a_model_is_saved(tmp_path, kind, tied):
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    theirs = reference(kind, tied, tmp_path / "a")
    ours = read_model_folder(tmp_path / "a")
    write_model_folder(ours, tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    with torch.no_grad():
        for other in (theirs, again):
            torch.testing.assert_close(ours(IDS), other(IDS).logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(read_model_folder(tmp_path / "b")(IDS), ours(IDS))


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
