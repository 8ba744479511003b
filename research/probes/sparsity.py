"""Do gradients become sparse while a model learns? Measured on a run, trained here or given.

Three things could be meant, and each is measured:

    groups       Groups whose answers all got the same reward carry no gradient: their share.
    tokens       Tokens that the model is certain of carry none: 1 - sum p^2 is the expected square
                 of the gradient of a log-prob at the logits.
    parameters   The gradient of the parameters may have few large entries: Hoyer's sparsity, 0
                 where all are equal and 1 where a single one is not 0. Beside GRPO's gradient
                 stands that of plain log-probs, which knows no reward.

If gradients become sparse, the first and the third grow over the run and the second falls. For the
groups there is something to compare with: with success p and R answers, p^R + (1 - p)^R of them
have equal answers. From k right ones among G answers (C(k, R) + C(G - k, R)) / C(G, R) estimates
this without bias.
"""
import io
from contextlib import redirect_stdout
from math import comb
from pathlib import Path

import numpy as np
import torch

import train
from analysis.plots import COLOURS, panels, save, whole_steps
from analysis.statistics import Estimate, estimate, mean_over
from analysis.tables import Table, by_row
from engine.credit_file import credit_steps
from engine.credit_file import read_columns
from engine.errors import UserError
from engine.flags import Flag
from engine.lab import Lab
from engine.progress import Progress
from engine.run_folder import run_config, step_of
from research.probes.common import QUICK_TOKENS, Probe, gradients, sample_batch
from research.probes.pictures import legend_under

FLAGS = {
    "run": Flag(None, "folder of a run to look at; without it one is trained"),
    "steps": Flag(40, "steps of the run that is trained", least=2, most=1_000_000, quick=2),
    "batch": Flag(16, "problems, and answers to each, in its batches; at checkpoints as many "
                      "problems, 8 answers at most", least=2, most=1000, quick=2),
    "batches": Flag(5, "batches at each checkpoint", least=2, most=10_000, quick=2)}
SIZES = (2, 4, 8, 16)
WITHOUT, SATURATION = "groups without advantage", "mean of 1 - sum p^2"
HOYER, PLAIN = "Hoyer, GRPO", "Hoyer, log-probs"
DECIDE = (WITHOUT, SATURATION, HOYER)  # what "sparser" could mean


def measure_run(probe: Probe, progress: Progress) -> tuple[list[Table], tuple[Path, str]]:
    progress("training")
    run = find_or_train(probe, progress)
    steps, series = series_of(run)
    hoyers = hoyer_at_checkpoints(probe, run, progress)
    tables = [steps_table(series), hoyer_table(hoyers, probe.args)]
    return tables, draw(steps, series, hoyers, probe.folder)


def check_run(run: str | None) -> None:
    """Refuse a run that cannot be measured, before anything is."""
    if run is None:
        return
    run_config(Path(run))
    if len(credit_steps(Path(run))) < 2:
        raise UserError(f"--run {run} has fewer than two credit files")
    if not checkpoints(Path(run)):
        raise UserError(f"--run {run} has no checkpoints, and the model it began with is not there")


