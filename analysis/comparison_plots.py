"""The pictures of several arms. `suffix` tells sets of runs apart that are not comparable."""
from pathlib import Path

import numpy as np

from analysis.arms import Comparison
from analysis.differences import PRIMARY
from analysis.plots import BLUE, COLOURS, GREY, ORANGE, panels, plt, save
from analysis.runs import evaluations
from analysis.statistics import mean_reach
from countdown_task import KINDS

Picture = tuple[Path, str]  # path and caption
PLACES = {  # below which table of the page they stand
    "arms": ("learning_curves",),
    PRIMARY: ("differences",),
    "stability": ("gradient_norm",),
    "credit by class": ("credit_by_class",)}


def draw_comparison(comparison: Comparison, tables: list, folder: Path,
                    suffix: str) -> list[Picture]:
    """`tables` are those of compare.py."""
    by_name = {table.name: table for table in tables}
    pictures = [learning_curves(comparison, folder, suffix),
                gradient_norms(comparison, folder, suffix)]
    if PRIMARY in by_name:
        pictures.append(difference_bars(by_name[PRIMARY], folder, suffix))
    if by_name["credit by class"].rows:
        pictures.append(credit_bars(by_name["credit by class"], folder, suffix))
    return pictures


def styles(names) -> dict[str, dict]:
    lines = ("-", "--", ":", "-.")
    return {name: {"color": COLOURS[i % len(COLOURS)], "ls": lines[i // len(COLOURS) % 4]}
            for i, name in enumerate(names)}


def band(axis, runs: list[dict], key: str, label: str, style: dict, log: bool = False) -> None:
    """Mean over the runs, smoothed, and its 95% interval where there are several; of the logarithms
    where the axis is logarithmic."""
    window = 5
    curves = [smoothed(run, key, window, log) for run in runs]
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return
    length = min(map(len, curves))
    curves = np.stack([curve[:length] for curve in curves])
    steps, mean = np.arange(length) + (window + 1) / 2, curves.mean(0)
    scale = np.exp if log else np.asarray
    axis.plot(steps, scale(mean), lw=1.5, label=f"{label} ({len(curves)})", **style)
    if len(curves) > 1:
        reach = mean_reach(curves)
        axis.fill_between(steps, scale(mean - reach), scale(mean + reach), color=style["color"],
                          alpha=0.15, lw=0)


def smoothed(run: dict, key: str, window: int, log: bool) -> np.ndarray:
    """Means of `window` steps in a row."""
    values = [np.nan if line.get(key) is None else line[key] for line in run["metrics"]]
    if len(values) < window:
        return np.zeros(0)
    means = np.convolve(np.array(values, float), np.ones(window) / window, "valid")
    return np.log(np.where(means > 0, means, np.nan)) if log else means


def learning_curves(comparison: Comparison, folder: Path, suffix: str) -> Picture:
    figure, (left, right) = panels(2)
    for name, style in styles(comparison.arms).items():
        band(left, comparison.shown(name), "success", name, style)
        held_out_means(right, comparison.shown(name), style)
    left.set(xlabel="step", ylabel="success in training batches", ylim=(0, 1),
             title="Success while training, mean of five steps")
    right.set(xlabel="step", ylabel="share of held-out problems solved", ylim=(0, 1),
              title="Held-out success, sampled")
    legend_of_arms(figure, left, comparison)
    return save(figure, folder, "learning_curves" + suffix,
                "Means over the runs of each arm with 95% intervals over seeds (Student's t), "
                "where there is more than one")


def held_out_means(axis, runs: list[dict], style: dict) -> None:
    by_step = {}
    for run in runs:
        for line in evaluations(run, "sampled"):
            by_step.setdefault(line["step"], []).append(line["success"])
    steps = sorted(by_step)
    mean = [np.mean(by_step[step]) for step in steps]
    reach = [mean_reach(by_step[step]) if len(by_step[step]) > 1 else 0 for step in steps]
    axis.errorbar(steps, mean, reach, marker="o", ms=3, lw=1.3, capsize=2, **style)


def legend_of_arms(figure, axis, comparison: Comparison) -> None:
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center",
                  ncols=min(3, len(comparison.arms)), title="arm (runs)")


def gradient_norms(comparison: Comparison, folder: Path, suffix: str) -> Picture:
    figure, (left, right) = panels(2)
    norms = []
    for name, style in styles(comparison.arms).items():
        band(left, comparison.shown(name), "gradient_norm", name, style, log=True)
        band(right, comparison.shown(name), "entropy", name, style)
        for run in comparison.arms[name]:
            norms += [line["gradient_norm"] for line in run["metrics"] if line.get("gradient_norm")]
    limits = (min(norms) / 2, max(norms) * 2) if norms else None
    left.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log", ylim=limits,
             title="Gradient norm, mean of five steps")
    right.set(xlabel="step", ylabel="entropy, nats", ylim=(0, None),
              title="Entropy of the policy, mean of five steps")
    legend_of_arms(figure, left, comparison)
    return save(figure, folder, "gradient_norm" + suffix,
                "Stability: gradient norm before clipping, and entropy, with 95% intervals over "
                "seeds")


def difference_bars(table, folder: Path, suffix: str) -> Picture:
    rows = [row for row in table.rows if row[2] is not None][::-1]
    figure, axis = plt.subplots(figsize=(8.5, 1.4 + 0.42 * len(rows)), layout="constrained")
    for y, (_, _, value, interval, *_, verdict) in enumerate(rows):
        colour = {"better": BLUE, "worse": ORANGE}.get(verdict, GREY)
        low, high = (100 * end if np.isfinite(end) else 100 * value for end in interval)
        axis.plot([low, high], [y, y], color=colour, lw=2)
        axis.plot(100 * value, y, "o", color=colour)
        axis.annotate(f" {verdict}", (max(high, 0), y), va="center", fontsize=8.5, color=colour)
    axis.axvline(0, color="#000000", lw=0.8)
    labels = [f"{row[0]} ({row[1]} seed{'s' * (row[1] != 1)})" for row in rows]
    axis.set(yticks=range(len(rows)), yticklabels=labels, title=table.title,
             xlabel="points of final held-out success, 95% interval")
    axis.margins(x=0.35)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    return save(figure, folder, "differences" + suffix,
                "Each arm minus the baseline, paired by seed and problem; grey: no difference "
                "seen, or one seed only")


def credit_bars(table, folder: Path, suffix: str) -> Picture:
    rows = table.rows[::-1]
    figure, axis = plt.subplots(figsize=(8.5, 1.6 + 0.4 * len(rows)), layout="constrained")
    left = np.zeros(len(rows))
    for k, kind in enumerate(KINDS):
        share = np.array([row[1 + k] for row in rows], float)
        if share.max() >= 0.005:
            axis.barh(range(len(rows)), share, left=left, color=COLOURS[k], label=kind, height=0.7)
        left += share
    axis.set(yticks=range(len(rows)), yticklabels=[row[0] for row in rows], xlim=(0, 1),
             xlabel="share of the gradient abs(A) w s",
             title="Where the gradient went, by kind of token")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return save(figure, folder, "credit_by_class" + suffix,
                "Share of the gradient that each kind of token got, weights included (kinds below "
                "0.5% not drawn)")
