"""Weightings: how much each token of an answer counts in the loss, one small function each.

    loss = - sum( weight * advantage * log_prob ) / N

A function with the decorator is a choice of `--mitigation`. Its keyword-only parameters are flags,
their types the ranges that are allowed, its docstring the help:

    @mitigation
    def my_idea(rollouts: Rollouts, *, strength: Positive = 1.0) -> Tensor:
        \"\"\"One line that becomes the help text.\"\"\"
        return 1 + strength * rollouts.entropy        # (B, T)

`rollouts` is the whole batch (engine/rollouts.py). Of each token it has ids, texts, mask, log_prob,
entropy, collision (sum of p^2), advantage, section, kind; of each answer length, finished, group,
reward, scores (its parts), answers (texts); then problems, step and generator. `hidden` and
`attention` cost one more forward pass. Padding is ignored. What becomes of weights is
`rescaled_weight` below: those of the loss have a mean of 1, or what --rescale says. They are not
negative: signed credit is an advantage, and is written here, too, with @advantage, as `span` is.

An answer is all that was generated; what stands between <answer> and </answer> is its answer
section. Weightings that keep a state or sample more are classes in credit/, in the same list. To
see weights on recorded tokens without training:

    python -m tools.preview runs/none-grpo-s0 --mitigation my_idea --strength 2
"""
import math
import typing

import numpy as np
import torch
from torch import Tensor

from engine.choices import (ADVANTAGES, LOSSES, MITIGATIONS, Method, Metrics, advantage,
                            checked_credit, metrics_of, mitigation)
from engine.errors import UserError
from engine.rollouts import Rollouts
from engine.tokens import ANSWER, NUMBER, OPERATOR, TAG, THINK, WORD
from grpo import centred, gradient_size, rescaling, to_every_token
from harness.flags import Count, NotNegative, Percent, Positive, Range, Share

if typing.TYPE_CHECKING:  # an analysis reads this file and loads no model
    from engine.policy import Policy


@mitigation
def none(rollouts: Rollouts) -> Tensor:
    """Weight 1 everywhere: plain GRPO."""
    return torch.ones_like(rollouts.log_prob)


@mitigation
def outcome_conditional(rollouts: Rollouts, *, think_discount: Share = 0.5) -> Tensor:
    """Weight 1 after `<answer>`; `think_discount` before it, and everywhere if there is no tag
    (before rescaling)."""
    weight = torch.full_like(rollouts.log_prob, think_discount)
    for row, texts in enumerate(rollouts.texts):
        weight[row, tokens_until(texts, "<answer>"):] = 1
    return weight


def tokens_until(texts: list[str], tag: str) -> int:
    """How many tokens there are up to the end of the tag, which may be cut into several; all if
    there is no tag."""
    place = "".join(texts).find(tag)
    if place < 0:
        return len(texts)
    token_ends = np.cumsum([len(text) for text in texts])
    return int(np.searchsorted(token_ends, place + len(tag))) + 1


