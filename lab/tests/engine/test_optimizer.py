"""AdamW against torch's own."""
import torch

from lab.engine.optimizer import AdamW


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
