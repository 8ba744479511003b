"""The pictures of one run, each with a title that says what is seen."""
from pathlib import Path

import numpy as np

from analysis.answer_plot import draw_answer
from analysis.histograms import (ADVANTAGE_EDGES, ENTROPY_EDGES, LOG_PROB_EDGES, S_EDGES,
                                 SIZE_EDGES)
from analysis.plots import BLUE, COLOURS, GREEN, GREY, ORANGE, panels, save, shade
from analysis.runs import evaluations
from analysis.sizes import size_label
from analysis.tally import Tally
from analysis.vocabulary import CLASSES
from countdown_task import KINDS, SECTIONS

Picture = tuple[Path, str]  # path and caption
PLACES = {  # below which table of the page they stand
    "gains": ("learning_curve",),
    "gradient by kind": ("answer",),
    "contribution": ("histograms", "log_prob_and_gradient"),
    "gradient by position": ("position",),
    "class by position": ("class_by_position",),
    "sections": ("entropy_and_gradient", "weights"),
    "growth": ("over_training", "length_and_entropy")}


def draw_run(run: dict, tally: Tally | None, folder: Path) -> list[Picture]:
    pictures = [learning_curve(run, folder)]
    if run["metrics"]:
        pictures.append(length_and_entropy(run, folder))
    if tally:
        pictures += [draw(tally, folder) for draw in (
            draw_answer, position_bars, histograms, log_prob_and_gradient, entropy_and_gradient,
            class_by_position, over_training, weights)]
    return pictures


def learning_curve(run: dict, folder: Path) -> Picture:
    figure, axis = panels(1)
    title = "Success while training"
    if run["metrics"]:
        steps = [line["step"] for line in run["metrics"]]
        success = [line["success"] for line in run["metrics"]]
        axis.plot(steps, success, color=GREY, lw=0.8, alpha=0.6, label="training batches")
    for mode, colour in (("greedy", ORANGE), ("sampled", BLUE)):
        lines = evaluations(run, mode)
        if lines:
            held_out_curve(axis, lines, colour, f"held-out, {mode} (95% interval)")
            start, end = lines[0]["success"], lines[-1]["success"]
            title = f"Held-out success, {mode}: {start:.0%} to {end:.0%}"
    axis.set(xlabel="step", ylabel="share of problems solved", ylim=(0, None), title=title)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")
    return save(figure, folder, "learning_curve",
                "Share of problems solved while training and on held-out problems")


def held_out_curve(axis, lines: list[dict], colour: str, label: str) -> None:
    success = np.array([line["success"] for line in lines])
    bounds = np.array([[line["success_low"], line["success_high"]] for line in lines])
    axis.errorbar([line["step"] for line in lines], success, np.abs(bounds.T - success),
                  color=colour, marker="o", ms=3, lw=1.4, capsize=2, label=label)


def length_and_entropy(run: dict, folder: Path) -> Picture:
    figure, axes = panels(2)
    for axis, key, label in ((axes[0], "length", "tokens an answer"),
                             (axes[1], "entropy", "mean entropy, nats")):
        lines = [line for line in run["metrics"] if line.get(key) is not None]
        if lines:
            values = [line[key] for line in lines]
            axis.plot([line["step"] for line in lines], values, color=BLUE, lw=1.2)
            start, end = f"{values[0]:.3g}", f"{values[-1]:.3g}"
            axis.set(title=f"{key.capitalize()}: {start} at the start, {end} at the end")
        axis.set(xlabel="step", ylabel=label, ylim=(0, None))
    return save(figure, folder, "length_and_entropy",
                "Length of the answers and entropy of the policy over training")


def old_and_new(tally: Tally) -> tuple[tuple[str, str], ...]:
    """The two units that stand side by side, with their labels."""
    return (("contribution", "abs(A log p)"), (tally.final, size_label(tally.final)))


def position_bars(tally: Tally, folder: Path) -> Picture:
    figure, axes = panels(2)
    titles = ("The old unit by position", "The gradient by position")
    for axis, (unit, label), colour, title in zip(axes, old_and_new(tally), (ORANGE, BLUE), titles):
        sizes, tokens = tally.drawn("position", unit)
        with np.errstate(invalid="ignore", divide="ignore"):
            reach = 1.96 * (sizes / tokens).std(0)
        mean = tally.mean("position", f"abs {unit}")
        axis.bar(range(10), mean, 0.85, yerr=reach, color=colour,
                 error_kw={"lw": 0.8, "capsize": 2})
        axis.set(xlabel="tenth of the answer", ylabel=f"mean {label}", xticks=range(10),
                 title=title)
    return save(figure, folder, "position",
                "Mean size in ten bins of relative position, 95% intervals over groups")


