"""Weightings: how much each token of an answer counts in the loss, one small function each.

    loss = - sum( weight * advantage * log_prob ) / N

A weighting is also called a mitigation: it is a way around giving all tokens of an answer the same
advantage, whether they earned it or not.

A function under the decorator becomes a choice of `--mitigation`. Its keyword-only parameters
become flags, their types say which values are allowed, and its docstring is the help:

    @mitigation
    def my_idea(rollouts: Rollouts, *, strength: Positive = 1.0) -> Tensor:
        \"\"\"One line that becomes the help text.\"\"\"
        return 1 + strength * rollouts.entropy        # (B, T)

`rollouts` is the whole batch (lab/engine/rollouts.py). It holds

    for each token    ids, texts, mask, log_prob, entropy, collision (sum of p^2), advantage,
                      section, kind; `hidden` and `attention` cost one more forward pass
    for each answer   length, finished, group, reward, scores (the parts of the reward), answers
                      (the texts)
    for the batch     problems, step, generator (for random numbers)

The weight of padding is ignored. `rescaled_weight` below turns the returned weights into those of
the loss: with a mean of 1 over the batch, unless --rescale says otherwise. Weights may not be
negative. A function whose values may be negative is an advantage, and stands under @advantage
instead, as `span` does at the end of this file.

An answer is everything that was generated; its answer section is the part between <answer> and
</answer>. Weightings that keep a state, or sample answers of their own, are classes in lab/credit/.
They are choices of the same flag. To see weights on recorded tokens without training:

    python -m lab idea my_idea --strength 2 --look runs/none-grpo-s0
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py --mitigation none")
import numpy as np
import torch
from torch import Tensor

from lab.engine.methods import (ADVANTAGES, CLIP_KINDS, MITIGATIONS, Method, Metrics, advantage,
                                checked_credit, metrics_of, mitigation)
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts, double
from lab.engine.tokens import ANSWER, KINDS, NUMBER, OPERATOR, TAG, THINK, WORD
from grpo import centred, gradient_size, rescaling, to_every_token
from lab.harness.flags import NotNegative, Percent, Positive, Share


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


@mitigation(rescaled=False)
def inverse_logprob_as_published(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """The weight is epsilon / (|log p| + epsilon)^2, and it is never rescaled. It has the gradient
    that inverse_logprob would have if the gradient also flowed through the weight.

    The reason is that this weight is the derivative of log p / (|log p| + epsilon) with respect to
    log p.
    """
    return epsilon / (rollouts.log_prob.abs() + epsilon).square()


@mitigation
def equal_gradient(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """The weight is 1 / (s + epsilon), where s = norm(onehot - p) is the norm of the gradient of
    log p at the logits. So the gradients of all tokens become about equally large."""
    return 1 / (gradient_size(rollouts.log_prob, rollouts.collision) + epsilon)


@mitigation
def attention_credit(rollouts: Rollouts, *, credit_scale: NotNegative = 2.0) -> Tensor:
    """The weight is 0.5 + credit_scale * a, where a is the attention that the answer section pays
    to the token, divided by the mean of this attention over all tokens of the answer.

    The attention is that of the last layer. It is averaged over heads, and over those tokens of the
    answer section that come after the token. The weight is clamped to [0.1, 0.5 + 3 credit_scale].
    Answers without an answer section get the mean weight of the others.
    """
    in_section = ((rollouts.section == ANSWER) & rollouts.mask).float()
    # (B, T): how many tokens of the section come after token t
    later = in_section.sum(1, keepdim=True) - in_section.cumsum(1)
    received = torch.einsum("bi,bij->bj", in_section, rollouts.attention) / later.clamp(min=1)
    mean = received.sum(1, keepdim=True) / rollouts.length[:, None].clamp(min=1)
    relative = torch.where(mean > 0, received / mean, 0.0)
    weight = (0.5 + credit_scale * relative).clamp(0.1, 0.5 + 3 * credit_scale)
    has_section = in_section.any(1)[:, None]
    if not has_section.any():
        return torch.ones_like(weight)
    mean_weight = weight[has_section & rollouts.mask].mean()
    return torch.where(has_section, weight, mean_weight)


@mitigation
def entropy_weighted(rollouts: Rollouts, *, entropy_temp: Positive = 1.0) -> Tensor:
    """The weight is softmax(entropy / entropy_temp) over the batch's tokens, times their number.
    Tokens of high entropy, where the answer could go on in several ways, weigh more."""
    score = (rollouts.entropy / entropy_temp).masked_fill(~rollouts.mask, float("-inf"))
    return score.flatten().softmax(0).view_as(score) * rollouts.mask.sum()


@mitigation
def entropy_masking(rollouts: Rollouts, *, mask_percentile: Percent = 80.0) -> Tensor:
    """The weight is 1 where the entropy is at or above this percentile of the batch, and 0
    elsewhere (arXiv 2506.01939). The paper does not rescale the weights, which is --rescale none
    here."""
    entropy = double(rollouts.entropy)
    threshold = float(np.percentile(entropy[rollouts.mask.cpu()].numpy(), mask_percentile))
    return (entropy >= threshold).to(rollouts.entropy)


@mitigation
def entropy_ratio(rollouts: Rollouts, *, entropy_beta: NotNegative = 1.0) -> Tensor:
    """The weight is max(0, 1 + entropy_beta * (entropy / mean entropy - 1)). The mean is over the
    tokens of the batch, so tokens of more than average entropy weigh more.

    The idea is from GTPO (arXiv 2508.04349). GTPO itself is the advantage gtpo
    (lab/credit/gtpo.py).
    """
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
    too. They belong to no method, so a run with them shows what uneven weights alone do."""
    # numpy draws, with a seed from the batch's generator
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    noise = np.random.default_rng(seed).exponential(1.0, rollouts.mask.shape)
    return torch.tensor(noise, dtype=torch.float32, device=rollouts.mask.device)


