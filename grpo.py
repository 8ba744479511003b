"""GRPO (2402.03300) in the open: one reward an answer, compared within its group, given to every token.

    A_i   = (R_i - mean of the group) / (std of the group + 1e-4)
    loss  = - sum over answers i and tokens t of  weight_it * A_it * log pi(y_it | prompt, y_i<t)  / N

N is the number of response tokens of the whole batch. Advantages and weights are computed for the whole
batch before it is cut into micro-batches, so their size changes nothing. With one update a batch the ratio
of new to old probability is exactly 1 and clipping would do nothing; --epochs above 1 brings both in.

The baselines that need more than the rewards (a critic, Monte Carlo values) are in critic.py, the ways to
choose the weights in mitigations.py. Left out: anything asynchronous, so there is no stale policy to correct.
"""
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine import processes as ranks
from countdown_task import ANSWER, TAG, THINK
from qwen2_model import Qwen2
from engine.forward import micro_batches, response_log_probs
from engine.rollouts import Rollouts


def group_mean(value: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(B,) -> (B,): the mean of each one's group. In float32 the mean of equal rewards can be off by a bit."""
    count, value = torch.bincount(group), value.double()
    return (torch.zeros_like(count, dtype=value.dtype).index_add(0, group, value) / count)[group]


def group_z_score(value: torch.Tensor, group: torch.Tensor, epsilon: float = 1e-4) -> torch.Tensor:
    """(B,) -> (B,), with the population's spread. A group whose values are all equal gets exactly 0."""
    centred = value.double() - group_mean(value, group)
    std = group_mean(centred.square(), group).sqrt()
    return torch.where(std < 1e-8, 0.0, centred / (std + epsilon)).float()


def grpo(rollouts: Rollouts) -> torch.Tensor:
    """z-score in the group"""
    return spread(group_z_score(rollouts.reward, rollouts.group), rollouts)


def dr_grpo(rollouts: Rollouts) -> torch.Tensor:
    """Reward minus the group's mean (2503.20783): without the division no question counts more than another."""
    return spread(centred(rollouts.reward, rollouts.group), rollouts)


def rloo(rollouts: Rollouts) -> torch.Tensor:
    """Reward minus the mean of the others (2402.14740), which is G/(G-1) (R - mean)."""
    size = torch.bincount(rollouts.group)[rollouts.group]
    return spread(centred(rollouts.reward, rollouts.group) * size / (size - 1), rollouts)


def span(rollouts: Rollouts) -> torch.Tensor:
    """Each part of the score (0 to 1) minus its group's mean, given to its own span: format to tags, reasoning (a process
    reward) to think tokens, the answer to answer tokens. Biased for think tokens: the answer they lead to
    is not theirs. Other tokens, the end of turn say, get 0."""
    advantage = torch.zeros_like(rollouts.log_prob)
    places = {"format": rollouts.kind == TAG, "reasoning": rollouts.section == THINK, "answer": rollouts.section == ANSWER}
    for part, place in places.items():
        advantage += spread(centred(rollouts.scores[part], rollouts.group), rollouts) * place
    return advantage


def centred(value: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    difference = value.double() - group_mean(value, group)
    return torch.where(difference.abs() < 1e-8, 0.0, difference).float()


def spread(value: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """(B,) -> (B, T): the same number to every token of an answer."""
    return value[:, None] * rollouts.mask


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "span": span}
WHOLE_ANSWERS = ("grpo", "dr_grpo", "rloo")  # the same advantage for every token of an answer


def shuffled_advantage(rollouts: Rollouts, whole_answers: bool) -> torch.Tensor:
    """The placebo: within each group, another answer's advantage. Where the tokens of an answer may differ, the
    advantages of the group's tokens change places instead."""
    advantage, mask, result = rollouts.advantage, rollouts.mask, torch.zeros_like(rollouts.advantage)
    for g in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == g).nonzero().squeeze(1)
        order = torch.randperm(len(rows) if whole_answers else int(mask[rows].sum()), generator=rollouts.generator).to(rows.device)
        if whole_answers:
            result[rows] = advantage[rows[order], :1] * mask[rows]
        else:
            result[rows] = torch.zeros_like(result[rows]).masked_scatter(mask[rows], advantage[rows][mask[rows]][order])
    return result


def gradient_size(log_prob: torch.Tensor, collision: torch.Tensor) -> torch.Tensor:
    """norm(onehot - p) = sqrt(1 - 2 p + sum p^2): the size of a log-prob's gradient at the logits.
    It lies between 1 - p and sqrt(2) (1 - p); the plain form loses its digits where p is near 1."""
    rest = -torch.expm1(log_prob)
    return (1 - 2 * log_prob.exp() + collision).clamp(rest.square(), 2 * rest.square()).sqrt()


def policy_loss(log_prob, advantage, weight, mask, total: float, old=None, clip=(0.2, 0.28)) -> torch.Tensor:
    """The formula at the top of this file, for the rows given; `total` is N of the whole batch.

    With `old`, the log-probs from before the batch's first update, the clipped ratio of PPO (1707.06347; a
    wider upper bound as in DAPO, 2503.14476) takes the place of log_prob. At ratio 1 its gradient is the same.
    """
    if old is None:
        objective = weight * advantage * log_prob
    else:
        ratio = (log_prob - old).exp()
        objective = weight * torch.minimum(ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
    return -(objective * mask).sum() / total


SUMS = ("loss", "gap", "tokens", "kl", "ratio", "clipped", "ordered")  # what the passes over a batch count


def divergence(log_prob: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Per token, of pi from the reference, estimated at the token that pi sampled (Schulman's k2 and k3).

    As a loss at a fixed prefix k2 has the gradient of KL(pi || ref) and k3 that of KL(ref || pi). Neither
    knows that a token also decides which prefixes come after it.
    """
    d = reference - log_prob
    return d.exp() - d - 1 if kind == "k3" else d.square() / 2


def answer_shares(rollouts: Rollouts, kind: str, max_new_tokens: int) -> torch.Tensor:
    """(B, 1): what an answer's tokens count for, relative to 1 / N each.

    token: 1. sequence: every answer the same, its tokens 1 / length. constant: 1 / (B * max_new_tokens),
    which nothing sampled has any part in.
    """
    N, length = rollouts.mask.sum(), rollouts.length[:, None]
    if kind == "sequence":
        return torch.where(length > 0, N / ((length > 0).sum() * length.clamp(min=1)), 0.0)
    return N / (len(length) * max_new_tokens) * torch.ones_like(length) if kind == "constant" else torch.ones_like(length).float()


@dataclass
class Terms:
    """What the loss of a batch is made of; all but the two numbers are (B, T) or (B, 1)."""
    mask: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    share: torch.Tensor                   # answer_shares
    total: int                            # N
    old: torch.Tensor | None = None       # log-probs before the first update, when there are several
    reference: torch.Tensor | None = None  # log-probs of the initial model, when it holds the policy back

    def loss(self, log_prob: torch.Tensor, rows: torch.Tensor, s) -> torch.Tensor:
        mask, weight, share = self.mask[rows], self.weight[rows], self.share[rows]
        old = None if self.old is None else self.old[rows]
        loss = policy_loss(log_prob, self.advantage[rows], weight * share, mask, self.total, old, (s.clip_low, s.clip_high))
        if self.reference is not None:
            apart = divergence(log_prob, self.reference[rows], s.kl_kind)
            loss = loss + s.kl * (share * apart * mask).sum() / self.total
        return loss

    def measure(self, log_prob: torch.Tensor, rows: torch.Tensor, s) -> dict[str, torch.Tensor]:
        """Sums over these rows' tokens: of k3, of the ratio, and of tokens beyond a clipping bound."""
        mask, sums = self.mask[rows], {}
        if self.reference is not None:
            sums["kl"] = (divergence(log_prob, self.reference[rows], "k3") * mask).sum()
        if self.old is not None:
            ratio, up = (log_prob - self.old[rows]).exp(), self.advantage[rows] > 0
            beyond = torch.where(up, ratio > 1 + s.clip_high, ratio < 1 - s.clip_low) & (self.advantage[rows] != 0)
            sums |= {"ratio": (ratio * mask).sum(), "clipped": (beyond & mask).sum()}
        return sums


def update(model: Qwen2, optimizer, rollouts: Rollouts, weight, s, reference: Qwen2 | None = None) -> dict:
    """One optimizer step on the whole batch, or with s.epochs several; the numbers worth watching come back.

    Answers whose every token has weight times advantage 0 add nothing to the gradient and are not computed;
    they still count in N. When no answer is left, or a gradient is not finite, nothing is changed.
    """
    credit = (weight * rollouts.advantage * rollouts.mask).abs().sum(1) + s.kl * rollouts.length
    if not credit.any():
        return skipped(why_nothing_is_left(rollouts, weight))
    own = rollouts.rows_of(ranks.share(len(rollouts.prompt_ids)))
    rows = own[credit[own] != 0]
    share = answer_shares(rollouts, s.loss_norm, s.max_new_tokens)
    terms = Terms(rollouts.mask, rollouts.advantage, weight, share, int(rollouts.mask.sum()))
    terms.old = torch.zeros_like(weight) if s.epochs > 1 else None
    terms.reference = frozen_log_probs(reference, rollouts, rows, s.micro_batch) if s.kl else None
    passes = []
    for epoch in range(s.epochs):
        passes.append(one_pass(model, optimizer, rollouts, rows, terms, s, epoch == 0))
        if not np.isfinite(passes[-1]["norm"]):
            break
    return report(passes, terms)


def one_pass(model, optimizer, rollouts, rows, terms: Terms, s, first: bool) -> dict[str, float]:
    """The gradient of the whole batch, one micro-batch after another, and a step along it."""
    sums = Counter()
    optimizer.zero_grad(set_to_none=True)
    for part in micro_batches(rollouts, rows, s.micro_batch):
        log_prob = response_log_probs(model, rollouts, part)
        if first and terms.old is not None:
            terms.old[part] = log_prob.detach()  # the training forward's own: the ratio starts at exactly 1
        loss = terms.loss(log_prob, part, s)
        loss.backward()
        gap = (log_prob.detach() - rollouts.log_prob[part]) * rollouts.mask[part]
        measured = {"loss": loss, "gap": gap.abs().sum(), "tokens": rollouts.mask[part].sum(), **terms.measure(log_prob.detach(), part, s)}
        sums.update({name: value.detach() for name, value in measured.items()})
    return over_all_ranks(sums) | {"norm": clip_and_step(optimizer, s.max_grad_norm)}


def over_all_ranks(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of a rank without answers, too."""
    numbers = torch.tensor([float(sums.get(name, 0)) for name in SUMS], dtype=torch.float64)
    ranks.add_up(numbers)
    return dict(zip(SUMS, numbers.tolist()))


def report(passes: list[dict[str, float]], terms: Terms | None = None) -> dict:
    """Loss, gradient norm and sampler gap of the first pass over the batch; ratio, clipping and KL of the last."""
    first, last = passes[0], passes[-1]
    found = {"loss": first["loss"], "gradient_norm": first["norm"], "sampler_gap": first["gap"] / first["tokens"],
             "trained_tokens": first["tokens"]}
    if terms is not None and terms.old is not None:
        found |= {"ratio_mean": last["ratio"] / last["tokens"], "clipped_share": last["clipped"] / last["tokens"],
                  "gradient_norm_last": last["norm"]}
    if terms is not None and terms.reference is not None:
        found["kl"] = last["kl"] / last["tokens"]
    if np.isfinite(last["norm"]):
        return {**found, "skipped": None}
    return {**found, "skipped": ("" if len(passes) == 1 else f"from pass {len(passes)} on, ") + "the gradient was not finite"}


def skipped(reason: str) -> dict:
    return {"loss": 0.0, "gradient_norm": None, "sampler_gap": None, "trained_tokens": 0, "skipped": reason}


def why_nothing_is_left(rollouts: Rollouts, weight: torch.Tensor) -> str:
    if not rollouts.mask.any():
        return "no answer was finished"
    if not rollouts.advantage.any():
        return "every group's answers had equal rewards"
    return "no token has both a weight and an advantage" if (weight * rollouts.mask).any() else "all weights are 0"


@torch.no_grad()
def frozen_log_probs(model: Qwen2, rollouts: Rollouts, rows: torch.Tensor, micro_batch: int) -> torch.Tensor:
    """(B, T), 0 in other rows."""
    log_prob = torch.zeros_like(rollouts.log_prob)
    for part in micro_batches(rollouts, rows, micro_batch):
        log_prob[part] = response_log_probs(model, rollouts, part)
    return log_prob


def clip_and_step(optimizer, max_grad_norm: float) -> float:
    """Of the gradient over all ranks the norm before clipping. One that is not finite changes nothing."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if ranks.count() > 1:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        ranks.add_up(*(p.grad for p in parameters))
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf")).item()
    if np.isfinite(norm):
        optimizer.step()
    return norm


def best_and_worst(rollouts: Rollouts) -> torch.Tensor:
    """(pairs, 2) rows: the first best and the first worst answer of each group whose rewards differ."""
    pairs = []
    for g in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == g).nonzero().squeeze(1)
        reward = rollouts.reward[rows]
        if reward.max() > reward.min():
            pairs.append(rows[torch.stack([reward.argmax(), reward.argmin()])])
    return torch.stack(pairs) if pairs else torch.zeros(0, 2, dtype=torch.long)


def update_preferences(model: Qwen2, optimizer, rollouts: Rollouts, s, reference: Qwen2) -> tuple[dict, torch.Tensor]:
    """DPO (2305.18290) on pairs from the batch:  - log sigmoid(beta (margin of the better - margin of the worse)),
    an answer's margin being its log-prob minus that under the initial model, summed over its tokens.

    Its gradient is the policy loss's with an advantage of its own, +-N beta sigmoid(-beta * difference) / pairs,
    the same for every token of an answer. That is what comes back, for the record, from before the update.
    """
    pairs, implied = best_and_worst(rollouts), torch.zeros_like(rollouts.log_prob)
    if not len(pairs):
        return skipped("every group's answers had equal rewards"), implied
    own, count = pairs[torch.isin(pairs[:, 0], rollouts.rows_of(ranks.share(len(rollouts.prompt_ids))))], len(pairs)
    anchor = frozen_log_probs(reference, rollouts, own.flatten(), s.micro_batch)
    passes = []
    for epoch in range(s.epochs):
        passes.append(one_preference_pass(model, optimizer, rollouts, own, count, anchor, s, implied if epoch == 0 else None))
        if not np.isfinite(passes[-1]["norm"]):
            break
    ranks.add_up(implied)
    return {**report(passes), "pairs": count, "pairs_in_order": passes[-1]["ordered"] / count}, implied


def one_preference_pass(model, optimizer, rollouts, pairs, count: int, anchor, s, implied: torch.Tensor | None) -> dict[str, float]:
    """Some pairs after another, of `count` over all ranks, and a step. `implied` is filled with the advantage that has the same gradient."""
    sums = Counter()
    optimizer.zero_grad(set_to_none=True)
    for part in micro_batches(rollouts, pairs, max(1, s.micro_batch // 2)):
        rows = part.flatten()
        log_prob = response_log_probs(model, rollouts, rows)
        margin = (log_prob - anchor[rows]).sum(1).view(-1, 2)  # (pairs, better and worse)
        difference = s.dpo_beta * (margin[:, 0] - margin[:, 1])
        loss = -F.logsigmoid(difference).sum() / count
        loss.backward()
        mask = rollouts.mask[rows]
        if implied is not None:
            pull = s.dpo_beta * torch.sigmoid(-difference.detach()) * rollouts.mask.sum() / count
            implied[rows] = torch.stack([pull, -pull], 1).view(-1, 1) * mask
        gap = (log_prob.detach() - rollouts.log_prob[rows]) * mask
        measured = {"loss": loss, "gap": gap.abs().sum(), "tokens": mask.sum(), "ordered": (difference > 0).sum()}
        sums.update({name: value.detach() for name, value in measured.items()})
    return over_all_ranks(sums) | {"norm": clip_and_step(optimizer, s.max_grad_norm)}
