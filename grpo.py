"""GRPO (2402.03300) in the open: one reward an answer, compared within its group, given to every
token.

    A_i  = (R_i - mean of the group) / (std of the group + 1e-4)
    loss = - sum_it  weight_it * A_it * log pi(y_it | prompt, y_i<t)  / N

N is the number of generated tokens of the whole batch. Start at `policy_loss`: it is the formula,
and it never changes. What goes in changes: the advantage (below it, and in credit/) and the weight
(mitigations.py). `group_z_score` makes the advantage of the formula above, `update` takes the
gradient.

Advantages and weights are made for the whole batch before it is cut into micro-batches, so the size
of a micro-batch changes nothing. With one update a batch, the ratio of new to old probability is
exactly 1 and clipping would do nothing; --epochs above 1 brings in both, ratio and clipping.

Left out: anything asynchronous, so there is no stale policy to correct (--rollouts_every may make
one, and it stays uncorrected). Preference pairs are in credit/preferences.py, critics and Monte
Carlo values in credit/.
"""
from dataclasses import dataclass

import torch

from countdown_task import ANSWER, TAG, THINK
from engine import processes
from engine.forward import frozen_log_probs, micro_batches, response_log_probs
from engine.optimizer import clip_and_step
from engine.registry import advantage
from engine.rollouts import Rollouts
from qwen2_model import Qwen2


def policy_loss(log_prob, advantage, weight, mask, total, old=None, clip=(0.2, 0.28)):
    """The formula at the top of this file, for the rows given; `total` is N of the whole batch.

    `old` are the log-probs from before the batch's first update. With them, the clipped ratio of
    PPO (1707.06347; a wider upper bound as in DAPO, 2503.14476) takes the place of log_prob. At
    ratio 1 its gradient is the same.
    """
    if old is None:
        objective = weight * advantage * log_prob
    else:
        ratio = (log_prob - old).exp()
        clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
        objective = weight * torch.minimum(ratio * advantage, clipped * advantage)
    return -(objective * mask).sum() / total


