"""Where a gradient points on average, and how much one batch of it scatters: many batches, few vectors in memory.

Of each arm are kept the sums over blocks of batches, and beside them the squares of single batches. A mean that is estimated
is longer than the true one by its noise, so lengths and products are taken from pairs of different batches only: their
expectation is that of the true means.
"""
from dataclasses import dataclass, field

import numpy as np
import torch

from analysis.statistics import Estimate, jackknife

MOST = 2 ** 20  # entries of a gradient that are kept: of a large model a random choice of them


@dataclass
class Directions:
    """`reference` is the arm whose mean is the true gradient. `blocks` parts of the batches, to know how sure a number is."""
    reference: str
    blocks: int
    entries: torch.Tensor | None = None
    count: np.ndarray | None = None  # batches in each block
    sums: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    own: dict[str, np.ndarray] = field(default_factory=dict)     # sum over a block's batches of |g|^2
    same: dict[str, np.ndarray] = field(default_factory=dict)    # sum over a block's batches of g . reference of the same batch

    def kept(self, gradient: torch.Tensor) -> torch.Tensor:
        if len(gradient) <= MOST:
            return gradient
        if self.entries is None:
            self.entries = torch.randint(len(gradient), (MOST,), generator=torch.Generator().manual_seed(0)).unique().to(gradient.device)
        return gradient[self.entries]

    def add(self, block: int, gradients: dict[str, torch.Tensor]) -> None:
        found = {name: self.kept(gradient) for name, gradient in gradients.items()}
        for name, gradient in found.items():
            sums = self.sums.setdefault(name, [torch.zeros_like(gradient) for _ in range(self.blocks)])
            sums[block] += gradient
            for table, value in ((self.own, gradient @ gradient), (self.same, gradient @ found[self.reference])):
                table.setdefault(name, np.zeros(self.blocks))[block] += value.item()
        self.count = np.zeros(self.blocks) if self.count is None else self.count
        self.count[block] += 1

    def products(self, name: str, other: str) -> np.ndarray:
        """(blocks, blocks): products of the blocks' sums."""
        one, two = (torch.stack(self.sums[arm]).double() for arm in (name, other))
        return (one @ two.T).cpu().numpy()

    def estimates(self, name: str) -> dict[str, Estimate]:
        """cosine: of the mean with the true gradient; off: that minus 1. one batch: of a single batch with it. noise: variance
        of a batch over the squared part of the mean that lies along the true gradient: the rest of it is no signal."""
        products = [self.products(*pair) for pair in ((name, self.reference), (name, name), (self.reference, self.reference))]
        whole = self.numbers(name, products, np.arange(self.blocks))
        left = [self.numbers(name, products, np.delete(np.arange(self.blocks), k)) for k in range(self.blocks)]
        return {key: jackknife(value, np.array([numbers[key] for numbers in left])) for key, value in whole.items()}

    def numbers(self, name: str, products: list[np.ndarray], here: np.ndarray) -> dict[str, float]:
        """From these blocks alone."""
        M = self.count[here].sum()
        cross, own, true = (product[np.ix_(here, here)].sum() for product in products)
        pairs, square = M * (M - 1), self.own[name][here].sum()
        product, length = (cross - self.same[name][here].sum()) / pairs, (own - square) / pairs
        true = (true - self.own[self.reference][here].sum()) / pairs
        if not (length > 0 and true > 0):  # without noise they are; with much of it an estimate may come out negative
            return dict.fromkeys(("cosine", "off", "one batch", "noise"), np.nan)
        cosine, variance = product / np.sqrt(length * true), square / M - length
        return {"cosine": cosine, "off": cosine - 1, "one batch": product / np.sqrt(true * square / M),
                "noise": variance * true / product ** 2 if product > 0 else np.nan}

    def batch_cosine(self, gradient: torch.Tensor) -> float:
        """Of another batch's gradient with the true one."""
        gradient, M, total = self.kept(gradient).double(), self.count.sum(), sum(self.sums[self.reference]).double()
        true = (total @ total - self.own[self.reference].sum()).item() / (M * (M - 1))
        return (gradient @ total).item() / M / (gradient.norm().item() * np.sqrt(true)) if true > 0 else np.nan
