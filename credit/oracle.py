"""Weights from measured credit: a reference for all others."""
import math
import typing

import torch

from credit.measured import chance_of_others, credit_at, refuse_other_temperatures
from engine.rollouts import Rollouts
from harness.flags import Flag
from harness.registry import mitigation

SURE = 1e-3  # a token with 1 - p below this is taken to have no credit
K = typing.Annotated[int, Flag(8, "fresh answers that leave a token which is a free choice; of the "
                                  "others fewer", least=1, most=10_000)]


@mitigation
class oracle:
    """|V(after) - V(before)|, measured by Monte Carlo: expensive, a reference for the others.

    Measured as --advantage measured does it, at every token with 1 - p above a thousandth, by
    oracle_k (1 - p) fresh answers, rounded up. A token of probability p cannot be credited with
    more than (1 - p) of the reward's range, so the others get 0. The sign stays the outcome's, so
    this is no upper bound; that is --advantage measured.
    """

    def __init__(self, policy, *, oracle_k: K = 8):
        refuse_other_temperatures(policy)
        self.k, self.metrics = oracle_k, {}

    def __call__(self, tokens: Rollouts, policy) -> torch.Tensor:
        other_chance = chance_of_others(tokens)
        places = (other_chance > SURE).nonzero().tolist()
        counts = [math.ceil(self.k * other_chance[b, t].item()) for b, t in places]
        credit, spent = credit_at(policy, tokens, places, counts)
        self.metrics = {"extra_tokens": spent}
        return credit.abs()
