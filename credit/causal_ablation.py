"""Credit by ablation (intervention): what becomes of the answer without a token?

    causal_ablation   a weighting: another token there, a continuation, abs(change of reward)
    deletion          an advantage: without it the rest is scored as a text, change of reward
"""
from itertools import islice

import numpy as np
import torch

from credit.monte_carlo import continuation_rewards
from engine import processes
from engine.choices import Metrics, advantage, mitigation
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.settings import Count


@mitigation
class causal_ablation:
    """abs(change of reward) when every n-th token is resampled and the answer goes on.

    The replacement is drawn from the policy with the token ruled out. One continuation for each;
    linear interpolation in between.
    """

    def __init__(self, policy: Policy, *, ablate_every: Count = 8):
        self.every = ablate_every
        self.metrics: Metrics = {}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        answers = [(row, length, range(0, length, self.every))
                   for row, length in enumerate(rollouts.length.tolist()) if length]
        places = [(row, t) for row, _, at in answers for t in at]
        groups, ids = rollouts.lists
        prefixes = [(groups[row], tuple(ids[row][:t])) for row, t in places]
        rewards, self.metrics = continuation_rewards(policy, rollouts, prefixes, 1,
                                                     without=[ids[row][t] for row, t in places])
        change = rollouts.reward[[row for row, _ in places]] - rewards[:, 0]
        changes = iter(change.abs().tolist())
        weight = torch.zeros_like(rollouts.log_prob)
        for row, length, at in answers:
            between = np.interp(range(length), at, list(islice(changes, len(at))))
            weight[row, :length] = torch.tensor(between)
        return weight


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
