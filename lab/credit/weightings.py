"""Weightings that need more than one function of the batch, such as the attention between tokens,
or that are no part of the book; how weights are rescaled beyond the book; placebos."""
from dataclasses import replace

import torch
from torch import Tensor

from countdown_task import ANSWER, KINDS, TAG, THINK
from grpo import centred, generator_of, to_every_token
from lab.engine.errors import UserError, location_of
from lab.engine.methods import (WHOLE_ANSWERS, Method, Metrics, advantage, checked_credit,
                                metrics_of, mitigation)
from lab.engine.policy import Policy, RunSettings
from lab.engine.rollouts import Rollouts
from lab.engine.update import rescaling
from lab.harness.flags import NotNegative, Positive


@mitigation
def inverse_logprob_as_published(rollouts: Rollouts, *, epsilon: Positive = 0.1) -> Tensor:
    """The weight is epsilon / (|log p| + epsilon)^2, and it is never rescaled. It has the gradient
    that inverse_logprob would have if the gradient also flowed through the weight.

    The reason is that this weight is the derivative of log p / (|log p| + epsilon) with respect to
    log p.
    """
    return epsilon / (rollouts.log_prob.abs() + epsilon).square()


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


@advantage
def span(rollouts: Rollouts) -> Tensor:
    """Each part of the reward, minus the group's mean of this part, is paid at tokens of its own:
    the format at tags, the reasoning (a process reward) in the think section, and the answer in the
    answer section.

    A part is paid whether or not the reward pays it: the reasoning also with --reasoning_weight 0,
    and the format also with --reward_form right. A run says so.

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
    weight = checked_credit(chosen, f"the weighting {name}", rollouts, policy)
    if (weight < 0).any():
        raise UserError(f"the weighting {name} ({location_of(chosen)}) is negative at "
                        f"{int((weight < 0).sum())} tokens: credit with a sign stands under "
                        "@advantage (docs/reference/methods.md)")
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


def advantage_of(chosen: Method, s: RunSettings, rollouts: Rollouts, policy: Policy | None
                 ) -> Tensor:
    """The advantage (B, T) of a batch, with --entropy_bonus and --placebo."""
    values = checked_credit(chosen, f"the advantage {s.advantage}", rollouts, policy)
    if s.entropy_bonus:
        from lab.credit.entropy_bonus import entropy_bonus
        values = values + s.entropy_bonus * entropy_bonus(rollouts)
    if s.placebo.startswith("advantages"):
        values = shuffled(values, rollouts, s.placebo, s.advantage in WHOLE_ANSWERS)
    return values


def with_advantage(rollouts: Rollouts, advantage_method: Method, policy: Policy, s: RunSettings,
                   step: int) -> Rollouts:
    """The batch of a step with its advantage, as the training loop makes it."""
    rollouts = replace(rollouts, step=step, generator=generator_of("credit", s.seed, step),
                       forward=policy.extra_forward())
    return replace(rollouts, advantage=advantage_of(advantage_method, s, rollouts, policy))


def drop_unfinished(rollouts: Rollouts) -> Rollouts:
    """Mask the answers that were cut off by the limit. They are not trained on, but the advantages
    of the other answers were computed with their rewards."""
    return replace(rollouts, mask=rollouts.mask & rollouts.finished[:, None])


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
