"""The types of the lab's model: products in bfloat16 as a CPU with instructions for them makes
them, and as one without."""
import pytest
import torch

from lab.engine.forward import response_log_probs
import lab.engine.model as qwen2_model
from lab.engine.model import linear, product_type
from lab.engine.sampler import generate
from small import copied

pytestmark = pytest.mark.numerics


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
    assert seen == [(torch.float32, torch.float32)]
    assert logits.dtype == product_type(torch.bfloat16, ids.device)
    assert all(p.dtype == torch.float32 for p in small_model.parameters())
    error = (logits.float() - exact).abs()
    assert 0 < error.max() < 0.05 * exact.abs().max()  # 8 bits of mantissa


def set_product_type(monkeypatch, wide):
    monkeypatch.setattr("lab.engine.model.product_type",
                        lambda dtype, device: wide if dtype == torch.bfloat16 else dtype)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32], ids=["native", "widened"])
def test_a_sum_is_rounded_once_and_not_term_by_term(monkeypatch, wide):
    """256 + 1 + 1: above 256 bfloat16 has even numbers only, so 256 + 1 would be 256 again. The
    third weight is rounded before, from 1.001 to 1."""
    set_product_type(monkeypatch, wide)
    x = torch.tensor([[256.0, 1.0, 1.0]]).bfloat16()
    found = linear(x, torch.tensor([[1.0, 1.0, 1.001]]))
    assert found.dtype == torch.bfloat16 and found.tolist() == [[258.0]]


@pytest.mark.parametrize("has, expected", [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_alone_and_on_a_cpu_without_it_alone_is_widened(monkeypatch, has, expected):
    monkeypatch.setattr(qwen2_model, "has_bfloat16", lambda: has)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert product_type(torch.bfloat16, cpu) == expected
    assert product_type(torch.bfloat16, meta) == torch.bfloat16
    assert product_type(torch.float64, cpu) == torch.float64


def test_a_cpu_without_bfloat16_rounds_less_and_trains_the_same(small_model, rollouts, monkeypatch):
    """A number of bfloat16 has 8 bits, so one rounding moves it by at most 2^-8 of itself. What
    passes many roundings, as a log-prob, has an error of 1.5 times that. It is 0.6 times that where
    products are computed in float32, because only what a norm hands on is rounded. The two ways lie
    at most as far apart as two numbers with the larger error that are rounded independently."""
    found = []
    for wide, kind in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16),
                       (torch.float32, torch.float32)):
        set_product_type(monkeypatch, wide)
        model = copied(small_model).compute_in(kind)
        sampled = generate(model, [[5, 6, 7]], max_new_tokens=3, greedy=True, stop_ids=())
        log_prob = response_log_probs(model, rollouts, torch.arange(len(rollouts.ids)))
        log_prob.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((sampled.ids, sampled.log_prob, log_prob.detach(), gradient))
    native, widened, exact = found
    assert torch.equal(native[0], widened[0])
    for one, other, truth, times in zip(native[1:], widened[1:], exact[1:], (2, 2, 12)):
        error = (one - truth).norm()
        assert 0 < (other - truth).norm() < error < times * 2 ** -8 * truth.norm()
        assert (one - other).norm() < 2 ** 0.5 * error
