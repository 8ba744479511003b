"""An exercise: write GRPO's loss from its formula. docs/exercises.md explains it, in exercise 0.

    python examples/write_the_loss.py      # checks what you have written

Write your code in the place of the two lines that raise NotImplementedError. Part 1 can be checked
before part 2 is written. The project does not use this function: its own are policy_loss and
clipped_loss in grpo.py.
"""
import sys
from pathlib import Path

import torch  # noqa: F401  for your code
from torch import Tensor


def policy_loss(log_prob: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor, total: float,
                old: Tensor | None = None, clip: tuple[float, float] = (0.2, 0.28)) -> Tensor:
    """The loss of some answers: a tensor with one number, from which the gradient flows back to
    log_prob. Tensors are (answers, T); T is the number of tokens of the longest answer.

    log_prob   the log-probability of each token, computed by the model as it is now
    advantage  how much better the token's answer was than the others of its group
    weight     how much the token counts
    mask       1 at the tokens of an answer, 0 at the padding behind its last token
    total      N, the number of tokens in the whole batch; these answers may be a part of it
    old        the log-probabilities before the first update with this batch
    clip       how far the ratio may go below 1 and above 1
    """
    if old is None:
        raise NotImplementedError("part 1")
    raise NotImplementedError("part 2")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from any folder
    from lab.engine.update import ppo
    from lab.formula.exercise import check
    sys.exit(0 if check(policy_loss, right=ppo) else 1)
