"""What theory says of the small world, each identity with both of its sides.
"""
import math

import torch

from analysis.tables import Table, by_row
from grpo import gradient_size
from research.probes.batches import Batches
from research.probes.estimator import Estimator, estimator
from research.probes.world import World

HOLDS = 1e-5  # an identity holds when its sides differ by less, relative to the right one


def identities(world: World, batches: Batches, advantage: dict[str, torch.Tensor],
               unweighted: dict[str, Estimator]) -> Table:
    """`unweighted` are the estimators of some advantages with all weights 1."""
    rows = [*rows_of_credit(world),
            *rows_of_advantages(world, batches, advantage, unweighted),
            *rows_of_weights(world, batches, advantage["rloo"]),
            *rows_of_chance(world, batches)]
    wrong = sum(row[3] >= HOLDS for row in rows)
    largest = max(row[3] for row in rows)
    holds = f"All {len(rows)} identities hold"
    if wrong:
        holds = f"{wrong} of {len(rows)} identities do not hold"
    formats = {"identity": "", "left": ".6f", "right": ".6f", "difference": ".1e"}
    return Table("identities", "What theory says", by_row(formats, rows),
                 f"{holds}: the largest relative difference is {largest:.0e}.",
                 ["left and right: sizes, where both are vectors; difference: size of the "
                  "difference over that of the right side"],
                 {"left": "left side", "right": "right side", "difference": "relative difference"})


def rows_of_credit(world: World) -> list[list]:
    J, credit = world.J, world.credit * world.rollouts.mask.double()
    return [
        row("gradient of J by autograd = E[sum A_t grad log pi], A_t = V(after) - V(before)",
            world.gradient, gradient_with(world, credit)),
        row("sum_t E[A_t^2] = Var(R) = p (1 - p)",
            world.probability @ credit.square().sum(1), torch.tensor(J * (1 - J)))]


def rows_of_advantages(world: World, batches: Batches, advantage: dict[str, torch.Tensor],
                       unweighted: dict[str, Estimator]) -> list[list]:
    true, J, G = world.gradient, world.J, batches.which.shape[1]
    c = z_score_factor(J, G)
    rows = [row(f"{name}: mean estimate = true gradient", unweighted[name].mean, true)
            for name in ("rloo", "critic", "one-step", "vine")]
    dr_grpo = estimator(world, batches, advantage["dr_grpo"] / G).mean
    wrong = estimator(world, batches, advantage["wrong critic"] / G).mean
    rows += [
        row("dr_grpo = (G - 1) / G of it", dr_grpo, true * (G - 1) / G),
        row("a critic that is wrong, lambda 1: still the true gradient", wrong, true),
        row(f"z-score: c(p, G) times the true gradient, c({J:.2f}, {G}) = {c:.3f}",
            unweighted["grpo"].mean, c * true)]
    return rows


def rows_of_weights(world: World, batches: Batches, rloo: torch.Tensor) -> list[list]:
    """What a weight does to the mean depends on whether it looks at the token that was drawn."""
    G, which, rollouts = batches.which.shape[1], batches.which, world.rollouts
    by_prefix = 1 + rollouts.entropy.double()
    by_token = 1 / (rollouts.log_prob.double().abs() + 0.1)
    credit = world.credit * rollouts.mask.double()
    before = world.worth[:, :-1]
    return [
        row("weight by the prefix alone (1 + entropy): E[sum w A_t grad log pi]",
            estimator(world, batches, by_prefix[which] * rloo / G).mean,
            gradient_with(world, by_prefix * credit)),
        row("weight by the token (1 / (abs(log p) + 0.1)): that + E[sum w (V - b) grad log pi]",
            estimator(world, batches, by_token[which] * rloo / G).mean,
            gradient_with(world, by_token * (credit + before - world.J)))]


def rows_of_chance(world: World, batches: Batches) -> list[list]:
    p, mask = world.probability, world.rollouts.mask.double()
    collision = world.rollouts.collision.double()
    size = gradient_size(world.rollouts.log_prob.double(), collision)
    return [
        row("E[s^2] of a token = 1 - sum p^2: the unsure ones get the larger gradients",
            p @ (size.square() * mask).sum(1), p @ ((1 - collision) * mask).sum(1)),
        row("probabilities of all groups add up to 1",
            batches.probability.sum(), torch.tensor(1.0)),
        row("and of all answers", p.sum(), torch.tensor(1.0))]


def gradient_with(world: World, values: torch.Tensor) -> torch.Tensor:
    """E[sum_t value_t grad log pi(y_t)] over single answers; `values` are (n, T)."""
    mask = world.rollouts.mask.double()
    terms = (world.probability[:, None] * values * mask).flatten()
    of_choices = torch.zeros(len(world.score), dtype=torch.float64)
    return of_choices.index_add(0, world.node.flatten(), terms) @ world.score


def row(identity: str, left: torch.Tensor, right: torch.Tensor) -> list:
    left, right = torch.atleast_1d(left).double(), torch.atleast_1d(right).double()
    difference = ((left - right).norm() / right.norm()).item()
    return [identity, left.norm().item(), right.norm().item(), difference]


def z_score_factor(p: float, G: int, epsilon: float = 1e-4) -> float:
    """By how much the z-score stretches the gradient of a problem of success p, rewards 0 and 1.

    The mean advantage of a right answer minus that of a wrong one. Without epsilon
    E sqrt((G-1-K)/(K+1)) + E sqrt(K/(G-K)),  K ~ Bin(G-1, p).
    """
    total = 0.0
    for K in range(G):  # right ones among the other answers
        chance = math.comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        if_right, if_wrong = (K + 1) / G, K / G  # share of right answers in the group
        up = (1 - if_right) / (math.sqrt(if_right * (1 - if_right)) + epsilon)
        down = if_wrong / (math.sqrt(if_wrong * (1 - if_wrong)) + epsilon)
        total += chance * (up + down)
    return total


def mix() -> Table:
    """The z-score keeps each problem's direction and changes how much it counts."""
    sizes, rows = (2, 4, 8, 16, 64), []
    for p in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98):
        factors = [z_score_factor(p, G) for G in sizes]
        rows.append([f"{p:.2f}", *factors, 1 / math.sqrt(p * (1 - p))])
    formats = {"p": "", **{f"G = {G}": ".2f" for G in sizes}, "no limit": ".2f"}
    return Table("mix", "How much a problem of success p counts under the z-score, c(p, G)",
                 by_row(formats, rows), notes=[
                     "0/1 rewards. For one problem the direction stays the same; several are "
                     "mixed otherwise. Mean only and leave-one-out give every problem the same"],
                 headings={"p": "success p", "no limit": "G without limit"})
