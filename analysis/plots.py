"""The pictures, each with a title that says what is seen. Colours are told apart by colour-blind readers too."""
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from countdown_task import KINDS, SECTIONS
from analysis.statistics import mean_reach
from analysis.tally import ADVANTAGE_EDGES, CLASSES, ENTROPY_EDGES, LOG_PROB_EDGES, S_EDGES, SIZE_EDGES, Tally, size

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe and Ito
BLUE, ORANGE, GREEN, GREY = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[7]
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "axes.titlesize": 10.5,
                     "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8.5, "font.size": 9.5})


def panels(count: int, **size):
    figure, axes = plt.subplots(1, count, figsize=(5.6 * count if count > 1 else 7.5, 4.0), layout="constrained", **size)
    return figure, axes


def save(figure, folder: Path, name: str, caption: str) -> tuple[Path, str]:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path, caption


def draw_run(run: dict, tally: Tally | None, folder: Path) -> list[tuple[Path, str]]:
    """Path and caption of every picture of one run."""
    pictures = [learning_curve(run, folder)]
    if run["metrics"]:
        pictures.append(length_and_entropy(run, folder))
    if tally:
        pictures += [draw(tally, folder) for draw in (position_bars, histograms, log_prob_and_gradient, entropy_and_gradient, class_by_position,
                                                      over_training, weights)]
    return pictures


def learning_curve(run: dict, folder: Path) -> tuple[Path, str]:
    figure, axis = panels(1)
    if run["metrics"]:
        axis.plot([m["step"] for m in run["metrics"]], [m["success"] for m in run["metrics"]], color=GREY, lw=0.8, alpha=0.6, label="training batches")
    title = "Success while training"
    for mode, colour in (("greedy", ORANGE), ("sampled", BLUE)):
        lines = [line for line in run["evaluations"] if line["mode"] == mode]
        if lines:
            success = np.array([line["success"] for line in lines])
            reach = np.abs(np.array([[line["success_low"], line["success_high"]] for line in lines]).T - success)
            axis.errorbar([line["step"] for line in lines], success, reach, color=colour, marker="o", ms=3, lw=1.4, capsize=2,
                          label=f"held-out, {mode} (95% interval)")
            title = f"Held-out success, {mode}: {success[0]:.0%} to {success[-1]:.0%}"
    axis.set(xlabel="step", ylabel="share of problems solved", ylim=(0, None), title=title)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")
    return save(figure, folder, "learning_curve", "Share of problems solved while training and on held-out problems")


