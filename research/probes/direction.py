"""Where a gradient points on average, and how much one batch scatters, with few vectors in memory.

Of each arm the sums over blocks of batches are kept, and the squares of single batches. A mean
that is estimated is longer than the true one by its noise, so lengths and products are taken from
pairs of different batches only: their expectation is that of the true means.
"""
from dataclasses import dataclass, field

import numpy as np
import torch

from analysis.statistics import Estimate, jackknife

MOST = 2 ** 20  # entries of a gradient that are kept: of a large model a random choice of them
NAMES = ("cosine", "off", "one batch", "noise")


@dataclass
class Directions:
    """`reference` is the arm whose mean is the true gradient; blocks show how sure a number is."""
    reference: str
    blocks: int
    entries: torch.Tensor | None = None     # which entries are kept, if not all
    count: np.ndarray | None = None         # (blocks,) batches in each
    # of each arm, for each block, the sum over its batches of
    sums: dict[str, list[torch.Tensor]] = field(default_factory=dict)   # g
    squares: dict[str, np.ndarray] = field(default_factory=dict)        # |g|^2
    with_reference: dict[str, np.ndarray] = field(default_factory=dict)  # g . g of the reference

    def kept(self, gradient: torch.Tensor) -> torch.Tensor:
        if len(gradient) <= MOST:
            return gradient
        if self.entries is None:
            generator = torch.Generator().manual_seed(0)
            entries = torch.randint(len(gradient), (MOST,), generator=generator).unique()
            self.entries = entries.to(gradient.device)
        return gradient[self.entries]

    def add(self, block: int, gradients: dict[str, torch.Tensor]) -> None:
        """One batch: the gradient of every arm."""
        if self.count is None:
            self.count = np.zeros(self.blocks)
        self.count[block] += 1
        reference = self.kept(gradients[self.reference])
        for name, gradient in gradients.items():
            gradient = self.kept(gradient)
            if name not in self.sums:
                self.sums[name] = [torch.zeros_like(gradient) for _ in range(self.blocks)]
                self.squares[name] = np.zeros(self.blocks)
                self.with_reference[name] = np.zeros(self.blocks)
            self.sums[name][block] += gradient
            self.squares[name][block] += (gradient @ gradient).item()
            self.with_reference[name][block] += (gradient @ reference).item()

    def products(self, name: str, other: str) -> np.ndarray:
        """(blocks, blocks): products of the blocks' sums."""
        one = torch.stack(self.sums[name]).double()
        two = torch.stack(self.sums[other]).double()
        return (one @ two.T).cpu().numpy()

    def estimates(self, name: str) -> dict[str, Estimate]:
        """Four numbers of an arm, with intervals over blocks.

        cosine     of its mean gradient with the true one
        off        the same minus 1
        one batch  cosine of a single batch's gradient with the true one
        noise      variance of a batch over the squared part of the mean along the true gradient
        """
        pairs = ((name, self.reference), (name, name), (self.reference, self.reference))
        products = [self.products(*pair) for pair in pairs]
        every_block = np.arange(self.blocks)
        whole = self.numbers(name, products, every_block)
        left_out = []
        for k in range(self.blocks):
            left_out.append(self.numbers(name, products, np.delete(every_block, k)))
        return {key: jackknife(whole[key], np.array([numbers[key] for numbers in left_out]))
                for key in NAMES}

    def numbers(self, name: str, products: list[np.ndarray],
                blocks: np.ndarray) -> dict[str, float]:
        """The same from some blocks alone, without the products of a batch with itself."""
        M = self.count[blocks].sum()
        pairs = M * (M - 1)
        squares = self.squares[name][blocks].sum()
        same_batch = (self.with_reference[name], self.squares[name], self.squares[self.reference])
        product, length, true = (
            (of_all[np.ix_(blocks, blocks)].sum() - of_same[blocks].sum()) / pairs
            for of_all, of_same in zip(products, same_batch))
        if not (length > 0 and true > 0):  # with much noise an estimate may come out negative
            return dict.fromkeys(NAMES, np.nan)
        cosine = product / np.sqrt(length * true)
        variance = squares / M - length
        noise = variance * true / product ** 2 if product > 0 else np.nan
        return {"cosine": cosine, "off": cosine - 1, "noise": noise,
                "one batch": product / np.sqrt(true * squares / M)}

    def batch_cosine(self, gradient: torch.Tensor) -> float:
        """Of another batch's gradient with the true one."""
        gradient, M = self.kept(gradient).double(), self.count.sum()
        total = sum(self.sums[self.reference]).double()
        true = (total @ total - self.squares[self.reference].sum()).item() / (M * (M - 1))
        if not true > 0:
            return np.nan
        return (gradient @ total).item() / M / (gradient.norm().item() * np.sqrt(true))
