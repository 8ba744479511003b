"""Is the `policy_loss` that a reader has written the right one? examples/write_the_loss.py asks.

Both functions are given the same tensors, made of the batches on which two losses are compared.
For each typical mistake there is the loss that somebody gets who makes it, which is the right one
with other arguments, and what is told about it. The first that has the reader's gradient is told.
"""
import math
from collections.abc import Callable
from dataclasses import replace
from textwrap import fill
from typing import NamedTuple

import torch
from torch import Tensor

from lab.formula.adapters import log_probs, z_score
from lab.formula.batches import Batch, make_case
from lab.formula.calling import Examined, Loss, LossFailed
from lab.formula.formula import KNOWN, best_of, left_of
from lab.formula.report import worst_of
from lab.formula.search import differences

RIGHT_BOUNDS = (0.2, 0.28)


class Given(NamedTuple):
    """The arguments of policy_loss. Tensors are (answers, T)."""
    log_prob: Tensor
    advantage: Tensor
    weight: Tensor
    mask: Tensor
    total: float
    old: Tensor | None
    clip: tuple[float, float]

    @property
    def change(self) -> Tensor:
        """The logarithm of the ratio."""
        return self.log_prob - self.old

    @property
    def clipped_change(self) -> Tensor:
        return self.change.clamp(math.log(1 - self.clip[0]), math.log(1 + self.clip[1]))


def with_ratio_of_logs(b: Given) -> Tensor:
    ratio = b.log_prob / b.old
    clipped = ratio.clamp(1 - b.clip[0], 1 + b.clip[1])
    objective = b.weight * torch.minimum(ratio * b.advantage, clipped * b.advantage)
    return -(objective * b.mask).sum() / b.total


MISTAKES = {  # of both parts: the loss with this mistake, and what is told about it
    "sign": (lambda right, b: -right(b),
        "The sign. The optimizer makes the loss smaller, and a token with a positive advantage "
        "should become more likely. So the loss has a minus."),
    "no_gradient": (lambda right, b: right(b, log_prob=b.log_prob.detach()),
        "A detach. No gradient flows back to log_prob. Is there a detach() or a no_grad() on the "
        "way? The ratio must not be detached, because in the loss with `old` the gradient flows "
        "through nothing else."),
    "probability": (lambda right, b: right(b, log_prob=b.log_prob.exp()),
        "The log-probability. Yours has the probability exp(log_prob) in the place of log_prob."),
    "no_advantage": (lambda right, b: right(b, advantage=torch.ones_like(b.advantage)),
        "The advantage. It is missing, so good and bad answers are pushed the same way."),
    "no_weight": (lambda right, b: right(b, weight=torch.ones_like(b.weight)),
        "The weight. It is missing, so all tokens count the same."),
    "no_mask": (lambda right, b: right(b, mask=torch.ones_like(b.mask)),
        "The mask. Padding counts in your sum. Multiply each token's term by the mask before you "
        "add them up."),
    "no_division": (lambda right, b: right(b, total=1.0),
        "N. The sum is not divided. Divide it by `total`."),
    "mean_of_positions": (lambda right, b: right(b, total=b.mask.numel()),
        "N. You divide by the number of all positions, as mean() does, and padding is among them. "
        "Take the sum, and divide it by `total`."),
    "mean_without_mask": (
        lambda right, b: right(b, mask=torch.ones_like(b.mask), total=b.mask.numel()),
        "The mask and N. You take the mean over all positions, and padding is among them. "
        "Multiply each token's term by the mask, take the sum, and divide it by `total`."),
    "mean_of_answers": (lambda right, b: right(
        b, weight=b.weight / b.mask.sum(1, keepdim=True), total=len(b.mask)),
        "N. You divide each answer by its own length, so a token of a short answer counts more. "
        "Here each token counts the same: take the sum over all answers, and divide it by "
        "`total`."),
    "tokens_of_these_answers": (lambda right, b: right(b, total=b.mask.sum()),
        "N. You divide by the number of tokens in these answers, mask.sum(). But they may be a "
        "micro-batch, that is, a part of the batch. `total` is the number of tokens in the whole "
        "batch: only with it do the gradients of all parts add up to that of the batch.")}
