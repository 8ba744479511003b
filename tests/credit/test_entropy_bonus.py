"""A bonus for entropy as an advantage: the mean over all tokens is the gradient of the entropy."""
import torch
from conftest import hand_made

from credit.entropy_bonus import WithEntropyBonus


def nothing(rollouts, policy):
    return torch.zeros_like(rollouts.log_prob)


def test_on_average_it_is_the_gradient_of_the_entropy():
    """For each of five tokens that could have been drawn the bonus times grad log p, weighted with
    p, is grad H as autograd computes it."""
    logits = torch.tensor([1.0, 0.5, -0.3, 0.0, -2.0], requires_grad=True)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum()
    [expected] = torch.autograd.grad(entropy, logits, retain_graph=True)
    rollouts = hand_made(torch.ones(5, 1, dtype=torch.bool), log_prob=log_p.detach()[:, None],
                         entropy=entropy.detach().expand(5, 1))
    bonus = WithEntropyBonus(nothing, 0.5)(rollouts, None)
    total = (log_p.exp().detach() * bonus[:, 0] * log_p).sum()
    [found] = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, 0.5 * expected)


class Counts:
    """An advantage with a state."""
    def __init__(self):
        self.calls = torch.zeros(1)

    def __call__(self, rollouts, policy):
        self.calls += 1
        return nothing(rollouts, policy)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, tensors):
        self.calls = tensors["calls"]


def test_the_state_of_the_advantage_is_kept():
    mask = torch.ones(1, 2, dtype=torch.bool)
    method, again = (WithEntropyBonus(Counts(), 0.1) for _ in range(2))
    method(hand_made(mask, log_prob=torch.zeros(1, 2), entropy=torch.zeros(1, 2)), None)
    again.load_state_dict(method.state_dict())
    assert again.advantage.calls == 1
    WithEntropyBonus(nothing, 0.1).load_state_dict({})  # a function has none
