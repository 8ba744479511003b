"""A bonus for entropy (--entropy_bonus), written as an advantage.

Many trainers subtract c H from the loss, where H is the mean entropy at the sampled tokens. At one
position the gradient of H = -sum p log p is

    grad H = -sum over all tokens v of  p_v (log p_v + H) grad log p_v

and that is a mean over tokens drawn from p. So the one token that was drawn estimates it without
bias if it was drawn from p, that is at --temperature 1: c (-log p_y - H) is an advantage, which
train.py adds to that of --advantage. A token that was less likely than usual at its position is
pushed up, one that was likelier is pushed down. No other forward pass is needed, and the loss stays
the policy loss. (That the policy also decides which positions it reaches is left out, as it is in
those trainers.)
"""
from torch import Tensor

from lab.engine.rollouts import Rollouts


def entropy_bonus(rollouts: Rollouts) -> Tensor:
    """(B, T): -log p_y - H, which is the bonus for c = 1."""
    return (-rollouts.log_prob - rollouts.entropy) * rollouts.mask
