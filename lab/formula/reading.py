"""Read the coefficient of each token off the gradient of a loss.

A loss that sees the model only through the log-prob of sampled tokens has, at the logits of one
place, the gradient

    dloss/dlogits = -c (onehot(y) - p) / temperature        p = softmax(logits / temperature)

where y is the token that is predicted there. So one number c for each token says all. It is the
`push`: positive where the loss makes the token more probable. A term with the entropy H of the
distribution p adds a second vector, h p (log p + H) / temperature. What neither vector explains is
left over.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batches import Case, Lens

SHIFTS = (1, 0, 2)
TEMPERATURES = (1.0, .9, .8, .7, .6, .5, 1.1, 1.2, 1.5)  # tried first
EXACT = 1e-7      # what is left over of a gradient that is explained, relative to its size


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
    p = lens.distribution(case.logits, lens.temperature).exp()
    onehot = torch.zeros_like(p).scatter(2, case.ids[:, :, None], 1.0)
    log_q = lens.distribution(case.logits, lens.entropy_temperature)
    entropy = -(log_q.exp() * log_q).sum(-1, keepdim=True)
    return (onehot - p) / lens.temperature, \
        log_q.exp() * (log_q + entropy) / lens.entropy_temperature


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
    """The temperature and the shift that leave least over, and how much that is."""
    absent = tuple(token for token in range(grad.shape[2]) if not grad[:, :, token].any())
    tries = [Lens(temperature, shift, warm, absent) for shift in SHIFTS
             for temperature in TEMPERATURES for warm in {1.0, temperature}]
    found = [(lens, read(grad, case, lens).left_over) for lens in tries]
    exact = [pair for pair in found if pair[1] <= EXACT]
    if exact:  # the most usual one: an entropy alone, for example, fits several
        return exact[0]
    for entropy in ("none", "same", "at 1"):
        for shift in SHIFTS:
            lens = best_temperature(grad, case, Lens(1.0, shift, 1.0, absent), entropy)
            found.append((lens, read(grad, case, lens).left_over))
        if min(rest for _, rest in found) <= EXACT:
            break
    return min(found, key=lambda pair: pair[1])


def best_temperature(grad: Tensor, case: Case, lens: Lens, entropy: str) -> Lens:
    """The lens with the temperature that leaves least over. There is no entropy term, or it has
    the same temperature, or always 1. With one there are two valleys, so the two lowest are
    searched."""
    def lens_at(temperature: float) -> Lens:
        return replace(lens, temperature=temperature,
                       entropy_temperature=temperature if entropy == "same" else 1.0)

    def rest_of(temperature: float) -> float:
        return read(grad, case, lens_at(temperature), entropy != "none").left_over

    grid = torch.linspace(-2.5, 2.5, 101).exp().tolist()
    rest = [rest_of(temperature) for temperature in grid]
    valleys = [k for k in range(1, 100) if rest[k] <= min(rest[k - 1], rest[k + 1])]
    valleys.sort(key=lambda k: rest[k])
    lowest = [golden_section(rest_of, grid[k - 1], grid[k + 1]) for k in valleys[:2]] or [1.0]
    tries = [short for value in lowest for short in with_few_digits(value)]
    return lens_at(min(tries, key=rest_of))


def golden_section(rest_of: Callable[[float], float], low: float, high: float) -> float:
    """Where rest_of is least between low and high, if it has one valley there."""
    ratio = (5 ** .5 - 1) / 2
    for _ in range(44):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if rest_of(a) < rest_of(b) else (a, high)
    return (low + high) / 2


def with_few_digits(value: float) -> list[float]:
    """The value, and near it those that have two or three digits, or whose inverse has."""
    short = [float(f"{value:.{digits}g}") for digits in (2, 3)]
    return [value, *short, *(1 / float(f"{1 / value:.{digits}g}") for digits in (2, 3))]
