"""GTPO (2508.04349): rewards per token, shaped by entropy among the answers at each position.

    right:   r_t =   1 + part * H_t / (sum of H_t over the right answers) * d_t
    wrong:   r_t = -(1 + part * (1 / H_t) / (sum of 1 / H_t over the wrong ones) * h_t)

H_t is the entropy at token t of an answer, and the sums are over the group's answers at the same
index t. d_t and h_t are the numbers of right and wrong answers that have a token t. They are
factors, so that on average a token of a right answer gets 1 + part, and one of a wrong answer
-(1 + part). In right answers high entropy is reinforced, in wrong ones low entropy is penalised.
"""
import torch

from lab.engine.methods import advantage
from lab.engine.rollouts import Rollouts
from grpo import centred, group_z_score
from lab.engine.update import over_group
from lab.engine.declared import NotNegative

LEAST_ENTROPY = 1e-6  # 1 / entropy stays finite


@advantage
def gtpo(rollouts: Rollouts, *, entropy_part: NotNegative = 0.1) -> torch.Tensor:
    """Each token has a reward of its own, made from its entropy (GTPO, arXiv 2508.04349). In right
    answers it is larger where the entropy is high, and in wrong ones more negative where the
    entropy is low. The two sets of rewards, those of right and of wrong answers, are standardised
    over the tokens of the group.

    GTPO is known here from reimplementations. The paper has two factors, 1 and 0.1, and only their
    ratio matters: entropy_part. An answer counts as right if its reward is above the group's mean.

    As the paper defines it, the rewards of right answers are standardised together with a 0 for
    each token of a wrong answer, and the other way round. The reimplementations leave these zeros
    out. Without them the tokens of right answers have mean 0, and so do those of wrong answers, so
    that nothing is learned from being right. It is biased: which tokens get more depends on their
    entropy, and not on the reward."""
    difference = centred(rollouts.reward, rollouts.group)
    entropy = rollouts.entropy.clamp(min=LEAST_ENTROPY)
    right = shaped(rollouts, difference > 0, entropy, entropy_part)
    wrong = shaped(rollouts, difference < 0, 1 / entropy, entropy_part)
    return right - wrong


def shaped(rollouts: Rollouts, rows: torch.Tensor, signal: torch.Tensor,
           part: float) -> torch.Tensor:
    """(B, T): the shaped rewards of these rows (B,), from their signal: the entropy or 1 / entropy.
    A token of them gets 1 + part * share * count, where share is its part of the signals that these
    rows have at this index, and count is the number of these rows there. All other tokens get 0.
    Then the rewards are standardised over each group's tokens, and other rows are set to 0 again.
    """
    mask = rollouts.mask & rows[:, None]
    total = over_group(signal * mask, rollouts)
    count = over_group(mask.float(), rollouts)
    share = torch.where(mask, signal / total, 0.0)
    reward = (1 + part * share * count) * mask
    group_of_token = rollouts.group[:, None].expand_as(mask)[rollouts.mask]  # (tokens,)
    standardised = torch.zeros_like(reward)
    standardised[rollouts.mask] = group_z_score(reward[rollouts.mask], group_of_token)
    return standardised * mask
