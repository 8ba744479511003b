"""A bonus for entropy as an advantage: the mean over all tokens is the gradient of the entropy."""
import torch
from small import hand_made

import mitigations  # noqa: F401  fills the choices
from lab.engine.entropy_bonus import entropy_bonus
from lab.harness.build import load_policy, make_advantage
from lab.harness.settings import make_settings
from lab.engine.credited import with_advantage

MASK = torch.tensor([[True, True], [True, False]])


def test_on_average_it_is_the_gradient_of_the_entropy():
    """For each of five tokens that could have been drawn the bonus times grad log p, weighted with
    p, is grad H as autograd computes it."""
    logits = torch.tensor([1.0, 0.5, -0.3, 0.0, -2.0], requires_grad=True)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum()
    [expected] = torch.autograd.grad(entropy, logits, retain_graph=True)
    rollouts = hand_made(torch.ones(5, 1, dtype=torch.bool), log_prob=log_p.detach()[:, None],
                         entropy=entropy.detach().expand(5, 1))
    bonus = entropy_bonus(rollouts)
    total = (log_p.exp().detach() * bonus[:, 0] * log_p).sum()
    [found] = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, expected)


def test_it_is_added_to_the_advantage_of_a_run(learner):
    """With its coefficient, and not beyond an answer's end."""
    found = {}
    for coefficient in (0.0, 0.5):
        s = make_settings({"model": str(learner), "entropy_bonus": coefficient})
        policy = load_policy(s)
        batch = hand_made(MASK, log_prob=torch.full((2, 2), -2.0), entropy=torch.full((2, 2), 0.5))
        batch.scores["reward"] = torch.tensor([1.0, 0.0])
        found[coefficient] = with_advantage(batch, make_advantage(s, policy), policy, s, 1)
    added = found[0.5].advantage - found[0.0].advantage
    torch.testing.assert_close(added, torch.tensor([[0.75, 0.75], [0.75, 0.0]]))
