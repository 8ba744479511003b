"""The update of a run beyond the book: `update` of grpo.py, with another way to rescale weights
(--rescale gradient), others to count tokens (--loss_norm), another KL (--kl_kind), a temperature.
"""
import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import grpo
from mitigations import gradient_size
from lab.engine.errors import NotFinite, UserError
from lab.engine.forward import at_temperature, frozen_log_probs
from lab.engine.methods import Metrics
from lab.engine.model import Qwen2
from lab.engine.policy import RunSettings
from lab.engine.rollouts import Rollouts, double

Columns = dict[str, Tensor]  # a tensor (B, T) for each new column of the credit file


def rescaling(weight: Tensor, rollouts: Rollouts) -> float:
    """The number c by which --rescale gradient multiplies the weights of a batch: the sum of
    abs(A) c w s becomes the sum of abs(A) s, which is the sum without weights. abs(A) w s is the
    size of a token's gradient at the logits (`gradient_size`)."""
    size = double(gradient_size(rollouts.log_prob, rollouts.collision))
    unweighted = double(rollouts.mask) * double(rollouts.advantage.abs()) * size
    wanted, found = unweighted.sum().item(), (double(weight) * unweighted).sum().item()
    if wanted == 0:
        return 1.0
    # no number can rescale a sum of 0; `rescaled_weight` takes care of it
    return wanted / found if found > 0 else math.inf


def length_scaling(length: Tensor, loss_norm: str, max_new_tokens: int) -> Tensor:
    """The factor m of each answer (B, 1). `policy_loss` divides every term by N; m turns that into
    the normalisation that --loss_norm asks for.

    token      every token counts 1 / N, so m is 1
    sequence   every answer counts the same, each of its tokens 1 / (answers * its length), where
               answers that --drop_unfinished drops are not counted
    constant   every token counts 1 / (B * max_new_tokens), and B counts dropped answers too
    """
    N, per_answer = length.sum(), length[:, None]
    if loss_norm == "sequence":
        kept = (length > 0).sum()  # a dropped answer has no tokens left
        return torch.where(per_answer > 0, N / (kept * per_answer.clamp(min=1)), 0.0)
    one = torch.ones_like(per_answer).float()
    if loss_norm == "constant":
        return N / (len(length) * max_new_tokens) * one
    return one


def divergence_k2(log_prob: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) at each position, estimated from the token that was sampled there:
    k2 = (reference - log_prob)^2 / 2, in the place of the book's k3.

    Both estimate the same number, but as a loss they are not the same. On average k2 has the
    gradient of KL(policy || reference), and k3 has the gradient of KL(reference || policy), each
    for a fixed prefix. That the policy also decides which prefixes it reaches is left out of both
    gradients.
    """
    return (reference - log_prob).square() / 2


def kl_as_flagged(s: RunSettings, m: Tensor, of_reference: Tensor
                  ) -> tuple[RunSettings, Tensor, grpo.Divergence]:
    """Three arguments of the book's `update` for --kl_kind and the factors m (B, 1). A factor that
    all answers share changes the coefficient of the KL. Others travel with the log-probs of the
    reference, which the book cuts into micro-batches."""
    s, estimate = copy(s), grpo.k3 if s.kl_kind == "k3" else divergence_k2
    if (m == m[:1]).all():
        s.kl, m = s.kl * m[0].item(), torch.ones_like(m)

    def divergence(log_prob: Tensor, both: Tensor) -> Tensor:
        reference, factor = both.unbind(-1)
        return factor * estimate(log_prob, reference)

    return s, torch.stack([of_reference, m.expand_as(of_reference)], -1), divergence


def in_parts(s: RunSettings, rollouts: Rollouts, update_on: Callable[..., tuple[Metrics, Columns]]
             ) -> tuple[Metrics, Columns]:
    """--parts: the answers are shuffled and cut into so many parts, and each makes an update. From
    the second one on the model is not the one that sampled, so the loss has ratio and clipping, as
    with --epochs. A part is the batch without the tokens of the other answers."""
    if s.parts == 1:
        return update_on(rollouts)
    order = torch.randperm(len(rollouts.mask),
                           generator=grpo.generator_of("parts", s.seed, rollouts.step))
    found: list[Metrics] = []
    for rows in order.to(rollouts.mask.device).tensor_split(s.parts):
        mask = torch.zeros_like(rollouts.mask)
        mask[rows] = rollouts.mask[rows]
        metrics, _ = update_on(replace(rollouts, mask=mask), is_older=bool(found))
        if not metrics["skipped"]:
            found.append(metrics)
    if not found:
        return metrics, {}
    summed = {name: sum(one[name] for one in found) for name in ("N", "trained_tokens")}
    return found[-1] | found[0] | summed, {}  # ratio and clipping are those of the last part


def update(model: Qwen2, optimizer: Any, rollouts: Rollouts, weight: Tensor, s: RunSettings,
           reference: Qwen2 | None = None, is_measured: bool = False,
           largest_gap: float = math.inf) -> tuple[Metrics, Columns]:
    """Train the model on the whole batch, by grpo.py's `update`. `weight` is c w."""
    mask, known = rollouts.mask, rollouts.rows[rollouts.mask.any(1)]
    m = length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)               # (B, 1)
    # the sampler's log-probs on record are those at temperature 1, and so is their change
    at_one = of_reference = None
    if is_measured or s.temperature != 1:
        at_one = frozen_log_probs(model, rollouts, known, s.micro_batch)
    if reference is not None:
        of_reference = frozen_log_probs(reference, rollouts, known, s.micro_batch, s.temperature)
    of_kl: tuple[RunSettings, Tensor | None, grpo.Divergence] = s, None, grpo.k3
    if of_reference is not None:
        of_kl = kl_as_flagged(s, m, of_reference)
    try:
        with at_temperature(model, s.temperature, mask.device):
            metrics, columns = in_parts(s, rollouts, lambda batch, **more: grpo.update(
                model, optimizer, batch, weight * m, *of_kl, largest_gap, **more))
    except UserError as error:
        if not str(error).startswith("the gradient"):
            raise
        raise NotFinite("the gradient is not finite") from error
    if not mask.any():  # --drop_unfinished has dropped every answer
        metrics["skipped"] = "no answer was finished"
    if s.epochs > 1 and metrics["skipped"]:
        columns["ratio"] = torch.ones_like(rollouts.log_prob)
    if s.temperature != 1 and at_one is not None and not metrics["skipped"]:
        rows = (mask & ((weight * m * rollouts.advantage != 0) | (s.kl > 0))).any(1)
        metrics["sampler_gap"] = grpo.sampler_gap(at_one, rollouts, rows, largest_gap)
    if is_measured and at_one is not None:
        columns["change"] = frozen_log_probs(model, rollouts, known, s.micro_batch) - at_one
    return metrics, columns
