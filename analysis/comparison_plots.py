"""The pictures of several arms. `suffix` tells sets of runs apart that are not comparable."""
import textwrap
from pathlib import Path

import numpy as np

from analysis.arms import Comparison
from analysis.differences import PRIMARY
from analysis.plots import (BLUE, COLOURS, GREY, ORANGE, legend_below, panels, plt, save,
                            whole_steps)
from analysis.runs import evaluations
from analysis.statistics import mean_reach
from engine.labels import KINDS

Picture = tuple[Path, str]  # path and caption
WINDOW = 5                  # steps whose mean is a point of a curve
PLACES = {  # below which table of the page they stand
    "arms": ("learning_curves",),
    PRIMARY: ("differences",),
    "stability": ("gradient_norm",),
    "credit by class": ("credit_by_class",)}


def draw_comparison(comparison: Comparison, tables: list, folder: Path,
                    suffix: str) -> list[Picture]:
    """`tables` are those of compare.py."""
    by_name = {table.name: table for table in tables}
    metrics = [line for arm in comparison.arms.values() for run in arm for line in run["metrics"]]
    pictures = [learning_curves(comparison, folder, suffix)]
    if any(line.get("gradient_norm") for line in metrics):
        pictures.append(gradient_norms(comparison, folder, suffix))
    rows = by_name[PRIMARY].rows if PRIMARY in by_name else []
    if any(value is not None for _, _, value, *_ in rows):
        pictures.append(difference_bars(by_name[PRIMARY], folder, suffix))
    shares = by_name["credit by class"]
    if drawn_kinds(shares):
        pictures.append(credit_bars(shares, folder, suffix))
    return pictures


