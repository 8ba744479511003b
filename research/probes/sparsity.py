"""Do gradients become sparse while a model learns?

Question. It has been claimed that GRPO's gradient becomes sparse over training. Three things could
be meant, and each is measured on a run, from what it left behind:

    groups       Groups whose answers all got the same reward carry no gradient: their share.
    tokens       Tokens that the model is certain of carry none: 1 - sum p^2 is the expected square
                 of the gradient of a log-prob at the logits.
    parameters   The gradient of the parameters may have few large entries: Hoyer's sparsity
                 (2004), (sqrt n - l1 / l2) / (sqrt n - 1), is 0 where all n are equal, 1 where a
                 single one is not 0, and about 0.2 for Gaussian ones.

Measurement. Groups and tokens come from the run's credit files, its first third beside its last;
Hoyer's sparsity from batches at the model it began with and at its last checkpoint. Beside GRPO's
gradient stands that of plain log-probs, which knows no reward.

Reading it. If gradients become sparse, the first and the third grow over the run and the second
falls. With success p and R answers, p^R + (1 - p)^R of the groups have equal answers, least where p
is a half: that this share grows may only say that success has passed the half.
"""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import Estimate, estimate, mean_over, verdicts
from analysis.tables import Table, by_row
from harness.credit_file import checkpoint_folders
from harness.credit_reading import credit_steps, read_columns
from engine.errors import UserError
from harness.flags import Flag
from harness.files import is_file
from harness.identity import run_config
from research.probes.common import COMMON, OF_A_MODEL, Findings, Probe, gradients, sample_batch
from research.probes.progress import Progress

FLAGS = {
    "device": OF_A_MODEL["device"],
    **COMMON,
    "run": Flag("runs/none-grpo-s0", "folder of a run with two credit files and a checkpoint"),
    "batch": Flag(16, "problems in a batch, and answers to each, 8 at most", least=2, most=1000,
                  quick=2),
    "batches": Flag(5, "batches at each checkpoint", least=2, most=10_000, quick=2)}
WITHOUT, SATURATION = "groups without advantage", "mean of 1 - sum p^2"
HOYER, PLAIN = "Hoyer, GRPO", "Hoyer, log-probs"


def measure(probe: Probe) -> Findings:
    run = Path(probe.args.run)
    paths = checkpoints(run)
    steps = credit_steps(run)
    if len(steps) < 2:
        raise UserError(f"--run {run} has fewer than two credit files")
    progress = Progress(credit_files=1, checkpoints=6 * probe.args.batches)
    progress("credit_files")
    measures = [step_measures(read_columns(run, step)) for step in steps]
    series = {name: np.array([of_step[name] for of_step in measures]) for name in measures[0]}
    hoyers = {}
    for i, (step, path) in enumerate(paths.items()):
        progress("checkpoints", i / len(paths))
        hoyers[step] = hoyer_of_batches(probe, path)
    intro = [f"{run}: {len(steps)} steps with a credit file, checkpoints of the steps "
             f"{' and '.join(map(str, paths))}."]
    return Findings("Does the gradient become sparse?", intro, [changes_table(series, hoyers)],
                    None, "some minutes")


def checkpoints(run: Path) -> dict[int, Path]:
    """By step the first and the last; the model the run began with is step 0."""
    start = Path(run_config(run)["model"])
    paths = {0: start} if is_file(start / "config.json") else {}
    paths |= checkpoint_folders(run)
    if not paths:
        raise UserError(f"--run {run} has no checkpoints, and the model it began with is not there")
    return {step: paths[step] for step in sorted({min(paths), max(paths)})}


def step_measures(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one step's credit file."""
    carries = np.logical_or.reduceat(columns["advantage"] != 0, columns["episode_start"])
    carrying = np.bincount(columns["group"], carries)
    return {"success": float(columns["reward_answer"].mean()),
            WITHOUT: float((carrying == 0).mean()),
            SATURATION: float((1 - columns["collision"]).mean())}


def hoyer_of_batches(probe: Probe, model: Path) -> np.ndarray:
    """(batches, 2): of GRPO's gradient and of plain log-probs'; the same problems for any model."""
    args = SimpleNamespace(**vars(probe.args), model=str(model))
    policy, of_batches = replace(probe, args=args).policy(), []
    for j in range(args.batches):
        rollouts = sample_batch(policy, 2001 + j, args.batch, min(8, args.batch))
        coefficients = {HOYER: rollouts.advantage, PLAIN: rollouts.mask.float()}
        of_batch = gradients(policy, rollouts, coefficients)
        of_batches.append([hoyer(of_batch[HOYER]), hoyer(of_batch[PLAIN])])
    return np.array(of_batches)


def hoyer(x: torch.Tensor) -> float:
    root, x = x.numel() ** 0.5, x.double()
    return ((root - x.abs().sum() / x.norm()) / (root - 1)).item()


def thirds(values: np.ndarray) -> tuple[float, float, Estimate]:
    """Means of the first and the last third of the steps, and their difference.

    The steps of a third count as independent draws around one level.
    """
    third = max(1, len(values) // 3)
    first, last = values[:third], values[-third:]
    error = np.nan
    if third > 1:
        error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / third)
    change = float(last.mean() - first.mean())
    return float(first.mean()), float(last.mean()), estimate(change, float(error), 2 * third - 2)


def changes_table(series: dict[str, np.ndarray], hoyers: dict[int, np.ndarray]) -> Table:
    measured = {name: thirds(values) for name, values in series.items()}
    first, last = hoyers[min(hoyers)], hoyers[max(hoyers)]
    for j, name in enumerate((HOYER, PLAIN)):
        change = mean_over(last[:, j] - first[:, j] if len(hoyers) > 1 else [])
        measured[name] = mean_over(first[:, j]).value, mean_over(last[:, j]).value, change
    rows = []
    for name, (before, after, change) in measured.items():
        words = ("less sparse", "sparser") if name == SATURATION else ("sparser", "less sparse")
        [word] = verdicts([change], words, null=0.0) if name != "success" else "-"
        rows.append((name, before, after, change.value, change.interval, word))
    lines = [f"{name}: {before:.3f} to {after:.3f}, {word}."
             for name, before, after, _, _, word in rows[1:]]
    formats = {"": "", "first": ".4f", "last": ".4f", "change": "+.4f", "95%": "+.4f", "it is": ""}
    headings = {"": "measure", "first": "at first", "last": "at last", "95%": "95% interval",
                "it is": "verdict"}
    notes = ["Means of the first and the last third of the steps, their intervals with steps as "
             "independent draws. Hoyer: at the first and the last checkpoint, paired over batches "
             "of the same problems. All is about this one run."]
    return Table("sparsity over steps", "From the beginning to the end of the run",
                 by_row(formats, rows), "\n".join(lines), notes, headings)