def find_or_train(probe: Probe, progress: Progress) -> Path:
    args, folder = probe.args, probe.folder / "run"
    if args.run is not None:
        return Path(args.run)
    flags = {"model": args.model, "device": args.device, "threads": args.threads,
             "seed": args.seed, "steps": args.steps, "out": folder, "questions": args.batch,
             "answers": args.batch, "eval_every": 0, "checkpoint_every": (args.steps + 1) // 2}
    if args.quick:
        flags["max_new_tokens"] = QUICK_TOKENS
    with redirect_stdout(StepCounter(progress, args.steps)):
        train.main([f"--{name}={value}" for name, value in flags.items()])
    return folder


class StepCounter(io.TextIOBase):
    """Swallow what training prints and count its lines, which tell how far it is."""

    def __init__(self, progress: Progress, steps: int):
        self.progress, self.steps, self.lines = progress, steps, 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        self.progress("training", min(1.0, self.lines / self.steps))
        return len(text)


def series_of(run: Path) -> tuple[list[int], dict[str, np.ndarray]]:
    """The steps, and each measure at all of them."""
    steps = credit_steps(run)
    of_steps = [step_measures(read_columns(run, step)) for step in steps]
    names = [name for name, value in of_steps[0].items() if np.isfinite(value)]
    return steps, {name: np.array([measures[name] for measures in of_steps]) for name in names}


def step_measures(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one step's credit file."""
    group, is_right = columns["group"], columns["reward_answer"] > 0.5
    carries = np.logical_or.reduceat(columns["advantage"] != 0, columns["episode_start"])
    carrying = np.bincount(group, carries)
    answers = np.bincount(group).tolist()
    right = np.bincount(group, is_right).astype(int).tolist()
    measures = {"success": float(columns["reward_answer"].mean()),
                WITHOUT: float((carrying == 0).mean())}
    for R in SIZES:
        chances = [chance_of_equal(k, G, R) for k, G in zip(right, answers)]
        measures[f"expected, R = {R}"] = float(np.mean(chances))
    measures[SATURATION] = float((1 - columns["collision"]).mean())
    return measures


def chance_of_equal(right: int, answers: int, R: int) -> float:
    """That R of these answers, drawn without putting back, are all right or all wrong."""
    if R > answers:
        return np.nan
    return (comb(right, R) + comb(answers - right, R)) / comb(answers, R)


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


def verdict(change: Estimate, sign: int = 1) -> str:
    """`sign` is -1 for what becomes smaller as gradients become sparser."""
    low, high = sorted((sign * change.low, sign * change.high))
    if not np.isfinite(low):
        return "too few"
    if low > 0:
        return "sparser"
    return "less sparse" if high < 0 else "no change seen"


def checkpoints(run: Path) -> dict[int, Path]:
    """By step the first, the middle and the last; the model the run began with is step 0."""
    start, paths = Path(run_config(run)["model"]), {}
    if (start / "config.json").is_file():
        paths[0] = start
    for path in run.glob("checkpoints/step_*"):
        if step_of(path) is not None:
            paths[step_of(path)] = path
    steps = sorted(paths)
    if not steps:
        return {}
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    return {step: paths[step] for step in chosen}


def hoyer_at_checkpoints(probe: Probe, run: Path, progress: Progress) -> dict[int, np.ndarray]:
    """(batches, 2) sparsities by step: of GRPO's gradient and of plain log-probs'."""
    args, paths, hoyers = probe.args, checkpoints(run), {}
    for i, (step, path) in enumerate(paths.items()):
        lab, of_batches = probe.lab(model=str(path)), []
        for j in range(args.batches):
            progress("checkpoints", (i + j / args.batches) / len(paths))
            of_batches.append(batch_sparsity(lab, args.batch, 2001 + j))
        hoyers[step] = np.array(of_batches)
    return hoyers


def batch_sparsity(lab: Lab, batch: int, step: int) -> tuple[float, float]:
    rollouts = sample_batch(lab, step, batch, min(8, batch))
    coefficients = {"advantage": rollouts.advantage, "ones": rollouts.mask.float()}
    gradient = gradients(lab, rollouts, coefficients)
    return hoyer(gradient["advantage"]), hoyer(gradient["ones"])


def hoyer(x: torch.Tensor) -> float:
    """(sqrt n - l1 / l2) / (sqrt n - 1), Hoyer 2004."""
    root, x = x.numel() ** 0.5, x.double()
    return ((root - x.abs().sum() / x.norm()) / (root - 1)).item()


def steps_table(series: dict[str, np.ndarray]) -> Table:
    rows = []
    for name, values in series.items():
        first, last, change = thirds(values)
        sign = -1 if name == SATURATION else 1
        word = "-" if name == "success" else verdict(change, sign)
        rows.append((name, first, last, change.value, change.interval, word))
    formats = {"": "", "first third": ".3f", "last third": ".3f", "change": "+.3f",
               "95%": "+.3f", "it is": ""}
    notes = ["Expected, R: the mean over problems of p^R + (1 - p)^R for the answer's reward, "
             "estimated without bias from all its answers. It is lowest where p is a half: whether "
             "it grows over training depends on where success starts and ends.",
             "Intervals: steps as independent draws within a third, of this one run. A larger "
             "share, or a smaller 1 - sum p^2, counts as sparser."]
    title = "Sparsity over training: groups and tokens that carry no gradient"
    headings = {"": "measure", "95%": "95% interval", "it is": "verdict"}
    return Table("sparsity over steps", title, by_row(formats, rows), notes=notes,
                 headings=headings)


def hoyer_table(hoyers: dict[int, np.ndarray], args) -> Table:
    first, last, rows = min(hoyers), max(hoyers), []
    for j, name in enumerate((HOYER, PLAIN)):
        change = mean_over(hoyers[last][:, j] - hoyers[first][:, j] if last > first else [])
        at_steps = [mean_over(values[:, j]).value for values in hoyers.values()]
        rows.append((name, *at_steps, change.value, change.interval, verdict(change)))
    formats = {"": "", **{f"step {step}": ".4f" for step in hoyers}, "change": "+.4f",
               "95%": "+.4f", "it is": ""}
    notes = ["(sqrt n - l1 / l2) / (sqrt n - 1) of all n entries of the gradient (Hoyer 2004): 0 "
             "for equal entries, 1 for a single one; of Gaussian ones about 0.2. "
             f"{args.batches} batches of {args.batch} problems x {min(8, args.batch)} answers, "
             "the same problems at each checkpoint; the interval is that of the paired "
             "differences."]
    return Table("sparsity of the parameters' gradient",
                 "Sparsity over training: the parameters' gradient", by_row(formats, rows),
                 notes=notes, headings={"": "gradient", "95%": "95% interval", "it is": "verdict"})


def draw(steps: list[int], series: dict[str, np.ndarray], hoyers: dict[int, np.ndarray],
         folder: Path) -> tuple[Path, str]:
    figure, (groups, tokens, parameters) = panels(3)
    first_to_last = {name: "{:.2f} to {:.2f}".format(*thirds(series[name])[:2])
                     for name in (WITHOUT, SATURATION)}
    draw_groups(groups, steps, series)
    groups.set(title=f"Groups without advantage: {first_to_last[WITHOUT]}")
    tokens.plot(steps, series[SATURATION], color=COLOURS[0], lw=1.2)
    most = series[SATURATION].max()
    tokens.set(xlabel="step", ylabel="mean of 1 - sum p^2", ylim=(0, 1.1 * most),
               title=f"What tokens leave open: {first_to_last[SATURATION]}")
    draw_hoyers(parameters, hoyers)
    whole_steps(groups, tokens, parameters)
    return save(figure, folder, "sparsity", "Do gradients become sparse over training? Groups, "
                                            "tokens, and the gradient of the parameters")


def draw_groups(axis, steps: list[int], series: dict[str, np.ndarray]) -> None:
    window = max(1, len(steps) // 10)
    names = [name for name in series if name != SATURATION]
    for name, colour in zip(names, COLOURS):
        smooth = np.convolve(series[name], np.ones(window) / window, "valid")
        middle = np.array(steps[:len(smooth)]) + (window - 1) / 2
        style = "--" if name == "success" else "-"
        axis.plot(middle, smooth, color=colour, lw=1.4, ls=style, label=name)
    mean = f", mean of {window} steps" if window > 1 else ""
    axis.set(xlabel="step", ylabel=f"share{mean}", ylim=(0, 1))
    legend_under(axis, ncols=2)


def draw_hoyers(axis, hoyers: dict[int, np.ndarray]) -> None:
    for j, name in enumerate((HOYER, f"{PLAIN} without reward")):
        estimates = [mean_over(values[:, j]) for values in hoyers.values()]
        reach = [e.high - e.value if np.isfinite(e.high) else 0 for e in estimates]
        axis.errorbar(list(hoyers), [e.value for e in estimates], reach, color=COLOURS[j],
                      marker="o", ms=3, lw=1.4, capsize=2, label=name)
    axis.set(xlabel="step", ylabel="Hoyer sparsity", ylim=(0, 1),
             title="The gradient of the parameters, 95% intervals over batches")
    legend_under(axis)
