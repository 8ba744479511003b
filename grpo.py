"""GRPO (2402.03300) in the open: one reward an answer, compared within its group, given to every
token.

    A_i  = (R_i - mean of the group) / (std of the group + 1e-4)
    loss = - sum_it  c w_it m_i A_it log pi(y_it | prompt, y_i<t)  / N

    A_it  advantage: chosen by --advantage; here those that are the same for all t, as in GRPO
    w_it  weight of a token: mitigations.py, chosen by --mitigation; 1 in GRPO
    c     one number for the batch, after which weights have mean 1 (`rescaling`)
    m_i   length_scale: 1, or what --loss_norm makes of an answer's length (`length_scaling`). The
          weight on record is c w; m is in a token's account (analysis/account.py)
    N     the batch's generated tokens; with --drop_unfinished those of the answers that ended

Start at `policy_loss`: it is the formula, and it never changes. What goes in changes. Advantages
and weights are made for the whole batch before it is cut into micro-batches, so the size of a
micro-batch changes rounding alone. With one update a batch, the ratio of new to old probability is
exactly 1 and clipping would do nothing; --epochs above 1 brings in both.

Critics, Monte Carlo values and preference pairs (DPO) are in credit/. Left out: importance sampling
for off-policy answers, which --rollouts_every above 1 trains on uncorrected.
"""
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine import processes
from engine.choices import Metrics, advantage
from engine.rollouts import Rollouts

Columns = dict[str, Tensor]  # (B, T) of each name, for the credit file
if TYPE_CHECKING:  # an analysis reads the formulas of this file and loads no model
    from engine.optimizer import Optimizer
    from engine.policy import RunSettings
    from qwen2_model import Qwen2


def policy_loss(log_prob: Tensor, advantage: Tensor, coefficient: Tensor, mask: Tensor,
                total: float, old: Tensor | None = None,
                clip: tuple[float, float] = (0.2, 0.28)) -> Tensor:
    """The formula above for some answers, each argument (answers, T): `coefficient` is c w m,
    `total` is N.

    `old` are the log-probs from before the batch's first update. With them, the clipped ratio of
    PPO (1707.06347; a wider upper bound as in DAPO, 2503.14476) takes the place of log_prob. At
    ratio 1 its gradient is the same.
    """
    if old is None:
        objective = coefficient * advantage * log_prob
    else:
        ratio = (log_prob - old).exp()
        clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
        objective = coefficient * torch.minimum(ratio * advantage, clipped * advantage)
    return -(objective * mask).sum() / total


def rescaling(weight: Tensor, rollouts: Rollouts, rescale_to: str) -> float:
    """The number c by which a batch's weights are multiplied.

    mean      the batch's tokens weigh 1 on average
    gradient  the gradients at the logits have the same sum of sizes as without weights
    none      1
    """
    if rescale_to == "none":
        return 1.0
    size = rollouts.mask.double()
    if rescale_to == "gradient":
        at_logits = gradient_size(rollouts.log_prob, rollouts.collision)
        size = size * rollouts.advantage.abs() * at_logits
    total, weighted = size.sum().item(), (weight * size).sum().item()
    if total == 0:
        return 1.0
    return total / weighted if weighted > 0 else float("inf")


def length_scaling(length: Tensor, loss_norm: str, max_new_tokens: int) -> Tensor:
    """The number m of each answer (B, 1) by its tokens, because `policy_loss` divides by N.

    token      1: every token counts 1 / N
    sequence   every kept answer counts the same, each of its tokens 1 / (kept * length)
    constant   every token counts 1 / (B * max_new_tokens), B with the dropped answers
    """
    N, per_answer = length.sum(), length[:, None]
    if loss_norm == "sequence":
        kept = (length > 0).sum()  # without those that --drop_unfinished drops
        return torch.where(per_answer > 0, N / (kept * per_answer.clamp(min=1)), 0.0)
    scale = N / (len(length) * max_new_tokens) if loss_norm == "constant" else 1.0
    return scale * torch.ones_like(per_answer).float()


def group_mean(value: Tensor, group: Tensor) -> Tensor:
    """(B,) -> (B,): for each answer the mean of its group. In float64, because in float32 the mean
    of equal rewards can differ from them in the last digit."""
    count = torch.bincount(group)
    total = torch.zeros_like(count, dtype=torch.float64).index_add(0, group, value.double())
    return (total / count)[group]


def centred(value: Tensor, group: Tensor) -> Tensor:
    """(B,) -> (B,): value minus its group's mean; exactly 0 where a group's values are equal."""
    difference = value.double() - group_mean(value, group)
    return torch.where(difference.abs() < 1e-8, 0.0, difference).float()


