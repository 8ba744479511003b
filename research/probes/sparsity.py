"""Does the gradient become sparse while a model learns?

    python -m research sparsity --run runs/none-grpo-s0

It has been claimed that GRPO's gradient becomes sparse over training. Three things could be meant,
and each is measured at every checkpoint of a run, on the same problems:

    groups      those whose answers all got the same reward carry no gradient: their share in the
                run's credit files since the checkpoint before. Beside it what success alone makes
                of it: the mean over problems of p^R + (1 - p)^R, R the run's answers to a problem,
                unbiased from --answers answers to each (so at least R of them)
    tokens      the share with p > 0.99, and the mean of 1 - sum p^2, the expected square of a
                log-prob's gradient at the logits
    parameters  Hoyer's sparsity (2004) of the gradient, (sqrt n - l1 / l2) / (sqrt n - 1): 0 where
                all n numbers are equal in size, 1 where one is not 0, about 0.2 for Gaussian ones.
                Of GRPO's gradient, and of that of plain log-probs, which knows no reward

If gradients become sparse, groups without spread, sure tokens and Hoyer's sparsity grow, and
1 - sum p^2 falls. That groups without spread become more may only say that success has passed a
half: p^R + (1 - p)^R is least there.
"""
from dataclasses import replace
from math import comb
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.tables import Table, by_row
from engine.errors import UserError
from engine.forward import micro_batches, response_log_probs
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.record import (checkpoint_folders, credit_steps, find_folder, read_columns, run_config)
from harness.flags import Flag
from research.probes.common import OF_A_MODEL, Findings, Progress, policy_of, sample_batch

FLAGS = {
    "run": Flag("runs/none-grpo-s0", "folder of a run with checkpoints"),
    **{name: flag for name, flag in OF_A_MODEL.items() if name != "model"},
    "questions": Flag(32, "problems, the same at every checkpoint", least=2, most=10_000),
    "answers": Flag(16, "answers to each of them", least=2, most=1000)}
SURE = 0.99
NAMES = ("success", "groups without spread", "of success alone", "p > 0.99", "1 - sum p^2",
         "Hoyer, GRPO", "Hoyer, log-probs")
SPARSER = {"groups without spread": 1, "p > 0.99": 1, "1 - sum p^2": -1, "Hoyer, GRPO": 1}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    run = Path(args.run)
    models, R = checkpoints(run), int(run_config(run)["answers"])
    if args.answers < R:
        raise UserError(f"--answers {args.answers}: the run has groups of {R}, fewer say nothing "
                        "of them")
    progress, rows, before = Progress(checkpoints=len(models)), [], 0
    for number, (step, model) in enumerate(models.items()):
        progress("checkpoints", number / len(models))
        policy = policy_of(SimpleNamespace(**{**vars(args), "model": str(model)}))
        rollouts = sample_batch(policy, args.questions, args.answers)
        rows.append([step, *of_checkpoint(policy, rollouts, R)])
        rows[-1].insert(2, share_without_spread(run, before, step))
        before = step
    intro = [f"{run}: groups of {R}; at each checkpoint {args.questions} problems x "
             f"{args.answers} answers."]
    return Findings("Does the gradient become sparse?", intro, [steps_table(rows)])


def checkpoints(run: Path) -> dict[int, Path]:
    """By step; the model that the run began with is step 0."""
    model = str(run_config(run)["model"])
    start = find_folder(model) if (find_folder(model) / "config.json").exists() else None
    found = ({0: start} if start else {}) | checkpoint_folders(run)
    if len(found) < 2:
        raise UserError(f"--run {run} has {len(found)} checkpoints, two are needed")
    return found


def share_without_spread(run: Path, after: int, until: int) -> float | None:
    """Of the groups in the credit files of these steps."""
    flat: list[bool] = []
    for step in (step for step in credit_steps(run) if after < step <= until):
        columns = read_columns(run, step)
        for group in np.unique(columns["group"]):
            reward = columns["reward"][columns["group"] == group]
            flat.append(bool(reward.max() == reward.min()))
    return float(np.mean(flat)) if flat else None


def of_checkpoint(policy: Policy, rollouts: Rollouts, R: int) -> list[float]:
    """The numbers of NAMES, but the groups on record."""
    mask, n = rollouts.mask, len(rollouts.mask) // len(rollouts.prompt_ids)
    right = rollouts.scores["answer"].view(-1, n).sum(1).long().tolist()
    alike = [(comb(k, R) + comb(n - k, R)) / comb(n, R) for k in right]
    return [rollouts.scores["answer"].mean().item(), float(np.mean(alike)),
            (rollouts.log_prob[mask].exp() > SURE).float().mean().item(),
            (1 - rollouts.collision[mask]).mean().item(),
            hoyer_of_gradient(policy, rollouts),
            hoyer_of_gradient(policy, replace(rollouts, advantage=mask.float()))]


def hoyer_of_gradient(policy: Policy, rollouts: Rollouts) -> float:
    """Of the gradient of sum_t A_t log p, at all parameters; undefined where it is 0."""
    parameters = list(policy.model.parameters())
    for parameter in parameters:
        parameter.grad = None
    for rows in micro_batches(rollouts, rollouts.rows_of_rank(), policy.settings.micro_batch):
        log_prob = response_log_probs(policy.model, rollouts, rows)
        (rollouts.advantage[rows] * log_prob).sum().backward()
    return hoyer([p.grad for p in parameters if p.grad is not None])


def hoyer(parts: list[torch.Tensor]) -> float:
    n = sum(part.numel() for part in parts)
    l1 = sum(part.abs().sum(dtype=torch.float64).item() for part in parts)
    l2 = sum(part.double().square().sum().item() for part in parts) ** 0.5
    return (n ** 0.5 - l1 / l2) / (n ** 0.5 - 1) if l2 else float("nan")


def steps_table(rows: list[list]) -> Table:
    formats = {"step": "d", **dict.fromkeys(NAMES, ".3f")}
    places = {name: place for place, name in enumerate(formats)}
    first, last, lines = rows[0], rows[-1], []
    for name, sign in SPARSER.items():
        known = [row[places[name]] for row in rows if row[places[name]] is not None]
        if len(known) > 1:
            word = "sparser" if sign * (known[-1] - known[0]) > 0 else "not sparser"
            lines.append(f"{name}: {known[0]:.3f} to {known[-1]:.3f}, {word}.")
    lines.append(f"of success alone: {first[places['of success alone']]:.3f} to "
                 f"{last[places['of success alone']]:.3f}.")
    return Table("steps", "At each checkpoint", by_row(formats, rows), "\n".join(lines),
                 ["groups without spread: in the run's credit files since the checkpoint before, "
                  "by the whole reward; of success alone: by right or wrong, from the answers "
                  "sampled here. All is of this one run"],
                 {"of success alone": "mean of p^R + (1 - p)^R"})
