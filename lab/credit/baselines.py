"""Baselines and advantages that need more than the mean of a group."""
from math import comb

import torch
from torch import Tensor

from lab.engine.errors import UserError
from grpo import centred, gradient_size, group_mean, group_z_score, to_every_token
from lab.engine.declared import Count, Share
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
def pass_at_k(rollouts: Rollouts, *, pass_k: Count = 2) -> Tensor:
    """Pass@k training (arXiv 2508.10751): every set of `pass_k` answers of a group earns 1 if one
    of them is right, and the z-score of this reward goes to its answers. An answer gets the mean
    over all sets that it is in. `pass_k` is below the number of answers to a problem, and 1 is
    GRPO on right and wrong.

    With k = `pass_k`, of N answers with W wrong ones: a set earns m = 1 - C(W, k) / C(N, k) on
    average, with the standard deviation s = sqrt(m (1 - m)). A right answer gets (1 - m) / s, a
    wrong one (1 - m - C(W - 1, k - 1) / C(N - 1, k - 1)) / s. Where nearly every set has a right
    answer, hardly anything is pushed, so training goes on with the hard problems. Its goal is not
    the expected reward, so for that it is biased."""
    found = torch.zeros_like(rollouts.reward)
    is_right = rollouts.scores["answer"] > 0
    for number in rollouts.group.unique():
        rows = rollouts.group == number
        N, W, k = int(rows.sum()), int((rows & ~is_right).sum()), pass_k
        if k >= N:
            raise UserError(f"--pass_k {k}: it should be below the number of answers to a problem, "
                            f"which is {N}")
        mean = 1 - comb(W, k) / comb(N, k)
        s = (mean * (1 - mean)) ** 0.5
        if s == 0:  # every set earns the same
            continue
        of_wrong = 1 - mean - comb(W - 1, k - 1) / comb(N - 1, k - 1)
        found[rows] = torch.where(is_right[rows], (1 - mean) / s, of_wrong / s)
    return to_every_token(found, rollouts)


@advantage
def quantile_baseline(rollouts: Rollouts, *, quantile: Share = 0.4) -> Tensor:
    """(reward - Q) / (std + 0.0001), where Q is the `quantile` of the group's rewards in place of
    their mean (arXiv 2509.22611). As in the authors' code, Q lies between two neighbouring rewards
    if the quantile does. With rewards 0 and 1, a group with few right answers has Q = 0, so only
    the right ones are trained on; one with many has Q = 1, so only the wrong ones are. Q counts the
    answer's own reward, and the std divides problems by different numbers: it is biased."""
    z_score = group_z_score(rollouts.reward, rollouts.group)
    baseline = torch.zeros_like(z_score)
    for number in rollouts.group.unique():
        rows = rollouts.group == number
        baseline[rows] = torch.quantile(z_score[rows], quantile)
    return to_every_token(z_score - baseline, rollouts)


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
