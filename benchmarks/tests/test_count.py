"""What is counted without a GPU: bytes and launches by hand, and against tensors with numbers."""
from dataclasses import replace

import pytest
import torch

from benchmarks import count
from benchmarks.cases import Case, make_model
from conftest import ROOT

SMALL = Case(
    "", size="small", questions=2, answers=3, new_tokens=6, dtype="bfloat16", micro_batch=3)
GPU = {"bandwidth": 1e12, "rate": 1e15}


def counted(work):
    model = count.make_shapes(SMALL)
    with count.AsOnGPU(), count.Count(0.0, GPU) as found:
        work(model)
    return dict(found.total)


def meta(*shape):
    return torch.empty(shape, device="meta")


def half(*shape):
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize("work, launches, moved", [
    (lambda model: meta(3, 256) @ model.output_matrix.T, 1, 4096 * 256 + 3 * 4096 + 3 * 256),
    (lambda _: torch.addmm(meta(8), meta(3, 5), meta(5, 8)), 1, 8 + 15 + 40 + 24),
    (lambda _: torch.addmm(meta(3, 8), meta(3, 5), meta(5, 8)), 2, 79 + 24 + 48),
    (lambda _: meta(3, 8).addmm_(meta(3, 5), meta(5, 8)), 1, 79 + 24),
    (lambda _, x=meta(3, 8): torch.addmm(x, half(3, 6), half(6, 8), out_dtype=x.dtype, out=x), 1,
     24 + 9 + 24 + 24),
    (lambda _: meta(3, 8).view(24)[:5].expand(2, 5), 0, 0),
    (lambda _: meta(3, 1).expand(3, 8) + meta(3, 8), 1, 3 + 24 + 24),
    (lambda _: meta(9).add_(meta(9)), 1, 27),
    (lambda _: meta(9).copy_(meta(9)), 1, 18),
    (lambda _: torch.add(meta(9), meta(9), out=meta(9)), 1, 27),
    # bfloat16 to float32 in one pass
    (lambda _: half(3, 8).softmax(-1, dtype=torch.float32), 1, 12 + 24),
    # lines of a table: only they are read or written, once here and once there
    (lambda _: meta(500, 8)[torch.tensor([1, 2, 3])], 1, 3 * 2 + 24 * 2),
    (lambda _: meta(500, 8).index_copy_(0, torch.tensor([1, 2]), meta(2, 8)), 1,
     (2 * 2 + 16) * 2),
    (lambda _: meta(2, 8).scatter_(1, torch.tensor([[1], [2]]), meta(2, 1)), 1, (2 * 2 + 2) * 2),
])
def test_bytes_by_hand(work, launches, moved):
    """In numbers of 4 bytes; an index has 8."""
    found = counted(work)
    assert (found.get("launches", 0), found.get("bytes", 0)) == (launches, 4 * moved)


def test_a_model_without_numbers_is_counted_like_one_with(monkeypatch):
    """The same token step and the same update on the CPU, attention and softmax set aside."""
    monkeypatch.setattr(count, "attention", lambda q, k, v, *_, **__: q * 1)
    monkeypatch.setattr(count, "softmax", lambda x, dim, dtype=None: torch.mul(
        x, 1, out=torch.empty_like(x, dtype=dtype)))
    monkeypatch.setattr("engine.fused.adds_to_float32", lambda device: False)  # a GPU's alone
    monkeypatch.setattr("qwen2_model.has_bfloat16", lambda: True)  # a GPU widens no product
    monkeypatch.setattr(count.Count, "note_memory", lambda *_: None)  # that of a GPU alone
    expected = count.token_step(SMALL, GPU), count.whole_update(SMALL, GPU)
    monkeypatch.setattr(count, "make_shapes", make_model)
    assert (count.token_step(SMALL, GPU), count.whole_update(SMALL, GPU)) == expected


def test_larger_micro_batches_have_fewer_launches_and_checkpointing_has_more_work():
    """Four micro-batches, two, and four whose forward pass is made again, loss and logits aside.
    Memory is the other way round."""
    case = replace(SMALL, size="tiny", questions=4)
    four, two, again = (count.whole_update(changed, GPU) for changed in (
        case, replace(case, micro_batch=6), replace(case, checkpointing=True)))
    assert 1.6 * two["launches"] < four["launches"] < 2 * two["launches"]
    assert 1.15 * four["launches"] < again["launches"] < 1.5 * four["launches"]
    assert again["peak"] < 0.9 * four["peak"] < 0.8 * two["peak"]


def test_the_page_shows_what_is_printed(capsys):
    """It is computed, so it is the same everywhere: after a change, paste what is printed."""
    count.main([])
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in page
