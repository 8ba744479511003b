'''Weightings: how much each token of an answer counts in the loss, one small function each.

    loss = - sum( weight * advantage * log_prob ) / N

A weighting is also called a mitigation, because it is meant to mitigate a weakness of GRPO: all
tokens of an answer get the same advantage, whether they earned it or not.

A function under the decorator becomes a choice of `--mitigation`, its keyword-only parameters
become flags, and its docstring is the help:

    @mitigation
    def my_idea(rollouts: Rollouts, *, strength: float = 1.0) -> Tensor:
        """One line that becomes the help text."""
        return 1 + strength * rollouts.entropy        # (B, T)

`rollouts` is the whole batch (`Rollouts` in grpo.py). It holds

    for each token    ids, texts, mask, log_prob, entropy, collision (sum of p^2), advantage,
                      section, kind
    for each answer   length, finished, group, reward, scores (the parts of the reward), answers
                      (the texts)
    for the batch     problems, step, generator (for random numbers)

A number for each answer, (B,), becomes (B, 1) by value[:, None]. The weight of padding is ignored.
`weights` at the end gives the weights of a batch a mean of 1, unless --rescale says otherwise.
Weights may not be negative. A function with negative values is an advantage: put it under
@advantage, here or in grpo.py. `python mitigations.py` shows the weights of each on one answer.

An answer is everything that was generated; its answer section is the part between <answer> and
</answer>.
'''
from typing import Any

import numpy as np
import torch
from torch import Tensor

from countdown_task import NUMBER, OPERATOR, THINK, WORD
from grpo import Method, Metrics, Rollouts, add_choice, place_of, values_of
from grpo import advantage as advantage  # for values that may be negative
from qwen2_model import UserError

MITIGATIONS: dict[str, Method] = {}  # the choices of --mitigation


def mitigation(function: Method) -> Method:
    """Make a function a choice of --mitigation: weights (B, T), not negative."""
    return add_choice(MITIGATIONS, function)


@mitigation
def none(rollouts: Rollouts) -> Tensor:
    """Weight 1 everywhere: plain GRPO."""
    return torch.ones_like(rollouts.log_prob)


@mitigation
def outcome_conditional(rollouts: Rollouts, *, think_discount: float = 0.5) -> Tensor:
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
def inverse_logprob(rollouts: Rollouts, *, epsilon: float = 0.1) -> Tensor:
    """The weight is 1 / (|log p| + epsilon), so the tokens that the model was surest of get the
    largest weights. It divides by |log p|, which is not the size of a token's gradient."""
    return 1 / (rollouts.log_prob.abs() + epsilon)


@mitigation
def equal_gradient(rollouts: Rollouts, *, epsilon: float = 0.1) -> Tensor:
    """The weight is 1 / (s + epsilon), where s = norm(onehot - p) is the norm of the gradient of
    log p at the logits. So the gradients of all tokens become about equally large."""
    return 1 / (gradient_size(rollouts.log_prob, rollouts.collision) + epsilon)


def gradient_size(log_prob: Tensor, collision: Tensor) -> Tensor:
    """s = norm(onehot - p) = sqrt(1 - 2 p_y + sum p^2): the length of the gradient that the
    log-prob of a token y has with respect to the logits. This gradient is onehot - p, where p are
    the probabilities of all tokens. `collision` is sum p^2.

    When p_y is near 1, the formula subtracts numbers that are nearly equal, and few right digits
    are left. So the result is clamped to its exact range [1 - p_y, sqrt2 (1 - p_y)].
    """
    rest = -torch.expm1(log_prob)  # 1 - p_y
    square = 1 - 2 * log_prob.exp() + collision
    return square.clamp(rest.square(), 2 * rest.square()).sqrt()


