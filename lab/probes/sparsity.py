"""Does the gradient become sparse while a model learns?

    python -m lab sparsity --run runs/none-grpo-s0

It has been claimed that GRPO's gradient becomes sparse over training. Three things could be meant,
and each is measured at every checkpoint of a run, on the same problems:

    groups      the share of groups without spread: all their answers got the same reward, so they
                carry no gradient. It is counted in the run's credit files since the checkpoint
                before. Beside it is the share that follows from the success rate p alone: the mean
                over problems of p^R + (1 - p)^R, where R is the run's number of answers to a
                problem. It is estimated without bias from --answers answers (so at least R)
    tokens      the share of tokens with p > 0.99, and the mean of 1 - sum p^2, which is the
                expected square of a log-prob's gradient at the logits
    parameters  Hoyer's sparsity (2004) of the gradient, (sqrt n - l1 / l2) / (sqrt n - 1): 0 where
                all n numbers are equal in size, 1 where all but one are 0, about 0.2 for Gaussian
                ones. It is measured for GRPO's gradient, and for the gradient of the log-probs
                alone, which does not depend on the reward

If gradients become sparse, groups without spread, confident tokens and Hoyer's sparsity grow, and
1 - sum p^2 falls. More groups without spread may only mean that success has passed one half,
because p^R + (1 - p)^R is smallest there.
"""
from dataclasses import replace
from math import comb
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.analysis.shares import jackknife_of_sums
from lab.analysis.statistics import Estimate, estimate
from lab.analysis.tables import Row, Table, by_row
from lab.engine.errors import UserError
from lab.engine.forward import micro_batches, response_log_probs
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.analysis.run_folders import read_columns
from lab.harness.read_record import credit_steps, run_config
from lab.harness.record import checkpoint_folders, find_folder
from lab.harness.flags import Flag
from lab.harness.screen import show_status
from lab.probes.common import MODEL_FLAGS, Findings, policy_from_flags, sample_batch

FLAGS = {
    "run": Flag("runs/none-grpo-s0", "folder of a run that has checkpoints"),
    **{name: flag for name, flag in MODEL_FLAGS.items() if name != "model"},
    "questions": Flag(32, "number of problems, the same at every checkpoint", least=2, most=10_000),
    "answers": Flag(16, "answers to each problem", least=2, most=1000)}
Sums = dict[str, tuple[np.ndarray, np.ndarray]]  # by measure
CONFIDENT = 0.99
MEASURED = ("success", "groups without spread", "of success alone", "p > 0.99", "1 - sum p^2",
            "Hoyer, GRPO", "Hoyer, log-probs")
SPARSER = {  # the measures that would show it, in words, and whether they would grow or fall
    "groups without spread": ("The share of groups without spread", 1),
    "p > 0.99": ("The share of tokens with p > 0.99", 1),
    "1 - sum p^2": ("The mean of 1 - sum p^2", -1),
    "Hoyer, GRPO": ("Hoyer's sparsity of GRPO's gradient", 1)}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    run = Path(args.run)
    models, R = checkpoints(run), int(run_config(run)["answers"])
    if args.answers < R:
        raise UserError(f"--answers {args.answers}: the run has groups of {R} answers, and fewer "
                        "answers say nothing of them")
    rows: list[Row] = []
    of_groups: list[list[bool]] = []
    of_tokens: list[Sums] = []
    before = 0
    for step, model in models.items():
        show_status(f"checkpoint of step {step}")
        policy = policy_from_flags(SimpleNamespace(**{**vars(args), "model": str(model)}))
        rollouts = sample_batch(policy, args.questions, args.answers)
        success, *others = of_checkpoint(policy, rollouts, R)
        of_groups.append(without_spread(run, before, step))
        of_tokens.append(sums_of_problems(rollouts))
        share = float(np.mean(of_groups[-1])) if of_groups[-1] else None
        rows.append([step, success, share, *others])
        before = step
    intro = [f"{run} has groups of {R} answers. At each of its checkpoints, {args.questions} "
             f"problems x {args.answers} answers were sampled."]
    return Findings("Does the gradient become sparse?", intro,
                    [steps_table(rows, changes(of_groups, of_tokens))])


def checkpoints(run: Path) -> dict[int, Path]:
    """The run's models by step; the model that it began with is step 0."""
    start = find_folder(str(run_config(run)["model"]))
    found = checkpoint_folders(run)
    if (start / "config.json").exists():
        found = {0: start, **found}
    if len(found) < 2:
        raise UserError(f"--run {run} has {len(found)} checkpoints, and two are needed")
    return found


def without_spread(run: Path, after: int, until: int) -> list[bool]:
    """Of each group in the credit files of these steps whether it is without spread."""
    flat: list[bool] = []
    for step in credit_steps(run):
        if not after < step <= until:
            continue
        columns = read_columns(run, step)
        for group in np.unique(columns["group"]):
            reward = columns["reward"][columns["group"] == group]
            flat.append(bool(reward.max() == reward.min()))
    return flat


def sums_of_problems(rollouts: Rollouts) -> Sums:
    """For each measure of tokens its sum over those of each problem, and the number of these."""
    problem = rollouts.group[:, None].expand_as(rollouts.mask)[rollouts.mask].cpu().numpy()
    confident = rollouts.log_prob[rollouts.mask].exp() > CONFIDENT
    found = {"p > 0.99": confident, "1 - sum p^2": 1 - rollouts.collision[rollouts.mask]}
    return {name: (np.bincount(problem, values.double().cpu().numpy()), np.bincount(problem))
            for name, values in found.items()}


