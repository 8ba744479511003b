"""A bonus for entropy as an advantage: the mean over all tokens is the gradient of the entropy."""
import torch
from conftest import hand_made

from credit.entropy_bonus import CHANGE, WithEntropyBonus


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
    bonus = WithEntropyBonus(nothing, 0.5, target=0.0)(rollouts, None)
    total = (log_p.exp().detach() * bonus[:, 0] * log_p).sum()
    [found] = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, 0.5 * expected)


def test_the_coefficient_follows_the_target_and_is_part_of_a_checkpoint():
    mask = torch.ones(1, 2, dtype=torch.bool)
    low = hand_made(mask, log_prob=torch.zeros(1, 2), entropy=torch.full((1, 2), 0.2))
    high = hand_made(mask, log_prob=torch.zeros(1, 2), entropy=torch.full((1, 2), 0.9))
    method = WithEntropyBonus(nothing, 0.1, target=0.5)
    method(low, None), method(low, None)
    assert abs(method.metrics["entropy_coefficient"] - 0.1 * CHANGE ** 2) < 1e-6
    again = WithEntropyBonus(nothing, 0.1, target=0.5)
    again.load_state_dict(method.state_dict())
    method(high, None), again(high, None)
    assert method.metrics == again.metrics
    assert abs(method.metrics["entropy_coefficient"] - 0.1 * CHANGE) < 1e-6