def histograms(tally: Tally, folder: Path) -> Picture:
    figure, axes = panels(2, sharey=True, sharex=True)
    for axis, (unit, label) in zip(axes, old_and_new(tally)):
        for c, colour in enumerate((ORANGE, BLUE, GREEN)):
            axis.stairs(tally.histograms.sizes[unit][c] / tally.tokens, SIZE_EDGES, color=colour,
                        lw=1.4, label=CLASSES[c])
        mean = tally.mean("all", f"abs {unit}")[0]
        largest = max(map(abs, tally.sums.extremes[unit]))
        axis.axvline(np.log10(max(mean, 1e-6)), color=GREY, lw=0.9, ls="--")
        axis.set(xlabel=f"{label}, powers of ten",
                 title=f"{label}: mean {mean:.2g} (dashed), largest {largest:.3g}")
    axes[0].set(ylabel="share of all tokens")
    axes[0].legend(title="class by the regex", loc="upper left")
    none = tally.histograms.zeros["contribution"] / tally.tokens
    return save(figure, folder, "histograms",
                f"How sizes are spread over tokens, old unit and gradient; the {none:.0%} that are "
                "exactly 0 (no advantage) left out, what is smaller than 1e-6 in the first bin")


def log_prob_and_gradient(tally: Tally, folder: Path) -> Picture:
    figure, (left, right) = panels(2)
    shade(left, LOG_PROB_EDGES, ADVANTAGE_EDGES, tally.histograms.log_prob_and_advantage)
    left.set(xlabel="log p of the token", ylabel="advantage A",
             title="Log-prob and advantage, the earlier picture")
    shade(right, LOG_PROB_EDGES, S_EDGES, tally.histograms.log_prob_and_s)
    log_p = np.linspace(-14, -1e-3, 400)
    rest = -np.expm1(log_p)
    right.plot(log_p, rest, color=ORANGE, lw=1.2,
               label="1 - p and sqrt(2) (1 - p): the limits of s")
    right.plot(log_p, rest * np.sqrt(2), color=ORANGE, lw=1.2)
    right.plot(log_p, -log_p, color="#000000", lw=1.2, ls="--", label="abs(log p): the old unit")
    right.set(xlabel="log p of the token", ylabel="gradient size s at A = 1", ylim=(0, 3),
              title="Rare tokens: the old unit grows without limit, the gradient does not")
    right.legend(loc="upper left")
    return save(figure, folder, "log_prob_and_gradient",
                "Why the old unit misleads: log-prob against advantage, and against the size of "
                "the gradient")


def entropy_and_gradient(tally: Tally, folder: Path) -> Picture:
    figure, (left, right) = panels(2)
    shade(left, ENTROPY_EDGES, S_EDGES, tally.histograms.entropy_and_s)
    used = np.flatnonzero(tally.histograms.entropy_and_s.sum(1))
    top = ENTROPY_EDGES[used[-1] + 1] if len(used) else 1
    left.set(xlabel="entropy of the distribution", ylabel="gradient size s of the drawn token",
             title="Tokens drawn where the model was uncertain, and where it was sure",
             xlim=(0, top))
    enough = tally.histograms.by_entropy[0] >= 30
    tokens, squares, theory = tally.histograms.by_entropy[:, enough]
    middle = (ENTROPY_EDGES[1:] + ENTROPY_EDGES[:-1])[enough] / 2
    off = np.abs((theory - squares) / tokens).max(initial=0)
    right.plot(middle, theory / tokens, color=ORANGE, lw=1.6, label="theory: E s^2 = 1 - sum p^2")
    right.plot(middle, squares / tokens, "o", color=BLUE, ms=3.5,
               label="mean s^2 of the recorded tokens")
    right.set(xlabel="entropy of the distribution", ylabel="mean s^2", xlim=(0, top),
              title=f"Mean s^2 of the recorded tokens is within {off:.2g} of theory")
    right.legend(loc="lower right")
    return save(figure, folder, "entropy_and_gradient",
                "Entropy against the size of the gradient, with the theoretical line (bins of at "
                "least 30 tokens)")


