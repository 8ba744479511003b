"""Gradients of whole batches or groups, side by side: their inner products, and how noisy one is.

A gradient of half a billion numbers is too large to be kept many times. So it is folded into a
million numbers: it is cut into blocks of this length, each block gets a random sign and a random
rotation, and the blocks are added up. On average over the signs the inner products stay what they
are (Charikar et al. 2002).
"""
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.optimizer import AdamW

FOLDED = 2 ** 20  # so many numbers are left of a gradient
SLICE = 2 ** 16   # so many of them are taken at a time for the inner products


class Unmoved(AdamW):
    """An optimizer that leaves the model as it is. The gradients stay where the update left
    them."""

    def step(self) -> None:
        pass


def folded(parameters: Iterable[nn.Parameter], length: int = FOLDED, seed: int = 0) -> Tensor:
    """(length,) the gradient of all parameters, cut into blocks that are added up, each with a
    random sign and rotated by a random number of places. They are the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(parameters)
    total = torch.zeros(length, device=parameters[0].device)
    for parameter in parameters:
        count = -(-parameter.numel() // length)
        signs = (2.0 * torch.randint(2, (count,), generator=generator) - 1).tolist()
        places = torch.randint(length, (count,), generator=generator).tolist()
        if parameter.grad is None:
            continue
        for block, sign, by in zip(parameter.grad.flatten().split(length), signs, places):
            filled = F.pad(block, (0, length - len(block)))
            total += sign * filled.roll(by)
    return total.cpu()


def inner_products(gradients: Sequence[Sequence[Tensor]]) -> np.ndarray:
    """(methods, methods, N, N): [a, b, i, j] is <g_i, g_j>, of method a in batch i and method b in
    batch j. They are summed in float64 over slices of the gradients, so that there is never a
    second copy of all gradients in memory."""
    rows = [gradient for of_method in gradients for gradient in of_method]
    inner = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, len(rows[0]), SLICE):
        part = torch.stack([row[start:start + SLICE] for row in rows]).double()
        inner += part @ part.T
    methods = len(gradients)
    N = len(rows) // methods
    return inner.view(methods, N, methods, N).transpose(1, 2).numpy()


def mean_of_pairs(products: np.ndarray) -> float:
    """The mean of (N, N) inner products over all pairs of different batches."""
    N = len(products)
    return float((products.sum() - products.trace()) / (N * (N - 1)))


def noise_to_signal(products: np.ndarray) -> float:
    """The ratio, from (N, N) inner products of one method; nan if no signal is seen."""
    squared_signal = mean_of_pairs(products)
    noise = products.trace() / len(products) - squared_signal
    return float(noise / squared_signal) if squared_signal > 0 else np.nan
