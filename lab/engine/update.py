"""The update of a run beyond the book: grpo.py's `update`, with other losses on a batch that is
used again, other ways to count tokens (--loss_norm), a KL of another kind, a
temperature, and the engine's forward pass. Where none of this is asked for it has the same
gradient, to rounding: a test ties the two.
"""
import torch
from torch import Tensor

from grpo import clipped_loss, policy_loss, why_skipped
from mitigations import gradient_size
from grpo import divergence as k3
from lab.engine.methods import Metrics
from lab.engine.forward import frozen_log_probs, micro_batches, response_log_probs
from lab.engine.optimizer import Optimizer, clip_and_step
from lab.engine.policy import RunSettings
from lab.engine.rollouts import Rollouts, double
from lab.engine.model import Qwen2

Columns = dict[str, Tensor]  # a tensor (B, T) for each new column of the credit file


def ppo(log_prob: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor, total: int,
        old: Tensor | None = None, clip: tuple[float, float] = (0.2, 0.28)) -> Tensor:
    """The book's loss for some answers; with `old`, the log-probs from before the first update on
    this batch, that with PPO's clipped ratio. `weight` is c w m: what the weighting returned,
    rescaled, and times the length scale."""
    if old is None:
        return policy_loss(log_prob, advantage, weight, mask, total)
    return clipped_loss(log_prob, old, advantage, weight, mask, total, *clip)



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
           reference: Qwen2 | None = None) -> tuple[Metrics, Columns]:
    """Train the model on the whole batch: one step of the optimizer, or with --epochs several.

    `weight` is c w, and `scaled_weight` is c w m. With a `reference` model the loss has a KL term.
    Returns metrics, and columns (B, T) for the credit file: with --epochs the ratio of new to old
    probability in the last pass.

    Answers without a gradient are not computed, so their ratio is not known, and 1 stands there. If
    no answer has a gradient, nothing is changed.
    """
    mask, advantage = rollouts.mask, rollouts.advantage
    N = int(mask.sum())
    length_scale = length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)    # (B, 1)
    scaled_weight = weight * length_scale                                            # (B, T)
    old, ratio = torch.zeros_like(weight), torch.ones_like(weight)  # both are filled in below
    columns = {"ratio": ratio} if s.epochs > 1 else {}
    is_trained = has_gradient(mask, scaled_weight * advantage, reference is not None)  # (B,)
    if not is_trained.any():
        # where --drop_unfinished has dropped every answer, no token is left
        reason = why_skipped(rollouts) if mask.any() else "no answer was finished"
        return {"N": N, "skipped": reason, "loss": 0.0, "trained_tokens": 0,
                "gradient_norm": None, "sampler_gap": None}, columns

    trained_rows = rollouts.rows[is_trained]
    reference_log_prob = None
    if reference is not None:
        reference_log_prob = frozen_log_probs(reference, rollouts, trained_rows, s.micro_batch,
                                              s.temperature)
    # The sampler's log-probs on record are those at temperature 1, and are compared with these.
    at_one = None
    if s.temperature != 1:
        at_one = frozen_log_probs(model, rollouts, trained_rows, s.micro_batch)
    clip = (s.clip_low, s.clip_high)
    totals = []  # of each pass over the batch
    for epoch in range(s.epochs):
        model.zero_grad()
        sums = []  # of each micro-batch
        for part in micro_batches(rollouts, trained_rows, s.micro_batch):
            log_prob = response_log_probs(model, rollouts, part, s.temperature)
            if epoch == 0:
                # the sampler's log-probs differ by rounding: with them no ratio would be exactly 1
                old[part] = log_prob.detach()
            loss = ppo(log_prob, advantage[part], scaled_weight[part], mask[part], N,
                       old[part] if s.epochs > 1 else None, clip)
            if reference_log_prob is not None:
                kl = divergence(log_prob, reference_log_prob[part], s.kl_kind)
                loss = loss + s.kl * (length_scale[part] * kl * mask[part]).sum() / N
            loss.backward()
            log_prob = log_prob.detach()
            ratio[part] = (log_prob - old[part]).exp()
            gap = (log_prob if at_one is None else at_one[part]) - rollouts.log_prob[part]
            sums.append(diagnostics(rollouts, part, loss, log_prob, gap, ratio[part], clip,
                                    reference_log_prob))
        norm = clip_and_step(optimizer, s.max_grad_norm)
        totals.append(add_up(sums) | {"norm": norm})
    return summary(totals, N, s.epochs > 1), columns


