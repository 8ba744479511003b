"""Products in bfloat16 as a CPU with instructions for them makes them, and as one without."""

import pytest
import torch

import lab.engine.model as qwen2_model
from small import copied
from lab.engine.forward import response_log_probs
from lab.engine.sampler import generate
from lab.engine.model import linear, product_type

pytestmark = pytest.mark.numerics


def set_product_type(monkeypatch, wide):
    for module in ("lab.engine.model",):
        monkeypatch.setattr(f"{module}.product_type",
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


def test_both_ways_sample_and_train_alike(small_model, rollouts, monkeypatch):
    """The same greedy answer, and gradients that differ by less than each from float32's."""
    found = []
    for wide, kind in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16),
                       (torch.float32, torch.float32)):
        set_product_type(monkeypatch, wide)
        model = copied(small_model).compute_in(kind)
        sampled = generate(model, [[5, 6, 7]], max_new_tokens=3, greedy=True, stop_ids=())
        log_prob = response_log_probs(model, rollouts, torch.arange(len(rollouts.ids)))
        log_prob.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((sampled, log_prob.detach(), gradient))
    (one, log_prob, gradient), (other, widened, of_widened), (_, _, exact) = found
    torch.testing.assert_close(one.log_prob, other.log_prob, atol=0.05, rtol=0)
    torch.testing.assert_close(log_prob, widened, atol=0.05, rtol=0)
    error = min((one - exact).norm() for one in (gradient, of_widened))
    assert (gradient - of_widened).norm() < error < 0.05 * exact.norm()