@advantage
def span(rollouts: Rollouts) -> Tensor:
    """Each part of the reward, minus the group's mean of this part, is paid at tokens of its own:
    the format at tags, the reasoning (a process reward) in the think section, and the answer in the
    answer section.

    This advantage is biased, because think tokens get nothing for the answer that they lead to.
    Tokens that belong to no part get 0.
    """
    spans = {"format": rollouts.kind == TAG, "reasoning": rollouts.section == THINK,
             "answer": rollouts.section == ANSWER}
    result = torch.zeros_like(rollouts.log_prob)
    for part, where in spans.items():
        value = centred(rollouts.scores[part], rollouts.group)
        result += to_every_token(value, rollouts) * where
    return result


@torch.no_grad()
def rescaled_weight(chosen: Method, name: str, rollouts: Rollouts, policy: Policy | None = None,
                    rescale_to: str = "mean", placebo: str = "none") -> tuple[Tensor, Metrics]:
    """The weights c w (B, T) that the loss uses and the credit file stores, and metrics about them.

    They are what the weighting `chosen` returned: checked, without gradient, 0 beyond the mask,
    shuffled for --placebo weights, and multiplied by one number for the batch (grpo.rescaling).
    """
    if not rollouts.mask.any():  # every answer was dropped, so the weighting is not called
        metrics: Metrics = dict.fromkeys(metrics_of(chosen))  # its own metrics are None
        metrics |= {"weight_factor": 1.0, "weight_max": 0.0, "weight_note": None}
        return torch.zeros_like(rollouts.log_prob), metrics
    note = None
    weight = checked_credit(chosen, f"the weighting {name}", rollouts, policy, is_weight=True)
    if not weight.any():
        weight, note = rollouts.mask.float(), "all weights were 0, so every token gets 1"
    if placebo.startswith("weights"):
        weight = shuffled(weight, rollouts, placebo)
    c = rescaling(weight, rollouts, rescale_to)
    if not (weight * c).isfinite().all():
        c, note = 1.0, "weights were not rescaled: hardly any weight is on tokens with an advantage"
    weight = weight * c
    about = {"weight_factor": c, "weight_max": weight.max().item(), "weight_note": note}
    return weight, metrics_of(chosen) | about


