"""GTPO (2508.04349): rewards per token, shaped by entropy among the answers at each position.

    right:   r_t =   1 + part * H_t / (sum of H_t over the right answers) * d_t
    wrong:   r_t = -(1 + part * (1 / H_t) / (sum of 1 / H_t over the wrong ones) * h_t)

d_t and h_t are the numbers of right and wrong answers that have a token t, so that on average a
token gets 1 + part. In right answers high entropy is reinforced, in wrong ones low entropy is
penalised.
"""
import torch

from engine.choices import advantage
from engine.rollouts import Rollouts
from grpo import centred, group_z_score
from harness.flags import NotNegative

LEAST_ENTROPY = 1e-6  # 1 / entropy stays finite


@advantage
def gtpo(rollouts: Rollouts, *, entropy_part: NotNegative = 0.1) -> torch.Tensor:
    """Each token has a reward of its own, made from its entropy (GTPO, arXiv 2508.04349). In right
    answers it is larger where the entropy is high, and in wrong ones more negative where the
    entropy is low. Both sets of rewards are standardised over the tokens of the group.

    GTPO is known here from reimplementations. The paper has two factors, 1 and 0.1, and only their
    ratio matters: entropy_part. An answer counts as right if its reward is above the group's mean.

    As the paper defines it, the rewards of right answers are standardised together with a 0 for
    each token of a wrong answer, and the other way round. The reimplementations leave these zeros
    out. Then the tokens of right answers have mean 0, and so do those of wrong answers, and nothing
    is learned from being right."""
    difference = centred(rollouts.reward, rollouts.group)
    entropy = rollouts.entropy.clamp(min=LEAST_ENTROPY)
    right = shaped(rollouts, difference > 0, entropy, entropy_part)
    wrong = shaped(rollouts, difference < 0, 1 / entropy, entropy_part)
    return right - wrong


def shaped(rollouts: Rollouts, rows: torch.Tensor, signal: torch.Tensor,
           part: float) -> torch.Tensor:
    """(B, T): 1 + part * share * count at the tokens of these rows (B,) and 0 at the others,
    standardised over each group's tokens; after that, other rows are set to 0 again."""
    mask = rollouts.mask & rows[:, None]
    total = over_group(signal * mask, rollouts)
    count = over_group(mask.float(), rollouts)
    share = torch.where(mask, signal / total, 0.0)
    reward = (1 + part * share * count) * mask
    group = rollouts.group[:, None].expand_as(mask)[rollouts.mask]
    standardised = group_z_score(reward[rollouts.mask], group)
    return torch.zeros_like(reward).masked_scatter(rollouts.mask, standardised) * mask


def over_group(value: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """(B, T): at each position the sum over the group's answers."""
    groups = torch.zeros(len(rollouts.prompt_ids), value.shape[1], device=value.device)
    return groups.index_add(0, rollouts.group, value)[rollouts.group]
