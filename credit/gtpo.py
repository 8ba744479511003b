"""GTPO (2508.04349): rewards per token, shaped by entropy among the answers at each position.

    right:   r_t =   1 + part * H_t / (sum of H_t over the right answers) * d_t
    wrong:   r_t = -(1 + part * (1 / H_t) / (sum of 1 / H_t over the wrong ones) * h_t)

d_t and h_t count the right and the wrong answers that have a token t: on average a token gets
1 + part. High entropy is reinforced in right answers, low entropy penalised in wrong ones.
"""
import torch

from engine.choices import advantage
from engine.rollouts import Rollouts
from grpo import centred, group_z_score
from harness.flags import NotNegative

LEAST_ENTROPY = 1e-6  # 1 / entropy stays finite


@advantage
def gtpo(rollouts: Rollouts, *, entropy_part: NotNegative = 0.1) -> torch.Tensor:
    """Token rewards shaped by entropy, among the right answers and among the wrong ones, each
    standardised over the group's tokens (GTPO, 2508.04349).

    Known here from reimplementations. The paper's two factors are 1 and 0.1: only their ratio
    matters. Right are answers with more than the group's mean reward. In the standardisation the
    tokens of wrong answers have a right reward of 0, as they have in the definition. Read without
    them, as the reimplementations do, right answers would have mean 0, and so would wrong ones:
    nothing would be learned from being right. """
    difference = centred(rollouts.reward, rollouts.group)
    entropy = rollouts.entropy.clamp(min=LEAST_ENTROPY)
    return (shaped(rollouts, difference > 0, entropy, entropy_part)
            - shaped(rollouts, difference < 0, 1 / entropy, entropy_part))


def shaped(rollouts: Rollouts, rows: torch.Tensor, signal: torch.Tensor,
           part: float) -> torch.Tensor:
    """(B, T): 1 + part * share * count at the tokens of these rows (B,), 0 at others, standardised
    over each group's tokens; then 0 in other rows."""
    mask = rollouts.mask & rows[:, None]
    total = over_group(signal * mask, rollouts)
    count = over_group(mask.float(), rollouts)
    share = torch.where(mask, signal / total, 0.0)
    reward = (1 + part * share * count) * mask
    group = rollouts.group[:, None].expand_as(mask)[rollouts.mask]
    standardised = group_z_score(reward[rollouts.mask], group)
    return torch.zeros_like(reward).masked_scatter(rollouts.mask, standardised) * mask


def over_group(value: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """(B, T): the sum over the group's answers, at each position."""
    groups = torch.zeros(len(rollouts.prompt_ids), value.shape[1], device=value.device)
    return groups.index_add(0, rollouts.group, value)[rollouts.group]
