"""Do gradients become sparse while a model learns? Read off a run that is trained here, or off one that is given.

Three things could be meant. Groups whose answers all got the same reward carry no gradient: their share, and beside it what
to expect with R answers a question, the mean over questions of p^R + (1 - p)^R, without bias from the k right among its G
answers: (C(k, R) + C(G - k, R)) / C(G, R). Tokens that are certain carry none either: 1 - sum p^2 is the expected square of
a log-prob's gradient at the logits. And the gradient of the parameters may have few large entries: Hoyer's sparsity, 0 where
all are equal and 1 where a single one is not 0, of the gradient of whole batches on the same problems, beside that of plain
log-probs, where no reward has any part.
"""
import io
from contextlib import redirect_stdout
from math import comb
from pathlib import Path

import numpy as np
import torch

import train
from analysis.statistics import Estimate, estimate, mean_over
from engine.lab import Lab
from analysis.plots import COLOURS, panels, save
from engine.errors import UserError
from analysis.tables import Table, by_row
from engine.credit_file import read_columns
from engine.run_folder import run_config, step_of
from analysis.runs import credit_steps
from truth.common import QUICK_TOKENS, Flag, Probe, Progress, gradients, sample_batch

FLAGS = {"run": Flag(None, None, "folder of a run to look at; without it one is trained"),
         "steps": Flag(40, 2, "steps of the run that is trained", 2),
         "batch": Flag(16, 2, "questions, and answers to each, in its batches; at checkpoints as many questions, 8 answers at most", 2),
         "batches": Flag(5, 2, "batches at each checkpoint", 2)}
SIZES, WITHOUT, SATURATION, HOYER = (2, 4, 8, 16), "groups without advantage", "mean of 1 - sum p^2", "Hoyer, GRPO"
PLAIN = "Hoyer, log-probs"
DECIDE = (WITHOUT, SATURATION, HOYER)  # what "sparser" could mean


def chance_of_equal(right: int, answers: int, R: int) -> float:
    """That R of these answers, drawn without putting back, are all right or all wrong."""
    return (comb(right, R) + comb(answers - right, R)) / comb(answers, R) if R <= answers else np.nan


def hoyer(x: torch.Tensor) -> float:
    """(sqrt n - l1 / l2) / (sqrt n - 1), Hoyer 2004."""
    root, x = x.numel() ** 0.5, x.double()
    return ((root - x.abs().sum() / x.norm()) / (root - 1)).item()


class StepCounter(io.TextIOBase):
    """What training prints goes nowhere, but its lines tell how far it is."""

    def __init__(self, progress: Progress, steps: int):
        self.progress, self.steps, self.lines = progress, steps, 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        self.progress("training", min(1.0, self.lines / self.steps))
        return len(text)


def check_run(run: str | None) -> None:
    """Before anything is measured."""
    if run is not None:
        run_config(Path(run))
        if len(credit_steps(Path(run))) < 2:
            raise UserError(f"--run {run} has fewer than two credit files")
        if not checkpoints(Path(run)):
            raise UserError(f"--run {run} has no checkpoints, and the model it began with is not there")