def length_and_entropy(run: dict, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    for axis, key, label in ((axes[0], "length", "tokens an answer"), (axes[1], "entropy", "mean entropy, nats")):
        found = [(m["step"], m[key]) for m in run["metrics"] if m.get(key) is not None]
        if found:
            axis.plot(*zip(*found), color=BLUE, lw=1.2)
            axis.set(title=f"{key.capitalize()}: {found[0][1]:.3g} at the start, {found[-1][1]:.3g} at the end")
        axis.set(xlabel="step", ylabel=label, ylim=(0, None))
    return save(figure, folder, "length_and_entropy", "Length of the answers and entropy of the policy over training")


def position_bars(tally: Tally, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    unit, label = tally.final, size(tally.final)
    for axis, which, name, colour in ((axes[0], "contribution", "abs(A log p)", ORANGE), (axes[1], unit, label, BLUE)):
        mean = tally.mean("position", f"abs {which}")
        sizes, tokens = tally.drawn("position", which)
        with np.errstate(invalid="ignore", divide="ignore"):
            reach = 1.96 * (sizes / tokens).std(0)
        axis.bar(range(10), mean, 0.85, yerr=reach, color=colour, error_kw=dict(lw=0.8, capsize=2))
        axis.set(xlabel="tenth of the answer", ylabel=f"mean {name}", xticks=range(10),
                 title=f"{'The old unit' if colour == ORANGE else 'The gradient'} by position")
    return save(figure, folder, "position", "Mean size in ten bins of relative position, 95% intervals over groups")


def histograms(tally: Tally, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2, sharey=True, sharex=True)
    unit, label = tally.final, size(tally.final)
    for axis, which, name in ((axes[0], "contribution", "abs(A log p)"), (axes[1], unit, label)):
        for c, colour in zip(range(len(CLASSES)), (ORANGE, BLUE, GREEN)):
            axis.stairs(tally.histograms.sizes[which][c] / tally.tokens, SIZE_EDGES, color=colour, lw=1.4, label=CLASSES[c])
        mean = tally.mean("all", f"abs {which}")[0]
        axis.axvline(np.log10(max(mean, 1e-6)), color=GREY, lw=0.9, ls="--")
        axis.set(xlabel=f"{name}, powers of ten", title=f"{name}: mean {mean:.2g} (dashed), largest {max(map(abs, tally.sums.extremes[which])):.3g}")
    axes[0].set(ylabel="share of all tokens")
    axes[0].legend(title="class by the regex", loc="upper left")
    none = tally.histograms.zeros["contribution"] / tally.tokens
    return save(figure, folder, "histograms",
                f"How sizes are spread over tokens, old unit and gradient; the {none:.0%} that are exactly 0 (no advantage) left out, what is "
                "smaller than 1e-6 in the first bin")


def log_prob_and_gradient(tally: Tally, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    shade(axes[0], LOG_PROB_EDGES, ADVANTAGE_EDGES, tally.histograms.log_prob_and_advantage)
    axes[0].set(xlabel="log p of the token", ylabel="advantage A", title="Log-prob and advantage, the earlier picture")
    shade(axes[1], LOG_PROB_EDGES, S_EDGES, tally.histograms.log_prob_and_s)
    x = np.linspace(-14, -1e-3, 400)
    low, high = -np.expm1(x), -np.expm1(x) * np.sqrt(2)
    axes[1].plot(x, low, color=ORANGE, lw=1.2, label="1 - p and sqrt(2) (1 - p): the limits of s")
    axes[1].plot(x, high, color=ORANGE, lw=1.2)
    axes[1].plot(x, -x, color="#000000", lw=1.2, ls="--", label="abs(log p): the old unit")
    axes[1].set(xlabel="log p of the token", ylabel="gradient size s at A = 1", ylim=(0, 3),
                title="Rare tokens: the old unit grows without limit, the gradient does not")
    axes[1].legend(loc="upper left")
    return save(figure, folder, "log_prob_and_gradient",
                "Why the old unit misleads: log-prob against advantage, and against the size of the gradient")


def shade(axis, x_edges, y_edges, counts) -> None:
    shown = np.where(counts > 0, counts, np.nan)
    axis.pcolormesh(x_edges, y_edges, np.log10(shown).T, cmap="viridis_r", rasterized=True)
    axis.grid(False)


def entropy_and_gradient(tally: Tally, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    shade(axes[0], ENTROPY_EDGES, S_EDGES, tally.histograms.entropy_and_s)
    used = np.flatnonzero(tally.histograms.entropy_and_s.sum(1))
    top = ENTROPY_EDGES[used[-1] + 1] if len(used) else 1
    axes[0].set(xlabel="entropy of the distribution", ylabel="gradient size s of the drawn token", xlim=(0, top),
                title="Tokens drawn where the model was uncertain, and where it was sure")
    tokens, squares, theory = tally.histograms.by_entropy
    there = tokens >= 30
    middle = (ENTROPY_EDGES[1:] + ENTROPY_EDGES[:-1]) / 2
    off = np.abs((theory - squares)[there] / tokens[there]).max(initial=0)
    axes[1].plot(middle[there], theory[there] / tokens[there], color=ORANGE, lw=1.6, label="theory: E s^2 = 1 - sum p^2")
    axes[1].plot(middle[there], squares[there] / tokens[there], "o", color=BLUE, ms=3.5, label="mean s^2 of the recorded tokens")
    axes[1].set(xlabel="entropy of the distribution", ylabel="mean s^2", xlim=(0, top),
                title=f"Mean s^2 of the recorded tokens is within {off:.2g} of theory")
    axes[1].legend(loc="lower right")
    return save(figure, folder, "entropy_and_gradient",
                "Entropy against the size of the gradient, with the theoretical line (bins of at least 30 tokens)")


def class_by_position(tally: Tally, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    unit, label = tally.final, size(tally.final)
    for axis, which, name in ((axes[0], "contribution", "abs(A log p)"), (axes[1], unit, label)):
        means = tally.mean("class by fifth", f"abs {which}").reshape(len(CLASSES), 5)
        tokens = tally.total("class by fifth", "tokens").reshape(len(CLASSES), 5)
        for c, (name_of_class, colour) in enumerate(zip(CLASSES[:2], (ORANGE, BLUE))):
            axis.bar(np.arange(5) + 0.4 * c - 0.2, np.where(tokens[c], means[c], 0), 0.38, color=colour, label=name_of_class)
        ahead = int((means[0] > means[1]).sum())
        axis.set(xlabel="fifth of the answer", ylabel=f"mean {name}", title=f"{name}: filler ahead in {ahead} of 5",
                 xticks=range(5), xticklabels=["0-20%", "20-40%", "40-60%", "60-80%", "80-100%"])
    axes[0].legend()
    return save(figure, folder, "class_by_position", "Filler and reasoning (by the regex) in five bins of relative position, old unit and gradient")


def over_training(tally: Tally, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    unit, label = tally.final, size(tally.final)
    steps = [block.mean() for block in tally.blocks]
    def by_block(partition, measure):
        return np.stack([tally.total(partition, measure, [b]) for b in range(len(steps))])  # (blocks, cells)

    tokens = by_block("all", "tokens")[:, 0]
    for measure, name, colour in (("abs contribution", "mean abs(A log p), old unit", ORANGE), ("contribution", "mean A log p, signed", GREY),
                                  (f"abs {unit}", f"mean {label}, gradient", BLUE)):
        axes[0].plot(steps, by_block("all", measure)[:, 0] / tokens, color=colour, lw=1.4, label=name)
    axes[0].set(xlabel="step", ylabel="mean over tokens", title="What a token is given over training")
    axes[0].legend()
    shares = by_block("kind", f"abs {unit}")
    shares = shares / shares.sum(1, keepdims=True).clip(1e-300)
    for k in np.argsort(-shares.mean(0)):
        if shares[:, k].max() >= 0.01:
            axes[1].plot(steps, shares[:, k], color=COLOURS[k], lw=1.4, label=KINDS[k])
    axes[1].set(xlabel="step", ylabel="share of the gradient", ylim=(0, None),
                title=f"Most of the gradient went to {KINDS[int(shares.mean(0).argmax())]} tokens")
    if axes[1].lines:
        axes[1].legend(ncols=2)
    return save(figure, folder, "over_training",
                "Mean sizes over training, and the share of the gradient of each kind of token (kinds below 1% left out)")


def weights(tally: Tally, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    counts, zeros = tally.histograms.sizes["weight"].sum(0), tally.histograms.zeros["weight"] / tally.tokens
    low, high = tally.sums.extremes["weight"]
    if low == high:
        axes[0].bar([0], [1.0], 0.1, color=BLUE)
        axes[0].set(xlim=(-1, 1))
    else:
        axes[0].stairs(counts / tally.tokens, SIZE_EDGES, color=BLUE, fill=True, alpha=0.75)
        used = np.flatnonzero(counts)
        if len(used):
            axes[0].set(xlim=(SIZE_EDGES[used[0]] - 0.2, SIZE_EDGES[used[-1] + 1] + 0.2))
    axes[0].set(xlabel="weight, powers of ten", ylabel="share of all tokens",
                title=f"All weights are {low:.3g}" if low == high else f"Weights from {low:.2g} to {high:.2g}, {zeros:.0%} are 0")
    means, tokens = (x.reshape(len(SECTIONS), len(KINDS)) for x in (tally.mean("section by kind", "weight"), tally.count("section by kind")))
    for i, (section, colour) in enumerate(zip(SECTIONS, (GREY, BLUE, ORANGE))):
        shown = np.where(tokens[i] >= 0.0005 * tally.tokens, means[i], 0)
        axes[1].bar(np.arange(len(KINDS)) + 0.27 * (i - 1), shown, 0.25, color=colour, label=section)
    axes[1].set(xticks=range(len(KINDS)), xticklabels=KINDS, ylabel="mean weight", title="Mean weight by kind and section",
                ylim=(0, 1.2 * np.nanmax(means) or 1))
    axes[1].legend(ncols=3, loc="upper left")
    return save(figure, folder, "weights", "The weights that the mitigation chose (kinds with less than 0.05% of the tokens left out)")


def draw_comparison(comparison, tables: list, folder: Path, suffix: str) -> list[tuple[Path, str]]:
    """Path and caption of the pictures of several arms; `tables` are those of compare.py."""
    by_name = {table.name: table for table in tables}
    pictures = [learning_curves(comparison, folder, suffix), gradient_norms(comparison, folder, suffix)]
    if "final success, sampled" in by_name:
        pictures.append(difference_bars(by_name["final success, sampled"], folder, suffix))
    if by_name["credit by class"].rows:
        pictures.append(credit_bars(by_name["credit by class"], folder, suffix))
    return pictures


def styles(names) -> dict[str, dict]:
    return {name: dict(color=COLOURS[i % len(COLOURS)], ls=("-", "--", ":", "-.")[i // len(COLOURS) % 4]) for i, name in enumerate(names)}


def band(axis, runs: list[dict], key: str, label: str, style: dict, window: int = 5, log: bool = False) -> None:
    """Mean over the runs, smoothed, and its 95% interval where there are several; of the logarithms where the axis is logarithmic."""
    curves = []
    for run in runs:
        values = np.array([np.nan if line.get(key) is None else line[key] for line in run["metrics"]], float)
        if len(values) >= window:
            smooth = np.convolve(values, np.ones(window) / window, "valid")
            curves.append(np.log(np.where(smooth > 0, smooth, np.nan)) if log else smooth)
    if not curves:
        return
    length = min(map(len, curves))
    curves = np.stack([curve[:length] for curve in curves])
    steps, mean = np.arange(length) + (window + 1) / 2, curves.mean(0)
    scale = np.exp if log else np.asarray
    axis.plot(steps, scale(mean), lw=1.5, label=f"{label} ({len(curves)})", **style)
    if len(curves) > 1:
        reach = mean_reach(curves)
        axis.fill_between(steps, scale(mean - reach), scale(mean + reach), color=style["color"], alpha=0.15, lw=0)


def learning_curves(comparison, folder: Path, suffix: str) -> tuple[Path, str]:
    figure, axes = panels(2)
    for name, style in styles(comparison.arms).items():
        runs = comparison.shown(name)
        band(axes[0], runs, "success", name, style)
        by_step = {}
        for run in runs:
            for line in run["evaluations"]:
                if line["mode"] == "sampled":
                    by_step.setdefault(line["step"], []).append(line["success"])
        steps = sorted(by_step)
        mean = [np.mean(by_step[step]) for step in steps]
        reach = [mean_reach(by_step[step]) if len(by_step[step]) > 1 else 0 for step in steps]
        axes[1].errorbar(steps, mean, reach, marker="o", ms=3, lw=1.3, capsize=2, **style)
    axes[0].set(xlabel="step", ylabel="success in training batches", ylim=(0, 1), title="Success while training, mean of five steps")
    axes[1].set(xlabel="step", ylabel="share of held-out problems solved", ylim=(0, 1), title="Held-out success, sampled")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(comparison.arms)), title="arm (runs)")
    return save(figure, folder, "learning_curves" + suffix,
                "Means over the runs of each arm with 95% intervals over seeds (Student's t), where there is more than one")


def gradient_norms(comparison, folder: Path, suffix: str) -> tuple[Path, str]:
    figure, axes = panels(2)
    for name, style in styles(comparison.arms).items():
        band(axes[0], comparison.shown(name), "gradient_norm", name, style, log=True)
        band(axes[1], comparison.shown(name), "entropy", name, style)
    norms = [line["gradient_norm"] for arm in comparison.arms.values() for run in arm for line in run["metrics"] if line.get("gradient_norm")]
    axes[0].set(xlabel="step", ylabel="gradient norm before clipping", yscale="log", ylim=(min(norms) / 2, max(norms) * 2) if norms else None,
                title="Gradient norm, mean of five steps")
    axes[1].set(xlabel="step", ylabel="entropy, nats", ylim=(0, None), title="Entropy of the policy, mean of five steps")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(comparison.arms)), title="arm (runs)")
    return save(figure, folder, "gradient_norm" + suffix, "Stability: gradient norm before clipping, and entropy, with 95% intervals over seeds")


def difference_bars(table, folder: Path, suffix: str) -> tuple[Path, str]:
    rows = [row for row in table.rows if row[2] is not None][::-1]
    figure, axis = plt.subplots(figsize=(8.5, 1.4 + 0.42 * len(rows)), layout="constrained")
    for y, (name, seeds, value, interval, *_, said) in enumerate(rows):
        colour = {"better": BLUE, "worse": ORANGE}.get(said, GREY)
        low, high = (100 * x if np.isfinite(x) else 100 * value for x in interval)
        axis.plot([low, high], [y, y], color=colour, lw=2)
        axis.plot(100 * value, y, "o", color=colour)
        axis.annotate(f" {said}", (max(high, 0), y), va="center", fontsize=8.5, color=colour)
    axis.axvline(0, color="#000000", lw=0.8)
    axis.set(yticks=range(len(rows)), yticklabels=[f"{row[0]} ({row[1]} seed{'s' * (row[1] != 1)})" for row in rows],
             xlabel="points of final held-out success, 95% interval", title=table.title)
    axis.margins(x=0.35)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    return save(figure, folder, "differences" + suffix,
                "Each arm minus the baseline, paired by seed and problem; grey: no difference seen, or one seed only")


def credit_bars(table, folder: Path, suffix: str) -> tuple[Path, str]:
    rows = table.rows[::-1]
    figure, axis = plt.subplots(figsize=(8.5, 1.6 + 0.4 * len(rows)), layout="constrained")
    left = np.zeros(len(rows))
    for k, kind in enumerate(KINDS):
        share = np.array([row[1 + k] for row in rows], float)
        if share.max() >= 0.005:
            axis.barh(range(len(rows)), share, left=left, color=COLOURS[k], label=kind, height=0.7)
        left += share
    axis.set(yticks=range(len(rows)), yticklabels=[row[0] for row in rows], xlabel="share of the gradient abs(A) w s", xlim=(0, 1),
             title="Where the gradient went, by kind of token")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return save(figure, folder, "credit_by_class" + suffix,
                "Share of the gradient that each kind of token got, weights included (kinds below 0.5% not drawn)")
