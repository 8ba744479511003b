"""Weightings by the drawn token, and their means by the prefix, in the world of 31 answers.

    by the drawn token    w(prefix, token)
    by the prefix         sum over tokens of  pi(token | prefix) w(prefix, token)

Both point at the same prefixes, equally strongly. The second leaves the direction of the gradient
right wherever nothing is decided: there reward does not depend on the token, and the gradients of
log pi(token | prefix) have the mean 0. The first has not: it pushes tokens of high weight up behind
prefixes that are worth more than others, and down behind the rest.
"""
import numpy as np
import torch

from analysis.tables import Table, by_row
from research.probes.batches import Batches, estimator
from research.probes.world import ONE, World, make_world


def listed_table(seeds: range, length: int, progress) -> Table:
    """Medians over policies of what listed_pointers finds."""
    found = {}
    for i, seed in enumerate(seeds):
        progress(i / len(seeds))
        world = make_world(seed, length)
        for row, numbers in listed_pointers(world, Batches.all(world, 3)).items():
            found.setdefault(row, []).append(numbers)
    rows = [[*row, *np.median(numbers, 0).tolist()] for row, numbers in found.items()]
    return Table("listed", "A pointer by the drawn token, and its mean by the prefix",
                 by_row({"pointer": "", "by": "", "bias": ".3f", "pushed": ".3f", "noise": ".2f"},
                        rows), "",
                 [f"medians over {len(seeds)} policies, advantage rloo; bias: what remains at "
                  "the best learning rate, over the true gradient; pushed: the part of the mean "
                  "gradient from prefixes where no token has credit, over the true one, which has "
                  "none there; noise: batches until noise and signal are alike"],
                 {"pushed": "pushed where nothing is decided"})


def listed_pointers(world: World, batches: Batches) -> dict[tuple[str, str], list[float]]:
    """Bias, push and noise of each, with weights of mean 1 over all that is drawn."""
    decided = mean_by_prefix(world, world.credit.abs()) > 1e-9
    reward, G = world.rollouts.reward.double()[batches.which], batches.which.shape[1]
    others = (reward.sum(1, keepdim=True) - reward) / (G - 1)
    advantage = (reward - others)[..., None] / G  # (M, G, 1): rloo
    share = world.probability[:, None] * world.rollouts.mask
    share, true, found = share / share.sum(), world.gradient, {}
    for name, drawn in token_weights(world, decided).items():
        for by, weight in (("the drawn token", drawn),
                           ("the prefix", mean_by_prefix(world, drawn))):
            weight = weight / (weight * share).sum()
            whole, part = (estimator(world, batches, of[batches.which] * advantage)
                           for of in (weight, weight * ~decided))
            against = whole.against(true)
            found[name, by] = [max(0.0, 1 - against["cosine"] ** 2) ** 0.5,
                               (part.mean.norm() / true.norm()).item(), against["noise"]]
    return found


def mean_by_prefix(world: World, values: torch.Tensor) -> torch.Tensor:
    """(n, T) -> (n, T): over the tokens that could have been drawn there, by their chance."""
    ids, T = world.rollouts.ids.tolist(), world.rollouts.ids.shape[1]
    begun = [[tuple(row[:t]) for t in range(T)] for row in ids]
    number = {prefix: i for i, prefix in enumerate(dict.fromkeys(sum(begun, [])))}
    prefix = torch.tensor([[number[part] for part in row] for row in begun])
    chance = world.probability[:, None] * world.rollouts.mask  # 0 beyond the end
    above, below = (torch.zeros(len(number), dtype=torch.float64).index_add(
        0, prefix.flatten(), part.flatten()) for part in (values * chance, chance))
    return torch.where(below > 0, above / below, 0.0)[prefix]


def token_weights(world: World, decided: torch.Tensor) -> dict[str, torch.Tensor]:
    """(n, T) of pointers that may look at the drawn token. `decided`: some token has credit."""
    rollouts, generator = world.rollouts, torch.Generator().manual_seed(0)
    by_choice = torch.rand(len(world.score), generator=generator, dtype=torch.float64)
    symbol, surprise = (rollouts.ids == ONE).double(), -rollouts.log_prob.double()
    return {"none": torch.ones_like(symbol), "where it is decided": decided.double(),
            "where it is decided, and one symbol": decided.double().maximum(symbol),
            "abs(credit)": world.credit.abs(), "surprise: -log p": surprise,
            "one symbol": symbol, "at random": by_choice[world.node]}
