"""The best number to subtract from the reward, beside the group's mean and others.

Let g be the gradient of an answer's log-prob and R its reward. Because E[g] = 0, (R - b) g has the
same expectation for every b that is made without this answer. Its mean square, and with it its
variance, is least at one b* (Greensmith et al. 2004, JMLR 5):

    b* = E[|g|^2 R] / E|g|^2,      b* - E[R] = Cov(|g|^2, R) / E|g|^2
    E|(R - b) g|^2 = E|(R - b*) g|^2 + (b - b*)^2 E|g|^2

So the mean is best exactly where Cov(|g|^2, R) = 0. Advantages that sum to zero only show that the
mean was subtracted, not that it is best.
"""
import numpy as np
import torch

from lab.engine.forward import response_log_probs
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.harness.screen import show_status

MEAN, NONE, BY_LENGTH, BEST, BATCH_MEAN = BASELINES = (
    "the mean of the others (RLOO)", "none", "by length (OPO)", "by |g|^2 (b*)",
    "the mean of other problems (batch mean)")


def squares(policy: Policy, rollouts: Rollouts, advantage: torch.Tensor | None = None
            ) -> np.ndarray:
    """(B,) of each answer |sum_t A_t grad log p(y_t)|^2; by default A is 1, and this is |g|^2."""
    found, parameters = [], list(policy.model.parameters())
    for b in range(len(rollouts.mask)):
        show_status(f"answer {b + 1} of {len(rollouts.mask)}")
        row = torch.tensor([b], device=rollouts.mask.device)
        log_prob = response_log_probs(policy.model, rollouts, row)[0]
        weighted = log_prob if advantage is None else advantage[b] * log_prob
        gradient = torch.autograd.grad(weighted.sum(), parameters)
        found.append(sum(g.double().square().sum().item() for g in gradient))
    return np.array(found)


def best_baseline(reward: np.ndarray, square: np.ndarray,
                  probability: np.ndarray) -> tuple[float, float, float]:
    """b*, the mean, and what the mean costs, as a share of the mean square that b* leaves."""
    mean, of_g = (probability * reward).sum(), (probability * square).sum()
    b = (probability * square * reward).sum() / of_g
    least = (probability * (reward - b) ** 2 * square).sum()
    cost = (mean - b) ** 2 * of_g
    return float(b), float(mean), float(cost / least) if least > 0 else 0.0


def without_own(reward: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(Q, n): the weighted mean of the other answers to the same problem."""
    whole, total = (weight * reward).sum(1, keepdims=True), weight.sum(1, keepdims=True)
    return (whole - weight * reward) / (total - weight)


def baselines(reward: np.ndarray, square: np.ndarray, length: np.ndarray) -> dict[str, np.ndarray]:
    """Baselines (Q, n), each made without the answer that it is subtracted from."""
    Q, n = reward.shape
    of_others = (reward.sum() - reward.sum(1, keepdims=True)) / (Q * n - n)
    found = (without_own(reward, np.ones_like(reward)), np.zeros_like(reward),
             without_own(reward, length), without_own(reward, square),
             np.broadcast_to(of_others, reward.shape))
    return dict(zip(BASELINES, found))


def bandit(logits: list[float], reward: list[float]) -> tuple[float, float, float]:
    """`best_baseline` of a softmax over a few answers, where g is the gradient at the logits:
    |g|^2 = 1 - 2 p + sum p^2."""
    p = np.exp(logits) / np.exp(logits).sum()
    square = 1 - 2 * p + (p ** 2).sum()
    return best_baseline(np.array(reward), square, p)
