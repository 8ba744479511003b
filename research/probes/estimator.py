"""Mean and covariance of the gradient that a batch makes, by sums over all batches of the world."""
import math
from dataclasses import dataclass

import torch

from research.probes.batches import Batches
from research.probes.world import World


@dataclass
class Estimator:
    """What a batch's gradient is on average, and how it scatters."""
    mean: torch.Tensor      # (P,)
    variance: float         # trace of the covariance

    def against(self, true: torch.Tensor) -> dict[str, float]:
        size = self.mean.norm().item()
        along = (self.mean @ true / true.norm()).item()
        is_zero = size < 1e-9 * true.norm().item()
        return {"bias": ((self.mean - true).norm() / true.norm()).item(),
                "cosine": math.nan if is_zero else along / size,
                "noise": math.inf if is_zero or along <= 0 else self.variance / along ** 2}


def estimator(world: World, batches: Batches, factor: torch.Tensor,
              extra: torch.Tensor | None = None) -> Estimator:
    """Of  sum factor * grad log pi  over a batch's tokens, `factor` being (M, G, T).

    A batch is a vector over the choices, of which there are few. Chance inside a batch adds `extra`
    (choices, choices) to the second moment.
    """
    mask = world.rollouts.mask[batches.which]
    vectors = torch.zeros(len(batches.which), len(world.score), dtype=torch.float64)
    vectors.scatter_add_(1, world.node[batches.which].flatten(1), (factor * mask).flatten(1))
    mean = batches.probability @ vectors
    second = vectors.T @ (batches.probability[:, None] * vectors)
    if extra is not None:
        second = second + extra
    gram = world.score @ world.score.T
    return Estimator(mean @ world.score, ((second * gram).sum() - mean @ gram @ mean).item())


def placebo(world: World, batches: Batches, advantage: torch.Tensor,
            weight: torch.Tensor) -> Estimator:
    """The N weights of each batch change places at random.

    E[w_i] = m,  E[w_i w_j] = (N m^2 - E[w^2]) / (N - 1).
    """
    mask = world.rollouts.mask[batches.which].double()
    N = mask.sum((1, 2))
    mean = (weight * mask).sum((1, 2)) / N
    square = (weight.square() * mask).sum((1, 2)) / N
    pair = torch.where(N > 1, (N * mean * mean - square) / (N - 1).clamp(min=1), square)
    return scattered(world, batches, advantage, mean, pair, square)


def gamma_noise(world: World, batches: Batches, advantage: torch.Tensor) -> Estimator:
    """Weights drawn from a gamma of shape 1 and divided by their mean: flat on the simplex."""
    N = world.rollouts.mask[batches.which].sum((1, 2)).double()
    return scattered(world, batches, advantage, torch.ones_like(N), N / (N + 1), 2 * N / (N + 1))


def scattered(world: World, batches: Batches, advantage: torch.Tensor, mean: torch.Tensor,
              pair: torch.Tensor, square: torch.Tensor) -> Estimator:
    """Exchangeable random weights with E[w_i], E[w_i w_j] and E[w_i^2] in each batch, (M,) each."""
    G = batches.which.shape[1]
    on_average = estimator(world, batches, advantage * mean[:, None, None] / G)
    mask, node = world.rollouts.mask[batches.which].double(), world.node[batches.which]
    chance = (square - pair) * batches.probability
    alone = chance[:, None, None].mul((advantage * mask / G).square())
    of_choices = torch.zeros(len(world.score), dtype=torch.float64)
    of_choices.index_add_(0, node.flatten(), alone.flatten())
    together = advantage * pair.clamp(min=0).sqrt()[:, None, None] / G
    both = estimator(world, batches, together, torch.diag(of_choices))
    second_moment = both.variance + both.mean.square().sum().item()
    return Estimator(on_average.mean, second_moment - on_average.mean.square().sum().item())
