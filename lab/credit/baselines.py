"""A baseline of the whole batch."""
import torch
from torch import Tensor

from grpo import centred, to_every_token
from lab.engine.methods import advantage
from lab.engine.rollouts import Rollouts


@advantage
def batch_mean(rollouts: Rollouts) -> Tensor:
    """The reward minus the mean of the whole batch, as if there were no groups. So answers to easy
    problems are pushed up, and answers to hard ones down."""
    one_group = torch.zeros_like(rollouts.group)
    return to_every_token(centred(rollouts.reward, one_group), rollouts)