def shuffled(value: Tensor, rollouts: Rollouts, placebo: str, whole_answers: bool = False
             ) -> Tensor:
    """A placebo (B, T): the same values, but at other tokens, chosen at random. What a method loses
    by this is what its choice of tokens was worth. `placebo` says which tokens exchange their
    values (`cells_of`). With `whole_answers` the answers of a group exchange theirs."""
    result = torch.zeros_like(value)
    cells, mask = cells_of("advantages" if whole_answers else placebo, rollouts), rollouts.mask
    for cell in cells.unique():
        if whole_answers:  # all tokens of an answer have the value of its first
            rows = (rollouts.group == cell).nonzero().squeeze(1)
            order = torch.randperm(len(rows), generator=rollouts.generator).to(rows.device)
            result[rows] = value[rows[order], :1] * mask[rows]
        else:
            inside = mask & (cells == cell)
            order = torch.randperm(int(inside.sum()), generator=rollouts.generator)
            result[inside] = value[inside][order.to(value.device)]
    return result


def cells_of(placebo: str, rollouts: Rollouts) -> Tensor:
    """(B, T): which tokens exchange their values, those with the same number. Advantages stay in
    their group, and weights go through the whole batch. `by_kind` keeps them at tokens of one
    category, and `by_position` at the tokens that are first in their answers, second, and so on."""
    cells = torch.zeros_like(rollouts.ids)
    if placebo.startswith("advantages"):
        cells = cells + rollouts.group[:, None]
    if placebo.endswith("by_kind"):
        cells = cells * len(KINDS) + rollouts.kind
    if placebo.endswith("by_position"):
        T = cells.shape[1]
        cells = cells * T + torch.arange(T, device=cells.device)
    return cells


# The methods of these modules are choices as well. A module is imported when its method is chosen
# or its help is printed.
MITIGATIONS.update({
    "learned_importance": "lab.credit.learned_importance", "lambda_grpo": "lab.credit.lambda_grpo",
    "causal_ablation": "lab.credit.causal_ablation", "oracle": "lab.credit.measured",
    "shared_prefix": "lab.credit.prefix_tree", "rlsd": "lab.credit.hinted",
    "low_probability": "lab.credit.more_weightings", "taco": "lab.credit.more_weightings",
    "planning": "lab.credit.more_weightings", "future_attention": "lab.credit.more_weightings",
    "covariance": "lab.credit.more_weightings", "negative_only": "lab.credit.more_weightings"})
ADVANTAGES.update({
    "vine": "lab.credit.monte_carlo", "deletion": "lab.credit.causal_ablation",
    "measured": "lab.credit.measured", "gae": "lab.credit.critic",
    "prefix_tree": "lab.credit.prefix_tree", "gtpo": "lab.credit.gtpo",
    "optimal_token_baseline": "lab.credit.baselines", "maxrl": "lab.credit.baselines",
    "gdpo": "lab.credit.baselines", "opo": "lab.credit.baselines",
    "pass_at_k": "lab.credit.baselines", "teacher": "lab.credit.teacher",
    "quantile_baseline": "lab.credit.baselines", "turn_credit": "lab.credit.turns",
    "without_luck": "lab.credit.turns", "turn_mean": "lab.credit.turns",
    "mt_grpo": "lab.credit.turns", "gigpo": "lab.credit.turns"})
CLIP_KINDS.update(dict.fromkeys(("dual", "gspo", "cispo", "sapo", "gmpo", "dppo"),
                                "lab.credit.clips"))
