"""AdamW against torch's own, and the learning rate of each step."""
import pytest
import torch

from lab.engine.optimizer import AdamW, rate_of_step


def test_the_rate_rises_and_falls_by_hand():
    rates = [rate_of_step(step, 8, 1.0, 2, "linear") for step in range(1, 9)]
    assert rates == pytest.approx([0.5, 1.0, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])
    assert rate_of_step(8, 8, 0.3, 0, "none") == 0.3
    # three of four parts are left, so 135 degrees: (1 + sqrt(1/2)) / 2
    assert rate_of_step(1, 3, 1.0, 0, "cosine") == pytest.approx(0.8535534)
    assert rate_of_step(3, 3, 1.0, 0, "cosine") == pytest.approx(0.1464466)


def test_a_step_is_that_of_torch():
    """To the bit, in three steps, also with a state that was put back; a parameter without a
    gradient stays."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (9,), (4,))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    one = AdamW(ours, 1e-2, 0.1)
    two = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(3):
        again = AdamW(ours, 1e-2, 0.1)
        again.put_back("abc", one.tensors("abc"))
        one = again
        for p, q in zip(ours[:2], theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        two.step()
    assert all(map(torch.equal, ours, theirs))
