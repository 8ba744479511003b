"""Read the coefficient of each token off the gradient of a loss.

A loss that sees the model only through the log-prob of sampled tokens has, at the logits of one
place, the gradient

    dloss/dlogits = -c (onehot(y) - p) / temperature        p = softmax(logits / temperature)

where y is the token that is predicted there. So one number c for each token says all. It is the
`push`: positive where the loss makes the token more probable. A term with the entropy H of the
distribution p adds a second vector, h p (log p + H) / temperature. What neither vector explains is
left over.
"""
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .batches import Case, Lens

SHIFTS = (1, 0, 2, -1)
TEMPERATURES = (1.0, .9, .8, .7, .6, .5, 1.1, 1.2, 1.5, 2.0, .95, .85, .75, .65, .4, .3, 1.3, 1.4,
                1 / .9, 1 / .8, 1 / .7, 1 / .6)
KNOWN = 1e-6      # a formula that leaves less of a gradient over is right, relative to its norm
EXACT = 1e-7      # what is left over of a gradient that is explained, relative to its size
Candidate = TypeVar("Candidate")


def first_right(candidates: Iterable[Candidate], left_over: Callable[[Candidate], float],
                enough: float = KNOWN) -> tuple[Candidate | None, float]:
    """The first candidate that leaves less than `enough` over, and how much that is; or else the
    nearest one. All questions of the search are asked so, the advantage and the counting aside."""
    nearest, least = None, math.inf
    for candidate in candidates:
        rest = left_over(candidate)
        if rest < least:
            nearest, least = candidate, rest
        if rest < enough:
            break
    return nearest, least


@dataclass(frozen=True)
class Reading:
    """What a gradient says of each token (B, L)."""
    push: Tensor
    entropy: Tensor       # the coefficient h
    left_over: float      # norm of what is not explained / norm of the gradient


def read(grad: Tensor, case: Case, lens: Lens, with_entropy: bool = True) -> Reading:
    """Least squares at each place, for push and entropy."""
    towards, spread = directions(case, lens)
    g = lens.to_tokens(grad)
    push = -(g * towards).sum(-1) / squared(towards)
    entropy = torch.zeros_like(push)
    rest = g + push[..., None] * towards
    if with_entropy and rest.norm() > 1e-10 * grad.norm():
        push, entropy = both(g, -towards, spread)
        rest = g + push[..., None] * towards - entropy[..., None] * spread
    unread = float((grad - lens.to_places(g)).square().sum())  # at places without a token
    share = (float(rest.square().sum()) + unread) ** .5 / max(float(grad.norm()), 1e-300)
    return Reading(push, entropy, share)


def directions(case: Case, lens: Lens) -> tuple[Tensor, Tensor]:
    """At each token the gradient of its log-prob, and minus the gradient of the entropy."""
    log_p = lens.distribution(case.logits)
    p = log_p.exp()
    onehot = torch.zeros_like(p).scatter(2, case.ids[:, :, None], 1.0)
    entropy = -(p * log_p).sum(-1, keepdim=True)
    return (onehot - p) / lens.temperature, p * (log_p + entropy) / lens.temperature


def both(g: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The least squares solution for two vectors at each token."""
    aa, bb, ab = squared(first), squared(second), (first * second).sum(-1)
    ga, gb = (g * first).sum(-1), (g * second).sum(-1)
    determinant = aa * bb - ab.square()
    usable = determinant > 1e-12 * aa * bb
    safe = torch.where(usable, determinant, 1.0)
    return (torch.where(usable, (ga * bb - gb * ab) / safe, ga / aa),
            torch.where(usable, (gb * aa - ga * ab) / safe, 0.0))


def squared(vector: Tensor) -> Tensor:
    return vector.square().sum(-1).clamp(min=1e-300)


def find_lens(grad: Tensor, case: Case) -> tuple[Lens, float]:
    """The temperature and the shift that leave least over, and how much that is. Of several that
    leave nothing, as an entropy alone does, it is the most usual one."""
    lenses = [Lens(temperature, shift) for shift in SHIFTS for temperature in TEMPERATURES]
    lens, rest = first_right(lenses, lambda lens: read(grad, case, lens).left_over, EXACT)
    return lens or Lens(), rest
