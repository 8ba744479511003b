"""How much of a step's gradient is noise? Estimated from parts of the batch, at no further pass.

A batch is cut into k parts of equally many problems. With g_j for the gradient that part j adds to
that of the batch, g = g_1 + ... + g_k, the parts differ by noise alone, so

    noise  = (k * sum |g_j|^2 - |g|^2) / (k - 1)      on average the variance of g, trace of Cov(g)
    signal = |g|^2 - noise                            on average the squared length of E[g]

Both are unbiased, each for itself, if the parts are independent: if what a problem adds follows
from its own answers, and the loss is divided by a constant. Their ratio is the gradient noise scale
of McCandlish et al. (arXiv 1812.06162) in batches of this size; they compare a small batch with a
large one, which is the same. With k = 2 the noise is |g_1 - g_2|^2.

One step says little, because `signal` may be negative. So noise and |g|^2 are each added up over
steps, and then divided: the share of the gradient's square that was noise. A batch n times as large
has the noise 1 / n, and the same signal.
"""
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lab.analysis.statistics import Estimate, jackknife, within

BLOCKS = 10  # consecutive steps are alike, so whole blocks of them are left out in turn
FEWEST = 20  # steps from which a share is told


class PartNorms:
    """The squared lengths of what each part of a batch adds to the gradient of a model. `end_part`
    is called when the last backward pass of a part is done. It keeps a copy of the gradient."""

    def __init__(self, model: nn.Module):
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.before: list[Tensor] = []
        self.squares: list[float] = []

    def end_part(self) -> None:
        now = [torch.zeros_like(one) if one.grad is None else one.grad.detach().clone()
               for one in self.parameters]
        before = self.before or [torch.zeros_like(one) for one in now]
        self.squares.append(sum(float((new - old).double().square().sum())
                                for new, old in zip(now, before)))
        self.before = now

    @property
    def noise(self) -> float | None:
        """The variance of the whole gradient; None if it was made in one part."""
        return noise_of(self.squares, sum(float(one.double().square().sum())
                                          for one in self.before))


def noise_of(squares: Sequence[float], square_of_sum: float) -> float | None:
    """From the squared lengths of the parts, and that of their sum."""
    k = len(squares)
    if k < 2:
        return None
    return max(0.0, k * sum(squares) - square_of_sum) / (k - 1)  # below 0 it is rounding


def parts_of(group: Tensor, parts: int) -> list[Tensor]:
    """The rows of a batch in parts of equally many problems. If their number cannot be divided so,
    there are fewer parts; with one problem, one."""
    problems = int(group.max()) + 1
    k = max(count for count in range(1, min(parts, problems) + 1) if problems % count == 0)
    size = problems // k
    return [((group >= start) & (group < start + size)).nonzero().squeeze(1)
            for start in range(0, problems, size)]


def noise_share(noise: Sequence[float | None], length: Sequence[float | None]) -> Estimate | None:
    """The share of the squared gradient that was noise in these steps, from the estimates of each
    step and the length of its gradient before it is clipped. Steps without a gradient are left out;
    None if fewer than 20 are left."""
    known = [(of_step, float(norm) ** 2) for of_step, norm in zip(noise, length)
             if of_step is not None and norm]
    if len(known) < FEWEST:
        return None
    noises, squares = np.array(known).T
    block = np.arange(len(known)) * BLOCKS // len(known)
    share = jackknife(lambda kept: float(noises[kept].sum() / squares[kept].sum()), block)
    return within(share, 0.0, 1.0)


def share_with(share: float, times: float) -> float:
    """The same share in a batch so many times as large."""
    noise = share / times
    return noise / (noise + 1 - share) if noise + 1 - share > 0 else 1.0


def in_words(share: Estimate | None) -> str:
    if share is None:
        return "How much of the gradient was noise is not known: there are too few steps."
    value = min(1.0, max(0.0, share.value))
    return (f"Of the squared gradient of a step about {value:.0%} was noise ({share.low:.0%} to "
            f"{share.high:.0%}). With four times the problems about {share_with(value, 4):.0%} of "
            "it would be.")
