"""Advantages and weights as a step uses them: what the chosen methods return is checked, and then
rescaled, shuffled for a placebo, or dropped with answers that were cut off."""
from dataclasses import replace

import torch
from torch import Tensor

import mitigations
from countdown_task import KINDS
from grpo import generator_of
from lab.engine.methods import (WHOLE_ANSWERS, Called, Method, Metrics, checked_credit,
                                metrics_of)
from lab.engine.policy import Policy, RunSettings
from lab.engine.rollouts import Rollouts
from lab.engine.update import rescaling


@torch.no_grad()
def rescaled_weight(chosen: Method, name: str, rollouts: Rollouts, policy: Policy | None = None,
                    rescale_to: str = "mean", placebo: str = "none") -> tuple[Tensor, Metrics]:
    """The weights c w (B, T) that the loss uses and the credit file stores, by `weights` of
    mitigations.py, and metrics about them. Before they are rescaled they are shuffled for --placebo
    weights, and multiplied for --rescale gradient."""
    if not rollouts.mask.any():  # every answer was dropped, so the weighting is not called
        metrics: Metrics = dict.fromkeys(metrics_of(chosen))  # its own metrics are None
        metrics |= {"weight_factor": 1.0, "weight_max": 0.0, "weight_note": None}
        return torch.zeros_like(rollouts.log_prob), metrics
    c, is_rescaled = 1.0, True

    def after(weight: Tensor) -> Tensor:
        nonlocal c, is_rescaled
        if placebo.startswith("weights"):
            weight = shuffled(weight, rollouts, placebo)
        if rescale_to == "gradient":
            c = rescaling(weight, rollouts)
            is_rescaled = bool((weight * c).isfinite().all())
        return weight * c if is_rescaled else weight

    asked = Called(chosen, f"the weighting {name}", policy, after)
    weight, about = mitigations.weights(asked, rollouts, {}, rescale_to)
    if rescale_to == "mean":
        is_rescaled = bool((weight > 1e-30).any())
    elif is_rescaled:
        about["weight_factor"] = c
    note = "weights were not rescaled: hardly any weight is on tokens with an advantage"
    return weight, metrics_of(chosen) | about | {"weight_note": None if is_rescaled else note}


def advantage_of(chosen: Method, s: RunSettings, rollouts: Rollouts, policy: Policy | None
                 ) -> Tensor:
    """The advantage (B, T) of a batch, with --placebo."""
    values = checked_credit(chosen, f"the advantage {s.advantage}", rollouts, policy)
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


def credited(batch: Rollouts, methods: tuple[Method, Method], policy: Policy, s: RunSettings,
             step: int) -> tuple[Rollouts, Tensor, Metrics]:
    """The batch and its weights (B, T), as a step of training makes them with an advantage and a
    weighting; and their metrics."""
    advantage, weighting = methods
    rollouts = with_advantage(batch, advantage, policy, s, step)
    rollouts = drop_unfinished(rollouts) if s.drop_unfinished else rollouts
    weight, metrics = rescaled_weight(weighting, s.mitigation, rollouts, policy, s.rescale,
                                      s.placebo)
    return rollouts, weight, metrics


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
    """A number for each token, (B, T): tokens with the same number exchange their values.
    Advantages stay in their group, and weights move through the whole batch. With `by_kind` values
    move only between tokens of the same category."""
    cells = torch.zeros_like(rollouts.ids)
    if placebo.startswith("advantages"):
        cells = cells + rollouts.group[:, None]
    if placebo.endswith("by_kind"):
        cells = cells * len(KINDS) + rollouts.kind
    return cells