def styles(names) -> dict[str, dict]:
    lines = ("-", "--", ":", "-.")
    return {name: {"color": COLOURS[i % len(COLOURS)], "ls": lines[i // len(COLOURS) % 4]}
            for i, name in enumerate(names)}


def window_of(comparison: Comparison) -> int:
    """How many steps a point of a curve is the mean of: five, or all of a shorter run."""
    lengths = [len(run["metrics"]) for name in comparison.arms for run in comparison.shown(name)]
    return min([WINDOW, *filter(None, lengths)])


def band(axis, runs: list[dict], key: str, label: str, style: dict, window: int,
         log: bool = False) -> None:
    """Mean over the runs, smoothed; where there are several, each of them thin behind it, and its
    95% interval. Of the logarithms where the axis is logarithmic."""
    curves = [smoothed(run, key, window, log) for run in runs]
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return
    length = min(map(len, curves))
    curves = np.stack([curve[:length] for curve in curves])
    steps, mean = np.arange(length) + (window + 1) / 2, curves.mean(0)
    scale = np.exp if log else np.asarray
    if len(curves) > 1:
        reach = mean_reach(curves)
        axis.plot(steps, scale(curves).T, alpha=0.4, **{**style, "lw": 0.6})
        axis.fill_between(steps, scale(mean - reach), scale(mean + reach), color=style["color"],
                          alpha=0.12, lw=0)
    axis.plot(steps, scale(mean), lw=1.8, label=label, **style)


def smoothed(run: dict, key: str, window: int, log: bool) -> np.ndarray:
    """Means of `window` steps in a row."""
    values = [np.nan if line.get(key) is None else line[key] for line in run["metrics"]]
    if len(values) < window:
        return np.zeros(0)
    means = np.convolve(np.array(values, float), np.ones(window) / window, "valid")
    return np.log(np.where(means > 0, means, np.nan)) if log else means


def learning_curves(comparison: Comparison, folder: Path, suffix: str) -> Picture:
    figure, (left, right) = panels(2)
    window, runs = window_of(comparison), comparison.arms[comparison.baseline]
    apart = 0.012 * runs[0]["config"]["steps"]  # so that intervals do not lie on each other
    for number, (name, style) in enumerate(styles(comparison.arms).items()):
        band(left, comparison.shown(name), "success", label_of(comparison, name), style, window)
        held_out_means(right, comparison.shown(name), style, number * apart)
    left.set(xlabel="step", ylabel="success in training batches", ylim=(0, 1),
             title=f"Success while training, mean of {window} steps")
    right.set(xlabel="step", ylabel="share of held-out problems solved", ylim=(0, 1),
              title="Held-out success, sampled")
    whole_steps(left, right)
    legend_below(figure, left, ncols=min(3, len(comparison.arms)))
    return save(figure, folder, "learning_curves" + suffix,
                "Means over the runs of each arm; where there is more than one, each run is a thin "
                "line, and intervals are 95% over seeds (Student's t). Arms stand a little apart")


def held_out_means(axis, runs: list[dict], style: dict, shift: float) -> None:
    """Means and intervals, `shift` steps to the right, over the curves of single seeds."""
    by_step = {}
    for run in runs:
        for line in evaluations(run, "sampled"):
            by_step.setdefault(line["step"], []).append(line["success"])
        single = evaluations(run, "sampled") if len(runs) > 1 else []
        axis.plot([line["step"] for line in single], [line["success"] for line in single],
                  alpha=0.4, **{**style, "lw": 0.6})
    steps = sorted(by_step)
    mean = [np.mean(by_step[step]) for step in steps]
    reach = [mean_reach(by_step[step]) if len(by_step[step]) > 1 else 0 for step in steps]
    places = np.array(steps) + shift
    axis.errorbar(places, mean, reach, marker="o", ms=3, lw=1.3, capsize=2, **style)


def label_of(comparison: Comparison, name: str) -> str:
    """The arm with its number of runs; where none is finished, that is said."""
    count = len(comparison.shown(name))
    finished = "" if comparison.seeds(name) else ", not finished"
    return f"{name} ({count} run{'s' * (count != 1)}{finished})"


def gradient_norms(comparison: Comparison, folder: Path, suffix: str) -> Picture:
    figure, (left, right) = panels(2)
    norms, window = [], window_of(comparison)
    for name, style in styles(comparison.arms).items():
        label = label_of(comparison, name)
        runs = comparison.shown(name)
        band(left, runs, "gradient_norm", label, style, window, log=True)
        band(right, runs, "entropy", label, style, window)
        for run in comparison.arms[name]:
            norms += [line["gradient_norm"] for line in run["metrics"] if line.get("gradient_norm")]
    limits = (min(norms) / 2, max(norms) * 2) if norms else None
    left.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log", ylim=limits,
             title=f"Gradient norm, mean of {window} steps")
    right.set(xlabel="step", ylabel="entropy, nats", ylim=(0, None),
              title=f"Entropy of the policy, mean of {window} steps")
    whole_steps(left, right)
    legend_below(figure, left, ncols=min(3, len(comparison.arms)))
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
        axis.annotate(verdict, (1.01, y), xycoords=("axes fraction", "data"), va="center",
                      fontsize=8.5)
    axis.axvline(0, color="#000000", lw=0.8)
    labels = [f"{row[0]} ({row[1]} seed{'s' * (row[1] != 1)})" for row in rows]
    axis.set(yticks=range(len(rows)), yticklabels=wrapped(labels), title=table.title,
             xlabel="points of final held-out success, 95% interval")
    axis.set_ylim(-0.6, len(rows) - 0.4)
    return save(figure, folder, "differences" + suffix,
                "Each arm minus the baseline, paired by seed and problem; grey: no difference "
                "seen, or one seed only")


def wrapped(names: list[str]) -> list[str]:
    return [textwrap.fill(name, 38) for name in names]


def drawn_kinds(table) -> dict[str, list]:
    """Of the kinds of token that got a gradient worth drawing, the share of each arm."""
    by_kind = {kind: table.columns[kind][1] for kind in KINDS}
    return {kind: shares for kind, shares in by_kind.items()
            if np.nan_to_num(shares).max(initial=0) >= 0.005}


def credit_bars(table, folder: Path, suffix: str) -> Picture:
    """A panel for each kind of token, with the arms below each other in all of them."""
    names, by_kind = table.columns["arm"][1], drawn_kinds(table)
    figure, axes = plt.subplots(1, len(by_kind), sharex=True, sharey=True, squeeze=False,
                                figsize=(3 + 1.8 * len(by_kind), 1.6 + 0.36 * len(names)),
                                layout="constrained")
    for axis, (kind, shares) in zip(axes[0], by_kind.items()):
        bars = axis.barh(range(len(names)), shares, 0.7, color=BLUE)
        axis.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=8.5, padding=2)
        axis.axvline(shares[0], color=GREY, lw=0.9, ls="--")
        axis.set(title=kind, yticks=range(len(names)), yticklabels=wrapped(names))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.margins(x=0.25)
    axes[0][0].invert_yaxis()
    figure.supxlabel("share of the gradient abs(A) w s", fontsize=9.5)
    return save(figure, folder, "credit_by_class" + suffix,
                "Share of the gradient that each kind of token got, weights included (kinds below "
                "0.5% not drawn); dashed: the baseline")
