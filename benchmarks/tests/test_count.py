"""What is counted without a GPU: bytes and launches by hand, and against tensors with numbers."""
from dataclasses import replace

import pytest
import torch

from benchmarks import count, speed
from benchmarks.cases import Case, make_model, make_prompts
from conftest import ROOT
from engine.forward import TokenLogProbs
from engine.optimizer import AdamW

SMALL = Case(
    "", size="small", questions=2, answers=3, new_tokens=6, dtype="bfloat16", micro_batch=3)
GPU = {"bandwidth": 1e12, "rate": 1e15}


def counted(work, launch=0.0):
    model = count.make_shapes(SMALL)
    with count.AsOnGPU(), count.Count(launch, GPU) as found:
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


def test_the_backward_pass_of_the_logits_takes_their_softmax_at_once(monkeypatch):
    """As the forward pass does: in chunks all logits are made twice. A copy in float32 before it
    would be 14 bytes a logit for 6."""
    sizes, softmax = [], count.softmax

    def noted(x, dim, dtype):
        sizes.append(len(x))
        return softmax(x, dim, dtype)

    monkeypatch.setattr("engine.forward.LOGITS_AT_ONCE", 4096)
    monkeypatch.setattr(count, "softmax", noted)
    count.whole_update(SMALL, GPU)
    assert sum(sizes) == 2 * 6 * 6  # answers and tokens


def test_seconds_are_those_of_the_launch_or_the_bytes_or_the_products():
    def add(side):
        return counted(lambda _: meta(side) + meta(side), launch=1e-6)["seconds"]
    assert add(10) == 1e-6
    assert add(10 ** 9) == pytest.approx(3 * 4e9 / 0.6e12)
    square = counted(lambda _: meta(10 ** 5, 10 ** 5) @ meta(10 ** 5, 10 ** 5))
    assert square["seconds"] == pytest.approx(2 * 1e15 / 0.6e15)


def test_adamw_moves_32_bytes_a_parameter():
    """It reads four numbers and writes four: its operator may change gradients, too."""
    model = count.make_shapes(SMALL)
    optimizer = AdamW(model.parameters(), 1e-3)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step()  # makes the moments
    with count.Count(0, GPU) as found:
        optimizer.step()
    parameters = sum(p.numel() for p in model.parameters())
    assert found.total["bytes"] == pytest.approx(32 * parameters, rel=1e-4)
    assert found.total["launches"] == 2


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


def test_the_peak_is_what_is_held_at_the_same_time():
    """Two tensors of 400 bytes, of which one makes room for the third; a view holds nothing."""
    with count.Count(0.0, GPU) as found:
        first = meta(100)
        second = first + first.view(10, 10).flatten()
        del first
        third = second + second
    assert found.peak == 800 and len(third) == 100


def test_of_the_logits_one_chunk_is_held(monkeypatch):
    """16 tokens in chunks of 4, a vocabulary of 4096, width 8. The matrix, its gradient and what is
    added to it have 131,072 bytes each, p and the gradient at the logits of a chunk 65,536."""
    monkeypatch.setattr("engine.forward.LOGITS_AT_ONCE", 4 * 4096)
    hidden, matrix = meta(16, 8).requires_grad_(), meta(4096, 8).requires_grad_()
    with count.Count(0.0, GPU) as found:
        TokenLogProbs.apply(hidden, matrix, torch.zeros(16, dtype=torch.long)).sum().backward()
    assert 0 <= found.peak - 3 * 131_072 - 2 * 65_536 < 4096


def test_larger_micro_batches_have_fewer_launches_and_checkpointing_has_more_work():
    """Four micro-batches, two, and four whose forward pass is made again, loss and logits aside.
    Memory is the other way round."""
    case = replace(SMALL, size="tiny", questions=4)
    four, two, again = (count.whole_update(changed, GPU) for changed in (
        case, replace(case, micro_batch=6), replace(case, checkpointing=True)))
    assert 1.6 * two["launches"] < four["launches"] < 2 * two["launches"]
    assert 1.15 * four["launches"] < again["launches"] < 1.5 * four["launches"]
    assert again["peak"] < 0.9 * four["peak"] < 0.8 * two["peak"]


def test_a_token_step_reads_every_matrix_once():
    """Beside them at least keys and values of two prompts and of 3 tokens each of 6 rows, in 6
    layers 2 heads of 32; and each logit once written, once read."""
    matrices = [p for p in count.make_shapes(SMALL).parameters() if p.dim() == 2]
    earlier = sum(map(len, make_prompts(SMALL))) + 18
    least = 2 * (sum(p.numel() for p in matrices) + earlier * 2 * 6 * 2 * 32 + 2 * 6 * 4096)
    assert least < count.token_step(SMALL, GPU)["bytes"] < 1.3 * least


def test_the_page_shows_what_is_printed(capsys):
    """It is computed, so it is the same everywhere: after a change, paste what is printed."""
    speed.main(["--count"])
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in page
