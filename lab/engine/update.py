"""The update of a run beyond the book: grpo.py's `update`, with other ways to count tokens
(--loss_norm), another KL (--kl_kind), a temperature, and the log-probs of lab/engine/forward.py.
Where none of this is asked for it has the same gradient, to rounding: a test ties the two.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo import clipped_loss, policy_loss, why_skipped
from grpo import divergence as k3
from mitigations import gradient_size
from lab.engine.methods import Metrics
from lab.engine.forward import frozen_log_probs, micro_batches, response_log_probs
from lab.engine.optimizer import Optimizer, clip_and_step
from lab.engine.policy import RunSettings
from lab.engine.rollouts import Rollouts, double
from lab.engine.model import Qwen2

Columns = dict[str, Tensor]  # a tensor (B, T) for each new column of the credit file


def rescaling(weight: Tensor, rollouts: Rollouts, rescale_to: str) -> float:
    """The number c by which the weights of a batch are multiplied, as --rescale says:

    mean      the mean weight of the batch's tokens becomes 1
    gradient  the sum of abs(A) w s over the batch becomes the sum of abs(A) s, which is the sum
              without weights. abs(A) w s is the size of a token's gradient at the logits
              (`gradient_size`)
    none      c is 1
    """
    if rescale_to == "none":
        return 1.0
    weight = double(weight)
    unweighted = double(rollouts.mask)  # what a token of weight 1 adds to the sum: 1 or abs(A) s
    if rescale_to == "gradient":
        s = gradient_size(rollouts.log_prob, rollouts.collision)
        unweighted = unweighted * double(rollouts.advantage.abs()) * double(s)
    wanted_sum = unweighted.sum().item()
    weighted_sum = (weight * unweighted).sum().item()
    if wanted_sum == 0:
        return 1.0
    if weighted_sum > 0:
        return wanted_sum / weighted_sum
    return float("inf")  # no number can rescale a sum of 0; `rescaled_weight` takes care of it


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


def divergence(log_prob: Tensor, reference: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) at each position, estimated from the token that was sampled there:
    the book's k3, or k2 = (reference - log_prob)^2 / 2.

    Both estimate the same number, but as a loss they are not the same. On average k2 has the
    gradient of KL(policy || reference), and k3 has the gradient of KL(reference || policy), each
    for a fixed prefix. That the policy also decides which prefixes it reaches is left out of both
    gradients.
    """
    return k3(log_prob, reference) if kind == "k3" else (reference - log_prob).square() / 2


def update(model: Qwen2, optimizer: Optimizer, rollouts: Rollouts, weight: Tensor, s: RunSettings,
           reference: Qwen2 | None = None, is_measured: bool = False) -> tuple[Metrics, Columns]:
    """Train the model on the whole batch. `weight` is c w. With a `reference` model the loss has a
    KL term. Returns metrics, and columns (B, T) for the credit file.

    If `is_measured`, the column `change` has each token's log-prob after the update minus before,
    at the same prefix. This costs two forward passes. If no answer has a gradient, nothing is
    changed."""
    mask = rollouts.mask
    has_gradient = mask & (weight * rollouts.advantage != 0)                         # (B, T)
    # the KL term has a gradient at every token
    is_trained = (mask if reference is not None else has_gradient).any(1)            # (B,)
    # answers without a gradient change too: they share the parameters with the others
    trained, others = rollouts.rows[is_trained], rollouts.rows[~is_trained & mask.any(1)]

    def all_log_probs() -> Tensor:
        # one after the other, so that trained answers are in the same micro-batches as in a step
        return (frozen_log_probs(model, rollouts, trained, s.micro_batch)
                + frozen_log_probs(model, rollouts, others, s.micro_batch))  # 0 in other rows

    if not len(trained):
        # where --drop_unfinished has dropped every answer, no token is left
        reason = why_skipped(rollouts) if mask.any() else "no answer was finished"
        metrics: Metrics = {"N": int(mask.sum()), "skipped": reason, "loss": 0.0,
                            "trained_tokens": 0, "gradient_norm": None, "sampler_gap": None}
        columns = {"ratio": torch.ones_like(weight)} if s.epochs > 1 else {}
        return metrics, columns | ({"change": torch.zeros_like(weight)} if is_measured else {})
    before = all_log_probs() if is_measured else None
    metrics, columns = train_on(trained, model, optimizer, rollouts, weight, s, reference)
    if before is not None:
        columns["change"] = all_log_probs() - before
    return metrics, columns


