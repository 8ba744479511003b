"""Where a gradient points on average, and how much one batch scatters, with few vectors in memory.

Of each method the sums over blocks of batches are kept, and the squares of single batches. A mean
that is estimated is longer than the true one by its noise, so lengths and products are taken from
pairs of different batches only: their expectation is that of the true means.

    cosine     of its mean gradient with the true one
    noise      variance of a batch over the squared mean
"""
import numpy as np
import torch

from analysis.statistics import Estimate
from research.statistics import jackknife

MOST = 2 ** 20  # entries of a gradient that are kept: of a large model a random choice of them


class Directions:
    """Blocks of batches show how sure a number is. `true` is the method whose mean counts as that.
    """

    def __init__(self, batches: int, true: str) -> None:
        self.batches, self.blocks, self.true = batches, min(10, batches // 2), true
        self.count = np.zeros(self.blocks)  # batches in each
        self.entries = None                 # which entries are kept, if not all
        # of each method, for each block, the sum over its batches of g, |g|^2 and g . true g
        self.sums, self.squares, self.with_true = {}, {}, {}

    def kept(self, gradient: torch.Tensor) -> torch.Tensor:
        if len(gradient) <= MOST:
            return gradient
        if self.entries is None:
            generator = torch.Generator().manual_seed(0)
            entries = torch.randint(len(gradient), (MOST,), generator=generator).unique()
            self.entries = entries.to(gradient.device)
        return gradient[self.entries]

    def add(self, gradients: dict[str, torch.Tensor]) -> None:
        block = int(self.count.sum()) * self.blocks // self.batches
        self.count[block] += 1
        true = self.kept(gradients[self.true])
        for name, gradient in gradients.items():
            gradient = self.kept(gradient)
            if name not in self.sums:
                self.sums[name] = gradient.new_zeros(self.blocks, len(gradient))
                self.squares[name], self.with_true[name] = np.zeros((2, self.blocks))
            self.sums[name][block] += gradient
            self.squares[name][block] += (gradient @ gradient).item()
            self.with_true[name][block] += (gradient @ true).item()

    def cosine(self, name: str) -> float:
        product, length, true = (self.products(one, other)[0] for one, other in (
            (name, self.true), (name, name), (self.true, self.true)))
        # with much noise a length may come out negative
        return product / np.sqrt(length * true) if length > 0 and true > 0 else np.nan

    def noise_ratio(self, name: str, other: str) -> Estimate:
        """The noise of one over that of the other, in the same batches."""
        whole, *without = self.noise(name) / self.noise(other)
        return jackknife(whole, np.array(without))

    def noise(self, name: str) -> np.ndarray:
        """From all blocks, then from all but each; undefined where the mean points away."""
        length, square = self.products(name, name), left_out(self.squares[name])
        is_known = (length > 0) & (self.products(name, self.true) > 0)
        length = np.where(is_known, length, np.nan)
        return square / left_out(self.count) / length - 1

    def products(self, name: str, other: str) -> np.ndarray:
        """Of their means, without a batch's product with itself: from all blocks, then from all but
        each. `other` is the same or the true one."""
        pairs = (self.sums[name].double() @ self.sums[other].double().T).cpu().numpy()
        without = pairs.sum() - pairs.sum(0) - pairs.sum(1) + pairs.diagonal()
        same = left_out(self.with_true[name] if other == self.true else self.squares[name])
        M = left_out(self.count)
        return (np.append(pairs.sum(), without) - same) / (M * (M - 1))


def left_out(sums: np.ndarray) -> np.ndarray:
    """Of all blocks, then of all but each."""
    return np.append(sums.sum(), sums.sum() - sums)