def group_z_score(value: Tensor, group: Tensor, epsilon: float = 1e-4) -> Tensor:
    """(B,) -> (B,): (value - mean) / (std + epsilon) in its group, with the std that divides by G;
    exactly 0 where a group's values are equal."""
    difference = value.double() - group_mean(value, group)
    std = group_mean(difference.square(), group).sqrt()
    return torch.where(std < 1e-8, 0.0, difference / (std + epsilon)).float()


def to_every_token(value: Tensor, rollouts: Rollouts) -> Tensor:
    """(B,) -> (B, T): the same number to every token of an answer."""
    return value[:, None] * rollouts.mask


@advantage(whole_answers=True)
def grpo(rollouts: Rollouts) -> Tensor:
    """The z-score of the reward in its group."""
    return to_every_token(group_z_score(rollouts.reward, rollouts.group), rollouts)


@advantage(whole_answers=True)
def dr_grpo(rollouts: Rollouts) -> Tensor:
    """Reward minus the group's mean (2503.20783): no problem counts more than another."""
    return to_every_token(centred(rollouts.reward, rollouts.group), rollouts)


@advantage(whole_answers=True)
def rloo(rollouts: Rollouts) -> Tensor:
    """Reward minus the mean of the others (2402.14740), which is G / (G - 1) (R - mean)."""
    size = torch.bincount(rollouts.group)[rollouts.group]
    return to_every_token(centred(rollouts.reward, rollouts.group) * size / (size - 1), rollouts)


@advantage(whole_answers=True)
def batch_mean(rollouts: Rollouts) -> Tensor:
    """Reward minus the mean of the whole batch, as without groups: answers to easy problems are
    pushed up, those to hard ones down."""
    one_group = torch.zeros_like(rollouts.group)
    return to_every_token(centred(rollouts.reward, one_group), rollouts)


def gradient_size(log_prob: Tensor, collision: Tensor) -> Tensor:
    """norm(onehot - p) = sqrt(1 - 2 p + sum p^2): the size of a log-prob's gradient at the logits.

    Clamped to its exact range [1 - p, sqrt2 (1 - p)]: the formula cancels when p is near 1.
    """
    rest = -torch.expm1(log_prob)  # 1 - p
    square = 1 - 2 * log_prob.exp() + collision
    return square.clamp(rest.square(), 2 * rest.square()).sqrt()