def group_mean(value: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(B,) -> (B,): for each answer the mean of its group. In float64, because in float32 the mean
    of equal rewards can differ from them in the last digit."""
    count = torch.bincount(group)
    total = torch.zeros_like(count, dtype=torch.float64).index_add(0, group, value.double())
    return (total / count)[group]


def centred(value: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(B,) -> (B,): value minus its group's mean; exactly 0 where a group's values are equal."""
    difference = value.double() - group_mean(value, group)
    return torch.where(difference.abs() < 1e-8, 0.0, difference).float()


def group_z_score(value: torch.Tensor, group: torch.Tensor, epsilon: float = 1e-4) -> torch.Tensor:
    """(B,) -> (B,): (value - mean) / (std + epsilon) in its group, with the std that divides by G;
    exactly 0 where a group's values are equal."""
    difference = value.double() - group_mean(value, group)
    std = group_mean(difference.square(), group).sqrt()
    return torch.where(std < 1e-8, 0.0, difference / (std + epsilon)).float()


def to_every_token(value: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """(B,) -> (B, T): the same number to every token of an answer."""
    return value[:, None] * rollouts.mask


@advantage(whole_answers=True)
def grpo(rollouts: Rollouts) -> torch.Tensor:
    """The z-score of the reward in its group."""
    return to_every_token(group_z_score(rollouts.reward, rollouts.group), rollouts)


@advantage(whole_answers=True)
def dr_grpo(rollouts: Rollouts) -> torch.Tensor:
    """Reward minus the group's mean (2503.20783): no problem counts more than another."""
    return to_every_token(centred(rollouts.reward, rollouts.group), rollouts)


@advantage(whole_answers=True)
def rloo(rollouts: Rollouts) -> torch.Tensor:
    """Reward minus the mean of the others (2402.14740), which is G / (G - 1) (R - mean)."""
    size = torch.bincount(rollouts.group)[rollouts.group]
    return to_every_token(centred(rollouts.reward, rollouts.group) * size / (size - 1), rollouts)


@advantage
def span(rollouts: Rollouts) -> torch.Tensor:
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


def gradient_size(log_prob: torch.Tensor, collision: torch.Tensor) -> torch.Tensor:
    """norm(onehot - p) = sqrt(1 - 2 p + sum p^2): the size of a log-prob's gradient at the logits.

    It lies between 1 - p and sqrt(2) (1 - p), and is clamped to that: where p is near 1, the
    difference of nearly equal numbers above has lost its digits.
    """
    rest = -torch.expm1(log_prob)  # 1 - p
    square = 1 - 2 * log_prob.exp() + collision
    return square.clamp(rest.square(), 2 * rest.square()).sqrt()


def divergence(log_prob: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """KL(policy || reference) at each place, estimated from the token that the policy sampled.

    k2 = d^2 / 2 and k3 = exp(d) - d - 1 with d = reference - log_prob (Schulman, "Approximating
    KL divergence", 2020). As a loss at a fixed prefix k2 has the gradient of KL(policy ||
    reference), k3 that of KL(reference || policy). Neither knows that a token also decides which
    prefixes follow.
    """
    d = reference - log_prob
    return d.exp() - d - 1 if kind == "k3" else d.square() / 2


def answer_shares(rollouts: Rollouts, loss_norm: str, max_new_tokens: int) -> torch.Tensor:
    """(B, 1): a factor for the tokens of each answer, because `policy_loss` divides by N.

    token      1: every token counts 1 / N
    sequence   every answer counts the same, each of its tokens 1 / (answers * length)
    constant   every token counts 1 / (B * max_new_tokens), however long the answers are
    """
    N, length = rollouts.mask.sum(), rollouts.length[:, None]
    if loss_norm == "sequence":
        answers = (length > 0).sum()
        return torch.where(length > 0, N / (answers * length.clamp(min=1)), 0.0)
    share = N / (len(length) * max_new_tokens) if loss_norm == "constant" else 1.0
    return share * torch.ones_like(length).float()


@dataclass
class BatchLoss:
    """Everything in the loss of a batch except the log-probs."""
    settings: object
    mask: torch.Tensor                      # (B, T)
    advantage: torch.Tensor                 # (B, T)
    weight: torch.Tensor                    # (B, T) times answer_shares
    total: int                              # N
    share: torch.Tensor                     # (B, 1) answer_shares, for the KL term
    old: torch.Tensor | None = None         # (B, T) log-probs before the first of several updates
    ratio: torch.Tensor | None = None       # (B, T) new to old probability at the last update
    reference: torch.Tensor | None = None   # (B, T) log-probs of the initial model, with --kl

    def of(self, log_prob: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The part of the loss that these rows make up; the parts of all micro-batches add up."""
        s, mask = self.settings, self.mask[rows]
        old = None if self.old is None else self.old[rows]
        loss = policy_loss(log_prob, self.advantage[rows], self.weight[rows], mask, self.total, old,
                           (s.clip_low, s.clip_high))
        if self.reference is not None:
            apart = divergence(log_prob, self.reference[rows], s.kl_kind)
            loss = loss + s.kl * (self.share[rows] * apart * mask).sum() / self.total
        return loss

    def diagnostics(self, log_prob: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sums over these rows' tokens: of k3, of the ratio, of tokens beyond a clipping bound."""
        s, mask, advantage = self.settings, self.mask[rows], self.advantage[rows]
        sums = {}
        if self.reference is not None:
            sums["kl"] = (divergence(log_prob, self.reference[rows], "k3") * mask).sum()
        if self.old is not None:
            ratio = (log_prob - self.old[rows]).exp()
            too_high, too_low = ratio > 1 + s.clip_high, ratio < 1 - s.clip_low
            clipped = torch.where(advantage > 0, too_high, too_low) & (advantage != 0) & mask
            sums |= {"ratio": (ratio * mask).sum(), "clipped": clipped.sum()}
        return sums


def update(model: Qwen2, optimizer, rollouts: Rollouts, weight: torch.Tensor, s,
           reference: Qwen2 | None = None, ratio: torch.Tensor | None = None) -> dict:
    """One step of the optimizer on the whole batch, or with --epochs several; `s` are the settings.
    Returns the numbers worth watching. Into `ratio` (B, T), where given, goes the ratio of new to
    old probability at the last step.

    Answers whose every token has weight times advantage 0 add nothing to the gradient and are not
    computed, unless there is a KL term; they still count in N. When no answer is left, nothing is
    changed.
    """
    credit = (weight * rollouts.advantage * rollouts.mask).abs().sum(1)  # (B,)
    credit = credit + s.kl * rollouts.length  # with a KL term every token pulls
    if not credit.any():
        return skipped(why_nothing_is_left(rollouts, weight))
    rows = rollouts.own_rows()
    rows = rows[credit[rows] != 0]
    share = answer_shares(rollouts, s.loss_norm, s.max_new_tokens)
    total = int(rollouts.mask.sum())
    loss = BatchLoss(s, rollouts.mask, rollouts.advantage, weight * share, total, share,
                     ratio=ratio)
    if s.epochs > 1:
        loss.old = torch.zeros_like(weight)  # the first pass fills it
    if s.kl:
        loss.reference = frozen_log_probs(reference, rollouts, rows, s.micro_batch)
    passes = []
    for epoch in range(s.epochs):
        passes.append(one_pass(model, optimizer, rollouts, rows, loss, is_first=epoch == 0))
    return summary(passes, loss)


# what a pass adds up over its tokens; "ordered" is of pairs (credit/preferences.py)
SUMS = ("loss", "gap", "tokens", "kl", "ratio", "clipped", "ordered")


def one_pass(model: Qwen2, optimizer, rollouts: Rollouts, rows: torch.Tensor, loss: BatchLoss,
             is_first: bool) -> dict:
    """The gradient of the whole batch, one micro-batch after another, and a step along it."""
    sums = dict.fromkeys(SUMS, 0)
    optimizer.zero_grad()
    for part in micro_batches(rollouts, rows, loss.settings.micro_batch):
        log_prob = response_log_probs(model, rollouts, part)
        if is_first and loss.old is not None:
            loss.old[part] = log_prob.detach()  # not the sampler's: the ratio starts at exactly 1
        part_loss = loss.of(log_prob, part)
        part_loss.backward()
        log_prob = log_prob.detach()
        if loss.ratio is not None:
            loss.ratio[part] = (log_prob - loss.old[part]).exp()
        add_to(sums, rollouts, part, part_loss, log_prob, loss.diagnostics(log_prob, part))
    return step_along(optimizer, sums, loss.settings.max_grad_norm)


def add_to(sums: dict, rollouts: Rollouts, rows, loss, log_prob, diagnostics: dict) -> None:
    """Add the numbers of a micro-batch to the sums of the pass."""
    # how far the training forward pass is from what the sampler computed: rounding, or a mistake
    gap = (log_prob - rollouts.log_prob[rows]) * rollouts.mask[rows]
    measured = {"loss": loss.detach(), "gap": gap.abs().sum(), "tokens": rollouts.mask[rows].sum()}
    for name, value in {**measured, **diagnostics}.items():
        sums[name] = sums[name] + value


def step_along(optimizer, sums: dict, max_grad_norm: float) -> dict:
    """Clip the gradient and step. Returns the sums over all processes, and the gradient's norm."""
    norm = clip_and_step(optimizer, max_grad_norm)
    return processes.all_reduce_numbers(sums) | {"norm": norm}


def summary(passes: list[dict], loss: BatchLoss | None = None) -> dict:
    """Loss, gradient norm and gap of the first pass over the batch; ratio, clipping and KL of the
    last."""
    first, last = passes[0], passes[-1]
    numbers = {"loss": first["loss"], "gradient_norm": first["norm"],
               "sampler_gap": first["gap"] / first["tokens"], "trained_tokens": first["tokens"]}
    if loss is not None and loss.old is not None:
        numbers |= {"ratio_mean": last["ratio"] / last["tokens"],
                    "clipped_share": last["clipped"] / last["tokens"],
                    "gradient_norm_last": last["norm"]}
    if loss is not None and loss.reference is not None:
        numbers["kl"] = last["kl"] / last["tokens"]
    return {**numbers, "skipped": None}


def skipped(reason: str) -> dict:
    return {"loss": 0.0, "gradient_norm": None, "sampler_gap": None, "trained_tokens": 0,
            "skipped": reason}


def why_nothing_is_left(rollouts: Rollouts, weight: torch.Tensor) -> str:
    if not rollouts.mask.any():
        return "no answer was finished"
    if not rollouts.advantage.any():
        return "every group's answers had equal rewards"
    if not (weight * rollouts.mask).any():
        return "all weights are 0"
    return "no token has both a weight and an advantage"