def changes(of_groups: list[list[bool]], of_tokens: list[Sums]) -> dict[str, Estimate]:
    """How far each measure changed from the first checkpoint to the last, with its interval: over
    groups, or over the problems, which are the same at each checkpoint. Hoyer's sparsity is one
    number of one gradient, so it has no interval."""
    found = {}
    known = [np.array(flat, float) for flat in of_groups if flat]
    if len(known) > 1 and min(len(known[0]), len(known[-1])) > 1:
        first, last = known[0], known[-1]
        error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
        found["groups without spread"] = estimate(last.mean() - first.mean(), error,
                                                  len(first) + len(last) - 2)
    for name, first in of_tokens[0].items():
        sums = [*first, *of_tokens[-1][name]]
        found[name] = jackknife_of_sums(np.arange(len(sums[0])), sums,
                                        lambda x: float(x[2] / x[3] - x[0] / x[1]))
    return found


def of_checkpoint(policy: Policy, rollouts: Rollouts, R: int) -> list[float]:
    """The numbers of MEASURED, without the groups on record."""
    mask, n = rollouts.mask, len(rollouts.mask) // len(rollouts.prompt_ids)
    right = rollouts.scores["answer"].view(-1, n).sum(1).long().tolist()
    alike = [(comb(k, R) + comb(n - k, R)) / comb(n, R) for k in right]
    success = rollouts.scores["answer"].mean().item()
    confident = (rollouts.log_prob[mask].exp() > CONFIDENT).float().mean().item()
    squared_size = (1 - rollouts.collision[mask]).mean().item()
    of_grpo = hoyer_of_gradient(policy, rollouts)
    of_log_probs = hoyer_of_gradient(policy, replace(rollouts, advantage=mask.float()))
    return [success, float(np.mean(alike)), confident, squared_size, of_grpo, of_log_probs]


def hoyer_of_gradient(policy: Policy, rollouts: Rollouts) -> float:
    """Hoyer's sparsity of the gradient of sum_t A_t log p at all parameters; undefined where it is
    0."""
    parameters = list(policy.model.parameters())
    for parameter in parameters:
        parameter.grad = None
    for rows in micro_batches(rollouts, rollouts.rows, policy.settings.micro_batch):
        log_prob = response_log_probs(policy.model, rollouts, rows)
        (rollouts.advantage[rows] * log_prob).sum().backward()
    return hoyer([p.grad for p in parameters if p.grad is not None])


def verdict(change: Estimate | None, sign: int) -> str:
    """The end of a sentence: whether the gradient became sparser, if the interval says it."""
    if change is None or not np.isfinite(change.low):
        return ", which has no interval"
    interval = f" (by {change.value:+.3f}, 95% interval {change.low:+.3f} to {change.high:+.3f})"
    if change.low <= 0 <= change.high:
        return f"{interval}: no difference is seen"
    is_sparser = sign * change.value > 0
    return f"{interval}, so by this measure it became {'sparser' if is_sparser else 'less sparse'}"


def hoyer(parts: list[torch.Tensor]) -> float:
    n = sum(part.numel() for part in parts)
    l1 = sum(part.abs().sum(dtype=torch.float64).item() for part in parts)
    l2 = sum(part.double().square().sum().item() for part in parts) ** 0.5
    if not l2:
        return float("nan")
    return (n ** 0.5 - l1 / l2) / (n ** 0.5 - 1)


def steps_table(rows: list[Row], changed: dict[str, Estimate]) -> Table:
    columns = dict(zip(("step", *MEASURED), zip(*rows)))
    sentences = []
    for name, (in_words, sign) in SPARSER.items():
        known = [value for value in columns[name] if value is not None]
        if len(known) > 1:
            sentences.append(f"{in_words} went from {known[0]:.3f} to {known[-1]:.3f}"
                             f"{verdict(changed.get(name), sign)}.")
    of_success = columns["of success alone"]
    sentences.append("The share of groups without spread that follows from the success rate alone "
                     f"went from {of_success[0]:.3f} to {of_success[-1]:.3f}.")
    formats = {"step": "d", **dict.fromkeys(MEASURED, ".3f")}
    return Table("steps",
                 "Measures of sparsity at each checkpoint",
                 by_row(formats, rows), "\n".join(sentences),
                 ["Groups without spread have equal rewards. They are counted in the run's credit "
                  "files since the checkpoint before. The mean of p^R + (1 - p)^R over problems is "
                  "the share of such groups that follows from the success rate p alone. It comes "
                  "from answers sampled here, and counts only right and wrong. Hoyer's sparsity is "
                  "0 where all numbers of a gradient are equally large, and 1 where all but one "
                  "are 0. All numbers are of this one run"],
                 {"groups without spread": "share of groups without spread",
                  "of success alone": "mean of p^R + (1 - p)^R",
                  "p > 0.99": "share of tokens with p > 0.99",
                  "1 - sum p^2": "mean of 1 - sum p^2",
                  "Hoyer, GRPO": "Hoyer's sparsity, GRPO's gradient",
                  "Hoyer, log-probs": "Hoyer's sparsity, gradient of the log-probs"})
