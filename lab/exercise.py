"""Are the five functions that a reader has written the right ones? examples/write_the_loss.py asks.

The reader's function and the right one are given the same tensors. Parts 1, 2 and 4 compare what
the functions return, part 2 also its gradient, and parts 3 and 5, the losses, compare gradients, on
the batches on which two losses are compared. For each typical mistake there is what somebody gets
who makes it, and what is told about it. The first that fits what the reader's function gives is
told.
"""
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from textwrap import fill
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo import centred, clipped_loss, group_mean, group_z_score, policy_loss
from lab.formula.adapters import log_probs, z_score
from lab.formula.batches import Batch, make_case
from lab.formula.calling import Examined, Loss, LossFailed, of_the_user
from lab.formula.formula import KNOWN, best_of, left_of
from lab.formula.report import worst_of
from lab.formula.search import new_gradients, shares_of

Function = Callable[..., Tensor]

RIGHT_BOUNDS = (0.2, 0.28)
CLOSE = 5e-5  # values that differ by less are the same


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


def with_ratio(b: Given, ratio: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """The loss of part 5 with another ratio, and with a factor at each token."""
    clipped = ratio.clamp(1 - b.clip[0], 1 + b.clip[1])
    objective = b.weight * torch.minimum(ratio * b.advantage, clipped * b.advantage) * factor
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
        "The ratio. Yours has the gradient of part 3, as if `old` were ignored, or as if you "
        "compared log_prob with itself. Here the ratio exp(log_prob - old) takes the place of "
        "log_prob."),
    "ratio_upside_down": (lambda right, b: right(b, log_prob=b.old, old=b.log_prob),
        "The ratio. Yours is upside down. New over old is exp(log_prob - old)."),
    "difference_of_logs": (lambda right, b: with_ratio(b, b.change),
        "The ratio. Yours is log_prob - old, which is the logarithm of the ratio. Take its exp."),
    "ratio_times_log_prob": (lambda right, b: with_ratio(b, b.change.exp(), b.log_prob),
        "The ratio. You multiply log_prob by it. Here the ratio takes the place of log_prob: the "
        "gradient flows through the ratio itself."),
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
    "bounds_without_1": (lambda right, b: right(b, clip=(1 - b.clip[0], b.clip[1] - 1)),
        "The bounds. You clip the ratio between clip[0] and clip[1]. They say how far it may go "
        "from 1, so the bounds are 1 - clip[0] and 1 + clip[1]."),
    "upper_bound": (lambda right, b: right(b, clip=(b.clip[0], b.clip[0])),
        "The bounds. Your upper bound is 1 + clip[0], and it should be 1 + clip[1]."),
    "fixed_bounds": (lambda right, b: right(b, clip=RIGHT_BOUNDS),
        "The bounds. Yours are always 0.8 and 1.28. Use the argument `clip`.")}
LOSSES = {"policy_loss": MISTAKES, "clipped_loss": MISTAKES | MISTAKES_OF_THE_RATIO}


def right(given: Given, **changed: object) -> Tensor:
    """The two losses of grpo.py: the second one where there are old log-probs."""
    b = given._replace(**changed)
    if b.old is None:
        return policy_loss(b.log_prob, b.advantage, b.weight, b.mask, b.total)
    return clipped_loss(b.log_prob, b.old, b.advantage, b.weight, b.mask, b.total, *b.clip)


class Blank(NamedTuple):
    """A function that is judged by what it returns."""
    right: Function
    arguments: list[tuple[Any, ...]]
    mistakes: list[tuple[Function, str]]


def spread(reward: Tensor, group: Tensor) -> Tensor:
    """The standard deviation of each answer's group."""
    return group_mean((reward - group_mean(reward, group)).square(), group).sqrt()


def without_own(group: Tensor) -> Tensor:
    """G / (G - 1) for each answer, where G is the number of answers of its group."""
    return (group.bincount() / (group.bincount() - 1))[group]


