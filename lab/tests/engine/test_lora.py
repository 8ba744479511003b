"""LoRA: what it computes, samples, trains and writes."""
import gc

import pytest
import torch
from safetensors.torch import load_file

from conftest import INSTALL, SMALL, refusal
from small import copied
from lab.engine.model import has_bfloat16
from lab.engine.adapter import write_lora_folder
from lab.engine.lora import add_lora, additions, keep_less, keep_rounded, rank_of
from lab.engine.model_folder import read_model_folder, write_model_folder
from lab.engine.optimizer import trained_parameters
from lab.engine.sampler import generate
from lab.engine.model import Qwen2, keep_less_of_layers, linear
from qwen2_model import ModelConfig

IDS = torch.tensor([[5, 6, 10, 11, 12, 2]])


def with_additions(model, rank=3):
    """A copy with additions that are not zero."""
    model = add_lora(copied(model), rank, seed=1)
    torch.manual_seed(3)
    with torch.no_grad():
        for _, module in additions(model):
            module.B.add_(0.01 * torch.randn_like(module.B))
    return model


@pytest.fixture
def folders(small_model, tmp_path):
    """A model's folder, and that of the model with additions; and this model."""
    write_model_folder(small_model, tmp_path / "base")
    model = with_additions(read_model_folder(tmp_path / "base"))
    write_lora_folder(model, tmp_path / "added")
    return tmp_path / "base", tmp_path / "added", model


def test_a_new_addition_changes_nothing_and_all_else_is_frozen(small_model):
    model = add_lora(copied(small_model), 4)
    assert torch.equal(model(IDS), small_model(IDS))
    names = {name.rpartition(".")[2] for name in trained_parameters(model)}
    assert names == {"A", "B"} and rank_of(model) == 4
    linears = 7 * len(model.model.layers)
    assert len(trained_parameters(model)) == 2 * linears


@pytest.mark.parametrize("dtype, gap", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_a_wide_models_frozen_matrices_multiply_alike_in_sampling_and_in_training(dtype, gap):
    """In sampling they are kept in oneDNN's layout. In training x has its gradient."""
    if dtype == torch.bfloat16 and not has_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16, so the engine rounds less")
    torch.manual_seed(0)
    matrix, bias, x = torch.randn(24, 16).to(dtype), torch.randn(24), torch.randn(2, 3, 16)
    x = x.to(dtype).requires_grad_()
    matrix.is_frozen = torch.backends.mkldnn.is_available()
    for added in (bias, None):
        with torch.no_grad():
            sampled = linear(x, matrix, added)
        trained = linear(x, matrix, added)
        trained.sum().backward()
        torch.testing.assert_close(sampled, trained.detach(), atol=gap, rtol=gap)
    torch.testing.assert_close(x.grad, 2 * matrix.sum(0).expand(2, 3, 16), atol=gap, rtol=gap)


def test_of_an_mlp_two_large_tensors_are_kept_for_the_backward_pass(small_model):
    """gate and up. The other two, silu(gate) and the product, are computed again."""
    mlp = keep_less(with_additions(small_model)).model.layers[0].mlp
    size = mlp.gate_proj.weight.shape[0]
    y = mlp(torch.randn(1, 11, mlp.down_proj.weight.shape[0]))
    kept = {one.data_ptr() for one in gc.get_objects()
            if isinstance(one, torch.Tensor) and one.shape == (1, 11, size)}
    assert len(kept) == 2 and y.requires_grad


def test_what_keeps_less_has_the_same_gradients(small_model):
    """The MLPs of a frozen model, and whole layers, with --checkpointing."""
    gradients = []
    for keep in (lambda model: None, keep_less, keep_less_of_layers):
        one = with_additions(small_model)
        keep(one)
        one(IDS).square().sum().backward()
        gradients.append([p.grad for p in trained_parameters(one).values()])
    plain, *others = gradients
    assert all(all(map(torch.equal, plain, other)) for other in others)


@pytest.mark.parametrize("dtype, gap", [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_the_sampler_samples_what_is_trained(kind, dtype, gap):
    """Also after a step, when the matrices are laid out already and the additions are others."""
    torch.manual_seed(0)
    plain = Qwen2(ModelConfig(vocab_size=50, head_dim=16, model_type=kind, **SMALL))
    with torch.no_grad():
        for parameter in plain.parameters():  # norms and biases that are not 1 and 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = keep_rounded(with_additions(plain).compute_in(dtype))
    before = None
    for _ in range(2):
        sampled = generate(model, [[5, 6, 7]], max_new_tokens=8, greedy=True, stop_ids=())
        ids = torch.tensor([[5, 6, 7, *sampled.ids[0].tolist()]])
        with torch.no_grad():
            log_prob = model(ids).float().log_softmax(-1)[0, 2:-1]
        log_prob = log_prob.gather(1, sampled.ids[0][:, None])[:, 0]
        torch.testing.assert_close(sampled.log_prob[0], log_prob, atol=gap, rtol=0)
        assert before is None or (before - log_prob).abs().max() > 2 * gap
        before = log_prob
        with torch.no_grad():
            for _, module in additions(model):
                module.B.mul_(-8)


def test_matrices_are_kept_in_the_type_of_the_products_and_additions_in_float32(small_model):
    model = keep_rounded(add_lora(copied(small_model).compute_in(torch.bfloat16), 2))
    for name, parameter in model.named_parameters():
        is_rounded = parameter.dim() > 1 and not name.endswith((".A", ".B"))
        assert parameter.dtype == (torch.bfloat16 if is_rounded else torch.float32)


def test_what_is_written_computes_the_same_and_is_an_ordinary_model(folders):
    base, added, model = folders
    again = read_model_folder(added)
    torch.testing.assert_close(again(IDS), model(IDS), atol=2e-5, rtol=0)
    assert (again(IDS) - read_model_folder(base)(IDS)).abs().max() > 0.1
    assert rank_of(again) == 0
    with open(added / "model.safetensors", "rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0  # so the numbers are aligned
    assert set(trained_parameters(again)) == {name for name, _ in again.named_parameters()}


def test_of_a_rounded_model_the_small_additions_are_not_lost(small_model, tmp_path):
    """In bfloat16 a number of 0.02 has steps of 0.0001. These additions are smaller."""
    model = keep_rounded(add_lora(copied(small_model).compute_in(torch.bfloat16), 2))
    with torch.no_grad():
        for _, module in additions(model):
            module.B.add_(1e-6)
    write_lora_folder(model, tmp_path / "added")
    written = load_file(tmp_path / "added/model.safetensors")
    for name, module in additions(model):
        addition = 16 * module.B @ module.A
        found = written[f"{name}.weight"] - module.weight.float()
        assert 3e-6 < addition.abs().max() < 1e-4
        torch.testing.assert_close(found, addition, atol=3e-7, rtol=0)


def test_transformers_opens_what_is_written_and_adds_nothing_twice(folders):
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    _, added, model = folders
    theirs = transformers.AutoModelForCausalLM.from_pretrained(added)
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits.log_softmax(-1), model(IDS).log_softmax(-1),
                                   atol=1e-5, rtol=0)


def test_a_rank_above_the_smallest_side_is_refused(small_model):
    largest = min(min(p.shape) for name, p in small_model.named_parameters()
                  if p.dim() == 2 and "layers" in name)
    assert "smallest side" in refusal(add_lora, copied(small_model), largest + 1)
    add_lora(copied(small_model), largest)
