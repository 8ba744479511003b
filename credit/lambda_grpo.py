"""lambda-GRPO (2510.06870): a learned exponent of the answers' lengths."""
import typing

import torch
import torch.nn as nn

from credit.critic import Trained
from engine.choices import mitigation
from engine.rollouts import Rollouts
from grpo import group_z_score, length_scaling, policy_loss
from harness.flags import LearningRate, Range

Exponent = typing.Annotated[float, Range(least=-100, most=100)]


@mitigation
class lambda_grpo:
    """G softmax((1 + z/9)^lambda) over a group's answers, z their standardised lengths; lambda is
    learned.

    The formula is known here from reimplementations. After the weights of the batch are made,
    lambda takes a step down the same loss, through the weights, with log_prob fixed.
    """

    def __init__(self, policy, *, lambda_init: Exponent = 0.0, lambda_lr: LearningRate = 0.01):
        scalar = nn.ParameterDict({"lambda": torch.tensor(float(lambda_init))})
        self.scalar = Trained(scalar, lambda_lr, policy.model.device)
        self.metrics = {}
        self.state_dict, self.load_state_dict = self.scalar.state_dict, self.scalar.load_state_dict

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        s, exponent = policy.settings, self.scalar.module["lambda"]
        length_scale = length_scaling(rollouts, s.loss_norm, s.max_new_tokens)
        with torch.enable_grad():
            weight = answer_weights(rollouts, exponent)[:, None].expand_as(rollouts.log_prob)
            loss = policy_loss(rollouts.log_prob, rollouts.advantage, weight * length_scale,
                               rollouts.mask, int(rollouts.mask.sum()))
        self.metrics = {"lambda": exponent.item()}
        if (rollouts.advantage * rollouts.mask).any():
            self.scalar.gradient_step(loss)
        return weight.detach()

    @staticmethod
    def listed(rollouts: Rollouts) -> torch.Tensor:
        """The weights at lambda = 1, where no training takes place (research/probes/exact.py)."""
        return answer_weights(rollouts, torch.tensor(1.0))[:, None]


def answer_weights(rollouts: Rollouts, exponent: torch.Tensor) -> torch.Tensor:
    """(B,): the weight of each answer that has tokens; their mean in a group is 1."""
    has_tokens, group = rollouts.length > 0, rollouts.group
    z = torch.zeros(len(group), device=group.device)
    z[has_tokens] = group_z_score(rollouts.length[has_tokens], group[has_tokens], epsilon=0.0)
    power = (1 + z / 9).clamp(min=1e-6) ** exponent
    nothing = torch.zeros(len(rollouts.prompt_ids), device=group.device)
    largest = nothing.scatter_reduce(0, group, power.detach(), "amax")
    share = torch.where(has_tokens, (power - largest[group]).exp(), 0.0)
    total = nothing.index_add(0, group, share)
    size = nothing.index_add(0, group, has_tokens.float())
    return share / total.clamp(min=1e-30)[group] * size[group]
