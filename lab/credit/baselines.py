"""Baselines and advantages that need more than the mean of a group."""
import torch
from torch import Tensor

from grpo import centred, group_mean, to_every_token
from lab.engine.methods import advantage
from lab.engine.rollouts import Rollouts, double
from lab.engine.errors import say


@advantage
def opo(rollouts: Rollouts) -> Tensor:
    """The reward minus the group's mean reward, in which each answer counts with its length (arXiv
    2505.23585). The baseline with the least variance counts each answer with its squared gradient;
    if all tokens have gradients of the same size, and these are orthogonal, that is its length.
    It is biased, a little, because the answer itself is among them."""
    length = double(rollouts.length)
    total = group_mean(length * double(rollouts.reward), rollouts.group.cpu())
    baseline = total / group_mean(length, rollouts.group.cpu())
    difference = double(rollouts.reward) - baseline.to(length)
    same = difference.abs() < 1e-8  # all answers of the group have the same reward
    advantage_of_answer = torch.where(same, 0.0, difference).float()
    return to_every_token(advantage_of_answer.to(rollouts.reward.device), rollouts)


@advantage
def maxrl(rollouts: Rollouts) -> Tensor:
    """(reward - mean) / mean of the group (arXiv 2602.02710), for rewards of 0 and 1. It is 0 where
    the mean is 0. A problem that is solved rarely counts more than with any of the others: a group
    of 16 with one right answer gives it 15, and one with 8 right answers gives each of them 1."""
    is_other = (rollouts.reward != 0) & (rollouts.reward != 1)
    if rollouts.step == 1 and is_other.any():
        other = rollouts.reward[is_other][0].item()
        say(f"--advantage maxrl is made for rewards of 0 and 1. Some are others, such as "
            f"{other:.3g}, and with them it is not MaxRL (in Countdown, --reward_form right has 0 "
            "and 1)")
    difference = centred(rollouts.reward, rollouts.group)
    mean = group_mean(rollouts.reward, rollouts.group).to(difference)
    return to_every_token(torch.where(mean > 0, difference / mean, 0.0), rollouts)


maxrl.made_for_rewards = (0.0, 1.0)  # type: ignore[attr-defined]  # for lab exact

@advantage
def batch_mean(rollouts: Rollouts) -> Tensor:
    """The reward minus the mean of the whole batch, as if there were no groups. So answers to easy
    problems are pushed up, and answers to hard ones down."""
    one_group = torch.zeros_like(rollouts.group)
    return to_every_token(centred(rollouts.reward, one_group), rollouts)
