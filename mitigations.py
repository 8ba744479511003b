"""Weightings: how much each token of an answer counts in the loss, one small function each.

    loss = - sum( weight * advantage * log_prob ) / N

A weighting is also called a mitigation. It mitigates that all tokens of an answer get the same
advantage, whether they earned it or not.

A function under the decorator becomes a choice of `--mitigation`. Its keyword-only parameters
become flags, their types say which values are allowed, and its docstring is the help:

    @mitigation
    def my_idea(rollouts: Rollouts, *, strength: Positive = 1.0) -> Tensor:
        \"\"\"One line that becomes the help text.\"\"\"
        return 1 + strength * rollouts.entropy        # (B, T)

`rollouts` is the whole batch (`Rollouts` in grpo.py). It holds

    for each token    ids, texts, mask, log_prob, entropy, collision (sum of p^2), advantage,
                      section, kind
    for each answer   length, finished, group, reward, scores (the parts of the reward), answers
                      (the texts)
    for the batch     problems, step, generator (for random numbers)

The weight of padding is ignored. `rescaled_weight` below multiplies the returned weights, so that
their mean over the batch is 1, unless --rescale says otherwise. Weights may not be negative. A
function whose values may be negative is an advantage: put it under @advantage (grpo.py) instead.
A number for each answer, (B,), becomes (B, 1) by value[:, None].

An answer is everything that was generated; its answer section is the part between <answer> and
</answer>.
"""
import copy
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from countdown_task import NUMBER, OPERATOR, THINK, WORD
from grpo import (Method, Metrics, Rollouts, add_choice, advantage,  # noqa: F401  advantage is for
                  gradient_size)                                     # values that may be negative
from qwen2_model import UserError

# types of the keyword parameters: numbers with their limits
NotNegative = Annotated[float, {"least": 0}]
Positive = Annotated[float, {"above": 0}]
Share = Annotated[float, {"least": 0, "most": 1}]
Percent = Annotated[float, {"least": 0, "most": 100}]

MITIGATIONS: dict[str, Method] = {}


def mitigation(function: Method) -> Method:
    """Make a function a choice of --mitigation: weights (B, T), not negative."""
    return add_choice(MITIGATIONS, function)


@mitigation
def none(rollouts: Rollouts) -> Tensor:
    """Weight 1 everywhere: plain GRPO."""
    return torch.ones_like(rollouts.log_prob)


@mitigation
def outcome_conditional(rollouts: Rollouts, *, think_discount: Share = 0.5) -> Tensor:
    """The weight is 1 after `<answer>`, and `think_discount` before it. If an answer lacks this
    tag, all its tokens get `think_discount`. Like all weights, they are then rescaled (--rescale).
    """
    weight = torch.full_like(rollouts.log_prob, think_discount)
    for row, texts in enumerate(rollouts.texts):
        weight[row, tokens_until(texts, "<answer>"):] = 1
    return weight


def tokens_until(texts: list[str], tag: str) -> int:
    """The number of tokens up to the end of the tag, or the number of all tokens if there is no
    tag. The tag may be cut into several tokens."""
    start = "".join(texts).find(tag)
    if start < 0:
        return len(texts)
    token_ends = np.cumsum([len(text) for text in texts])
    last_of_tag = int(np.searchsorted(token_ends, start + len(tag)))
    return last_of_tag + 1