MISTAKES_OF_THE_RATIO = {
    "old_is_ignored": (lambda right, b: right(b, old=None),
        "The ratio. Yours has the gradient of part 1, as if `old` were ignored, or as if you "
        "compared log_prob with itself. Here the ratio exp(log_prob - old) takes the place of "
        "log_prob."),
    "ratio_upside_down": (lambda right, b: right(b, log_prob=b.old, old=b.log_prob),
        "The ratio. Yours is upside down. New over old is exp(log_prob - old)."),
    "ratio_of_logs": (lambda right, b: with_ratio_of_logs(b),
        "The ratio. You divide log_prob by `old`. The ratio is that of the probabilities, which "
        "is exp(log_prob - old)."),
    "clipped_ratio_as_weight": (
        lambda right, b: right(b, weight=b.weight * b.clipped_change.exp().detach(), old=None),
        "A detach. You multiply log_prob by a clipped and detached ratio. So the gradient flows "
        "also where the clip should stop it. In PPO the ratio takes the place of log_prob."),
    "no_clip": (lambda right, b: right(b, clip=(torch.inf, torch.inf)),
        "The clip. It is missing, so a token that has moved far enough is still pushed on. Or you "
        "multiply log_prob by a detached ratio: in PPO the ratio takes the place of log_prob, and "
        "the gradient flows through the ratio itself."),
    "no_minimum": (lambda right, b: right(b, log_prob=b.old + b.clipped_change),
        "The minimum. You use the clipped ratio alone, so a token that has moved the wrong way is "
        "not brought back. Take the smaller of ratio * advantage and clipped ratio * advantage."),
    "maximum": (lambda right, b: -right(b, advantage=-b.advantage),
        "The minimum. You take the larger of ratio * advantage and clipped ratio * advantage. "
        "Take the smaller one. (If you have moved the minus inside, it is the larger of the two "
        "negative ones.)"),
    "smaller_ratio": (lambda right, b: right(b, advantage=b.advantage.clamp(min=0))
        - right(b, advantage=-b.advantage.clamp(max=0)),
        "The clip's direction. You take the smaller ratio, and then multiply it by the "
        "advantage. If the advantage is negative, that is the larger product. Multiply both "
        "ratios by the advantage first, and then take the smaller product."),
    "bounds_without_1": (lambda right, b: right(b, clip=(1 - b.clip[0], b.clip[1] - 1)),
        "The bounds. You clip the ratio between clip[0] and clip[1]. They say how far it may go "
        "from 1, so the bounds are 1 - clip[0] and 1 + clip[1]."),
    "upper_bound": (lambda right, b: right(b, clip=(b.clip[0], b.clip[0])),
        "The bounds. Your upper bound is 1 + clip[0], and it should be 1 + clip[1]."),
    "lower_bound": (lambda right, b: right(b, clip=(b.clip[1], b.clip[1])),
        "The bounds. Your lower bound is 1 - clip[1], and it should be 1 - clip[0]."),
    "fixed_bounds": (lambda right, b: right(b, clip=RIGHT_BOUNDS),
        "The bounds. Yours are always 0.8 and 1.28. Use the argument `clip`.")}
PARTS = {1: ("one update with a batch", MISTAKES),
         2: ("several updates, with the ratio", MISTAKES | MISTAKES_OF_THE_RATIO)}


def loss_of(function: Callable[[Given], Tensor], part: int) -> Loss:
    """The loss of a batch that a function of policy_loss's arguments makes."""
    def loss(logits: Tensor, batch: Batch) -> Tensor:
        log_prob, mask = log_probs(logits, batch), batch.mask[:, 1:] > 0
        advantage = z_score(batch)[:, None].expand_as(log_prob).clone()
        weight = .5 + batch.ids[:, 1:].to(log_prob.dtype)  # any numbers, up to 10.5
        clip = RIGHT_BOUNDS if len(batch.group.unique()) != 3 else (0.1, 0.4)
        old = torch.where(mask, batch.old_log_prob[:, 1:], -1.0) if part == 2 else None
        given = Given(log_prob, advantage, weight, mask, float(batch.total), old, clip)
        before = {name: value.clone() for name, value in given._asdict().items()
                  if isinstance(value, Tensor)}
        value = function(given)
        for name, tensor in before.items():
            if not torch.equal(tensor, getattr(given, name)):
                raise LossFailed(f"the argument `{name}` is changed in place. Whoever calls the "
                                 "function uses it again: make a new tensor")
        return value
    return loss


def check(written: Callable[..., Tensor], right: Callable[..., Tensor]) -> bool:
    """Print of each part whether the written function has the gradient of the right one, and if it
    has not, what is probably wrong. Returns whether both parts have."""
    def right_but(given: Given, **changed: object) -> Tensor:
        return right(**given._asdict() | changed)

    for part, (title, mistakes) in PARTS.items():
        print(f"\nPart {part}: {title}")
        theirs = loss_of(lambda given: written(**given._asdict()), part)
        try:
            shares = differences(theirs, loss_of(right_but, part))
        except LossFailed as error:
            is_to_do = isinstance(error.__cause__, NotImplementedError)
            print(f"  not written yet: {error.__cause__}" if is_to_do else f"  WRONG  {error}")
            return False
        if max(shares.values()) < KNOWN:
            print(f"  right  the same gradient on {len(shares)} kinds of batches")
            continue
        differs = {name: share for name, share in shares.items() if share >= KNOWN}
        print(f"  WRONG  the gradient differs by {worst_of(differs, 2)}")

        case = replace(make_case(60).moved(61, .6), whole=200.0)
        gradient = Examined(theirs).gradient(case)

        def left_over(name: str) -> float:
            wrong = loss_of(lambda given: mistakes[name][0](right_but, given), part)
            share = left_of(gradient, Examined(wrong).gradient(case))
            try:
                return share if share > KNOWN else max(differences(theirs, wrong).values())
            except LossFailed:  # neither has a gradient
                return 0.0

        name, left = best_of(mistakes, left_over)
        told = f"Probably wrong: {mistakes[name][1]}" if left < KNOWN else (
            "No typical mistake has this gradient. Work out one token by hand, and compare it with "
            "what your function computes for this token.")
        print("\n" + fill(told, 88) + "\n\nMend it, and type the command again.")
        return False
    print("\nYour function has the gradient of grpo.py's. Now compare the two texts.")
    return True
