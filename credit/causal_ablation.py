"""Credit by ablation (intervention): what becomes of the answer without a token?

    causal_ablation   a weighting: another token there, a continuation, abs(change of reward);
                      --ablation delete: without it, abs(change of log p(answer section))
    deletion          an advantage: without it the rest is scored as a text, change of reward
"""
import typing
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from credit.monte_carlo import Places, continuation_rewards
from engine import processes
from engine.choices import Metrics, advantage, mitigation
from engine.forward import frozen_log_probs
from engine.policy import Policy
from engine.rollouts import Rollouts
from engine.tokens import ANSWER
from harness.flags import Count, Flag

Ablation = typing.Annotated[str, Flag("resample", "resample or delete the token",
                                      choices=("resample", "delete"))]


@mitigation
class causal_ablation:
    """abs(change of reward) when every n-th token is resampled and the answer goes on; or
    abs(change of log p(answer section)) when it is deleted and the rest is scored again.

    The replacement is drawn from the policy with the token ruled out. One continuation for each;
    linear interpolation in between.
    """

    def __init__(self, policy: Policy, *, ablate_every: Count = 8, ablation: Ablation = "resample"):
        self.every = ablate_every
        self.metrics: Metrics = {}
        self.changes = {"resample": self.after_resampling, "delete": after_deletion}[ablation]

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        answers = [(row, length, range(0, length, self.every))
                   for row, length in enumerate(rollouts.length.tolist()) if length]
        places = [(row, t) for row, _, at in answers for t in at]
        changes = iter(self.changes(rollouts, policy, places).abs().tolist())
        weight = torch.zeros_like(rollouts.log_prob)
        for row, length, at in answers:
            between = np.interp(range(length), at, list(islice(changes, len(at))))
            weight[row, :length] = torch.tensor(between)
        return weight

    def after_resampling(self, rollouts: Rollouts, policy: Policy, places: Places) -> torch.Tensor:
        """(places,): reward with the token minus reward without it."""
        groups, ids = rollouts.lists
        prefixes = [(groups[row], tuple(ids[row][:t])) for row, t in places]
        rewards, self.metrics = continuation_rewards(policy, rollouts, prefixes, 1,
                                                     without=[ids[row][t] for row, t in places])
        return rollouts.reward[[row for row, _ in places]] - rewards[:, 0]


def after_deletion(rollouts: Rollouts, policy: Policy, places: Places) -> torch.Tensor:
    """(places,): log p of the later tokens of the answer section, with the token minus without it;
    0 where there are none. Part of it is surprise at the gap itself, which no answer has."""
    shorter, later = without(rollouts, places)
    asked = later.any(1).nonzero().squeeze(1)
    share = processes.shard_of(len(asked))
    log_prob = frozen_log_probs(policy.model, shorter, asked[share.start:share.stop],
                                policy.settings.micro_batch)
    processes.all_reduce(log_prob)
    return ((shorter.log_prob - log_prob) * later).sum(1)


def without(rollouts: Rollouts, places: Places) -> tuple[Rollouts, torch.Tensor]:
    """An answer for each place, the token there deleted; and which of its tokens (places, T) come
    later in the answer section. Its log_prob is still that of before the deletion."""
    device, T = rollouts.mask.device, rollouts.mask.shape[1]
    rows = torch.tensor([row for row, _ in places], device=device)
    at = torch.tensor([t for _, t in places], device=device)[:, None]
    index = torch.arange(T, device=device).expand(len(places), T)
    source = (index + (index >= at)).clamp(max=T - 1)  # where a token stood before
    mask = index < rollouts.length[rows, None] - 1
    shorter = replace(rollouts, mask=mask, group=rollouts.group[rows],
                      ids=rollouts.ids[rows].gather(1, source) * mask,
                      log_prob=rollouts.log_prob[rows].gather(1, source) * mask)
    section = rollouts.section[rows].gather(1, source)
    return shorter, mask & (index >= at) & (section == ANSWER)


@advantage
class deletion:
    """Reward of the answer minus the reward of its text without the token: on which tokens the
    scoring of the text depends.

    Nobody asks what the policy would have written instead, so a step of the reasoning that led to
    the answer gets 0. Not centred, or tokens without effect would get something: right answers are
    reinforced where they are read, and hardly anything of a wrong one is.
    """

    def __init__(self, policy: Policy):
        pass

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        credit, (groups, answers) = torch.zeros_like(rollouts.log_prob), rollouts.lists
        for row in rollouts.rows_of_rank().tolist():
            problem, ids = rollouts.problems[groups[row]], answers[row]
            rest = [policy.reward_of(problem, ids[:t] + ids[t + 1:]) for t in range(len(ids))]
            credit[row, :len(ids)] = rollouts.reward[row] - torch.tensor(rest).to(credit)
        processes.all_reduce(credit)
        return credit
