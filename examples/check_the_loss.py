"""The checks of an exercise: is the `policy_loss` that a reader has written that of grpo.py?

write_the_loss.py calls `check`. Each check gives the same tensors to both functions. It compares
the losses, and their gradients with respect to log_prob.

How is a mistake found? For each name in MISTAKES there is the loss that somebody gets who makes
this mistake, which is grpo.py's function with other arguments, and what is told about it. If such a
loss and its gradient are those of the reader's function, and the mistake has passed all checks of
this part so far, it is told.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python examples/write_the_loss.py")
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from lab.engine.update import ppo as policy_loss

WIDTH = 88
LARGEST_TABLE = 8  # tokens
RIGHT_BOUNDS = (0.2, 0.28)
NO_OLD = torch.tensor(math.nan)


@dataclass
class Batch:
    """The arguments of policy_loss. Tensors are (answers, T)."""
    log_prob: Tensor
    advantage: Tensor
    weight: Tensor
    mask: Tensor
    total: float
    old: Tensor | None = None
    clip: tuple[float, float] = RIGHT_BOUNDS

    def before(self) -> Tensor:
        """`old`, which the batches of part 2 have."""
        return NO_OLD if self.old is None else self.old

    def change(self) -> Tensor:
        """The logarithm of the ratio."""
        return self.log_prob - self.before()

    def clipped_change(self) -> Tensor:
        return self.change().clamp(math.log(1 - self.clip[0]), math.log(1 + self.clip[1]))


@dataclass
class Check:
    part: int    # of the exercise
    name: str
    batch: Batch


Loss = Callable[[Batch], Tensor]
Result = tuple[Tensor, Tensor]  # the loss, and its gradient (answers, T)
Mistakes = dict[str, tuple[Loss, str]]  # the loss with this mistake, and what is told about it


class NoLoss(Exception):
    """What a function did is not what a loss does, or nothing is written yet; the message says
    which."""


def right(batch: Batch, **changed: Any) -> Tensor:
    """grpo.py's loss of a batch, some of whose arguments are replaced."""
    return policy_loss(**vars(replace(batch, **changed)))


