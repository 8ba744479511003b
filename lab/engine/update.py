"""What a run beyond the book changes in grpo.py's `update`, which makes its steps too: other ways
to rescale weights (--rescale) and to count tokens (--loss_norm), another KL (--kl_kind), a
temperature, and the log-probs and micro-batches of lab/engine/forward.py.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import grpo
from mitigations import gradient_size
from lab.engine.forward import frozen_log_probs, micro_batches, response_log_probs
from lab.engine.methods import Metrics
from lab.engine.model import Qwen2
from lab.engine.optimizer import Optimizer
from lab.engine.policy import RunSettings
from lab.engine.rollouts import Rollouts, double

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
    if kind == "k2":
        return (reference - log_prob).square() / 2
    return grpo.divergence(log_prob, reference)


class Learner(grpo.Learner):
    """A run, with what the lab has in the place of the book's functions."""
    largest_gap = float("inf")  # bfloat16 rounds coarsely

    model: Any

    def log_probs(self, model: Any, rollouts: Any, rows: Tensor) -> Tensor:
        return response_log_probs(model, rollouts, rows, self.settings.temperature)

    def divergence(self, log_prob: Tensor, reference: Tensor, rollouts: Any, rows: Tensor
                   ) -> Tensor:
        m = self.length_scaling(rollouts)[rows]
        return m * divergence(log_prob, reference, self.settings.kl_kind)

    def micro_batches(self, rollouts: Any, rows: Tensor) -> Sequence[Tensor]:
        return micro_batches(rollouts, rows, self.settings.micro_batch)

    def length_scaling(self, rollouts: Rollouts) -> Tensor:
        s = self.settings
        return length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)        # (B, 1)

    def update(self, rollouts: Any, weight: Tensor, is_measured: bool = False
               ) -> tuple[Metrics, Columns]:
        """Train the model on the whole batch. `weight` is c w."""
        s, at_one = self.settings, None
        weight = weight * self.length_scaling(rollouts)                              # c w m
        if s.temperature != 1:
            at_one = self.log_probs_at_one(rollouts)
        metrics, columns = grpo.update(self, rollouts, weight, is_measured and at_one is None)
        if not rollouts.mask.any():  # --drop_unfinished has dropped every answer
            metrics["skipped"] = "no answer was finished"
        if at_one is None:
            return metrics, columns
        # the sampler's log-probs on record are those at temperature 1, and so is their change
        if not metrics["skipped"]:
            rows = grpo.trained_rows(self, rollouts, weight)
            gap = (at_one - rollouts.log_prob)[rows][rollouts.mask[rows]]
            metrics["sampler_gap"] = gap.abs().mean().item()
        if is_measured:
            columns["change"] = self.log_probs_at_one(rollouts) - at_one
        return metrics, columns

    def log_probs_at_one(self, rollouts: Rollouts) -> Tensor:
        rows = rollouts.rows[rollouts.mask.any(1)]
        return frozen_log_probs(self.model, rollouts, rows, self.settings.micro_batch)


def update(model: Qwen2, optimizer: Optimizer, rollouts: Rollouts, weight: Tensor, s: RunSettings,
           reference: Qwen2 | None = None, is_measured: bool = False) -> tuple[Metrics, Columns]:
    """An update without a run."""
    learner = Learner()
    vars(learner).update(model=model, optimizer=optimizer, settings=s, reference=reference,
                         last_good_model=lambda: "there is no checkpoint")
    return learner.update(rollouts, weight, is_measured)
