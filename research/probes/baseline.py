"""When is the group's mean the best number to subtract from the reward?

    python -m research baseline

Let g be the gradient of an answer's log-prob and R its reward. E[g] = 0, so (R - b) g has the same
expectation for every b that is made without this answer. Its noise is least at one b* (Greensmith
et al. 2004, JMLR 5):

    b* = E[|g|^2 R] / E|g|^2,      b* - E[R] = Cov(|g|^2, R) / E|g|^2
    E|(R - b) g|^2 = E|(R - b*) g|^2 + (b - b*)^2 E|g|^2

So the mean is best exactly where Cov(|g|^2, R) = 0, and costs (E[R] - b*)^2 E|g|^2 elsewhere. That
advantages sum to zero says that the mean was subtracted, not that it is best. Three tables:

    problems    b* beside the mean, and what the mean costs, of each problem's answers
    others      the noise of estimators made from the other answers: none, their mean (RLOO), by
                length (OPO, 2505.23585: sum l R / sum l), by |g|^2 (b* itself), the mean of the
                other problems' answers (batch mean)
    conditions  listed worlds, exact: where is the mean best, and what does it cost elsewhere?

The z-score divides by a number that differs between groups: it weights problems anew and is no
baseline. Which answers have large gradients changes while a model learns, so ask of a checkpoint,
too.
"""
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.tables import Table, by_row
from engine.forward import response_log_probs
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.flags import Flag
from research.probes.common import (OF_A_MODEL, Findings, Progress, jackknifed, policy_of,
                                    sample_batch)

FLAGS = {
    **OF_A_MODEL,
    "questions": Flag(16, "problems", least=2, most=10_000),
    "answers": Flag(32, "answers to each of them", least=3, most=1000)}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy, progress = policy_of(args), Progress(gradients=1)
    rollouts = sample_batch(policy, args.questions, args.answers)
    shape = args.questions, args.answers
    square = squares(policy, rollouts, progress).reshape(shape)
    reward, length = (values.double().cpu().numpy().reshape(shape)
                      for values in (rollouts.reward, rollouts.length))
    intro = [f"{policy.folder}: {args.questions} problems x {args.answers} answers."]
    return Findings("When is the group's mean the best baseline?", intro,
                    [others_table(reward, square, length), problems_table(reward, square),
                     conditions_table()])


def squares(policy: Policy, rollouts: Rollouts, progress: Progress) -> np.ndarray:
    """(B,): |g|^2 of each answer."""
    found, parameters = [], list(policy.model.parameters())
    for b in range(len(rollouts.mask)):
        progress("gradients", b / len(rollouts.mask))
        row = torch.tensor([b], device=rollouts.mask.device)
        log_prob = response_log_probs(policy.model, rollouts, row).sum()
        found.append(sum(g.double().square().sum().item()
                         for g in torch.autograd.grad(log_prob, parameters)))
    return np.array(found)


def best(reward: np.ndarray, square: np.ndarray, chance: np.ndarray) -> tuple[float, float, float]:
    """b*, the mean, and what the mean costs over what b* leaves: a share."""
    mean, of_g = (chance * reward).sum(), (chance * square).sum()
    b = (chance * square * reward).sum() / of_g
    least = (chance * (reward - b) ** 2 * square).sum()
    cost = (mean - b) ** 2 * of_g
    return float(b), float(mean), float(cost / least) if least > 0 else 0.0


def problems_table(reward: np.ndarray, square: np.ndarray) -> Table:
    rows = []
    for number, (R, g) in enumerate(zip(reward, square), 1):
        with np.errstate(invalid="ignore", divide="ignore"):
            rows.append([number, *best(R, g, np.full(len(R), 1 / len(R))),
                         float(np.corrcoef(R, g)[0, 1])])
    higher = sum(row[1] > row[2] for row in rows)
    return Table("problems", "b* beside the mean, by problem",
                 by_row({"problem": "d", "b*": ".3f", "mean": ".3f", "cost": ".1%",
                         "correlation": "+.2f"}, rows),
                 f"b* is above the mean in {higher} of {len(rows)} problems.",
                 ["cost: what the mean adds to the noise that b* leaves, on the answers that both "
                  "were made from, so b* looks too good; correlation: of |g|^2 and R"])