IN_BOTH_PARTS: Mistakes = {
    "sign": (lambda b: -right(b),
        "The sign. The optimizer makes the loss smaller, and a token with a positive advantage "
        "should become more likely. So the loss has a minus."),
    "no_gradient": (lambda b: right(b, log_prob=b.log_prob.detach()),
        "A detach. The number is right, but no gradient flows back to log_prob. Is there a "
        "detach() or a no_grad() on the way? The ratio must not be detached, because in the "
        "loss with `old` the gradient flows through nothing else."),
    "probability": (lambda b: right(b, log_prob=b.log_prob.exp()),
        "The log-probability. Yours has the probability exp(log_prob) in the place of log_prob."),
    "no_advantage": (lambda b: right(b, advantage=torch.ones_like(b.advantage)),
        "The advantage. It is missing, so good and bad answers are pushed the same way."),
    "no_weight": (lambda b: right(b, weight=torch.ones_like(b.weight)),
        "The weight. It is missing, so all tokens count the same."),
    "no_mask": (lambda b: right(b, mask=torch.ones_like(b.mask)),
        "The mask. Padding counts in your sum. Multiply each token's term by the mask before "
        "you add them up."),
    "no_division": (lambda b: right(b, total=1.0),
        "N. The sum is not divided. Divide it by `total`."),
    "mean_of_positions": (lambda b: right(b, total=b.mask.numel()),
        "N. You divide by the number of all positions, as mean() does, and padding is among "
        "them. Take the sum, and divide it by `total`."),
    "mean_without_mask": (lambda b: right(b, mask=torch.ones_like(b.mask), total=b.mask.numel()),
        "The mask and N. You take the mean over all positions, and padding is among them. "
        "Multiply each token's term by the mask, take the sum, and divide it by `total`."),
    "mean_of_answers": (
        lambda b: right(b, weight=b.weight / b.mask.sum(1, keepdim=True), total=len(b.mask)),
        "N. You divide each answer by its own length, so a token of a short answer counts more. "
        "Here each token counts the same: take the sum over all answers, and divide it by "
        "`total`."),
    "tokens_of_these_answers": (lambda b: right(b, total=b.mask.sum()),
        "N. You divide by the number of tokens in these answers, mask.sum(). But they may be a "
        "micro-batch, that is, a part of the batch. `total` is the number of tokens in the "
        "whole batch: only with it do the gradients of all parts add up to that of the batch."),
}
IN_PART_2: Mistakes = {  # they need `old`
    "old_is_ignored": (lambda b: right(b, old=None),
        "The ratio. `old` is given, but yours is still the loss of part 1. Here the ratio "
        "exp(log_prob - old) takes the place of log_prob."),
    "ratio_of_1": (lambda b: right(b, old=b.log_prob.detach()),
        "The ratio. Yours is 1 at every token, as if you compared log_prob with itself. Compare "
        "it with `old`."),
    "ratio_upside_down": (lambda b: right(b, log_prob=b.before(), old=b.log_prob),
        "The ratio. Yours is upside down. New over old is exp(log_prob - old)."),
    "ratio_of_logs": (lambda b: right(b, log_prob=b.before() + (b.log_prob / b.before()).log()),
        "The ratio. You divide log_prob by `old`. The ratio is that of the probabilities, which "
        "is exp(log_prob - old)."),
    "ratio_as_weight": (lambda b: right(b, weight=b.weight * b.change().exp().detach(), old=None),
        "A detach. You multiply log_prob by a detached ratio. In PPO the ratio takes the place "
        "of log_prob, and the gradient flows through the ratio itself."),
    "clipped_ratio_as_weight": (
        lambda b: right(b, weight=b.weight * b.clipped_change().exp().detach(), old=None),
        "A detach. You multiply log_prob by a clipped and detached ratio. So the gradient flows "
        "also where the clip should stop it. In PPO the ratio takes the place of log_prob."),
    "no_clip": (lambda b: right(b, clip=(torch.inf, torch.inf)),
        "The clip. It is missing, so a token that has moved far enough is still pushed on."),
    "no_minimum": (lambda b: right(b, log_prob=b.before() + b.clipped_change()),
        "The minimum. You use the clipped ratio alone, so a token that has moved the wrong way "
        "is not brought back. Take the smaller of ratio * advantage and clipped ratio * "
        "advantage."),
    "maximum": (lambda b: -right(b, advantage=-b.advantage),
        "The minimum. You take the larger of ratio * advantage and clipped ratio * advantage. "
        "Take the smaller one. (If you have moved the minus inside, it is the larger of the two "
        "negative ones.)"),
    "smaller_ratio": (
        lambda b: right(b, advantage=b.advantage.clamp(min=0))
        - right(b, advantage=-b.advantage.clamp(max=0)),
        "The clip's direction. You take the smaller ratio, and then multiply it by the "
        "advantage. If the advantage is negative, that is the larger product. Multiply both "
        "ratios by the advantage first, and then take the smaller product."),
    "bounds_without_1": (lambda b: right(b, clip=(1 - b.clip[0], b.clip[1] - 1)),
        "The bounds. You clip the ratio between clip[0] and clip[1]. They say how far it may go "
        "from 1, so the bounds are 1 - clip[0] and 1 + clip[1]."),
    "upper_bound": (lambda b: right(b, clip=(b.clip[0], b.clip[0])),
        "The bounds. Your upper bound is 1 + clip[0], and it should be 1 + clip[1]."),
    "lower_bound": (lambda b: right(b, clip=(b.clip[1], b.clip[1])),
        "The bounds. Your lower bound is 1 - clip[1], and it should be 1 - clip[0]."),
    "fixed_bounds": (lambda b: right(b, clip=RIGHT_BOUNDS),
        "The bounds. Yours are always 0.8 and 1.28. Use the argument `clip`."),
}
MISTAKES = IN_BOTH_PARTS | IN_PART_2
PARTS = {1: ("one update with a batch", IN_BOTH_PARTS),
         2: ("several updates, with the ratio", MISTAKES)}