def the_run(probe: Probe, progress: Progress) -> Path:
    args, folder = probe.args, probe.folder / "run"
    if args.run is not None:
        return Path(args.run)
    flags = {"model": args.model, "device": args.device, "threads": args.threads, "seed": args.seed, "steps": args.steps, "out": folder,
             "questions": args.batch, "answers": args.batch, "eval_every": 0, "checkpoint_every": (args.steps + 1) // 2}
    flags |= {"max_new_tokens": QUICK_TOKENS} if args.quick else {}
    with redirect_stdout(StepCounter(progress, args.steps)):
        train.main([f"--{name}={value}" for name, value in flags.items()])
    return folder


def measures(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one step's credit file."""
    group, carries = columns["group"], np.logical_or.reduceat(columns["advantage"] != 0, columns["episode_start"])
    answers = np.bincount(group).tolist()
    right = np.bincount(group, columns["reward_answer"] > 0.5).astype(int).tolist()
    expected = {f"expected, R = {R}": float(np.mean([chance_of_equal(k, G, R) for k, G in zip(right, answers)])) for R in SIZES}
    return {"success": float(columns["reward_answer"].mean()), WITHOUT: float((np.bincount(group, carries) == 0).mean()), **expected,
            SATURATION: float((1 - columns["collision"]).mean())}


def thirds(values: np.ndarray) -> tuple[float, float, Estimate]:
    """Means of the first and the last third of the steps, and their difference; steps count as draws around a level."""
    third = max(1, len(values) // 3)
    first, last = values[:third], values[-third:]
    error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / third) if third > 1 else np.nan
    return float(first.mean()), float(last.mean()), estimate(float(last.mean() - first.mean()), float(error), 2 * third - 2)


def verdict(change: Estimate, sign: int = 1) -> str:
    """`sign` is -1 for what becomes smaller as gradients become sparser."""
    low, high = sorted((sign * change.low, sign * change.high))
    if not np.isfinite(low):
        return "too few"
    return "sparser" if low > 0 else "less sparse" if high < 0 else "no change seen"


def checkpoints(run: Path) -> dict[int, Path]:
    """The first, middle and last there are, by step; where the run began counts as step 0."""
    start = Path(run_config(run)["model"])
    found = {0: start} if (start / "config.json").is_file() else {}
    found |= {step_of(path): path for path in run.glob("checkpoints/step_*") if step_of(path) is not None}
    steps = sorted(found)
    return {step: found[step] for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]})} if steps else {}


def batch_sparsity(lab: Lab, batch: int, step: int) -> tuple[float, float]:
    """Hoyer sparsity of the parameters' gradient, of plain GRPO and of the sum of log-probs."""
    rollouts = sample_batch(lab, step, batch, min(8, batch))
    found = gradients(lab, rollouts, {"advantage": rollouts.advantage, "ones": rollouts.mask.float()})
    return hoyer(found["advantage"]), hoyer(found["ones"])


def over_steps(run: Path) -> tuple[Table, list[int], dict[str, np.ndarray]]:
    steps = credit_steps(run)
    each = [measures(read_columns(run, step)) for step in steps]
    series = {name: np.array([values[name] for values in each]) for name in each[0] if np.isfinite(each[0][name])}
    rows = []
    for name, values in series.items():
        first, last, change = thirds(values)
        said = "-" if name == "success" else verdict(change, -1 if name == SATURATION else 1)
        rows.append((name, first, last, change.value, change.interval, said))
    by_name = {row[0]: row for row in rows}
    finding = (f"Over {len(steps)} steps, from the first to the last third: "
               + "; ".join(f"{name} {by_name[name][1]:.2f} to {by_name[name][2]:.2f} ({by_name[name][-1]})" for name in (WITHOUT, SATURATION))
               + f", while success went from {by_name['success'][1]:.0%} to {by_name['success'][2]:.0%}.")
    notes = ["Expected, R: the mean over questions of p^R + (1 - p)^R for the answer's reward, estimated without bias from all its answers. It "
             "is lowest where p is a half: whether it grows over training depends on where success starts and ends.",
             "Intervals: steps as independent draws within a third, of this one run. A larger share, or a smaller 1 - sum p^2, counts as sparser."]
    formats = {"": "", "first third": ".3f", "last third": ".3f", "change": "+.3f", "95%": "+.3f", "it is": ""}
    title = "Sparsity over training: groups and tokens that carry no gradient"
    return Table("sparsity over steps", title, by_row(formats, rows), finding, notes), steps, series


