"""When is the group's mean the best number to subtract from the reward?

    python -m lab baseline

Let g be the gradient of an answer's log-prob and R its reward. Because E[g] = 0, (R - b) g has the
same expectation for every b that is made without this answer. Its mean square, and with it its
variance, is least at one b* (Greensmith et al. 2004, JMLR 5):

    b* = E[|g|^2 R] / E|g|^2,      b* - E[R] = Cov(|g|^2, R) / E|g|^2
    E|(R - b) g|^2 = E|(R - b*) g|^2 + (b - b*)^2 E|g|^2

So the mean is best exactly where Cov(|g|^2, R) = 0. Elsewhere it adds (E[R] - b*)^2 E|g|^2 to the
variance, which the tables call its cost. Advantages that sum to zero only show that the mean was
subtracted, not that it is best. There are two tables:

    others      the mean square with each of these baselines, all made from other answers: none;
                their mean (RLOO); their mean weighted by length (OPO, arXiv 2505.23585: sum l R /
                sum l); their mean weighted by |g|^2 (b* itself); the mean over the answers to the
                other problems (batch mean)
    conditions  synthetic cases in which all answers are listed, so that all is exact: where is the
                mean best, and what does it cost elsewhere?

The z-score also divides by a number that differs between groups, so it is not only a baseline: it
gives problems different weights. Which answers have large gradients changes during training, so
measure a checkpoint, too.
"""
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.analysis.statistics import jackknife
from lab.analysis.tables import WITH_INTERVAL, Table, by_row
from lab.engine.forward import response_log_probs
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.harness.flags import Flag
from lab.harness.screen import show_status
from lab.probes.common import MODEL_FLAGS, Findings, policy_from_flags, sample_batch

FLAGS = {
    **MODEL_FLAGS,
    "questions": Flag(16, "number of problems", least=2, most=10_000),
    "answers": Flag(32, "answers to each problem", least=3, most=1000)}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy = policy_from_flags(args)
    rollouts = sample_batch(policy, args.questions, args.answers)
    shape = args.questions, args.answers
    square = squares(policy, rollouts).reshape(shape)
    reward = rollouts.reward.double().cpu().numpy().reshape(shape)
    length = rollouts.length.double().cpu().numpy().reshape(shape)
    intro = [f"{policy.folder} gave {args.answers} answers to each of {args.questions} problems. "
             "For each answer, R is its reward, g the gradient of its log-prob, and b a baseline "
             "that is subtracted from R. b* is the baseline with which (R - b) g varies least."]
    return Findings("When is the group's mean the best baseline?", intro,
                    [others_table(reward, square, length), conditions_table()])


def squares(policy: Policy, rollouts: Rollouts) -> np.ndarray:
    """(B,) |g|^2 of each answer."""
    found, parameters = [], list(policy.model.parameters())
    for b in range(len(rollouts.mask)):
        show_status(f"answer {b + 1} of {len(rollouts.mask)}")
        row = torch.tensor([b], device=rollouts.mask.device)
        log_prob = response_log_probs(policy.model, rollouts, row).sum()
        gradient = torch.autograd.grad(log_prob, parameters)
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
    evenly = np.ones_like(reward)
    return {
        "mean of the others (RLOO)": without_own(reward, evenly),
        "none": np.zeros_like(reward),
        "by length (OPO)": without_own(reward, length),
        "by |g|^2 (b*)": without_own(reward, square),
        "mean of other problems (batch mean)": np.broadcast_to(of_others, reward.shape)}


def others_table(reward: np.ndarray, square: np.ndarray, length: np.ndarray) -> Table:
    problem = np.arange(len(reward))
    mean_square = {}  # (problems,) with each baseline
    for name, baseline in baselines(reward, square, length).items():
        mean_square[name] = ((reward - baseline) ** 2 * square).mean(1)
    usual, rows = mean_square["mean of the others (RLOO)"], []
    for name, own in mean_square.items():

        def difference(kept: np.ndarray) -> float:
            return float(own[kept].sum() / usual[kept].sum() - 1)

        change = jackknife(difference, problem)
        rows.append([name, own.mean(), change])
    return Table("others", "The mean square E|(R - b) g|^2 with each baseline b",
                 by_row({"baseline": "", "noise": ".3g", "change": "+.1%"}, rows),
                 "", ["The interval is over problems (jackknife)"],
                 {"noise": "mean square",
                  "change": f"difference from the mean of the others{WITH_INTERVAL}"})


def bandit(logits: list[float], reward: list[float]) -> tuple[float, float, float]:
    """`best_baseline` of a softmax over a few answers, where g is the gradient at the logits:
    |g|^2 = 1 - 2 p + sum p^2."""
    p = np.exp(logits) / np.exp(logits).sum()
    square = 1 - 2 * p + (p ** 2).sum()
    return best_baseline(np.array(reward), square, p)


def conditions_table() -> Table:
    """For two answers, of which one is right with probability p, |g|^2 is 2 (1 - p)^2 and 2 p^2: so
    b* is 1 - p, and it is the mean at p = 1/2 alone."""
    cases = {}  # the logits of the answers, and their rewards
    for p in (0.1, 0.25, 0.5, 0.75, 0.9):
        logits = [np.log(p / (1 - p)), 0.0]
        cases[f"two answers, one right with p = {p:g}"] = logits, [1.0, 0.0]
    cases |= {
        "four answers alike, one right": ([0.0] * 4, [1.0, 0.0, 0.0, 0.0]),
        "all rewards equal": ([2.0, 1.0, 0.0], [0.5, 0.5, 0.5]),
        "of two likely and two rare answers, one each is right": (
            [2.0, 2.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]),
        "the rare one of four is right": ([2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 1.0]),
        "the likely one of four is right": ([2.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0])}
    rows = []
    for name, (logits, reward) in cases.items():
        b, mean, cost = bandit(logits, reward)
        rows.append([name, b, mean, cost])
    return Table("conditions",
                 "Synthetic cases in which all answers are listed: when is the mean best?",
                 by_row({"world": "", "b*": ".3f", "mean": ".3f", "cost": ".1%"}, rows),
                 "The mean is best, and costs nothing, where |g|^2 and R do not vary together.",
                 ["g is the gradient at the logits of a softmax over the answers. Cost: by how "
                  "much the mean square is larger with the mean than with b*"], {"world": "case"})
