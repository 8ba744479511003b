"""AdamW against torch's own, and the learning rate of each step."""
import pytest
import torch

from lab.engine.optimizer import STATE, AdamW, rate_of_step


def test_the_rate_rises_and_falls_by_hand():
    rates = [rate_of_step(step, 8, 1.0, 2, "linear") for step in range(1, 9)]
    assert rates == pytest.approx([0.5, 1.0, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])
    assert rate_of_step(8, 8, 0.3, 0, "none") == 0.3
    # three of four parts are left, so 135 degrees: (1 + sqrt(1/2)) / 2
    assert rate_of_step(1, 3, 1.0, 0, "cosine") == pytest.approx(0.8535534)
    assert rate_of_step(3, 3, 1.0, 0, "cosine") == pytest.approx(0.1464466)


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


def test_the_moments_take_their_room_before_an_update_makes_its_tensors():
    p = torch.nn.Parameter(torch.randn(5, 7))
    optimizer = AdamW([p], 1e-2)
    optimizer.zero_grad()
    assert list(optimizer.state[p]) == list(STATE)
    assert not any(tensor.any() for tensor in optimizer.state[p].values())