@mitigation
def entropy_weighted(rollouts: Rollouts, *, entropy_temp: float = 1.0) -> Tensor:
    """The weight is softmax(entropy / entropy_temp) over the batch's tokens, times their number.
    Tokens of high entropy, where the answer could go on in several ways, weigh more."""
    score = (rollouts.entropy / entropy_temp).masked_fill(~rollouts.mask, float("-inf"))
    return score.flatten().softmax(0).view_as(score) * rollouts.mask.sum()


@mitigation
def entropy_masking(rollouts: Rollouts, *, mask_percentile: float = 80.0) -> Tensor:
    """The weight is 1 where the entropy is at or above this percentile of the batch, and 0
    elsewhere (arXiv 2506.01939). The paper does not rescale the weights; --rescale none does as
    the paper."""
    entropy = rollouts.entropy.double()
    threshold = float(np.percentile(entropy[rollouts.mask].cpu().numpy(), mask_percentile))
    return (entropy >= threshold).to(rollouts.entropy)


@mitigation
def by_kind(rollouts: Rollouts, *, word_weight: float = 0.5,
            number_weight: float = 1.0) -> Tensor:
    """In the think section, words (filler) get word_weight, and numbers and operators (reasoning)
    get number_weight. All other tokens get 1."""
    in_think = rollouts.section == THINK
    is_word = rollouts.kind == WORD
    is_number = (rollouts.kind == NUMBER) | (rollouts.kind == OPERATOR)
    weight = torch.ones_like(rollouts.log_prob)
    weight[in_think & is_word] = word_weight
    weight[in_think & is_number] = number_weight
    return weight


def weights(function: Method, rollouts: Rollouts, keywords: dict[str, Any], rescale: str = "mean"
            ) -> tuple[Tensor, Metrics]:
    """Returns the weights (B, T) of a weighting as the loss uses them, and metrics about them.
    With --rescale mean all weights of the batch are multiplied by the number c that gives them a
    mean of 1: .5 .5 1 1 becomes .67 .67 1.33 1.33. So a weighting shifts the gradient from some
    tokens to others, and its size stays comparable from step to step. With --rescale none, c is 1.
    """
    weight = values_of(function, rollouts, keywords)
    if (weight < 0).any():
        raise UserError(f"{place_of(function)} is negative at {int((weight < 0).sum())} tokens. "
                        "Weights may not be: put values with a sign under @advantage")
    c = 1.0
    if rescale == "mean" and (weight > 1e-30).any():  # of smaller ones c overflows
        c = rollouts.mask.sum().item() / weight.double().sum().item()
    weight = weight * c
    return weight, {"weight_factor": c, "weight_max": weight.max().item()}


def show() -> None:
    """The rescaled weights of each choice on one answer; those of `none` are all 1. At each of its
    tokens the model had two possibilities, and p is the probability of the one that it took."""
    from countdown_task import Task
    texts = [" so", " 3", " *", " 5", "</think>", "<answer>", "3*5", "</answer>"]
    p = torch.tensor([[0.4, 0.6, 0.7, 0.9, 0.8, 0.99, 0.95, 0.99]])
    section, kind = torch.tensor(Task().label(texts))
    entropy = -p * p.log() - (1 - p) * (1 - p).log()
    collision = p ** 2 + (1 - p) ** 2
    rollouts = Rollouts(
        [None], [[0]], group=torch.tensor([0]), ids=torch.ones(1, 8), mask=p > 0,
        finished=torch.tensor([True]), log_prob=p.log(), entropy=entropy, collision=collision,
        texts=[texts], answers=["".join(texts)], section=section[None], kind=kind[None],
        scores={"reward": torch.ones(1)})
    print(" " * 19 + "".join(f"{text.strip():>10}" for text in texts))
    print("probability".ljust(19) + "".join(f"{x:10.2f}" for x in p[0]))
    for name in [*MITIGATIONS][1:]:
        weight, _ = weights(MITIGATIONS[name], rollouts, {})
        print(f"{name:19}" + "".join(f"{w:10.2f}" for w in weight[0]))


if __name__ == "__main__":
    show()
