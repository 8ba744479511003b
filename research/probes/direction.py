"""Where a gradient points on average, and how much one batch scatters, with few vectors in memory.

Of each method the sums over blocks of batches are kept, and the squares of single batches. A mean
that is estimated is longer than the true one by its noise, so lengths and products are taken from
pairs of different batches only: their expectation is that of the true means.
"""
from dataclasses import dataclass, field

import numpy as np
import torch

from analysis.statistics import Estimate
from engine.policy import Policy
from research.probes.common import gradients, sample_batch
from research.probes.methods import Methods
from research.statistics import jackknife

MOST = 2 ** 20  # entries of a gradient that are kept: of a large model a random choice of them
NAMES = ("cosine", "one batch", "noise")
TRUE = "rloo"   # has no bias: its mean is the true gradient


@dataclass
class Directions:
    """The mean of `reference` is the true gradient; blocks show how sure a number is."""
    reference: str
    blocks: int
    entries: torch.Tensor | None = None     # which entries are kept, if not all
    count: np.ndarray | None = None         # (blocks,) batches in each
    # of each method, for each block, the sum over its batches of
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
        """One batch: the gradient of every method."""
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

    def estimates(self, name: str) -> dict[str, Estimate]:
        """Three numbers of a method, with intervals over blocks.

        cosine     of its mean gradient with the true one
        one batch  cosine of a single batch's gradient with the true one: known also where the
                   method's own mean drowns in noise
        noise      variance of a batch over the squared part of the mean along the true gradient
        """
        whole, *without = self.with_and_without(name)
        return {key: jackknife(whole[key], np.array([numbers[key] for numbers in without]))
                for key in NAMES}

    def noise_ratio(self, name: str, other: str) -> Estimate:
        """The noise of one over that of the other, in the same batches."""
        both = zip(self.with_and_without(name), self.with_and_without(other))
        whole, *without = [one["noise"] / another["noise"] for one, another in both]
        return jackknife(whole, np.array(without))

    def with_and_without(self, name: str) -> list[dict[str, float]]:
        """From all blocks, then from all but each of them."""
        products = [self.products(name, self.reference), self.products(name, name),
                    self.products(self.reference, self.reference)]
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
                blocks: np.ndarray) -> dict[str, float]:
        """The same from some blocks alone, without the products of a batch with itself."""
        M = self.count[blocks].sum()
        square = self.squares[name][blocks].sum() / M
        same_batch = (self.with_reference[name], self.squares[name], self.squares[self.reference])
        product, length, true = (
            (of_all[np.ix_(blocks, blocks)].sum() - of_same[blocks].sum()) / (M * (M - 1))
            for of_all, of_same in zip(products, same_batch))
        numbers = dict.fromkeys(NAMES, np.nan)  # with much noise a length may come out negative
        if true > 0:
            numbers["one batch"] = product / np.sqrt(true * square)
        if true > 0 and length > 0:
            numbers["cosine"] = product / np.sqrt(length * true)
            numbers["noise"] = (square - length) * true / product ** 2 if product > 0 else np.nan
        return numbers


def measure_directions(policy: Policy, methods: Methods, batches: int, questions: int, answers: int,
                       progress, without=()) -> Directions:
    """The gradients of all methods in many batches."""
    directions = Directions(TRUE, min(10, batches // 2))
    for n in range(batches):
        progress(n / batches)
        batch = sample_batch(policy, n + 1, questions, answers)
        directions.add(n * directions.blocks // batches,
                       gradients(policy, batch, methods.coefficients(policy, batch, without)))
    return directions
