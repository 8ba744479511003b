"""Direction and noise of the gradient with each choice of price.py, in a task whose answers are all
listed, so that both are exact.

The cosine is that of the mean gradient with the true one: the gradient of the success of the
answers that are sampled. The noise is the variance over the squared signal. For a KL term by
itself, the true gradient is that of KL(policy || reference); the reference is here the policy at
temperature 1.5, which is less sure.
"""
from collections import defaultdict
from dataclasses import dataclass, replace
from math import nan

import torch
from torch import Tensor

from analysis.tables import Row, Table, by_row
from research.probes.common import Findings
from research.probes.enumerated import Batches, EnumeratedTask, estimator, make_enumerated

POLICIES, ANSWERS, LENGTH = 10, 4, 4
REFERENCE = 1.5  # temperature
ROUNDED = 1e6  # with more noise than this the mean gradient is 0, but for the rounding of float32


@dataclass(frozen=True)
class Sampler:
    """A way of sampling, and so of computing log-probs: at a temperature, from the likeliest."""
    temperature: float = 1.0
    top_k: int = 3  # of the three tokens that there are

    def log_prob(self, task: EnumeratedTask) -> Tensor:
        """(choices,) the log-prob of each choice after its prefix; -inf if it is not drawn."""
        plain = log_prob_of_choices(task)
        result = torch.full_like(plain, -torch.inf)
        for choices in siblings(task):
            kept = choices[plain[choices].argsort(descending=True)[:self.top_k]]
            result[kept] = (plain[kept] / self.temperature).log_softmax(0)
        return result

    def score(self, task: EnumeratedTask) -> Tensor:
        """(choices, P) the gradient of these log-probs. A score is the gradient of a logit, but for
        a vector that all choices after a prefix share, and this cancels here."""
        p = self.log_prob(task).exp()
        score = task.score.clone()
        for choices in siblings(task):
            score[choices] -= p[choices] @ task.score[choices]
        return score / self.temperature

    def task(self, task: EnumeratedTask) -> EnumeratedTask:
        """The task with the answers' probabilities, scores and true gradient that this gives."""
        mask = task.rollouts.mask
        log_prob = self.log_prob(task)[task.node].masked_fill(~mask, 0).sum(1)
        changed = replace(task, probability=log_prob.exp(), score=self.score(task))
        return replace(changed, gradient=weighted_gradient(changed, task.rollouts.reward.double()))


def log_prob_of_choices(task: EnumeratedTask) -> Tensor:
    """(choices,) the log-prob of each choice after its prefix, from the answers that go through
    it."""
    mass = torch.zeros(len(task.score), dtype=torch.float64)
    mask = task.rollouts.mask
    mass.index_add_(0, task.node[mask], task.probability[:, None].expand(mask.shape)[mask].double())
    result = mass.log()
    for choices in siblings(task):
        result[choices] -= mass[choices].sum().log()
    return result


def siblings(task: EnumeratedTask) -> list[Tensor]:
    """The choices after each prefix."""
    after: dict[int, set[int]] = defaultdict(set)
    for nodes, kept in zip(task.node.tolist(), task.rollouts.mask.tolist()):
        before = -1
        for node, is_token in zip(nodes, kept):
            if is_token:
                after[before].add(node)
                before = node
    return [torch.tensor(sorted(nodes)) for nodes in after.values()]


def weighted_gradient(task: EnumeratedTask, value: Tensor) -> Tensor:
    """(P,) the gradient of the mean of `value` (answers,), which itself is kept fixed."""
    mask = task.rollouts.mask.double()
    total = (mask[..., None] * task.score[task.node]).sum(1)  # (answers, P)
    return (task.probability * value) @ total