def divergence(log_prob: Tensor, reference: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) at each place, estimated from the token that the policy sampled.

    k2 = d^2 / 2 and k3 = exp(d) - d - 1 with d = reference - log_prob (Schulman, "Approximating KL
    divergence", 2020). As a loss at a fixed prefix k2 has the gradient of KL(policy || reference),
    k3 that of KL(reference || policy). Both drop the gradient through the state distribution.
    """
    d = reference - log_prob
    return d.exp() - d - 1 if kind == "k3" else d.square() / 2


def update(model: "Qwen2", optimizer: "Optimizer", rollouts: Rollouts, weight: Tensor,
           s: "RunSettings", reference: "Qwen2 | None" = None,
           with_change: bool = False) -> tuple[Metrics, Columns]:
    """One step of the optimizer on the whole batch, or with --epochs several. `weight` is c w. With
    a `reference` there is a KL term. Returns the metrics, and (B, T) for the record: after several
    steps the ratio of new to old probability at the last of them; with `with_change`, what became
    of each token, its log-prob behind the last step minus that before the first.

    Answers without a gradient are not computed. When no answer is left, nothing is changed.
    """
    from engine.forward import frozen_log_probs, micro_batches, response_log_probs
    from engine.optimizer import clip_and_step
    mask, advantage = rollouts.mask, rollouts.advantage
    N = int(mask.sum())
    length_scale = length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)  # (B, 1)
    coefficient = weight * length_scale                                          # (B, T)
    has_gradient = (mask & ((coefficient * advantage != 0) | (reference is not None))).any(1)
    old, ratio = torch.zeros_like(weight), torch.ones_like(weight)
    columns = {"ratio": ratio} if s.epochs > 1 else {}
    if with_change:
        columns["change"] = torch.zeros_like(weight)
    if not has_gradient.any():
        return {"N": N, **skipped(rollouts)}, columns
    own = rollouts.rows_of_rank()
    rows = own[has_gradient[own]]
    others = own[(~has_gradient & mask.any(1))[own]]  # they are moved by what they share
    if with_change:
        old += frozen_log_probs(model, rollouts, others, s.micro_batch)
    anchor = None if reference is None else (
        frozen_log_probs(reference, rollouts, rows, s.micro_batch))
    clip = (s.clip_low, s.clip_high)
    passes = []
    for epoch in range(s.epochs):
        sums = []  # over the tokens of each part
        optimizer.zero_grad()
        for part in micro_batches(rollouts, rows, s.micro_batch):
            log_prob = response_log_probs(model, rollouts, part)
            if epoch == 0:  # not the sampler's: the ratio starts at exactly 1
                old[part] = log_prob.detach()
            loss = policy_loss(log_prob, advantage[part], coefficient[part], mask[part], N,
                               old[part] if s.epochs > 1 else None, clip)
            if anchor is not None:
                kl = divergence(log_prob, anchor[part], s.kl_kind)
                loss = loss + s.kl * (length_scale[part] * kl * mask[part]).sum() / N
            loss.backward()
            log_prob = log_prob.detach()
            ratio[part] = (log_prob - old[part]).exp()
            sums.append(diagnostics(rollouts, part, loss, log_prob, ratio[part], clip, anchor))
        norm = clip_and_step(optimizer, s.max_grad_norm)
        total = {name: sum(of_part[name] for of_part in sums) for name in sums[0]}
        passes.append(processes.all_reduce_numbers(total) | {"norm": norm})
    metrics = {"N": N, **summary(passes, s.epochs > 1)}
    if with_change:
        new = sum(frozen_log_probs(model, rollouts, part, s.micro_batch) for part in (rows, others))
        columns["change"] = new - old
        size = gradient_size(rollouts.log_prob, rollouts.collision)
        given = coefficient * advantage * mask * size.square()
        metrics |= what_became(columns["change"][own], given[own])
    return metrics, columns


def diagnostics(rollouts: Rollouts, rows: Tensor, loss: Tensor, log_prob: Tensor, ratio: Tensor,
                clip: tuple[float, float], anchor: Tensor | None) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch: how far training's log-probs are from the sampler's
    (rounding, or a mistake), and how many tokens are beyond the bound that holds for them. The KL
    is told as k3, an unbiased estimate, whichever kind the loss has."""
    mask, advantage = rollouts.mask[rows], rollouts.advantage[rows]
    gap = (log_prob - rollouts.log_prob[rows]) * mask
    too_low, too_high = ratio < 1 - clip[0], ratio > 1 + clip[1]
    clipped = torch.where(advantage > 0, too_high, too_low) & (advantage != 0) & mask
    sums = {"loss": loss.detach(), "gap": gap.abs().sum(), "tokens": mask.sum(),
            "ratio": (ratio * mask).sum(), "clipped": clipped.sum()}
    if anchor is not None:
        sums["kl"] = (divergence(log_prob, anchor[rows], "k3") * mask).sum()
    return sums


def summary(passes: list[dict[str, float]], with_ratio: bool) -> Metrics:
    """Loss, norm and gap of the first pass over the batch; ratio, clipping and KL of the last."""
    first, last = passes[0], passes[-1]
    metrics: Metrics = {
        "loss": first["loss"], "gradient_norm": first["norm"],
        "sampler_gap": first["gap"] / first["tokens"], "trained_tokens": first["tokens"]}
    if with_ratio:
        metrics |= {"ratio_mean": last["ratio"] / last["tokens"],
                    "clipped_share": last["clipped"] / last["tokens"],
                    "gradient_norm_last": last["norm"]}
    if "kl" in last:
        metrics["kl"] = last["kl"] / last["tokens"]
    return metrics | {"skipped": None}


def what_became(change: Tensor, given: Tensor) -> Metrics:
    """In all processes: of what pushed tokens up, the share at tokens that fell, and of what pushed
    down at those that rose; the correlation of change and given, A c w m s^2, how each token's own
    gradient would move its log-prob. A count would be of tokens so sure that nothing moves them."""
    d, g = change[given != 0].double(), given[given != 0].double()
    up, down = g.clamp(min=0), -g.clamp(max=0)
    numbers = {"up": up, "fell": up * (d < 0), "down": down, "rose": down * (d > 0),
               "n": torch.ones_like(g), "d": d, "g": g, "dd": d * d, "gg": g * g, "dg": d * g}
    of = processes.all_reduce_numbers({name: values.sum() for name, values in numbers.items()})
    dg, dd, gg = (of[a + b] - of[a] * of[b] / max(of["n"], 1) for a, b in ("dg", "dd", "gg"))
    return {"fell_of_positive": of["fell"] / of["up"] if of["up"] else math.nan,
            "rose_of_negative": of["rose"] / of["down"] if of["down"] else math.nan,
            "change_correlation": dg / math.sqrt(dd * gg) if min(dd, gg) > 0 else math.nan}


def skipped(rollouts: Rollouts) -> Metrics:
    reasons = {"no answer was finished": rollouts.mask,
               "every group's answers had equal rewards": rollouts.advantage}
    reason = next((words for words, tensor in reasons.items() if not tensor.any()),
                  "no token has both a weight and an advantage")
    return {"loss": 0.0, "gradient_norm": None, "sampler_gap": None, "trained_tokens": 0,
            "skipped": reason}