@mitigation
def inverse_logprob(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """1 / (|log p| + epsilon): divides by abs(log p). That is not the gradient's size: confident
    tokens get the largest weight."""
    return 1 / (rollouts.log_prob.abs() + epsilon)


@mitigation(rescaled=False)
def inverse_logprob_as_published(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """epsilon / (|log p| + epsilon)^2: the effective weight of inverse_logprob without detach.
    Never rescaled.

    It is the derivative of log p / (|log p| + epsilon) with respect to log p.
    """
    return epsilon / (rollouts.log_prob.abs() + epsilon).square()


@mitigation
def equal_gradient(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """1 / (s + epsilon), s = norm(onehot - p): equalises the gradient norms at the logits."""
    return 1 / (gradient_size(rollouts.log_prob, rollouts.collision) + epsilon)


@mitigation
def attention_credit(rollouts: Rollouts, *, credit_scale: NotNegative = 2.0) -> Tensor:
    """0.5 + credit_scale * attention that the answer section pays to the token, relative to the
    mean over the answer's tokens.

    Attention of the last layer, mean over heads and over the later tokens of the answer section;
    clamped to [0.1, 0.5 + 3 credit_scale]. Answers without an answer section get the mean weight.
    """
    section = ((rollouts.section == ANSWER) & rollouts.mask).float()
    later = section.sum(1, keepdim=True) - section.cumsum(1)  # (B, T) section tokens after t
    received = torch.einsum("bi,bij->bj", section, rollouts.attention) / later.clamp(min=1)
    mean = received.sum(1, keepdim=True) / rollouts.length[:, None].clamp(min=1)
    relative = torch.where(mean > 0, received / mean, 0.0)
    weight = (0.5 + credit_scale * relative).clamp(0.1, 0.5 + 3 * credit_scale)
    has_section = section.any(1)[:, None]
    usual = weight[has_section & rollouts.mask].mean() if has_section.any() else 1.0
    return torch.where(has_section, weight, usual)


@mitigation
def entropy_weighted(rollouts: Rollouts, *, entropy_temp: Positive = 1.0) -> Tensor:
    """softmax(entropy / entropy_temp) over the batch's tokens, times their number: high-entropy
    (forking) tokens weigh more."""
    score = (rollouts.entropy / entropy_temp).masked_fill(~rollouts.mask, float("-inf"))
    return score.flatten().softmax(0).view_as(score) * rollouts.mask.sum()


@mitigation
def entropy_masking(rollouts: Rollouts, *, mask_percentile: Percent = 80.0) -> Tensor:
    """1 where the entropy is at or above this percentile of the batch, else 0 (2506.01939, which
    does not rescale: --rescale none)."""
    entropy = rollouts.entropy.double()
    threshold = float(np.percentile(entropy[rollouts.mask].cpu().numpy(), mask_percentile))
    return (entropy >= threshold).float()


@mitigation
def entropy_ratio(rollouts: Rollouts, *, entropy_beta: NotNegative = 1.0) -> Tensor:
    """max(0, 1 + beta (entropy / mean entropy - 1)).

    Inspired by GTPO (2508.04349), which is the advantage gtpo (credit/gtpo.py).
    """
    mean = rollouts.entropy[rollouts.mask].mean()
    relative = torch.where(mean > 0, rollouts.entropy / mean - 1, 0.0)
    return (1 + entropy_beta * relative).clamp(min=0)


@mitigation
def by_kind(rollouts: Rollouts, *, word_weight: NotNegative = 0.5,
            number_weight: NotNegative = 1.0) -> Tensor:
    """In the think section, word_weight for words (filler), number_weight for numbers and operators
    (reasoning); 1 elsewhere."""
    in_think = rollouts.section == THINK
    is_number = (rollouts.kind == NUMBER) | (rollouts.kind == OPERATOR)
    weight = torch.ones_like(rollouts.log_prob)
    weight[in_think & (rollouts.kind == WORD)] = word_weight
    weight[in_think & is_number] = number_weight
    return weight


@mitigation
def low_probability(rollouts: Rollouts, *, probability_share: Share = 0.2) -> Tensor:
    """share * p + 1 - share: low-probability tokens, whose gradients are large, weigh less
    (Advantage Reweighting, 2505.12929)."""
    return probability_share * rollouts.log_prob.exp() + 1 - probability_share


@mitigation
def taco(rollouts: Rollouts, *, tail_strictness: Positive = 0.01,
         tail_damping: Share = 0.9) -> Tensor:
    """1 - damping (1 - exp(-r)), r = -log p - entropy + log(strictness), where advantage and r are
    positive, else 1: less reinforcement of tokens improbable even at their position (2607.07976).
    """
    risk = -rollouts.log_prob - rollouts.entropy + math.log(tail_strictness)
    damped = (risk > 0) & (rollouts.advantage > 0)
    return torch.where(damped, 1 + tail_damping * torch.expm1(-risk), 1.0)


@mitigation
def planning(rollouts: Rollouts, *, planning_boost: Share = 0.2) -> Tensor:
    """1 + boost * sign(advantage) on words of the think section, which open, continue or end a
    try; 1 elsewhere.

    After HICRA (2509.03646, known here from reimplementations): A + boost |A| on planning tokens.
    There they are phrases from a list made for mathematics ("let's try"); here all words.
    """
    plans = (rollouts.kind == WORD) & (rollouts.section == THINK)
    return 1 + planning_boost * rollouts.advantage.sign() * plans


@mitigation
def future_attention(rollouts: Rollouts, *, future_window: Count = 4) -> Tensor:
    """Attention received from tokens more than future_window positions later, relative to the
    answer's mean.

    After 2510.13554, known here from summaries: there it is taken from long-range heads, and its
    peaks are raised. Here it is the mean over all heads of the last layer, and the weight itself.
    Tokens without such later tokens get 1.
    """
    place = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    is_far = place[:, None] - place > future_window         # (T, T) token i is far behind token j
    lookers = (is_far * rollouts.mask[:, :, None]).sum(1)     # (B, T) how many look at j from afar
    received = (rollouts.attention * is_far).sum(1) / lookers.clamp(min=1)
    count = (lookers > 0).sum(1, keepdim=True)
    mean = received.sum(1, keepdim=True) / count.clamp(min=1)
    return torch.where((lookers > 0) & (mean > 0), received / mean, 1.0)


Spread = typing.Annotated[float, Range(least=0.01, most=100)]


@mitigation
def random(rollouts: Rollouts, *, placebo_std: Spread = 1.0) -> Tensor:
    """Gamma noise of mean 1 and standard deviation placebo_std: a placebo."""
    # torch's gamma takes no generator, so numpy draws, from a seed of the batch's
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    chance = np.random.default_rng(seed)
    noise = chance.gamma(placebo_std ** -2, placebo_std ** 2, rollouts.mask.shape)
    return torch.tensor(noise, dtype=torch.float32, device=rollouts.mask.device)


@mitigation
def covariance(rollouts: Rollouts, *, covariance_share: Share = 0.0002,
               covariance_low: NotNegative = 1.0,
               covariance_high: NotNegative = 5.0) -> Tensor:
    """0 for a few random tokens of high covariance between log p and advantage, which lower the
    policy's entropy fastest; 1 elsewhere (Clip-Cov, 2505.22617).

    They are drawn where (log p - mean) (advantage - mean), with means over the batch, lies between
    low and high: as many as this share of the batch's tokens, at least one.
    """
    if covariance_low >= covariance_high:
        raise UserError(f"--covariance_low {covariance_low} should be below --covariance_high "
                        f"{covariance_high}")
    mean_log_prob = rollouts.log_prob[rollouts.mask].mean()
    mean_advantage = rollouts.advantage[rollouts.mask].mean()
    product = (rollouts.log_prob - mean_log_prob) * (rollouts.advantage - mean_advantage)
    is_inside = (product > covariance_low) & (product < covariance_high) & rollouts.mask
    inside = is_inside.flatten().nonzero().squeeze(1)  # places in the flattened batch
    count = max(1, int(covariance_share * rollouts.mask.sum()))
    order = torch.randperm(len(inside), generator=rollouts.generator).to(inside.device)
    drawn = inside[order[:count]]
    weight = torch.ones(rollouts.mask.numel(), device=rollouts.mask.device)
    weight[drawn] = 0
    return weight.view_as(rollouts.log_prob)


@advantage
def span(rollouts: Rollouts) -> Tensor:
    """Each part of the score minus its group's mean, given to its own span: format to tags,
    reasoning (a process reward) to think tokens, the answer to answer tokens.

    Biased: think tokens get nothing for the answer that they lead to. Other tokens get 0.
    """
    spans = {"format": rollouts.kind == TAG, "reasoning": rollouts.section == THINK,
             "answer": rollouts.section == ANSWER}
    result = torch.zeros_like(rollouts.log_prob)
    for part, where in spans.items():
        value = centred(rollouts.scores[part], rollouts.group)
        result += to_every_token(value, rollouts) * where
    return result


@torch.no_grad()
def rescaled_weight(chosen: Method, name: str, rollouts: Rollouts, policy: "Policy | None" = None,
                    rescale_to: str = "mean", placebo: str = "none") -> tuple[Tensor, Metrics]:
    """c w (B, T), the weights of the loss and of the record, and what there is to tell about them.
    They are what the weighting returned: checked, without gradient, 0 beyond the mask, shuffled for
    a placebo, and multiplied by one number for the batch (grpo.rescaling)."""
    if not rollouts.mask.any():  # every answer was dropped
        nothing: Metrics = {"weight_factor": 1.0, "weight_max": 0.0, "weight_note": None}
        return torch.zeros_like(rollouts.log_prob), nothing
    note = None
    weight = checked_credit(chosen, f"the weighting {name}", rollouts, policy, is_weight=True)
    if not weight.any():
        weight, note = rollouts.mask.float(), "all weights were 0: every token gets 1"
    if placebo == "weights":
        one_group = torch.zeros_like(rollouts.group)
        weight = shuffled(weight, rollouts.mask, one_group, rollouts.generator)
    c = rescaling(weight, rollouts, rescale_to)
    if not (weight * c).isfinite().all():
        c, note = 1.0, "not rescaled: next to no weight lies on tokens with an advantage"
    weight = weight * c
    about = {"weight_factor": c, "weight_max": weight.max().item(), "weight_note": note}
    return weight, metrics_of(chosen) | about


def shuffled(value: Tensor, mask: Tensor, group: Tensor, generator: torch.Generator,
             whole_answers: bool = False) -> Tensor:
    """A placebo (B, T): the same values in another order, so that only the choice is lost. They
    change places among a group's tokens, with `whole_answers` among its answers; for weights the
    batch is one group."""
    result = torch.zeros_like(value)
    for number in group.unique():
        rows = (group == number).nonzero().squeeze(1)
        own, inside = value[rows], mask[rows]
        count = len(rows) if whole_answers else int(inside.sum())
        order = torch.randperm(count, generator=generator).to(rows.device)
        if whole_answers:
            result[rows] = own[order, :1] * inside
        else:
            result[rows] = torch.zeros_like(own).masked_scatter(inside, own[inside][order])
    return result


# Methods that keep a state or sample more are classes in credit/. Here stands the module of each,
# which is imported when the method is chosen, or asked about.
MITIGATIONS.update({
    "learned_importance": "credit.learned_importance", "lambda_grpo": "credit.lambda_grpo",
    "causal_ablation": "credit.causal_ablation", "oracle": "credit.measured",
    "shared_prefix": "credit.prefix_tree"})
ADVANTAGES.update({
    "vine": "credit.monte_carlo", "deletion": "credit.causal_ablation",
    "measured": "credit.measured", "gae": "credit.critic",
    "prefix_tree": "credit.prefix_tree", "gtpo": "credit.gtpo"})
LOSSES["dpo"] = "credit.preferences"
