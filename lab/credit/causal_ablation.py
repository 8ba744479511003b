"""Credit by ablation (intervention): what changes if a token is replaced or deleted?

    causal_ablation   a weighting. The token is replaced and the answer continued: the weight is the
                      size of the change of reward. With --ablation delete the token is deleted: the
                      weight is the size of the change of log p(answer section)
    deletion          an advantage. The token is deleted and the rest scored as a text: the
                      advantage is the change of reward
"""
import typing
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from lab.credit.monte_carlo import Positions, continuation_rewards
from lab.engine.methods import Metrics, advantage, mitigation
from lab.engine.forward import frozen_log_probs
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import ANSWER
from lab.engine.declared import Count, Flag

Ablation = typing.Annotated[str, Flag("resample", "what is done to a token",
                                      choices=("resample", "delete"))]


@mitigation
class causal_ablation:
    """The weight says how much depends on a token. With --ablation resample, another token is
    sampled in its place and the answer is continued: the weight is how far the reward changes. With
    delete, the token is left out: the weight is how far the answer section's log-probability
    changes.

    Only every n-th token is tried, where n is ablate_every; the weights of those in between are
    interpolated linearly. The replacement is drawn from the policy, with the token itself excluded,
    and the answer is continued from it once.
    """

    def __init__(self, policy: Policy, *, ablate_every: Count = 8, ablation: Ablation = "resample"):
        self.every = ablate_every
        self.metrics: Metrics = {}
        self.changes = {"resample": self.after_resampling, "delete": after_deletion}[ablation]

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        lengths = rollouts.length.tolist()
        positions = [(row, t) for row, length in enumerate(lengths)
                     for t in range(0, length, self.every)]
        changes = iter(self.changes(rollouts, policy, positions).abs().tolist())
        weight = torch.zeros_like(rollouts.log_prob)
        for row, length in enumerate(lengths):
            if not length:
                continue
            ablated = range(0, length, self.every)
            of_ablated = list(islice(changes, len(ablated)))
            weight[row, :length] = torch.tensor(np.interp(range(length), ablated, of_ablated))
        return weight

    def after_resampling(self, rollouts: Rollouts, policy: Policy,
                         positions: Positions) -> torch.Tensor:
        """(positions,): reward with the token minus reward without it."""
        groups, ids = rollouts.groups_and_ids
        prefixes = [(groups[row], tuple(ids[row][:t])) for row, t in positions]
        own_tokens = [ids[row][t] for row, t in positions]
        rewards, self.metrics = continuation_rewards(policy, rollouts, prefixes, 1,
                                                     without=own_tokens)
        return rollouts.reward[[row for row, _ in positions]] - rewards[:, 0]


def after_deletion(rollouts: Rollouts, policy: Policy, positions: Positions) -> torch.Tensor:
    """(positions,): log p of the later tokens of the answer section, with the token minus without
    it; 0 if there are no such tokens. A part of it is surprise at the gap itself, because no
    sampled answer has one."""
    shorter, later = with_deletions(rollouts, positions)
    needed = later.any(1).nonzero().squeeze(1)
    log_prob = frozen_log_probs(policy.model, shorter, needed, policy.settings.micro_batch)
    return ((shorter.log_prob - log_prob) * later).sum(1)


def with_deletions(rollouts: Rollouts, positions: Positions) -> tuple[Rollouts, torch.Tensor]:
    """A batch with one answer for each position, in which the token there is deleted; and a mask
    (positions, T) of the tokens that come after it and are in the answer section. The batch's
    log_prob is still that from before the deletion."""
    device, T = rollouts.mask.device, rollouts.mask.shape[1]
    rows = torch.tensor([row for row, _ in positions], device=device)
    at = torch.tensor([t for _, t in positions], device=device)[:, None]
    index = torch.arange(T, device=device).expand(len(positions), T)
    source = (index + (index >= at)).clamp(max=T - 1)  # the token's index before the deletion
    mask = index < rollouts.length[rows, None] - 1
    of_each = rollouts.of_rows(rows)
    shorter = replace(of_each, mask=mask, written=mask, ids=of_each.ids.gather(1, source) * mask,
                      log_prob=of_each.log_prob.gather(1, source) * mask)
    section = of_each.section.gather(1, source)
    return shorter, mask & (index >= at) & (section == ANSWER)


@advantage
class deletion:
    """The reward of the answer minus the reward of its text without the token. It shows on which
    tokens the scoring of the text depends.

    The policy does not write anything in place of the token, so a step of the reasoning that led to
    the answer gets 0. No mean is subtracted, because then tokens without any effect would get an
    advantage. So right answers are reinforced at the tokens that the scoring reads, and wrong
    answers hardly anywhere. It is biased: the text without a token is none that the policy wrote.
    """

    def __init__(self, policy: Policy):
        pass

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        credit, (groups, answers) = torch.zeros_like(rollouts.log_prob), rollouts.groups_and_ids
        for row, ids in enumerate(answers):
            problem = rollouts.problems[groups[row]]
            rest = [policy.reward_of(problem, ids[:t] + ids[t + 1:]) for t in range(len(ids))]
            credit[row, :len(ids)] = rollouts.reward[row] - torch.tensor(rest).to(credit)
        return credit