def has_gradient(mask: Tensor, factor: Tensor, with_kl: bool) -> Tensor:
    """(B,) bool: whether some token of an answer has a gradient. `factor` (B, T) is c w m A."""
    if with_kl:  # the KL term has a gradient at every token
        return mask.any(1)
    return (mask & (factor != 0)).any(1)


def diagnostics(rollouts: Rollouts, rows: Tensor, loss: Tensor, log_prob: Tensor, gap: Tensor,
                ratio: Tensor, clip: tuple[float, float], reference_log_prob: Tensor | None
                ) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch, for the metrics.

    The gap, training's log-probs minus the sampler's, should be rounding; if it is more, there is
    a mistake. A token is clipped if its ratio is beyond the bound that holds for the sign of its
    advantage. The KL is measured as k3, which is unbiased, whichever kind the loss has.
    """
    mask, advantage = rollouts.mask[rows], rollouts.advantage[rows]
    too_low, too_high = ratio < 1 - clip[0], ratio > 1 + clip[1]
    clipped = torch.where(advantage > 0, too_high, too_low) & (advantage != 0) & mask
    sums = {"loss": loss.detach(), "gap": (gap * mask).abs().sum(), "tokens": mask.sum(),
            "ratio": (ratio * mask).sum(), "clipped": clipped.sum()}
    if reference_log_prob is not None:
        sums["kl"] = (divergence(log_prob, reference_log_prob[rows], "k3") * mask).sum()
    return sums


def add_up(sums: list[dict[str, Tensor]]) -> dict[str, float]:
    """The sums of all micro-batches."""
    total = {}
    for name in sums[0]:
        total[name] = float(sum(of_part[name] for of_part in sums))
    return total


def summary(totals: list[dict[str, float]], N: int, with_ratio: bool) -> Metrics:
    """Loss, norm and gap of the first pass over the batch; ratio, clipping and KL of the last."""
    first, last = totals[0], totals[-1]
    metrics: Metrics = {
        "N": N, "skipped": None, "loss": first["loss"], "gradient_norm": first["norm"],
        "sampler_gap": first["gap"] / first["tokens"], "trained_tokens": first["tokens"]}
    if with_ratio:
        metrics["ratio_mean"] = last["ratio"] / last["tokens"]
        metrics["clipped_share"] = last["clipped"] / last["tokens"]
        metrics["gradient_norm_last"] = last["norm"]
    if "kl" in last:
        metrics["kl"] = last["kl"] / last["tokens"]
    return metrics


def update_with_change(model: Qwen2, optimizer: Optimizer, rollouts: Rollouts, weight: Tensor,
                       s: RunSettings, reference: Qwen2 | None = None) -> tuple[Metrics, Columns]:
    """Call `update`, and add the column `change`: each token's log-prob after the update minus
    before, at the same prefix. This costs one forward pass before the update and one after."""
    length_scale = length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)  # (B, 1)
    factor = weight * length_scale * rollouts.advantage                            # (B, T)
    is_trained = has_gradient(rollouts.mask, factor, reference is not None)        # (B,)
    if not is_trained.any():
        metrics, columns = update(model, optimizer, rollouts, weight, s, reference)
        return metrics, {**columns, "change": torch.zeros_like(weight)}
    # answers without a gradient change too: they share the parameters with the others
    is_untrained = ~is_trained & rollouts.mask.any(1)
    trained_rows, untrained_rows = rollouts.rows[is_trained], rollouts.rows[is_untrained]

    def log_probs() -> Tensor:
        # one after the other, so that trained answers are in the same micro-batches as in `update`
        trained = frozen_log_probs(model, rollouts, trained_rows, s.micro_batch)
        untrained = frozen_log_probs(model, rollouts, untrained_rows, s.micro_batch)
        return trained + untrained  # each is 0 in the other's rows, so the sum joins them

    before = log_probs()
    metrics, columns = update(model, optimizer, rollouts, weight, s, reference)
    return metrics, columns | {"change": log_probs() - before}
