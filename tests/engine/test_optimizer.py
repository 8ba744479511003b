"""AdamW on the CPU against AdamW where the model is; what stays on the device."""
from types import SimpleNamespace

import torch

from conftest import copied, gradients
from engine.offload import OffloadedAdamW
from engine.optimizer import AdamW
from grpo import update


def updated(model, optimizer, rollouts, max_grad_norm=0.0):
    s = SimpleNamespace(micro_batch=2, max_grad_norm=max_grad_norm, epochs=1, loss_norm="token",
                        max_new_tokens=14, kl=0.0, clip_low=0.2, clip_high=0.28,
                        clip_kind="ppo", temperature=1.0, loss_temperature=1.0, top_k=0,
                        loss_top_k=0)
    return update(model, optimizer, rollouts, rollouts.mask.float(), s)[0]


def test_a_step_is_that_of_torch():
    """To the bit, in three steps; a parameter without a gradient stays, and has no moments."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (9,), (4,))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    one = AdamW(ours, 1e-2, 0.1)
    two = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(3):
        for p, q in zip(ours[:2], theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        two.step()
    for p, q in zip(ours, theirs):
        assert torch.equal(p, q)
        assert list(one.state[p]) == list(two.state[q])
        for name, value in two.state[q].items():
            assert torch.equal(one.state[p][name], value), name
    one.zero_grad()
    assert [p.grad for p in ours] == [None, None, None]


def test_in_float32_it_is_adamw_to_the_bit(small_model, rollouts):
    plain, moved = copied(small_model), copied(small_model)
    one = AdamW(plain.parameters(), 1e-2, 0.1)
    two = OffloadedAdamW(moved, "cpu", 1e-2, 0.1)
    for _ in range(3):
        results = [updated(model, optimizer, rollouts, max_grad_norm=0.5)
                   for model, optimizer in ((plain, one), (moved, two))]
        assert results[0] == results[1]
    for p, q, start in zip(plain.parameters(), moved.parameters(), small_model.parameters()):
        assert torch.equal(p, q) and not torch.equal(p, start)


def test_in_bfloat16_the_device_keeps_two_bytes_a_parameter_and_no_gradient(small_model, rollouts):
    """Against the same model by hand: float32 parameters that happen to be bfloat16 numbers, and
    products in bfloat16."""
    model, twin = copied(small_model).compute_in(torch.bfloat16), copied(small_model)
    optimizer = OffloadedAdamW(model, "cpu", 1e-3, 0.0)
    assert {p.dtype for p in model.parameters() if p.dim() == 2} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.dim() == 1} == {torch.float32}
    held, used = [], [p for p, _ in optimizer.pairs]

    def count_gradients(_):
        held.append(sum(p.grad is not None for p in used))

    for p in used:
        p.register_post_accumulate_grad_hook(count_gradients)
    updated(model, optimizer, rollouts)
    assert max(held) == 0 and len(held) == 2 * len(used)  # two micro-batches have credit
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(p.bfloat16() if p.dim() == 2 else p)
    twin.compute_in(torch.bfloat16)
    updated(twin, torch.optim.SGD(twin.parameters(), lr=0.0), rollouts)
    mine = torch.cat([kept.grad.flatten() for _, kept in optimizer.pairs])
    assert (mine - gradients(twin)).norm() < 0.01 * gradients(twin).norm()
    for (used, kept), start in zip(optimizer.pairs, small_model.parameters()):
        assert kept.dtype == torch.float32 and torch.equal(used, kept.to(used.dtype))
        assert 0 < (kept - start).abs().max() < 1.1e-3  # a first step that bfloat16 would swallow