def checks() -> list[Check]:
    """From the simplest to all at once. The numbers of 1, 2, 3, 5 and 6 are worked out by hand in
    docs/exercises.md."""
    two_tokens = Batch(log_prob=torch.tensor([[-1.0, -2.0]]), advantage=torch.tensor([[2.0, 2.0]]),
                       weight=torch.tensor([[1.0, 0.5]]), mask=torch.tensor([[True, True]]),
                       total=2)
    two_answers = Batch(log_prob=torch.tensor([[-1.0, -2.0], [-3.0, -5.0]]),
                        advantage=torch.tensor([[2.0, 2.0], [-1.0, -1.0]]),
                        weight=torch.tensor([[1.0, 0.5], [1.0, 1.0]]),
                        mask=torch.tensor([[True, True], [True, False]]), total=3)
    four = [0.5, 0.75, 1.25, 1.5]
    some, others = random_batch(seed=0), random_batch(seed=1)
    moved = others.log_prob + 0.4 * torch.randn(others.log_prob.shape, generator=seeded(2))
    return [
        Check(1, "two tokens", two_tokens),
        Check(1, "two answers, and padding", two_answers),
        Check(1, "a part of a larger batch", replace(two_answers, total=6)),
        Check(1, "random numbers", some),
        Check(2, "positive advantages", with_ratios(four, torch.ones(1, 4))),
        Check(2, "negative advantages", with_ratios(four, -torch.ones(1, 4))),
        Check(2, "ratios of 1", replace(some, old=some.log_prob)),
        Check(2, "random numbers", replace(others, old=moved, clip=(0.1, 0.4))),
        # a loss that bounds the ratio a second time is another one only far from 1
        Check(2, "ratios of 1/50 and 50", with_ratios([0.02, 50.0], torch.tensor([[1.0, -1.0]])))]


def with_ratios(ratios: list[float], advantage: Tensor) -> Batch:
    """An answer whose tokens have these ratios of new to old probability."""
    ratio = torch.tensor([ratios])
    old = torch.tensor([[-1.0, -2.0, -1.0, -2.0]])[:, :len(ratios)]
    ones = torch.ones_like(ratio)
    return Batch(log_prob=old + ratio.log(), advantage=advantage, weight=ones, mask=ones.bool(),
                 total=len(ratios), old=old)


def random_batch(seed: int) -> Batch:
    """Three answers of different lengths, which are a part of a batch of 40 tokens."""
    numbers = seeded(seed)
    log_prob = -2 * torch.rand(3, 6, generator=numbers) - 0.1
    advantage = torch.randn(3, 6, generator=numbers)
    weight = 2 * torch.rand(3, 6, generator=numbers)
    advantage[0, 0], advantage[2, 1], weight[0, 2] = 12.0, -12.0, 8.0  # a clamp would be seen
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    return Batch(log_prob, advantage, weight, mask, total=40)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(written: Callable[..., Tensor]) -> bool:
    """Print the checks up to the first one that fails, and say what is probably wrong there.
    Returns whether all have passed."""
    number = 0
    for part, (title, mistakes) in PARTS.items():
        print(f"\nPart {part}: {title}")
        candidates = dict(mistakes)
        for step in checks():
            if step.part == part:
                number += 1
                if not passes(written, step, number, candidates):
                    return False
    print("\nEvery check has passed: your function and grpo.py's have the same loss and the same "
          "gradient.\nNow compare the two texts.")
    return True


