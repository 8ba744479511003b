"""lambda-GRPO (2510.06870): a weight by the length of the answer, with a learned exponent."""
import torch
import torch.nn as nn

from lab.credit.critic import Trained
from lab.engine.methods import Metrics, mitigation
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from grpo import group_z_score, policy_loss
from lab.engine.update import length_scaling
from lab.engine.declared import LearningRate


@mitigation
class lambda_grpo:
    """All tokens of an answer get one weight, which depends on the answer's length (arXiv
    2510.06870). It is G softmax((1 + z/9)^lambda) over the G answers of a group. Here z is the
    standardised length of an answer, and the exponent lambda is learned.

    So one number is learned, and no network. It begins at 0, where all weights are 1. The formula
    is known here from reimplementations. After the weights of a batch are computed, lambda takes a
    gradient step on the same loss. There the gradient flows through the weights, and log_prob is
    held fixed.
    """

    def __init__(self, policy: Policy, *, lambda_lr: LearningRate = 0.01):
        scalar = nn.ParameterDict({"lambda": torch.tensor(0.0)})
        self.scalar = Trained(scalar, lambda_lr, policy.model.device)
        self.state_dict, self.load_state_dict = self.scalar.state_dict, self.scalar.load_state_dict
        self.metrics: Metrics = {"lambda": None}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        s, exponent, mask = policy.settings, self.scalar.module["lambda"], rollouts.mask
        length_scale = length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)
        self.metrics = {"lambda": exponent.item()}
        with torch.enable_grad():
            weight = answer_weights(rollouts, exponent)[:, None].expand_as(mask)
            loss = policy_loss(rollouts.log_prob.detach(), rollouts.advantage,
                               weight * length_scale, mask, int(mask.sum()))
        if (rollouts.advantage * mask).any():  # otherwise momentum alone would change lambda
            self.scalar.gradient_step(loss)
        return weight.detach()


def answer_weights(rollouts: Rollouts, exponent: torch.Tensor) -> torch.Tensor:
    """(B,): the weight of each answer that has tokens; its mean over a group is 1."""
    kept, group = rollouts.length > 0, rollouts.group
    z = torch.zeros(len(group), device=group.device)
    z[kept] = group_z_score(rollouts.length[kept], group[kept], epsilon=0.0)
    power = (1 + z / 9).clamp(min=1e-6) ** exponent
    zeros = torch.zeros(len(rollouts.prompt_ids), device=group.device)  # a number for each group
    largest = zeros.scatter_reduce(0, group, power.detach(), "amax")[group]
    share = torch.where(kept, (power - largest).exp(), 0.0)
    total = zeros.index_add(0, group, share)
    size = zeros.index_add(0, group, kept.float())
    return share / total.clamp(min=1e-30)[group] * size[group]
