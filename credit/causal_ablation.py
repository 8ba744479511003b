"""Token weights by intervention: what becomes of the answer when a token is another one?"""
import numpy as np
import torch

from credit.monte_carlo import continuation_rewards
from engine.flags import Count
from engine.registry import mitigation
from engine.rollouts import Rollouts


@mitigation
class causal_ablation:
    """What happens without the token: every n-th is replaced by another draw, the answer goes on,
    |change of reward|.

    The replacement comes from the policy with the token ruled out. One continuation for each;
    tokens in between get the linear interpolation.
    """

    def __init__(self, lab, *, ablate_every: Count = 8):
        self.every, self.metrics = ablate_every, {}

    def __call__(self, tokens: Rollouts, lab) -> torch.Tensor:
        lengths, groups, ids = tokens.length.tolist(), tokens.group.tolist(), tokens.ids.tolist()
        places = []  # (answer, index) of the tokens that are replaced
        for row, length in enumerate(lengths):
            places += [(row, t) for t in range(0, length, self.every)]
        prefixes = [(groups[row], tuple(ids[row][:t])) for row, t in places]
        own_tokens = [ids[row][t] for row, t in places]
        rewards, spent = continuation_rewards(lab, tokens, prefixes, 1, without=own_tokens)
        self.metrics = {"extra_tokens": spent}
        rows = [row for row, _ in places]
        changes = (tokens.reward[rows] - rewards[:, 0]).abs().tolist()
        weight, start = torch.zeros_like(tokens.log_prob), 0
        for row, length in enumerate(lengths):
            at = range(0, length, self.every)
            if length:
                between = np.interp(range(length), at, changes[start:start + len(at)])
                weight[row, :length] = torch.tensor(between)
            start += len(at)
        return weight