def passes(written: Callable[..., Tensor], step: Check, number: int,
           candidates: Mistakes) -> bool:
    """Print one check. From the candidates those mistakes are removed that would have failed."""
    begin = f"  {number}  {step.name:26}"
    expected = result_of(right, step.batch)
    try:
        found = result_of(lambda batch: written(**vars(batch)), step.batch)
    except NoLoss as reason:
        print(f"{begin} {reason}")
        return False
    if not agree(found, expected):
        wrong = f"and it should be {expected[0]:.4f}"
        if torch.isclose(found[0], expected[0], rtol=1e-4, atol=1e-6):
            wrong = "which is right, but its gradient is not"
        print(f"{begin} WRONG  the loss is {found[0]:.4f}, {wrong}")
        explain(step.batch, found, expected, candidates)
        return False
    print(f"{begin} right  the loss is {found[0]:.4f}")
    for name, (loss, _) in list(candidates.items()):
        if not agree(result_of(loss, step.batch), expected):
            del candidates[name]
    return True


def result_of(loss: Loss, batch: Batch) -> Result:
    """The loss and its gradient, which is 0 where no gradient flows."""
    log_prob = batch.log_prob.clone().requires_grad_()
    given: dict[str, Any] = {name: value.clone() for name, value in vars(batch).items()
                             if isinstance(value, Tensor) and name != "log_prob"}
    try:
        value = loss(replace(batch, log_prob=log_prob, **given))
    except NotImplementedError as error:
        raise NoLoss(f"not written yet: {error}" if str(error) else "not written yet") from None
    changed = [name for name, tensor in given.items()
               if not torch.equal(tensor, getattr(batch, name))]
    if wrong := what_is_wrong(value, changed):
        raise NoLoss(f"WRONG  {wrong}")
    gradient = None
    if value.requires_grad:
        [gradient] = torch.autograd.grad(value.sum(), log_prob, allow_unused=True)
    if gradient is None:
        gradient = torch.zeros_like(log_prob)
    return value.detach().sum().float(), gradient


def what_is_wrong(value: Any, changed: list[str]) -> str:
    """Why what a loss returned is no loss; `changed` names its arguments that are not as before."""
    if changed:
        return (f"the argument `{changed[0]}` is changed in place. Whoever calls the function uses "
                "it again: make a new tensor")
    if value is None:
        return "nothing is returned: is a `return` missing?"
    if not isinstance(value, Tensor):
        return (f"a {type(value).__name__} is returned. Return a tensor, because it carries the "
                "gradient")
    if value.numel() != 1:
        return (f"a tensor of shape {tuple(value.shape)} is returned. A loss is one number: take "
                "the sum")
    return ""


def agree(one: Result, other: Result) -> bool:
    """Whether two results are equal, rounding apart."""
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other))


def explain(batch: Batch, found: Result, expected: Result, candidates: Mistakes) -> None:
    """Print the tokens, if they are few, and the mistake that gives these numbers."""
    if batch.mask.numel() <= LARGEST_TABLE:
        print_tokens(batch, found[1], expected[1])
    for wrong, about in candidates.values():
        if agree(result_of(wrong, batch), found):
            told = f"Probably wrong: {about}"
            break
    else:
        told = ("No typical mistake gives these numbers. Work out one token by hand, and compare "
                "it with what your function computes for this token.")
    print("\n" + fill(told, WIDTH) + "\n\nMend it, and type the command again.")


def print_tokens(batch: Batch, found: Tensor, expected: Tensor) -> None:
    """A row for each position. The last columns are derivatives of the loss by its log_prob."""
    columns = {"log_prob": batch.log_prob, "advantage": batch.advantage, "weight": batch.weight,
               "mask": batch.mask.float()}
    if batch.old is not None:
        columns["ratio"] = (batch.log_prob - batch.old).exp()
    columns |= {"yours": found, "right": expected}
    answers, tokens = batch.mask.shape
    print("\n     The last two columns are the derivative of the loss by log_prob:\n\n"
          f"     answer  token  {'  '.join(f'{name:>9}' for name in columns)}")
    for answer in range(answers):
        for token in range(tokens):
            numbers = [f"{values[answer, token]:9.4g}" for values in columns.values()]
            print(f"     {answer:6}  {token:5}  {'  '.join(numbers)}")
