"""The matrices A, B and C of rank.py, arm by arm, problem by problem, at every group size.

An arm is a way to give advantages. Most give all tokens of an answer the same number; the others
give each token its own.
"""
from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch

from analysis.statistics import Estimate, mean_over
from engine.lab import Lab
from engine.rollouts import Rollouts
from credit.placebo import shuffled_advantage
from grpo import dr_grpo, grpo, rloo
from research.probes.rank_gradients import Gradients, centred_matrices, group_gradients, weight_matrices
from research.probes.spectra import (
    gram, matrix_ranks, mean_gradients, medians, off_the_line, outside, ranks, singular_values,
    span_of)

SIZES = (2, 4, 8, 16, 32)
Z, ONES = "z-score", "all ones"


@dataclass
class Measurements:
    """Named numbers, mostly ranks, by (matrix, arm, R) and problem."""
    answers: int                                        # to each problem
    values: dict = field(default_factory=lambda: defaultdict(dict))
    explained: list = field(default_factory=list)       # by the critic, of its targets' variance
    shapes: dict[str, tuple] = field(default_factory=dict)  # of the weight matrices

    @property
    def sizes(self) -> list[int]:
        return [R for R in SIZES if R <= self.answers]

    @property
    def main(self) -> int:
        """The group size at which arms are compared."""
        return max(R for R in self.sizes if R <= 8)

    def add(self, matrix: str, arm: str, R: int, question: int, values: dict[str, float]) -> None:
        self.values[matrix, arm, R][question] = values

    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for matrix, arm, _ in self.values if matrix == "A"))

    def mean(self, matrix: str, arm: str, R: int, name: str = "entropy rank") -> Estimate:
        by_question = self.values.get((matrix, arm, R), {})
        return mean_over([values[name] for values in by_question.values()])

    def change(self, one: tuple, other: tuple, name: str = "entropy rank") -> Estimate:
        """One entry minus another, over the problems that both have."""
        first, second = self.values.get(one, {}), self.values.get(other, {})
        return mean_over([first[q][name] - second[q][name] for q in first if q in second])

    def against_z(self, matrix: str, arm: str) -> Estimate:
        return self.change((matrix, arm, self.main), (matrix, Z, self.main))


def measure_question(lab: Lab, rollouts: Rollouts, question: int,
                     token_arms: dict[str, torch.Tensor], most: dict[str, int],
                     measured: Measurements) -> None:
    """Add what one problem's answers give at every group size.

    `token_arms` are the arms with an advantage (G, T) for each token; `most` names those of them
    that only the first so many answers have. A group of equal rewards says nothing about any arm.
    """
    kinds = {ONES: rollouts.mask.float(), **token_arms}
    gradients = group_gradients(lab, rollouts, kinds)
    grams = {kind: gram(rows) for kind, rows in gradients.rows.items()}
    for R in measured.sizes:
        factors = answer_arms(rollouts, R)
        if factors[Z].any():
            arms = {arm: (ONES, factor) for arm, factor in factors.items()}
            arms |= {arm: (arm, factors[ONES]) for arm in token_arms if R <= most.get(arm, R)}
            measure_a(grams, arms, R, question, measured)
            updates = {arm: factor @ gradients.rows[kind][:R]
                       for arm, (kind, factor) in arms.items()}
            measure_b(lab, gradients, updates, arms, R, question, measured)
            reward = rollouts.reward[:R]
            measure_c(gradients.rows[ONES][:R], reward, updates, R, question, measured)


def answer_arms(rollouts: Rollouts, R: int) -> dict[str, torch.Tensor]:
    """(R,) for each arm that gives all tokens of an answer the same.

    The advantages are those that training would give to a group of the first R answers.
    """
    device = rollouts.mask.device
    beyond = torch.arange(len(rollouts.mask), device=device) >= R
    apart = replace(rollouts, group=beyond.long())
    advantage = {Z: grpo(apart), "mean only": dr_grpo(apart), "rloo": rloo(apart)}
    with_z = replace(apart, advantage=advantage[Z])
    advantage["shuffled rewards"] = shuffled_advantage(with_z, True)
    noise = torch.randn(R, generator=rollouts.generator).to(device)
    return {**{arm: value[:R, 0] for arm, value in advantage.items()},
            "random zero-sum": noise - noise.mean(),
            "raw reward": rollouts.reward[:R],
            ONES: torch.ones(R, device=device)}


def measure_a(grams: dict[str, torch.Tensor], arms: dict, R: int, question: int,
              measured: Measurements) -> None:
    """Answers x parameters, and its null: rows of the same lengths, orthogonal to each other."""
    for arm, (kind, factor) in arms.items():
        weighted = grams[kind][:R, :R] * torch.outer(factor, factor)
        lengths = weighted.diagonal().sqrt().sort(descending=True).values
        measured.add("A", arm, R, question, ranks(singular_values(weighted)))
        measured.add("A null", arm, R, question, ranks(lengths))


def measure_b(lab: Lab, gradients: Gradients, updates: dict[str, torch.Tensor], arms: dict, R: int,
              question: int, measured: Measurements) -> None:
    """The median over weight matrices, and for the z-score each of them."""
    for arm, (kind, factor) in arms.items():
        matrices = weight_matrices(lab.model, updates[arm])
        by_matrix = {name: matrix_ranks(matrix) for name, matrix in matrices.items()}
        measured.add("B", arm, R, question, medians(by_matrix))
        if R != measured.main:
            continue
        centred = centred_matrices(gradients, matrices, kind, factor)
        centred_ranks = {name: matrix_ranks(matrix) for name, matrix in centred.items()}
        measured.add("B centred", arm, R, question, medians(centred_ranks))
        if arm == Z:
            for name, values in by_matrix.items():
                measured.add("B each", name, R, question, values)


def measure_c(rows: torch.Tensor, reward: torch.Tensor, updates: dict[str, torch.Tensor], R: int,
              question: int, measured: Measurements) -> None:
    """The mean gradient of each reward, and what of each update lies outside their span."""
    means = mean_gradients(rows, reward)
    measured.add("C", "", R, question, {"rewards": len(means), **matrix_ranks(means)})
    whole, differences = span_of(means), span_of(means[1:] - means[0])
    for arm, update in updates.items():
        shares = {"means": outside(update, whole), "differences": outside(update, differences)}
        measured.add("outside", arm, R, question, shares)
    if len(means) == 2:
        measured.add("line", Z, R, question, {"off": off_the_line(updates[Z], means, reward)})