def sampled(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probs of ids by the logits at the same places."""
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def stepped(parameter: Tensor, gradient: Tensor, learning_rate: float, max_norm: float) -> Tensor:
    return parameter - learning_rate * gradient * min(1.0, max_norm / float(gradient.norm()))


ADVANTAGES = Blank(
    group_z_score,
    [(torch.tensor([1.1, 0.1, 0.1, 0.1, 0.0, 0.5, 0.5, 1.1, 0.1, 1.0, 1.1]),
      torch.tensor([0, 0, 1, 0, 0, 2, 2, 1, 1, 3, 3]))],  # group 3 has a small spread
    [(lambda reward, group: (reward - reward.mean()) / (reward.std(correction=0) + 1e-4),
      "The group. You compare each answer with the whole batch. Take the mean and the standard "
      "deviation over the answers that have the same number in `group`."),
     (lambda reward, group: -group_z_score(reward, group),
      "The sign. The advantage is the reward minus the mean, so a better answer has a positive "
      "one."),
     (centred,
      "The standard deviation. It is missing."),
     (lambda reward, group: reward / (spread(reward, group) + 1e-4),
      "The mean. It is missing, so no answer is pushed down."),
     (lambda reward, group: centred(reward, group) / (
         spread(reward, group) * without_own(group).sqrt() + 1e-4),
      "The standard deviation. Yours divides by the number of answers minus 1, as torch.std does "
      "unless it is told correction=0."),
     (lambda reward, group: centred(reward, group) / spread(reward, group),
      "The 0.0001. It is missing, so a group of equal rewards gives 0 / 0.")])
LOG_PROBS = Blank(
    lambda logits, ids: sampled(logits[:, :-1], ids[:, 1:]),
    [(torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)),
      torch.tensor([[0, 3, 5, 1, 6], [2, 2, 4, 0, 5]]))],
    [(lambda logits, ids: sampled(logits[:, 1:], ids[:, 1:]),
      "The shift. The logits at a token are computed after reading it, so they predict the next "
      "token. For the token at position t take the logits at t - 1."),
     (lambda logits, ids: sampled(logits[:, :-1], ids[:, :-1]),
      "The shift. You ask the right logits for the wrong tokens: those at t - 1 predict the token "
      "at t."),
     (lambda logits, ids: sampled(logits[:, :-1], ids[:, 1:]).exp(),
      "The logarithm. Yours are probabilities."),
     (lambda logits, ids: -sampled(logits[:, :-1], ids[:, 1:]),
      "The sign. A log-probability is negative. (F.cross_entropy is the log-prob with a minus.)"),
     (lambda logits, ids: logits[:, :-1].log_softmax(1).gather(-1, ids[:, 1:, None])[..., 0],
      "The softmax. You take it over the positions. Take it over the last dimension, the V "
      "tokens."),
     (lambda logits, ids: logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0],
      "The softmax. Yours are logits. Take log_softmax over the last dimension first.")])
STEP = Blank(
    stepped,
    [(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), 0.1, 1.0),
     (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), 0.1, 2.0),
     (torch.tensor([1.0, 2.0]), torch.tensor([0.3, 0.4]), 0.1, 1.0),
     (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), 2.0, 1.0)],
    [(lambda parameter, gradient, rate, max_norm: 2 * parameter - stepped(
        parameter, gradient, rate, max_norm),
      "The sign. The loss should become smaller, so go against its gradient."),
     (lambda parameter, gradient, rate, max_norm: parameter - rate * gradient,
      "The limit. A gradient that is longer than max_norm is shortened to this length."),
     (lambda parameter, gradient, rate, max_norm:
         parameter - rate * gradient * max_norm / gradient.norm(),
      "The limit. You also lengthen a gradient that is shorter than max_norm."),
     (lambda parameter, gradient, rate, max_norm:
         parameter - rate * gradient * max(1.0, max_norm / float(gradient.norm())),
      "The limit. Your comparison is the wrong way round: shorten the gradient that is longer than "
      "max_norm."),
     (lambda parameter, gradient, rate, max_norm: stepped(parameter, gradient, 1.0, max_norm),
      "The learning rate. It is missing.")])
BLANKS = {"advantages": ADVANTAGES, "log_prob_of": LOG_PROBS, "stepped": STEP}
PARTS = {"advantages": "the advantage of each answer",
         "log_prob_of": "the log-probability of each token",
         "policy_loss": "the loss, for one update with a batch",
         "stepped": "the step",
         "clipped_loss": "the loss for several updates, with the ratio"}


def loss_of(function: Callable[[Given], Tensor], with_old: bool) -> Loss:
    """The loss of a batch that a function of policy_loss's arguments makes."""
    def loss(logits: Tensor, batch: Batch) -> Tensor:
        log_prob, mask = log_probs(logits, batch), batch.mask[:, 1:] > 0
        advantage = z_score(batch)[:, None].expand_as(log_prob).clone()
        weight = .5 + batch.ids[:, 1:].to(log_prob.dtype)  # any numbers, up to 10.5
        clip = RIGHT_BOUNDS if len(batch.group.unique()) != 3 else (0.1, 0.4)
        old = torch.where(mask, batch.old_log_prob[:, 1:], -1.0) if with_old else None
        given = Given(log_prob, advantage, weight, mask, float(batch.total), old, clip)
        return function(given)
    return loss


def check(written: Mapping[str, Any]) -> bool:
    """Print of each part whether the written function is right, and if it is not, what is probably
    wrong. Ends with the first that is not. Returns whether all are right."""
    for number, (name, title) in enumerate(PARTS.items(), 1):
        print(f"\nPart {number}: {title}")
        try:
            wrong = (wrong_values(written[name], BLANKS[name]) if name in BLANKS
                     else wrong_gradient(written[name], name))
        except LossFailed as error:
            if isinstance(error.__cause__, NotImplementedError):
                print(f"  not written yet: {error.__cause__}")
            else:
                print(f"  WRONG  {error}")
            return False
        if wrong:
            print("\n" + fill(wrong, 88, break_on_hyphens=False))
            print("\nMend it, and type the command again.")
            return False
    print("\nAll five are right. Now compare your text with the project's.")
    return True


def returned(function: Function, arguments: tuple[Any, ...]) -> Tensor:
    """What the function returns. It gets copies, because it may work in place."""
    return function(*(x.clone() if isinstance(x, Tensor) else x for x in arguments))


def wrong_values(function: Function, blank: Blank) -> str:
    """What is probably wrong with a function that is judged by what it returns; empty if it is
    right."""
    with of_the_user():
        theirs = [returned(function, a) for a in blank.arguments]

    def differing(other: Function) -> list[tuple[float, float]]:
        """Each number that is not the other function's, and the other's."""
        pairs = [(x, y) for found, a in zip(theirs, blank.arguments)
                 for x, y in zip(found.flatten().tolist(), returned(other, a).flatten().tolist())]
        return [(x, y) for x, y in pairs
                if not (abs(x - y) < CLOSE or math.isnan(x) and math.isnan(y))]

    for found, a in zip(theirs, blank.arguments):
        expected = returned(blank.right, a)
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            print(f"  WRONG  it returned {shape}, and should return a tensor of shape "
                  f"{tuple(expected.shape)}")
            return "Compare the shapes in the function's first line."
    wrong = differing(blank.right)
    if not wrong:
        return wrong_derivative(function, blank) if blank is LOG_PROBS else right_numbers()
    print("  WRONG  the numbers differ")
    for mistake, told in blank.mistakes:
        if not differing(mistake):
            return f"Probably wrong: {told}"
    return ("No typical mistake gives these numbers. The first that differs is "
            f"{wrong[0][0]:.4f}, and should be {wrong[0][1]:.4f}. Work it out by hand.")


def right_numbers(what: str = "the same numbers") -> str:
    print(f"  right  {what}")
    return ""


def wrong_derivative(function: Function, blank: Blank) -> str:
    """What is wrong with the gradient of numbers that are right; empty if it is right. Without a
    gradient nothing would be learned."""
    def derivative(of: Function) -> Tensor:
        logits, ids = blank.arguments[0]
        logits = logits.clone().requires_grad_()
        log_prob = of(1 * logits, ids)  # a product, because it may work in place
        if log_prob.requires_grad:
            (log_prob * torch.arange(1.0, 1 + log_prob.numel()).view_as(log_prob)).sum().backward()
        return torch.zeros_like(logits) if logits.grad is None else logits.grad

    with of_the_user():
        theirs = derivative(function)
    if torch.allclose(theirs, derivative(blank.right), atol=CLOSE):
        return right_numbers("the same numbers, and the same gradient")
    print("  WRONG  the numbers are right, and their gradient is not")
    return ("The gradient. None, or not all of it, flows back to the logits, so nothing can be "
            "learned. Is there a detach(), a no_grad() or a list of numbers on the way?")


right_gradients = cache(lambda with_old: new_gradients(loss_of(right, with_old)))


def wrong_gradient(function: Function, name: str) -> str:
    """What is probably wrong with a loss; empty if it is right."""
    with_old, mistakes = name == "clipped_loss", LOSSES[name]

    def as_written(given: Given) -> Tensor:
        arguments = given._asdict()
        if not with_old:
            del arguments["old"], arguments["clip"]
        return function(**arguments)

    theirs = loss_of(as_written, with_old)
    gradients = new_gradients(theirs)
    shares = shares_of(gradients, right_gradients(with_old))
    if max(shares.values()) < KNOWN:
        print(f"  right  the same gradient on {len(shares)} kinds of batches")
        return ""
    differs = {name: share for name, share in shares.items() if share >= KNOWN}
    print(f"  WRONG  the gradient differs by {worst_of(differs, 2)}")

    case = replace(make_case(60).moved(61, .6), whole=200.0)
    gradient = Examined(theirs).gradient(case)

    def left_over(name: str) -> float:
        wrong = loss_of(lambda given: mistakes[name][0](right, given), with_old)
        share = left_of(gradient, Examined(wrong).gradient(case))
        try:
            return share if share > KNOWN else max(
                shares_of(gradients, new_gradients(wrong)).values())
        except LossFailed:  # neither has a gradient
            return 0.0

    found, left = best_of(mistakes, left_over)
    return f"Probably wrong: {mistakes[found][1]}" if left < KNOWN else (
        "No typical mistake has this gradient. Work out one token by hand, and compare it with "
        "what your function computes for this token.")
