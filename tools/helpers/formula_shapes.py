"""Weights that differ between the tokens of one answer.

A `Shape` says how the push depends on the token within its answer: not at all in GRPO. Each other
shape has at most one number, which is computed from two tokens and then has to fit all of them.
Here x = -log p, which is not negative.
"""
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.helpers.formula_advantages import short
from tools.helpers.formula_batches import Case


@dataclass(frozen=True)
class Shape:
    code: str
    words: str
    value: Callable[[Case], Tensor]  # (B, L)
    detached: str = ""  # the same push, in words, of a weight through which no gradient flows


FLAT = Shape("no weights", "all tokens of an answer have the same weight",
             lambda case: torch.ones(case.ids.shape, dtype=torch.float64))


def surprise(case: Case) -> Tensor:
    return -case.log_prob


def entropy_of(case: Case) -> Tensor:
    log_p = case.lens.distribution(case.logits, case.lens.temperature)
    return -(log_p.exp() * log_p).sum(-1)


def place_in_answer(case: Case) -> Tensor:
    return (torch.arange(case.ids.shape[1])[None] - case.prompt_length[:, None]).double()


def places_left(case: Case) -> Tensor:
    return case.length[:, None] - 1 - place_in_answer(case)


WITHOUT_NUMBER = [
    Shape("weight p", "the push has a factor p, as if the loss were that of p instead of log p",
          lambda case: case.log_prob.exp()),
    Shape("weight 1-p", "the weight is 1 - p", lambda case: 1 - case.log_prob.exp()),
    Shape("weight 1-p undetached", "the weight is 1 - p and the gradient flows through it, so the "
          "push is 1 - p - p log p",
          lambda case: 1 - case.log_prob.exp() * (1 + case.log_prob),
          "the weight is 1 - p - p log p, detached"),
    Shape("weight p undetached", "the weight is p and the gradient flows through it, so the push "
          "is p (1 + log p)", lambda case: case.log_prob.exp() * (1 + case.log_prob),
          "the weight is p (1 + log p), detached"),
    Shape("weight 1 + log p", "the push has a factor 1 + log p, as where a ratio that is not "
          "detached multiplies log p, so that the gradient flows through both",
          lambda case: 1 + case.log_prob),
    Shape("weight -log p", "the weight is -log p; or it is half of that, and the gradient flows "
          "through it: the two have the same gradient", surprise),
    Shape("weight entropy", "the weight is the entropy of the token's distribution", entropy_of)]


def shapes(case: Case, push: Tensor, tokens: Tensor) -> Iterator[Shape]:
    """All shapes, with the number that two tokens of one answer ask for."""
    yield FLAT
    yield from WITHOUT_NUMBER
    row = int(((push.abs() > 0) & tokens).sum(1).argmax())
    columns = tokens[row].nonzero().flatten()
    x, c = surprise(case)[row, columns], push[row, columns]
    if len(x) < 2 or x.min() == x.max():
        return
    i, j = int(x.argmin()), int(x.argmax())
    yield from inverse(float(x[i]), float(x[j]), float(c[i]), float(c[j]))
    p, q = float((-x[i]).exp()), float((-x[j]).exp())
    yield from linear(p, q, float(c[i]), float(c[j]))
    yield from powers(float(x[i]), float(x[j]), float(c[i]), float(c[j]))
    yield from discounts(float(c[0]), float(c[1]))


def inverse(x: float, y: float, c: float, d: float) -> Iterator[Shape]:
    """1 / (x + epsilon), and epsilon / (x + epsilon)^2, whose gradient flows through the weight."""
    if c == d or c * d <= 0:
        return
    epsilon = short((d * y - c * x) / (c - d))
    if epsilon > 0:
        yield Shape(f"weight 1/(|log p|+{epsilon:g})",
                    f"the weight is 1 / (|log p| + {epsilon:g}), detached",
                    lambda case: 1 / (surprise(case) + epsilon))
    root, other = abs(c) ** .5, abs(d) ** .5
    second = short((other * y - root * x) / (root - other))
    if second > 0:
        yield Shape(f"weight 1/(|log p|+{second:g}) undetached",
                    f"the weight is 1 / (|log p| + {second:g}) and it is not detached: the "
                    f"gradient flows through it too, so what acts is {second:g} / (|log p| + "
                    f"{second:g})^2",
                    lambda case: second / (surprise(case) + second).square(),
                    f"the weight is {second:g} / (|log p| + {second:g})^2, detached")


def linear(p: float, q: float, c: float, d: float) -> Iterator[Shape]:
    """alpha p + 1 - alpha."""
    slope = (c - d) / (p - q)
    start = c - slope * p
    if slope + start:
        alpha = short(slope / (slope + start))
        if alpha not in (0, 1):
            yield Shape(f"weight {alpha:g} p + {1 - alpha:g}",
                        f"the weight is {alpha:g} p + {1 - alpha:g}",
                        lambda case: alpha * case.log_prob.exp() + 1 - alpha)


def powers(x: float, y: float, c: float, d: float) -> Iterator[Shape]:
    """p to a power."""
    if c * d > 0 and x != y:
        power = short(math.log(d / c) / (x - y))
        yield Shape(f"weight p^{power:g}", f"the push has a factor p^{power:g}",
                    lambda case: (power * case.log_prob).exp())


def discounts(c: float, d: float) -> Iterator[Shape]:
    """A factor for each place, counted from the answer's start or from its end."""
    if c * d > 0 and c != d:
        forward, backward = short(d / c), short(c / d)
        yield Shape(f"discount {forward:g} from the start",
                    f"each token has {forward:g} times the weight of the one before it, counted "
                    "from the start of the answer",
                    lambda case: (math.log(forward) * place_in_answer(case)).exp())
        yield Shape(f"discount {backward:g} from the end",
                    f"each token has {backward:g} times the weight of the one after it, counted "
                    "from the end of the answer",
                    lambda case: (math.log(backward) * places_left(case)).exp())


def rescaled(shape: Shape, tokens_of_case: Callable[[Case], Tensor]) -> list[Shape]:
    """The shape as it is, with mean 1 over the batch's tokens, and with mean 1 in each answer."""
    def over_batch(case: Case) -> Tensor:
        value, tokens = shape.value(case), tokens_of_case(case)
        return value * tokens.sum() / (value * tokens).sum()

    def over_answer(case: Case) -> Tensor:
        value, tokens = shape.value(case), tokens_of_case(case)
        total = (value * tokens).sum(1, keepdim=True)
        return value * tokens.sum(1, keepdim=True) / torch.where(total == 0, 1.0, total)

    if shape is FLAT:
        return [shape]
    return [shape,
            Shape(shape.code + " mean 1", shape.words + ", rescaled to the mean 1 over the tokens "
                  "of the batch", over_batch, shape.detached),
            Shape(shape.code + " mean 1 in an answer", shape.words + ", rescaled to the mean 1 in "
                  "each answer", over_answer, shape.detached)]
