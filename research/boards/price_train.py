"""Trains as train.py does, and knows three weightings more: differences between codes called GRPO.

    python -m research.boards.price_train --mitigation per_group --rescale none

They are mistakes or accidents of a code rather than methods, so they are no choices of train.py.
research/boards/price.py makes its runs with this program.
"""
import torch
from torch import Tensor

import train
from engine.choices import mitigation
from engine.rollouts import Rollouts
from harness.screen import run_as_program


def end_untrained(rollouts: Rollouts) -> Tensor:
    """Weight 0 at the last token of an answer that ended, and 1 elsewhere: what a code does that
    pads with the end token and masks the padding."""
    weight = torch.ones_like(rollouts.log_prob)
    ended = rollouts.finished.nonzero().flatten()
    weight[ended, rollouts.length[ended] - 1] = 0
    return weight


def per_group(rollouts: Rollouts) -> Tensor:
    """Every group counts the same, and every token within it."""
    return of_parts(rollouts, rollouts.group)


def micro_batches_of_4(rollouts: Rollouts) -> Tensor:
    """Each four answers after each other count the same: a token is divided by the number of tokens
    of its micro-batch, and not by that of the batch."""
    return of_parts(rollouts, torch.arange(len(rollouts.group), device=rollouts.group.device) // 4)


def of_parts(rollouts: Rollouts, part: Tensor) -> Tensor:
    """(B, T): N / (number of parts * tokens of the answer's part)."""
    length = rollouts.length.double()
    parts = int(part.max()) + 1
    tokens = length.new_zeros(parts).index_add(0, part, length)[part]
    weight = (length.sum() / (parts * tokens)).float()
    return weight[:, None] * rollouts.mask


def register_weightings() -> None:
    """Make the weightings above choices of --mitigation, in this process alone."""
    for weighting in (end_untrained, per_group, micro_batches_of_4):
        mitigation(rescaled=False)(weighting)


def main(argv: list[str]) -> None:
    register_weightings()
    train.main(argv)


if __name__ == "__main__":
    run_as_program("price_train", main)
