"""The picture of several arms: how they learned."""
from pathlib import Path

import numpy as np

from analysis.arms import Comparison
from analysis.plots import COLOURS, legend_below, panels, save, whole_steps
from analysis.runs import evaluations
from analysis.statistics import mean_reach

Picture = tuple[Path, str]  # path and caption
WINDOW = 5                  # steps whose mean is a point of a curve, but in a short run
LINES = ("-", "--", ":", "-.")


def learning_curves(comparison: Comparison, folder: Path) -> Picture:
    figure, (left, middle, right) = panels(3, figsize=(14, 4.4))
    shown = [run for name in comparison.arms for run in comparison.shown(name)]
    is_short = min(len(run["metrics"]) for run in shown) < 2 * WINDOW
    window, apart = 1 if is_short else WINDOW, 0.012 * shown[0]["config"]["steps"]
    for number, name in enumerate(comparison.arms):
        line = LINES[number // len(COLOURS) % len(LINES)]
        style = {"color": COLOURS[number % len(COLOURS)], "ls": line}
        runs = comparison.shown(name)
        band(left, runs, "success", style, window, label=label_of(comparison, name))
        held_out_means(middle, runs, style, number * apart)
        band(right, runs, "gradient_norm", style, window)
    smooth = f", mean of {window} steps" if window > 1 else ""
    left.set(xlabel="step", ylabel="success in training batches", ylim=(0, 1),
             title=f"Success while training{smooth}")
    middle.set(xlabel="step", ylabel="share of held-out problems solved", ylim=(0, 1),
               title="Held-out success, sampled")
    right.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log",
              title=f"Gradient norm{smooth}")
    norms = [line["gradient_norm"] for run in shown for line in run["metrics"]]
    if any(norms):  # intervals of two seeds would reach over many powers of ten
        norms = list(filter(None, norms))
        right.set_ylim(min(norms) / 2, max(norms) * 2)
    whole_steps(left, middle, right)
    legend_below(figure, left, ncols=min(3, len(comparison.arms)))
    return save(figure, folder, "learning_curves",
                "Means over the runs of each arm, with 95% intervals over seeds (Student's t) and "
                "each run as a thin line; held out, arms stand a little apart")


def label_of(comparison: Comparison, name: str) -> str:
    """The arm with its number of runs; where none is finished, that is said."""
    count = len(comparison.shown(name))
    finished = "" if comparison.seeds(name) else ", not finished"
    return f"{name} ({count} run{'s' * (count != 1)}{finished})"


def band(axis, runs: list[dict], key: str, style: dict, window: int, **more) -> None:
    """Means of `window` steps in a row, over the runs; gradient norms by their logarithms."""
    log = key == "gradient_norm"
    scale = np.exp if log else np.asarray
    curves = [smoothed(run, key, window) for run in runs if len(run["metrics"]) >= window]
    if not curves:
        return
    length = min(map(len, curves))
    curves = np.stack([curve[:length] for curve in curves])
    curves = np.log(np.where(curves > 0, curves, np.nan)) if log else curves
    steps, mean = np.arange(length) + (window + 1) / 2, curves.mean(0)
    if len(curves) > 1:
        reach = mean_reach(curves)
        axis.plot(steps, scale(curves).T, alpha=0.4, lw=0.6, **style)
        axis.fill_between(steps, scale(mean - reach), scale(mean + reach), color=style["color"],
                          alpha=0.12, lw=0)
    axis.plot(steps, scale(mean), lw=1.8, **style, **more)


def smoothed(run: dict, key: str, window: int) -> np.ndarray:
    values = [np.nan if line[key] is None else line[key] for line in run["metrics"]]
    return np.convolve(np.array(values, float), np.ones(window) / window, "valid")


def held_out_means(axis, runs: list[dict], style: dict, shift: float) -> None:
    """Means and intervals, `shift` steps to the right, over the curves of single seeds."""
    by_step = {}
    for run in runs:
        lines = evaluations(run, "sampled")
        for line in lines:
            by_step.setdefault(line["step"], []).append(line["success"])
        if len(runs) > 1:
            axis.plot([line["step"] for line in lines], [line["success"] for line in lines],
                      alpha=0.4, lw=0.6, **style)
    steps = sorted(by_step)
    mean = [np.mean(by_step[step]) for step in steps]
    reach = [mean_reach(by_step[step]) if len(by_step[step]) > 1 else 0 for step in steps]
    axis.errorbar(np.array(steps) + shift, mean, reach, marker="o", ms=3, lw=1.3, capsize=2,
                  **style)