def exact_findings() -> Findings:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in range(1, POLICIES + 1):
        for name, numbers in of_policy(make_enumerated(seed, LENGTH)).items():
            found[name].append(numbers)
    rows: list[Row] = []
    for name, pairs in found.items():
        cosine, noise = torch.tensor(pairs, dtype=torch.float64).nanmedian(0).values.tolist()
        known = cosine == cosine  # of some policies
        rows.append([name, cosine, noise] if known else [name, None, None])
    table = Table("exact", f"Medians of {POLICIES} policies, groups of {ANSWERS} answers",
                  by_row({"choice": "", "cosine": ".4f", "noise": ".2f"}, rows), "",
                  ["Without a number: the mean gradient is 0. Where only two tokens are drawn, "
                   "policies that then never answer right are left out"])
    return Findings("Direction and noise of each choice", [], [table])


def of_policy(task: EnumeratedTask) -> dict[str, tuple[float, float]]:
    """(cosine, noise) of each choice."""
    found = {}
    batches = Batches.all(task, ANSWERS)
    for name, factor in choices_of(task, batches).items():
        found[name] = against(task, batches, factor, task.gradient)
    for name, sampler in {"0.8": Sampler(.8), "top-k 2": Sampler(top_k=2)}.items():
        own = sampler.task(task)
        drawn = Batches.all(own, ANSWERS)
        factor = choices_of(own, drawn)[PLAIN]
        found[f"sampled and trained at {name}"] = against(own, drawn, factor, own.gradient)
        found[f"sampled at {name}, trained at 1 on all tokens"] = against(
            replace(own, score=task.score), drawn, factor, own.gradient)
    kl = true_kl_gradient(task)
    for name, factor in kl_terms(task, batches).items():
        found[f"KL by itself, {name}"] = against(task, batches, factor, -kl)
    return found


def against(task: EnumeratedTask, batches: Batches, factor: Tensor,
            true: Tensor) -> tuple[float, float]:
    if not true.any():  # no answer that is drawn is right, or all are
        return nan, nan
    numbers = estimator(task, batches, factor).against(true)
    if numbers["noise"] > ROUNDED:
        return nan, nan
    return numbers["cosine"], numbers["noise"]


def reference_minus_own(task: EnumeratedTask) -> Tensor:
    """(answers, T) d: log-prob of the reference minus that of the policy."""
    d = Sampler(REFERENCE).log_prob(task) - log_prob_of_choices(task)
    return d[task.node].masked_fill(~task.rollouts.mask, 0)


def true_kl_gradient(task: EnumeratedTask) -> Tensor:
    """(P,) the gradient of KL(policy || reference), a mean of -d, in which the gradient of -d
    itself has the mean 0."""
    return weighted_gradient(task, -reference_minus_own(task).sum(1))


def kl_terms(task: EnumeratedTask, batches: Batches) -> dict[str, Tensor]:
    """(M, G, T) the factor of each token's gradient in a loss that is a KL term alone."""
    d, mask = reference_minus_own(task)[batches.which], task.rollouts.mask[batches.which]
    return {"k1": -mask.double(), "k2": d * mask, "k3": torch.expm1(d) * mask,
            "k1 in the reward": d.sum(2, keepdim=True) * mask}


PLAIN = "z, token (plain GRPO)"


def choices_of(task: EnumeratedTask, batches: Batches) -> dict[str, Tensor]:
    """(M, G, T) the factor of each token's gradient, by choice, for all groups of answers."""
    rollouts, which = task.rollouts, batches.which
    mask = rollouts.mask[which].double()                             # (M, G, T)
    length = mask.sum(2, keepdim=True)                               # (M, G, 1)
    reward = rollouts.reward.double()[which][..., None]              # (M, G, 1)
    above = reward - reward.mean(1, keepdim=True)
    z_score = above / (reward.std(1, keepdim=True, correction=0) + 1e-4)
    by_token = mask / length.sum(1, keepdim=True)
    place = torch.arange(mask.shape[2])
    is_end = (place == length - 1) & rollouts.finished[which][..., None]
    return {"mean, sum": above * mask,
            "mean, token": above * by_token,
            "mean, answer": above * mask / length,
            "z, sum": z_score * mask,
            PLAIN: z_score * by_token,
            "z, answer": z_score * mask / length,
            "z, token, its end untrained": z_score * by_token * ~is_end,
            "no baseline, token": reward * by_token}
