"""The picture of several arms: how they learned."""
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator, PercentFormatter

from analysis.arms import Comparison
from analysis.plots import legend_below, panels, save, style_of, whole_steps
from analysis.runs import evaluations
from analysis.statistics import mean_reach

WINDOW = 5  # steps whose mean is a point of a curve, but in a short run


def learning_curves(comparison: Comparison, folder: Path) -> tuple[Path, str]:
    """What is decided comes first."""
    figure, (left, middle, right) = panels(3, figsize=(14, 4.4))
    for number, name in enumerate(comparison.arms):
        style, runs = style_of(number), comparison.shown(name)
        seeds_and_mean(middle, runs, "success", style, label_of(comparison, name))
        seeds_and_mean(right, runs, "gradient_norm", style)
        held_out_means(left, runs, style)
    left.set(xlabel="step", ylabel="held-out problems solved", title="Held-out success, sampled")
    middle.set(xlabel="step", ylabel="answers that are right", title="Success in training batches")
    for axis in (left, middle):  # a share has no interval outside of 0 to 1
        axis.set_ylim(*np.clip(axis.get_ylim(), -0.01, 1.01))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    right.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log",
              title="Gradient norm")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # it may span less than a decade
    whole_steps(left, middle, right)
    legend_below(figure, middle, ncols=min(3, len(comparison.arms)))
    caption = f"How each arm learned, smoothed over {WINDOW} steps where there are twice as many"
    if any(len(comparison.shown(name)) > 1 for name in comparison.arms):
        caption += "; means of its runs, each a thin line; held out with 95% intervals over seeds"
    return save(figure, folder, "learning_curves", caption)


def label_of(comparison: Comparison, name: str) -> str:
    """The arm with its number of runs; where none is finished, that is said."""
    count = len(comparison.shown(name))
    finished = "" if comparison.seeds(name) else ", not finished"
    return f"{name} ({count} run{'s' * (count != 1)}{finished})"


def seeds_and_mean(axis, runs: list[dict], key: str, style: dict, label: str = "") -> None:
    """Up to the last step that all of them have."""
    length = min(len(run["metrics"]) for run in runs)
    if not length:
        return
    curves = np.array([[line[key] for line in run["metrics"][:length]] for run in runs], float)
    window = WINDOW if length >= 2 * WINDOW else 1
    curves = np.stack([curves[:, i:i + window].mean(1) for i in range(length - window + 1)], 1)
    steps = np.arange(curves.shape[1]) + (window + 1) / 2
    if len(runs) > 1:
        axis.plot(steps, curves.T, alpha=0.4, lw=0.6, **style)
    axis.plot(steps, curves.mean(0), lw=1.8, label=label, **style)


def held_out_means(axis, runs: list[dict], style: dict) -> None:
    """Means and intervals over the curves of single seeds."""
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
    axis.errorbar(steps, mean, reach, marker="o", ms=3, lw=1.3, capsize=2, **style)
