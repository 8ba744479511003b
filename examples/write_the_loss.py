"""An exercise: write the five small functions that make a GRPO step.

    python examples/write_the_loss.py           # checks what you have written
    python examples/write_the_loss.py train     # trains the tiny model with parts 1 to 3

docs/course/5_can_i_write_it.md explains each part. Write your code in the place of the lines that
raise NotImplementedError. The parts are checked in their order, and the check ends at the first
that is missing or wrong.
"""
# mypy: allow-untyped-calls
import sys
from collections.abc import Callable
from pathlib import Path

import torch  # noqa: F401  for your code
from torch import Tensor

Loss = Callable[..., Tensor]


def advantages(reward: Tensor, group: Tensor) -> Tensor:
    """Part 1. How much better was each answer than the others of its group? (B,) and (B,) -> (B,)

    reward  the reward of each answer
    group   the number of its problem: answers with the same number are one group
    """
    raise NotImplementedError("part 1")


def log_prob_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Part 2. The log-probability of each token but the first: (B, L, V) and (B, L) -> (B, L - 1).

    logits  V numbers at each of L positions, as the model computes them from the tokens up to there
    ids     the token at each position
    """
    raise NotImplementedError("part 2")


def policy_loss(log_prob: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor, total: float
                ) -> Tensor:
    """Part 3. The loss of some answers: a tensor with one number, from which the gradient flows
    back to log_prob. Tensors are (answers, T); T is the number of tokens of the longest answer.

    log_prob   the log-probability of each token, computed by the model as it is now
    advantage  how much better the token's answer was than the others of its group
    weight     how much the token counts
    mask       1 at the tokens of an answer, 0 at the padding behind its last token
    total      N, the number of tokens in the whole batch; these answers may be a part of it
    """
    raise NotImplementedError("part 3")


def stepped(parameter: Tensor, gradient: Tensor, learning_rate: float, max_norm: float) -> Tensor:
    """Part 4. The parameter after one step of plain gradient descent. A gradient that is longer
    than max_norm is first shortened to this length."""
    raise NotImplementedError("part 4")


def clipped_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor,
                 total: float, clip: tuple[float, float]) -> Tensor:
    """Part 5. The loss for several updates with one batch.

    old        the log-probabilities before the first update with this batch
    clip       how far the ratio may go below 1 and above 1
    """
    raise NotImplementedError("part 5")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from any folder
    if sys.argv[1:] == ["train"]:
        from examples.own_grpo import train
        try:
            train(advantages, log_prob_of, policy_loss)
        except NotImplementedError as error:
            sys.exit(f"not written yet: {error}")
    else:
        from lab.exercise import check
        sys.exit(0 if check(globals()) else 1)
