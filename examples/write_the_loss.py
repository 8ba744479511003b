"""An exercise: write GRPO's loss from its formula. docs/exercises.md explains it, in exercise 0.

    python examples/write_the_loss.py      # checks what you have written

Write your code in the place of the two lines that raise NotImplementedError. Part 1 can be checked
before part 2 is written. A training does not use these functions: it has its own, in grpo.py.
"""
import sys
from collections.abc import Callable
from pathlib import Path

import torch  # noqa: F401  for your code
from torch import Tensor

Loss = Callable[..., Tensor]


def policy_loss(log_prob: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor, total: float
                ) -> Tensor:
    """Part 1. The loss of some answers: a tensor with one number, from which the gradient flows
    back to log_prob. Tensors are (answers, T); T is the number of tokens of the longest answer.

    log_prob   the log-probability of each token, computed by the model as it is now
    advantage  how much better the token's answer was than the others of its group
    weight     how much the token counts
    mask       1 at the tokens of an answer, 0 at the padding behind its last token
    total      N, the number of tokens in the whole batch; these answers may be a part of it
    """
    raise NotImplementedError("part 1")


def clipped_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor,
                 total: float, clip: tuple[float, float]) -> Tensor:
    """Part 2. The same for several updates with one batch.

    old        the log-probabilities before the first update with this batch
    clip       how far the ratio may go below 1 and above 1
    """
    raise NotImplementedError("part 2")


def of_both(policy_loss: Loss, clipped_loss: Loss) -> Loss:
    """One function for the checker: the second loss where there are old log-probabilities."""
    def loss(log_prob: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor, total: float,
             old: Tensor | None = None, clip: tuple[float, float] = (0.2, 0.28)) -> Tensor:
        if old is None:
            return policy_loss(log_prob, advantage, weight, mask, total)
        return clipped_loss(log_prob, old, advantage, weight, mask, total, clip)
    return loss


def right() -> Loss:
    """The two losses of grpo.py."""
    import grpo
    return of_both(grpo.policy_loss, lambda *given: grpo.clipped_loss(*given[:-1], *given[-1]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from any folder
    from lab.exercise import check
    sys.exit(0 if check(of_both(policy_loss, clipped_loss), right()) else 1)