@mitigation
def inverse_logprob(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """The weight is 1 / (|log p| + epsilon), so the tokens that the model was surest of get the
    largest weights. It divides by |log p|, which is not the size of a token's gradient."""
    return 1 / (rollouts.log_prob.abs() + epsilon)


@mitigation
def equal_gradient(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """The weight is 1 / (s + epsilon), where s = norm(onehot - p) is the norm of the gradient of
    log p at the logits. So the gradients of all tokens become about equally large."""
    return 1 / (gradient_size(rollouts.log_prob, rollouts.collision) + epsilon)


@mitigation
def entropy_weighted(rollouts: Rollouts, *, entropy_temp: Positive = 1.0) -> Tensor:
    """The weight is softmax(entropy / entropy_temp) over the batch's tokens, times their number.
    Tokens of high entropy, where the answer could go on in several ways, weigh more."""
    score = (rollouts.entropy / entropy_temp).masked_fill(~rollouts.mask, float("-inf"))
    return score.flatten().softmax(0).view_as(score) * rollouts.mask.sum()


@mitigation
def entropy_masking(rollouts: Rollouts, *, mask_percentile: Percent = 80.0) -> Tensor:
    """The weight is 1 where the entropy is at or above this percentile of the batch, and 0
    elsewhere (arXiv 2506.01939). The paper does not rescale the weights; --rescale none does as
    the paper."""
    entropy = rollouts.entropy.double()
    threshold = float(np.percentile(entropy[rollouts.mask].cpu().numpy(), mask_percentile))
    return (entropy >= threshold).to(rollouts.entropy)


@mitigation
def entropy_ratio(rollouts: Rollouts, *, entropy_beta: NotNegative = 1.0) -> Tensor:
    """The weight is max(0, 1 + entropy_beta * (entropy / mean entropy - 1)). The mean is over the
    tokens of the batch, so tokens of more than average entropy weigh more. The idea is from GTPO
    (arXiv 2508.04349)."""
    mean = rollouts.entropy[rollouts.mask].mean()
    relative = torch.where(mean > 0, rollouts.entropy / mean - 1, 0.0)
    return (1 + entropy_beta * relative).clamp(min=0)


@mitigation
def by_kind(rollouts: Rollouts, *, word_weight: NotNegative = 0.5,
            number_weight: NotNegative = 1.0) -> Tensor:
    """In the think section, words (filler) get word_weight, and numbers and operators (reasoning)
    get number_weight. All other tokens get 1."""
    in_think = rollouts.section == THINK
    is_word = rollouts.kind == WORD
    is_number = (rollouts.kind == NUMBER) | (rollouts.kind == OPERATOR)
    weight = torch.ones_like(rollouts.log_prob)
    weight[in_think & is_word] = word_weight
    weight[in_think & is_number] = number_weight
    return weight


@mitigation
def random(rollouts: Rollouts) -> Tensor:
    """Random weights, from the exponential distribution with mean 1, whose standard deviation is 1,
    too. They belong to no method, so such a run shows the effect of uneven weights alone."""
    # numpy draws, with a seed from the batch's generator
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    noise = np.random.default_rng(seed).exponential(1.0, rollouts.mask.shape)
    return torch.tensor(noise, dtype=torch.float32, device=rollouts.mask.device)


def credit_of(function: Method, rollouts: Rollouts, is_asked_twice: bool = False, /,
              **keywords: Any) -> Tensor:
    """The values of a weighting or an advantage, checked: (B, T), finite, and 0 beyond the mask. A
    second call with the same random numbers should return the same values. Otherwise a run could be
    neither repeated nor resumed.

    The function gets a copy of the batch, so its changes in place have no effect elsewhere. Only
    the random generator is the batch's own, so that the next method draws other numbers."""
    state, found = rollouts.generator.get_state(), []
    for _ in range(1 + is_asked_twice):
        rollouts.generator.set_state(state)
        batch = copy.deepcopy(rollouts, {id(rollouts.generator): rollouts.generator})
        with errors_of(function):
            values = function(batch, **keywords)
        found.append(checked(values, rollouts, place_of(function)))
    if not torch.equal(found[0], found[-1]):
        raise UserError(f"{place_of(function)} was asked twice about the same batch, and returned "
                        "other values: it keeps something from call to call, which a resumed run "
                        "would forget, or draws random numbers not from rollouts.generator")
    return found[0]


@contextmanager
def errors_of(function: Callable[..., Any]) -> Iterator[None]:
    """Report an error in a user's own function with the line that raised it."""
    try:
        yield
    except Exception as error:
        file = inspect.getsourcefile(function)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == file]
        raise UserError(f"{place_of(function, lines)}: {type(error).__name__}: {error}") from error


def place_of(function: Callable[..., Any], lines: Sequence[int | None] = ()) -> str:
    """A function with its file and line, as "my_idea (mitigations.py:57)". If an error passed
    several `lines`, the last one is named."""
    file = Path(inspect.getsourcefile(function) or "").name
    line = lines[-1] if lines else inspect.getsourcelines(function)[1]
    return f"{function.__name__} ({file}:{line})"


def checked(values: Any, rollouts: Rollouts, name: str) -> Tensor:
    """Refuse values that are not finite or not (B, T). (B, 1), a number for each answer, becomes
    (B, T). (B,) is refused, because torch would spread it over T instead of B."""
    B, T = rollouts.mask.shape
    if not isinstance(values, Tensor) or values.is_complex() or values.dim() != 2 or any(
            size not in (1, wanted) for size, wanted in zip(values.shape, (B, T))) or (
            (values.layout, values.device) != (torch.strided, rollouts.mask.device)):
        found = (f"{tuple(values.shape)} of {values.dtype}, {values.layout}, on {values.device}"
                 if isinstance(values, Tensor) else repr(values)[:80])
        raise UserError(f"{name} should return a tensor (B, T) = ({B}, {T}), got {found}")
    values = values.detach().float().expand(B, T).masked_fill(~rollouts.mask, 0.0)
    is_small = values.abs() <= 1e12  # of larger ones a squared gradient can overflow
    if not is_small.all():
        row, t = (~is_small).nonzero()[0].tolist()
        why = ("usually because of 0 / 0, 0 * log 0 or the mean of no tokens"
               if not values[row, t].isfinite() else "and at most 1e12 is computed with")
        raise UserError(f"{name} is {values[row, t]:g} at token {t} of answer {row}, {why}")
    return values


def rescaled_weight(weight: Tensor, rollouts: Rollouts, rescale_to: str, name: str
                    ) -> tuple[Tensor, Metrics]:
    """The weights (B, T) that the loss uses and the credit file stores, and metrics about them.

    With --rescale mean, all weights are multiplied by the number c that gives them a mean of 1: of
    the weights .5 .5 1 1 the mean is .75, so c is 1.33, and the loss gets .67 .67 1.33 1.33. So a
    weighting shifts the step from some tokens to others, and does not also change the learning
    rate. With --rescale none, c is 1.
    """
    note = None
    if (weight < 0).any():
        raise UserError(f"{name} is negative at {int((weight < 0).sum())} tokens: credit with a "
                        "sign stands under @advantage")
    if not weight.any():
        weight, note = rollouts.mask.float(), "all weights were 0, so every token gets 1"
    c = rollouts.mask.sum().item() / weight.double().sum().item() if rescale_to == "mean" else 1.0
    weight = weight * c
    return weight, {"weight_factor": c, "weight_max": weight.max().item(), "weight_note": note}
