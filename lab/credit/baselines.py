"""Baselines and advantages that need more than the mean of a group."""
import torch
from torch import Tensor

from grpo import centred, gradient_size, group_mean, group_z_score, to_every_token
from lab.engine.methods import advantage
from lab.engine.rollouts import Rollouts, double
from lab.engine.update import over_group
from run import say


@advantage
def optimal_token_baseline(rollouts: Rollouts, *, zero_tail: bool = True) -> Tensor:
    """The reward minus a baseline for each position (arXiv 2602.07078): B_t is the mean reward of
    the group's answers that reach token t, each counted with W_it, the sum of s^2 over its tokens
    up to t. An answer whose tokens have had large gradients adds more noise, so it counts more.
    It is biased, because the answer itself is among them, with a weight that knows its tokens.

    Nothing is divided by a standard deviation. Beyond the second longest answer only one answer is
    left; there the baseline is 0, unless --zero_tail no, which was verl's default until 24 February
    2026. With `no` it is this answer's own reward, so the rest of the answer has no gradient."""
    s = gradient_size(rollouts.log_prob, rollouts.collision)
    energy = (s.square() * rollouts.mask).cumsum(1) * rollouts.mask                 # W (B, T)
    reward = rollouts.reward[:, None]
    total = over_group(energy, rollouts)
    baseline = over_group(energy * reward, rollouts) / (total + 1e-8)
    if zero_tail:
        reached = over_group(rollouts.mask.float(), rollouts)
        baseline = torch.where(reached > 1, baseline, 0.0)
    return (reward - baseline) * rollouts.mask


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


@advantage
def gdpo(rollouts: Rollouts, *, parts_as_paid: bool = False) -> Tensor:
    """Each part of the reward is standardised in the group by itself, and their sum is standardised
    over the batch (arXiv 2601.05242, as in verl). So a part that differs little counts as much as
    one that differs a lot. The parts are answer, format and reasoning, those that are paid.

    A reward such as 1 for the answer plus 0.1 for the format counts both alike here. With
    --parts_as_paid yes they count 1 and 0.1, which are verl's gdpo_reward_weights. Either way it is
    biased: its mean gradient is not that of the reward."""
    total = torch.zeros_like(rollouts.reward)
    for part, pay in paid_parts(rollouts).items():
        z_score = group_z_score(rollouts.scores[part], rollouts.group)
        total += (pay if parts_as_paid else 1.0) * z_score
    one_group = torch.zeros_like(rollouts.group)
    return to_every_token(group_z_score(total, one_group), rollouts)


def paid_parts(rollouts: Rollouts) -> dict[str, float]:
    """The parts of the reward that are paid in this batch, and what each is paid: its coefficient
    if the reward is written as a sum of parts, each times a number (least squares)."""
    parts = [part for part in rollouts.scores if part != "reward"]
    columns = double(torch.stack([rollouts.scores[part] for part in parts], 1))
    reward = double(rollouts.reward)
    coefficients = torch.linalg.pinv(columns - columns.mean(0)) @ (reward - reward.mean())
    paid = {part: number for part, number in zip(parts, coefficients.tolist()) if number > 1e-3}
    return paid or {"reward": 1.0}


@advantage
def batch_mean(rollouts: Rollouts) -> Tensor:
    """The reward minus the mean of the whole batch, as if there were no groups. So answers to easy
    problems are pushed up, and answers to hard ones down."""
    one_group = torch.zeros_like(rollouts.group)
    return to_every_token(centred(rollouts.reward, one_group), rollouts)
