"""Token weights from measured credit: a reference for all others."""
import torch

from credit.monte_carlo import K, prefix_values
from engine.registry import mitigation
from engine.rollouts import Rollouts

SURE = 1e-3  # a token with 1 - p below this is taken to have no credit


@mitigation
class oracle:
    """The size of each token's Monte Carlo credit |V(after) - V(before)|: expensive, a reference
    for the others.

    The sign stays the outcome's, so this is no upper bound; that is --advantage vine with many
    continuations. A token of probability p cannot be credited with more than (1 - p) of the
    reward's range, so values are sampled only around tokens with 1 - p above a thousandth; the
    others get 0.
    """

    def __init__(self, lab, *, oracle_k: K = 8):
        self.k, self.metrics = oracle_k, {}

    def __call__(self, tokens: Rollouts, lab) -> torch.Tensor:
        is_choice = tokens.mask
        if lab.settings.temperature <= 1:  # at a higher one a sure token is not sure when sampled
            is_choice = is_choice & (-torch.expm1(tokens.log_prob) > SURE)
        choices = [row.nonzero().flatten().tolist() for row in is_choice]
        lengths = tokens.length.tolist()
        cuts = [prefixes_around(row, length) for row, length in zip(choices, lengths)]
        values, spent = prefix_values(lab, tokens, cuts, self.k)
        self.metrics, weight = {"extra_tokens": spent}, torch.zeros_like(tokens.log_prob)
        for row, length in enumerate(lengths):
            worth = dict(zip(cuts[row], values[row]))  # of the first n tokens
            worth[length] = tokens.reward[row].item()
            for t in choices[row]:
                weight[row, t] = abs(worth[t + 1] - worth[t])
        return weight


def prefixes_around(choices: list[int], length: int) -> list[int]:
    """How many first tokens stand before and after each choice; the whole answer has its reward."""
    before, after = set(choices), {t + 1 for t in choices}
    return sorted((before | after) - {length})
