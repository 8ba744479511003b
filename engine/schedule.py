"""The learning rate of a step (--warmup_steps, --decay). It follows from the step alone, so a run
that is resumed has the rates of one that was never stopped."""
import math


def rate_of_step(step: int, steps: int, rate: float, warmup: int, decay: str) -> float:
    """The rate of a step, counted from 1. It rises in equal parts over the first `warmup` steps, in
    the last of which it is `rate`. Then, with `decay`, it falls to nearly 0 in the last step:

        linear    in equal parts
        cosine    along half a cosine, slowly at first and at the end
    """
    if step <= warmup:
        return rate * step / warmup
    if decay == "none":
        return rate
    left = (steps - step + 1) / (steps - warmup + 1)  # below 1, above 0
    if decay == "linear":
        return rate * left
    return rate * (1 - math.cos(math.pi * left)) / 2
