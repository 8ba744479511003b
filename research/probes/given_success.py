"""What success says of a token, in the small world: the policy given success, and what it may hold.

    pi(y | prefix, success) = pi(y | prefix) V(after y) / V(before y)        Bayes' rule

V is the probability of reward 1. Two tables: how near a copy of the policy that was taught right
answers (credit/hindsight.py) comes to the left side, and how much of this can be at a token at all.

The bound. Let I be what a token tells of the reward R: the mutual information of the two after a
prefix, the mean over both rewards of KL(pi(. | prefix, R), pi(. | prefix)). 2604.11056 (known here
from its abstract) calls the shift from pi to pi(. | prefix, R) the credit, and bounds it by the
token's entropy H, since  I = H - H(token | R) <= H.  What follows is ours. With A = V(after) -
V(before), I is the mean over tokens of KL(Bernoulli(V after), Bernoulli(V before)), and Pinsker's
inequality says that each of these is at least 2 A^2. So

    2 E[A^2] <= I <= H:  what is decided at a token is at most half of the entropy before it.

For success alone there is no such bound: a rare token that is the only right one has a
KL(pi(. | prefix, success), pi(. | prefix)) of -log p, and next to no entropy.
"""
from dataclasses import dataclass

import torch

from analysis.tables import Table, by_row
from credit.hindsight import taught
from engine.forward import frozen_log_probs
from research.probes.world import TEXTS, World

STEPS, RATE, MICRO_BATCH = (1, 3, 10, 100), 1e-2, 64  # of the copies


@dataclass
class Forks:
    """Every prefix at which something may follow: S of them, with V tokens each."""
    chance: torch.Tensor   # (S, V) of each token
    after: torch.Tensor    # (S, V) V after it
    before: torch.Tensor   # (S,) V of the prefix


def forks_of(world: World) -> Forks:
    """The prefixes of the world's answers; those whose reward is already known are left out."""
    chance, after, before = {}, {}, {}
    rollouts = world.rollouts
    for b, length in enumerate(rollouts.length.tolist()):
        ids = tuple(rollouts.ids[b, :length].tolist())
        for t, token in enumerate(ids):
            prefix = ids[:t]
            before[prefix] = world.worth[b, t]
            chance.setdefault(prefix, {})[token] = rollouts.log_prob[b, t].double().exp()
            after.setdefault(prefix, {})[token] = world.worth[b, t + 1]
    open_ones = [prefix for prefix, V in before.items() if 0 < V < 1]
    tokens = range(len(TEXTS))
    return Forks(torch.stack([stacked(chance[prefix], tokens) for prefix in open_ones]),
                 torch.stack([stacked(after[prefix], tokens) for prefix in open_ones]),
                 torch.stack([before[prefix] for prefix in open_ones]))


def stacked(values: dict[int, torch.Tensor], tokens: range) -> torch.Tensor:
    return torch.stack([values[token] for token in tokens])


def bounds_table(forks: Forks) -> Table:
    """Each bound at the prefix where it is tightest."""
    before = forks.before[:, None]
    entropy = -torch.xlogy(forks.chance, forks.chance).sum(1)
    told = (forks.chance * bernoulli_divergence(forks.after, before)).sum(1)
    decided = (forks.chance * (forks.after - before).square()).sum(1)
    ratio = forks.after / before
    by_success = (forks.chance * torch.xlogy(ratio, ratio)).sum(1)
    rows = [bound("what the token tells of the reward, I <= H", told, entropy),
            bound("what is decided there, 2 E[A^2] <= I", 2 * decided, told),
            bound("and so 2 E[A^2] <= H", 2 * decided, entropy),
            bound("no theorem: KL(given success, policy) <= H", by_success, entropy)]
    broken = [row[0] for row in rows[:3] if row[3] > 1]
    finding = (f"Entropy bounds hindsight credit at all {len(entropy)} prefixes: the largest ratio "
               f"is {rows[0][3]:.3f}.")
    if broken:
        finding = f"A bound that is a theorem does not hold: {'; '.join(broken)}."
    formats = {"bound": "", "left": ".4f", "right": ".4f", "ratio": ".3f"}
    return Table("bounds", "How much credit a token can hold: entropy H bounds it",
                 by_row(formats, rows), finding,
                 ["at the prefix with the largest ratio of left to right side; H in nats, before "
                  "the token; the last row may exceed 1"],
                 {"left": "left side", "right": "right side", "ratio": "largest ratio"})


def bernoulli_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL of a coin with chance p of heads from one with chance q."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)
            + torch.xlogy(1 - p, 1 - p) - torch.xlogy(1 - p, 1 - q))


def bound(words: str, left: torch.Tensor, right: torch.Tensor) -> list:
    place = int((left / right).argmax())
    return [words, left[place].item(), right[place].item(), (left / right).max().item()]


def copies_table(world: World) -> Table:
    """Copies that were taught every right answer, each as often as it comes, against Bayes' rule:
    cosine of pi(y given success) / pi(y) - 1 with V(after) / V(before) - 1, and its share."""
    rollouts, before, after = world.rollouts, world.worth[:, :-1], world.worth[:, 1:]
    known = rollouts.mask & (before > 0) & (before < 1)
    reached = world.probability[:, None].expand_as(before)[known]
    exact = (after / before)[known] - 1
    own = log_probs(world.model, world)[known]
    share, rows = world.probability * rollouts.reward, []
    for steps in STEPS:
        copy = taught(world.model, rollouts, share, RATE, steps, MICRO_BATCH)
        guess = (log_probs(copy, world)[known] - own).double().exp() - 1
        product, square = (reached * guess * exact).sum(), (reached * exact.square()).sum()
        cosine = product / (square * (reached * guess.square()).sum()).sqrt()
        agrees = (reached * (guess.sign() == exact.sign())).sum() / reached.sum()
        rows.append([steps, cosine.item(), (product / square).item(), agrees.item()])
    formats = {"steps": "", "cosine": ".3f", "slope": ".3f", "sign": ".0%"}
    return Table("hindsight", "A copy taught right answers, against the policy given success",
                 by_row(formats, rows),
                 f"After {STEPS[-1]} steps on all right answers a copy has a cosine of "
                 f"{rows[-1][1]:.3f} with Bayes' rule.",
                 ["tokens count as often as they come; learning rate "
                  f"{RATE}; all right answers are known here, a batch knows a few of them"],
                 {"cosine": "cosine with Bayes' rule", "slope": "share of its size",
                  "sign": "right sign"})


def log_probs(model, world: World) -> torch.Tensor:
    rows = torch.arange(len(world.probability))
    return frozen_log_probs(model, world.rollouts, rows, MICRO_BATCH)