def without_own(reward: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(Q, n): the weighted mean of the other answers to the same problem."""
    whole, total = (weight * reward).sum(1, keepdims=True), weight.sum(1, keepdims=True)
    return (whole - weight * reward) / (total - weight)


def estimators(reward: np.ndarray, square: np.ndarray, length: np.ndarray) -> dict[str, np.ndarray]:
    """Baselines (Q, n), each made without the answer that it is subtracted from."""
    Q, n = reward.shape
    of_others = (reward.sum() - reward.sum(1, keepdims=True)) / (Q * n - n)
    return {"mean of the others (RLOO)": without_own(reward, np.ones_like(reward)),
            "none": np.zeros_like(reward),
            "by length (OPO)": without_own(reward, length),
            "by |g|^2 (b*)": without_own(reward, square),
            "mean of other problems (batch mean)": np.broadcast_to(of_others, reward.shape)}


def others_table(reward: np.ndarray, square: np.ndarray, length: np.ndarray) -> Table:
    problem = np.arange(len(reward))
    noise = {name: ((reward - baseline) ** 2 * square).mean(1)
             for name, baseline in estimators(reward, square, length).items()}
    plain, rows, lines = noise["mean of the others (RLOO)"], [], []
    for name, moment in noise.items():
        change = jackknifed(lambda kept: moment[kept].sum() / plain[kept].sum() - 1, problem)
        rows.append([name, moment.mean(), change.value, change.interval])
        if moment is not plain:
            lines.append(f"{name}: {change.value:+.1%} ({change.low:+.1%} to {change.high:+.1%}) "
                         "of the noise of the mean of the others.")
    return Table("others", "Noise E|(R - b) g|^2 of each baseline",
                 by_row({"baseline": "", "noise": ".3g", "change": "+.1%", "95%": "+.1%"}, rows),
                 "\n".join(lines), ["interval: over problems (jackknife)"],
                 {"change": "beside the mean of the others", "95%": "95% interval"})


def bandit(logits: list[float], reward: list[float]) -> tuple[float, float, float]:
    """Softmax over a few answers, g the gradient at the logits: |g|^2 = 1 - 2 p + sum p^2."""
    p = np.exp(logits) / np.exp(logits).sum()
    return best(np.array(reward), 1 - 2 * p + (p ** 2).sum(), p)


def conditions_table() -> Table:
    """Two answers, of which one is right with chance p: |g|^2 is 2 (1 - p)^2 and 2 p^2, so b* is
    1 - p and only p = 1/2 makes it the mean."""
    worlds = {f"two answers, one right with p = {p:g}": ([np.log(p / (1 - p)), 0.0], [1.0, 0.0])
              for p in (0.1, 0.25, 0.5, 0.75, 0.9)}
    worlds |= {
        "four answers alike, one right": ([0.0] * 4, [1.0, 0.0, 0.0, 0.0]),
        "all rewards equal": ([2.0, 1.0, 0.0], [0.5, 0.5, 0.5]),
        "right and wrong alike: each a likely and a rare answer": (
            [2.0, 2.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]),
        "the rare one of four is right": ([2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 1.0]),
        "the likely one of four is right": ([2.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0])}
    rows = [[name, *bandit(*world)] for name, world in worlds.items()]
    is_best = [row[0] for row in rows if abs(row[1] - row[2]) < 1e-9]
    return Table("conditions", "Worlds that can be listed: when is the mean best?",
                 by_row({"world": "", "b*": ".3f", "mean": ".3f", "cost": ".1%"}, rows),
                 f"The mean is best where |g|^2 and R do not vary together: {'; '.join(is_best)}.",
                 ["g at the logits of a softmax over the answers; cost: over what b* leaves"])
