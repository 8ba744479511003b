"""Identities of theory about credit and gradient, in a synthetic task whose answers are all listed
(enumerated.py): each with both of its sides."""
import math

import torch
from torch import Tensor

from analysis.tables import Row, Table, by_row
from grpo import gradient_size
from research.probes.enumerated import Batches, EnumeratedTask, estimator

HOLDS = 1e-5  # an identity holds when its sides differ by less, relative to the right one


def identities_table(task: EnumeratedTask, batches: Batches, advantage: dict[str, Tensor]) -> Table:
    rows = [*rows_of_credit(task), *rows_of_batches(task, batches, advantage)]
    wrong = sum(row[3] >= HOLDS for row in rows)
    largest = max(row[3] for row in rows)
    holds = f"All {len(rows)} identities hold"
    if wrong:
        holds = f"{wrong} of {len(rows)} identities do not hold"
    formats = {"identity": "", "left": ".6f", "right": ".6f", "difference": ".1e"}
    return Table("identities",
                 "Identities of theory, with both of their sides", by_row(formats, rows),
                 f"{holds}: the largest relative difference is {largest:.0e}.",
                 ["Where the sides are vectors, the table has their lengths. The relative "
                  "difference is the length of left minus right, divided by that of the right "
                  "side"],
                 {"left": "left side", "right": "right side", "difference": "relative difference"})


def rows_of_credit(task: EnumeratedTask) -> list[Row]:
    p, J, rollouts = task.probability, task.J, task.rollouts
    of_credit = gradient_with(task, task.credit)
    squared_credit = p @ task.credit.square().sum(1)
    collision = rollouts.collision.double()
    s = gradient_size(rollouts.log_prob.double(), collision)
    squared_size = p @ (s.square() * rollouts.mask).sum(1)
    undecided = p @ ((1 - collision) * rollouts.mask).sum(1)
    return [
        row("gradient of J by autograd = E[sum A_t grad log pi], A_t = V(after) - V(before)",
            task.gradient, of_credit),
        row("sum_t E[A_t^2] = Var(R) = p (1 - p)", squared_credit, torch.tensor(J * (1 - J))),
        row("E[s^2] of a token = 1 - sum p^2: uncertain tokens get the larger gradients",
            squared_size, undecided)]


def rows_of_batches(task: EnumeratedTask, batches: Batches,
                    advantage: dict[str, Tensor]) -> list[Row]:
    """The mean of the gradient with weights: it depends on whether a weight looks at the token that
    was drawn."""
    true, which, rollouts, rloo = task.gradient, batches.which, task.rollouts, advantage["rloo"]
    G = which.shape[1]

    def mean(factor: Tensor) -> Tensor:
        return estimator(task, batches, factor / G).mean

    c = z_score_factor(task.J, G)
    by_prefix = 1 + rollouts.entropy.double()
    of_prefix = gradient_with(task, by_prefix * task.credit)
    by_token = 1 / (rollouts.log_prob.double().abs() + 0.1)
    value_before = task.worth[:, :-1]
    of_token = gradient_with(task, by_token * (task.credit + value_before - task.J))
    return [
        row("dr_grpo = (G - 1) / G of the true gradient",
            mean(advantage["dr_grpo"]), true * (G - 1) / G),
        row(f"z-score: c(p, G) times the true gradient, c({task.J:.2f}, {G}) = {c:.3f}",
            mean(advantage["grpo"]), c * true),
        row("weight by the prefix alone (1 + entropy): E[sum w A_t grad log pi]",
            mean(by_prefix[which] * rloo), of_prefix),
        row("weight by the token (1 / (abs(log p) + 0.1)): E[sum w (A_t + V - b) grad log pi]",
            mean(by_token[which] * rloo), of_token)]


def gradient_with(task: EnumeratedTask, values: Tensor) -> Tensor:
    """E[sum_t value_t grad log pi(y_t)] over single answers; `values` are (n, T)."""
    terms = (task.probability[:, None] * values * task.rollouts.mask).flatten()
    of_choices = torch.zeros(len(task.score), dtype=torch.float64)
    return of_choices.index_add(0, task.node.flatten(), terms) @ task.score


def row(identity: str, left: Tensor, right: Tensor) -> Row:
    left, right = torch.atleast_1d(left).double(), torch.atleast_1d(right).double()
    difference = ((left - right).norm() / right.norm()).item()
    return [identity, left.norm().item(), right.norm().item(), difference]


def z_score_factor(p: float, G: int, epsilon: float = 1e-4) -> float:
    """The factor by which the z-score stretches the gradient of a problem of success p with rewards
    0 and 1.

    It is the mean advantage of a right answer minus that of a wrong one. Without epsilon
    E sqrt((G-1-K)/(K+1)) + E sqrt(K/(G-K)),  K ~ Bin(G-1, p).
    """
    total = 0.0
    for K in range(G):  # right ones among the other answers
        probability = math.comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        if_right, if_wrong = (K + 1) / G, K / G  # share of right answers in the group
        std_if_right = math.sqrt(if_right * (1 - if_right))
        std_if_wrong = math.sqrt(if_wrong * (1 - if_wrong))
        up = (1 - if_right) / (std_if_right + epsilon)
        down = if_wrong / (std_if_wrong + epsilon)
        total += probability * (up + down)
    return total