def over_checkpoints(probe: Probe, run: Path, progress: Progress) -> dict[int, np.ndarray]:
    """(batches, 2) Hoyer sparsities by step."""
    args, found, paths = probe.args, {}, checkpoints(run)
    for i, (step, path) in enumerate(paths.items()):
        lab, each = probe.lab(model=str(path)), []
        for j in range(args.batches):
            progress("checkpoints", (i + j / args.batches) / len(paths))
            each.append(batch_sparsity(lab, args.batch, 2001 + j))
        found[step] = np.array(each)
    return found


def hoyer_table(found: dict[int, np.ndarray], args) -> Table:
    first, last, rows = min(found), max(found), []
    for j, name in enumerate((HOYER, PLAIN)):
        change = mean_over(found[last][:, j] - found[first][:, j] if last > first else [])
        rows.append((name, *(mean_over(values[:, j]).value for values in found.values()), change.value, change.interval, verdict(change)))
    finding = "From step {} to {}: {}.".format(first, last, "; ".join(f"{row[0]} {row[1]:.3f} to {row[len(found)]:.3f} ({row[-1]})" for row in rows))
    notes = ["(sqrt n - l1 / l2) / (sqrt n - 1) of all n entries of the gradient (Hoyer 2004): 0 for equal entries, 1 for a single one; "
             f"of Gaussian ones about 0.2. {args.batches} batches of {args.batch} questions x {min(8, args.batch)} answers, the same problems at "
             "each checkpoint; the interval is that of the paired differences."]
    formats = {"": "", **{f"step {step}": ".4f" for step in found}, "change": "+.4f", "95%": "+.4f", "it is": ""}
    return Table("sparsity of the parameters' gradient", "Sparsity over training: the parameters' gradient", by_row(formats, rows), finding, notes)


def draw(steps: list[int], series: dict[str, np.ndarray], hoyers: dict[int, np.ndarray], folder: Path) -> tuple[Path, str]:
    figure, axes = panels(3)
    window = max(1, len(steps) // 10)
    for name, colour in zip((name for name in series if name != SATURATION), COLOURS):
        smooth = np.convolve(series[name], np.ones(window) / window, "valid")
        middle = np.array(steps[:len(smooth)]) + (window - 1) / 2
        axes[0].plot(middle, smooth, color=colour, lw=1.4, ls="--" if name == "success" else "-", label=name)
    ends = {name: "{:.2f} to {:.2f}".format(*thirds(series[name])[:2]) for name in (WITHOUT, SATURATION)}  # first third, last third
    axes[0].set(xlabel="step", ylabel=f"share, mean of {window} steps", ylim=(0, 1), title=f"Groups without advantage: {ends[WITHOUT]}")
    axes[0].legend(ncols=2)
    axes[1].plot(steps, series[SATURATION], color=COLOURS[0], lw=1.2)
    axes[1].set(xlabel="step", ylabel="mean of 1 - sum p^2", ylim=(0, None), title=f"What tokens leave open: {ends[SATURATION]}")
    for j, (name, colour) in enumerate(((HOYER, COLOURS[0]), (f"{PLAIN} without reward", COLOURS[1]))):
        found = [mean_over(values[:, j]) for values in hoyers.values()]
        reach = [e.high - e.value if np.isfinite(e.high) else 0 for e in found]
        axes[2].errorbar(list(hoyers), [e.value for e in found], reach, color=colour, marker="o", ms=3, lw=1.4, capsize=2, label=name)
    axes[2].set(xlabel="step", ylabel="Hoyer sparsity", ylim=(0, 1), title="The gradient of the parameters, 95% intervals over batches")
    axes[2].legend()
    return save(figure, folder, "sparsity", "Do gradients become sparse over training? Groups, tokens, and the gradient of the parameters")


def measure_run(probe: Probe, progress: Progress) -> tuple[list[Table], tuple[Path, str]]:
    progress("training")
    run = the_run(probe, progress)
    table, steps, series = over_steps(run)
    hoyers = over_checkpoints(probe, run, progress)
    return [table, hoyer_table(hoyers, probe.args)], draw(steps, series, hoyers, probe.folder)
