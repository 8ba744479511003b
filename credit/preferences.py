"""DPO (2305.18290) on pairs of answers, a better one and a worse one. Without --pairs they are the
best and the worst answer of each group of the batch. With --pairs they are read from a file
(credit/pairs.py), as in the paper, whose pairs were collected before training.

    loss = - mean over pairs of  log sigmoid( beta (margin of the better - margin of the worse) )

An answer's margin is its log-prob minus that under the initial model, summed over its tokens. The
policy loss has the same gradient as this loss if every token of an answer has the following
advantage, with + in the better answer and - in the worse one:

    A = +- N beta sigmoid( - beta (margin of the better - margin of the worse) ) / pairs

The margins are those before the update, so a batch is used for one update and no more.
"""
import torch
import torch.nn.functional as F

from engine.choices import LOSSES, Metrics
from engine.forward import frozen_log_probs
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.load import initial_model


def best_and_worst(rollouts: Rollouts) -> torch.Tensor:
    """(pairs, 2) rows: the first best and first worst answer of each group whose rewards differ."""
    pairs = []
    for group in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == group).nonzero().squeeze(1)
        reward = rollouts.reward[rows]
        if reward.max() > reward.min():
            pairs.append(rows[torch.stack([reward.argmax(), reward.argmin()])])
    return torch.stack(pairs) if pairs else torch.zeros(0, 2, dtype=torch.long)


class dpo:
    """The advantage whose policy loss has the gradient of the loss above."""

    def __init__(self, policy: Policy):
        self.reference = initial_model(policy.settings)
        self.metrics: Metrics = {}  # of the last batch

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        s = policy.settings
        self.metrics = {"dpo_loss": None, "pairs": 0, "pairs_in_order": None}
        pairs = best_and_worst(rollouts)                                     # (pairs, 2) rows
        if s.pairs:  # in a batch of --pairs the better one comes first, whatever the rewards
            pairs = torch.arange(len(rollouts.mask), device=rollouts.mask.device).view(-1, 2)
        advantage = torch.zeros_like(rollouts.log_prob[:, 0])                # (B,)
        if not len(pairs):
            return advantage[:, None]
        rows = pairs.flatten()
        log_prob = frozen_log_probs(policy.model, rollouts, rows, s.micro_batch)
        anchor = frozen_log_probs(self.reference, rollouts, rows, s.micro_batch)
        margin = (log_prob - anchor).sum(1)                                  # (B,)
        better, worse = pairs.unbind(1)
        difference = s.dpo_beta * (margin[better] - margin[worse])           # (pairs,)
        size = s.dpo_beta * torch.sigmoid(-difference) * rollouts.mask.sum() / len(pairs)
        advantage[pairs] = torch.stack([size, -size], 1)
        self.metrics = {
            "dpo_loss": -F.logsigmoid(difference).mean().item(),
            "pairs": len(pairs),
            "pairs_in_order": (difference > 0).float().mean().item()}
        return advantage[:, None]


LOSSES["dpo"] = dpo
