"""What "rank" can mean for a matrix of gradients, and how much of a vector lies outside a span.

An answer's gradient has as many entries as the model has parameters, but a group has few answers.
So singular values come from small Gram matrices, float32 gradients summed up in float64, and no
large matrix is ever decomposed.
"""
from functools import partial

import numpy as np
import torch

AT_ONCE = 2 ** 20  # columns of a Gram matrix's factor that are taken to float64 together


def entropy_rank(s: torch.Tensor) -> float:
    """exp(-sum p log p), p = s / sum s (Roy and Vetterli 2007): of s, not of s^2."""
    return torch.special.entr(s / s.sum()).sum().exp().item()


def stable_rank(s: torch.Tensor) -> float:
    return (s.square().sum() / s[0].square()).item()


def participation_ratio(s: torch.Tensor) -> float:
    return (s.square().sum().square() / s.pow(4).sum()).item()


def energy_count(s: torch.Tensor, share: float) -> int:
    """The fewest singular values that hold this share of sum s^2."""
    energy = s.square().cumsum(0)
    return int((energy < (share - 1e-9) * energy[-1]).sum()) + 1


def numerical_rank(s: torch.Tensor) -> int:
    """Float32 leaves about 1e-7 where there should be nothing."""
    return int((s > 1e-5 * s[0]).sum())


RANKS = {"entropy rank": entropy_rank, "stable rank": stable_rank,
         "participation": participation_ratio, "for 90%": partial(energy_count, share=0.9),
         "for 99%": partial(energy_count, share=0.99), "numerical": numerical_rank}
DEFINITIONS = (
    "With the singular values s, largest first: entropy rank exp(-sum p log p), p = s / sum s (Roy "
    "and Vetterli 2007; of s, not of s^2); stable rank sum s^2 / s_1^2; participation ratio "
    "(sum s^2)^2 / sum s^4; for 90% and 99%: how many hold that share of sum s^2; numerical: how "
    "many are above 1e-5 of the largest.")


def ranks(s: torch.Tensor) -> dict[str, float]:
    """By every definition; undefined for a matrix of zeros."""
    return {name: rank(s) if s[0] > 0 else np.nan for name, rank in RANKS.items()}


def gram(rows: torch.Tensor) -> torch.Tensor:
    """(n, P) float32 -> (n, n) float64, some columns at a time: P may be very large."""
    return sum(part.double() @ part.double().T for part in rows.split(AT_ONCE, dim=1))


def singular_values(gram: torch.Tensor) -> torch.Tensor:
    """Of any matrix with this Gram matrix, largest first."""
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)


def matrix_ranks(matrix: torch.Tensor) -> dict[str, float]:
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return ranks(singular_values(gram(wide)))


def medians(by_matrix: dict[str, dict[str, float]]) -> dict[str, float]:
    """By every definition, the median over matrices."""
    return {name: float(np.median([values[name] for values in by_matrix.values()]))
            for name in RANKS}


def span_of(rows: torch.Tensor) -> torch.Tensor:
    """(P, n) orthonormal columns, in float64."""
    return torch.linalg.qr(rows.double().T).Q


def outside(vector: torch.Tensor, span: torch.Tensor) -> float:
    """The share of the vector's length that is not in the span."""
    vector = vector.double()
    rest = vector - span @ (span.T @ vector)
    return (rest.norm() / vector.norm()).item()


def mean_gradients(rows: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """(m, P): matrix C, the mean row of each reward that occurs, the lowest reward first."""
    _, which = reward.unique(return_inverse=True)
    return torch.stack([rows[which == j].mean(0) for j in range(int(which.max()) + 1)])


def off_the_line(update: torch.Tensor, means: torch.Tensor, reward: torch.Tensor) -> float:
    """How far the z-score's update is from its formula for two rewards, relative to its length.

    With R answers, of which k have the higher reward, the update should be

        sqrt(k (R - k)) (mean of the winners - mean of the losers) std / (std + 1e-4)
    """
    k, R = (reward == reward.max()).sum(), len(reward)
    std = reward.double().std(correction=0)
    difference = (means[1] - means[0]).double()
    expected = (k * (R - k)).sqrt() * std / (std + 1e-4) * difference
    return ((update - expected).norm() / update.norm()).item()