def train_on(rows: Tensor, model: Qwen2, optimizer: Optimizer, rollouts: Rollouts, weight: Tensor,
             s: RunSettings, reference: Qwen2 | None) -> tuple[Metrics, Columns]:
    """One step of the optimizer on these answers, or with --epochs several. Other answers are not
    computed, so their ratio is not known, and 1 stands there."""
    mask, A, N = rollouts.mask, rollouts.advantage, int(rollouts.mask.sum())
    m = length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)               # (B, 1)
    scaled_weight = weight * m                                                       # c w m
    steps: list[Step] = []
    if reference is not None:
        of_reference = frozen_log_probs(reference, rollouts, rows, s.micro_batch, s.temperature)

    def loss_of(part: Tensor, log_prob: Tensor) -> Tensor:
        inputs = A[part], scaled_weight[part], mask[part], N
        if s.epochs == 1:
            loss = policy_loss(log_prob, *inputs)
        else:
            # the sampler's log-probs differ by rounding: with them no ratio would be exactly 1
            old = steps[0].log_prob[part] if steps else log_prob.detach()
            loss = clipped_loss(log_prob, old, *inputs, s.clip_low, s.clip_high)
        if reference is not None:
            kl = divergence(log_prob, of_reference[part], s.kl_kind)
            loss = loss + s.kl * (m[part] * kl * mask[part]).sum() / N
        return loss

    # The sampler's log-probs on record are those at temperature 1, and are compared with these.
    at_one = None
    if s.temperature != 1:
        at_one = frozen_log_probs(model, rollouts, rows, s.micro_batch)
    parts = micro_batches(rollouts, rows, s.micro_batch)
    for _ in range(s.epochs):
        steps.append(one_step(model, optimizer, rollouts, parts, s, loss_of))

    def mean(values: Tensor) -> float:  # over the trained tokens
        return float(sum((values[part] * mask[part]).sum() for part in parts)) / tokens

    first, last, tokens = steps[0], steps[-1], int(mask[rows].sum())
    # training's log-probs minus the sampler's should be rounding; more is a mistake
    gap = (first.log_prob if at_one is None else at_one) - rollouts.log_prob
    metrics: Metrics = {
        "N": N, "skipped": None, "loss": first.loss, "gradient_norm": first.norm,
        "sampler_gap": mean(gap.abs()), "trained_tokens": tokens}
    columns = {}
    if s.epochs > 1:
        ratio = columns["ratio"] = (last.log_prob - first.log_prob).exp()
        # beyond the bound that holds for the sign of the token's advantage
        is_clipped = torch.where(A > 0, ratio > 1 + s.clip_high, ratio < 1 - s.clip_low) & (A != 0)
        metrics |= {"ratio_mean": mean(ratio), "clipped_share": mean(is_clipped),
                    "gradient_norm_last": last.norm}
    if reference is not None:  # measured as k3, which is unbiased, whichever kind the loss has
        metrics["kl"] = mean(k3(last.log_prob, of_reference))
    return metrics, columns


class Step(NamedTuple):
    """What is known of a step of the optimizer."""
    loss: float
    norm: float       # of the gradient, before clipping
    log_prob: Tensor  # (B, T) before the step; 0 in rows that are not trained on


def one_step(model: Qwen2, optimizer: Optimizer, rollouts: Rollouts, parts: list[Tensor],
             s: RunSettings, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """One step of the optimizer on these micro-batches."""
    model.zero_grad()
    losses, before = [], torch.zeros_like(rollouts.log_prob)
    for part in parts:
        log_prob = response_log_probs(model, rollouts, part, s.temperature)
        loss = loss_of(part, log_prob)
        loss.backward()
        losses.append(loss.detach())
        before[part] = log_prob.detach()
    return Step(float(sum(losses)), clip_and_step(optimizer, s.max_grad_norm), before)
