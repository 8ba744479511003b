"""Where a gradient points on average, and how much one batch scatters, with few vectors in memory.

Of each method the sums over blocks of batches are kept, and the squares of single batches. A mean
that is estimated is longer than the true one by its noise, so lengths and products are taken from
pairs of different batches only: their expectation is that of the true means.

    cosine     of its mean gradient with the true one
    noise      variance of a batch over the squared part of the mean along the true gradient
"""
import numpy as np
import torch

from analysis.statistics import Estimate
from research.statistics import jackknife

MOST = 2 ** 20  # entries of a gradient that are kept: of a large model a random choice of them


class Directions:
    """Blocks of batches show how sure a number is. `true` is the method whose mean counts as that.
    """

    def __init__(self, batches: int, true: str):
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
                self.sums[name] = [torch.zeros_like(gradient) for _ in range(self.blocks)]
                self.squares[name], self.with_true[name] = np.zeros((2, self.blocks))
            self.sums[name][block] += gradient
            self.squares[name][block] += (gradient @ gradient).item()
            self.with_true[name][block] += (gradient @ true).item()

    def cosine(self, name: str) -> Estimate:
        whole, *without = [cosine for cosine, _ in self.with_and_without(name)]
        return jackknife(whole, np.array(without))

    def noise_ratio(self, name: str, other: str, own: bool = False) -> Estimate:
        """The noise of one over that of the other, in the same batches; `own`: over the square of
        its whole mean, wherever that points."""
        def noise(cosine: float, along: float) -> float:
            return along * cosine ** 2 if own else along
        both = zip(self.with_and_without(name), self.with_and_without(other))
        whole, *without = [noise(*one) / noise(*another) for one, another in both]
        return jackknife(whole, np.array(without))

    def with_and_without(self, name: str) -> list[tuple[float, float]]:
        """Cosine and noise from all blocks, then from all but each of them."""
        products = [self.products(*pair) for pair in (
            (name, self.true), (name, name), (self.true, self.true))]
        every = np.arange(self.blocks)
        with np.errstate(invalid="ignore", divide="ignore"):  # a method may have no gradient at all
            return [self.numbers(name, products, blocks)
                    for blocks in (every, *(np.delete(every, k) for k in every))]

    def products(self, name: str, other: str) -> np.ndarray:
        """(blocks, blocks): products of the blocks' sums."""
        one = torch.stack(self.sums[name]).double()
        two = torch.stack(self.sums[other]).double()
        return (one @ two.T).cpu().numpy()

    def numbers(self, name: str, products: list[np.ndarray],
                blocks: np.ndarray) -> tuple[float, float]:
        """The same from some blocks alone, without the products of a batch with itself."""
        M = self.count[blocks].sum()
        square = self.squares[name][blocks].sum() / M
        same_batch = (self.with_true[name], self.squares[name], self.squares[self.true])
        product, length, true = (
            (of_all[np.ix_(blocks, blocks)].sum() - of_same[blocks].sum()) / (M * (M - 1))
            for of_all, of_same in zip(products, same_batch))
        if true <= 0 or length <= 0:  # with much noise a length may come out negative
            return np.nan, np.nan
        noise = (square - length) * true / product ** 2 if product > 0 else np.nan
        return product / np.sqrt(length * true), noise