def class_by_position(tally: Tally, folder: Path) -> Picture:
    figure, axes = panels(2)
    fifths = [f"{20 * i}-{20 * i + 20}%" for i in range(5)]
    tokens = tally.total("class by fifth", "tokens").reshape(len(CLASSES), 5)
    for axis, (unit, label) in zip(axes, old_and_new(tally)):
        means = tally.mean("class by fifth", f"abs {unit}").reshape(len(CLASSES), 5)
        for c, colour in enumerate((ORANGE, BLUE)):
            axis.bar(np.arange(5) + 0.4 * c - 0.2, np.where(tokens[c], means[c], 0), 0.38,
                     color=colour, label=CLASSES[c])
        ahead = int((means[0] > means[1]).sum())
        axis.set(xlabel="fifth of the answer", ylabel=f"mean {label}", xticks=range(5),
                 xticklabels=fifths, title=f"{label}: filler ahead in {ahead} of 5")
    axes[0].legend()
    return save(figure, folder, "class_by_position",
                "Filler and reasoning (by the regex) in five bins of relative position, old unit "
                "and gradient")


def over_training(tally: Tally, folder: Path) -> Picture:
    figure, (left, right) = panels(2)
    steps = [block.mean() for block in tally.blocks]
    tokens = by_block(tally, "all", "tokens")[:, 0]
    for measure, label, colour in (
            ("abs contribution", "mean abs(A log p), old unit", ORANGE),
            ("contribution", "mean A log p, signed", GREY),
            (f"abs {tally.final}", f"mean {size_label(tally.final)}, gradient", BLUE)):
        mean = by_block(tally, "all", measure)[:, 0] / tokens
        left.plot(steps, mean, color=colour, lw=1.4, label=label)
    left.set(xlabel="step", ylabel="mean over tokens", title="What a token is given over training")
    left.legend()
    shares = by_block(tally, "kind", f"abs {tally.final}")
    shares = shares / shares.sum(1, keepdims=True).clip(1e-300)
    for k in np.argsort(-shares.mean(0)):
        if shares[:, k].max() >= 0.01:
            right.plot(steps, shares[:, k], color=COLOURS[k], lw=1.4, label=KINDS[k])
    most = KINDS[int(shares.mean(0).argmax())]
    right.set(xlabel="step", ylabel="share of the gradient", ylim=(0, None),
              title=f"Most of the gradient went to {most} tokens")
    if right.lines:
        right.legend(ncols=2)
    return save(figure, folder, "over_training",
                "Mean sizes over training, and the share of the gradient of each kind of token "
                "(kinds below 1% left out)")


def by_block(tally: Tally, partition: str, measure: str) -> np.ndarray:
    """(blocks, cells)"""
    return np.stack([tally.total(partition, measure, [b]) for b in range(len(tally.blocks))])


def weights(tally: Tally, folder: Path) -> Picture:
    figure, (left, right) = panels(2)
    weight_histogram(tally, left)
    means = tally.mean("section by kind", "weight").reshape(len(SECTIONS), len(KINDS))
    tokens = tally.count("section by kind").reshape(len(SECTIONS), len(KINDS))
    for i, (section, colour) in enumerate(zip(SECTIONS, (GREY, BLUE, ORANGE))):
        often = np.where(tokens[i] >= 0.0005 * tally.tokens, means[i], 0)
        place = np.arange(len(KINDS)) + 0.27 * (i - 1)
        right.bar(place, often, 0.25, color=colour, label=section)
    right.set(xticks=range(len(KINDS)), xticklabels=KINDS, ylabel="mean weight",
              title="Mean weight by kind and section", ylim=(0, 1.2 * np.nanmax(means) or 1))
    right.legend(ncols=3, loc="upper left")
    return save(figure, folder, "weights",
                "The weights that the mitigation chose (kinds with less than 0.05% of the tokens "
                "left out)")


def weight_histogram(tally: Tally, axis) -> None:
    counts = tally.histograms.sizes["weight"].sum(0)
    zeros = tally.histograms.zeros["weight"] / tally.tokens
    low, high = tally.sums.extremes["weight"]
    axis.set(xlabel="weight, powers of ten", ylabel="share of all tokens")
    if low == high:
        axis.bar([0], [1.0], 0.1, color=BLUE)
        axis.set(xlim=(-1, 1), title=f"All weights are {low:.3g}")
        return
    axis.stairs(counts / tally.tokens, SIZE_EDGES, color=BLUE, fill=True, alpha=0.75)
    axis.set(title=f"Weights from {low:.2g} to {high:.2g}, {zeros:.0%} are 0")
    used = np.flatnonzero(counts)
    if len(used):
        axis.set(xlim=(SIZE_EDGES[used[0]] - 0.2, SIZE_EDGES[used[-1] + 1] + 0.2))
