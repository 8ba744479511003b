"""The pictures of one run, each with a title that says what is seen."""
from pathlib import Path

import numpy as np

from analysis.answer_plot import draw_answer
from analysis.histograms import (ADVANTAGE_EDGES, ENTROPY_EDGES, LOG_PROB_EDGES, S_EDGES,
                                 SIZE_EDGES)
from analysis.opening import SEVERAL_STEPS, so_far
from analysis.plots import (BLUE, COLOURS, GREEN, GREY, ORANGE, legend_below, panels, save, shade,
                            whole_steps)
from analysis.ratios import shares
from analysis.runs import evaluations, is_done, steps_done
from analysis.sizes import LABELS, size_label
from analysis.tally import Tally
from analysis.vocabulary import CLASSES
from engine.labels import KINDS, SECTIONS

Picture = tuple[Path, str]  # path and caption
ON_TOP = ("learning_curve", "credit_by_kind")
PLACES = {  # below which table of the page the others stand
    "growth": ("length_and_entropy", "over_training"),
    "gradient by position": ("position",),
    "sections": ("entropy_and_gradient", "weights"),
    "contribution": ("contributions", "histograms", "log_prob_and_gradient"),
    "position": ("position_in_old_unit",),
    "class by position": ("class_by_position",)}
NARROW = (5.6, 3.8)     # inches: a picture that is still read on a telephone
CURVES = {"length": "tokens an answer", "entropy": "mean entropy, nats"}
FEWEST_TOKENS = 30      # in a bin, for its mean to be drawn


def draw_run(run: dict, tally: Tally | None, folder: Path) -> list[Picture]:
    """The pictures that have something to show."""
    pictures = []
    if run["metrics"] or run["evaluations"]:
        pictures.append(learning_curve(run, folder))
    if curves_of(run):
        pictures.append(length_and_entropy(run, folder))
    if tally:
        pictures += [draw_answer(tally, folder), log_prob_and_gradient(tally, folder)]
        if (tally.histograms.by_entropy[0] >= FEWEST_TOKENS).any():
            pictures.append(entropy_and_gradient(tally, folder))
        if not tally.weights_are_one:
            pictures.append(weights(tally, folder))
        if tally.total("all", f"abs {tally.final}")[0] > 0:
            pictures += draw_gradient(run, tally, folder)
    return [(path, caption + so_far_in_brackets(run)) for path, caption in pictures]


def draw_gradient(run: dict, tally: Tally, folder: Path) -> list[Picture]:
    return [credit_by_kind(tally, folder),
            position_bars(tally, folder, "position", tally.final),
            position_bars(tally, folder, "position_in_old_unit", "contribution"),
            contributions(run, tally, folder), histograms(tally, folder),
            class_by_position(tally, folder), over_training(run, tally, folder)]


def step_label(run: dict) -> str:
    if is_done(run):
        return "step"
    return f"step ({steps_done(run)} of {run['config']['steps']} so far)"


def so_far_in_brackets(run: dict) -> str:
    return "" if is_done(run) else f" ({so_far(run)})"


def learning_curve(run: dict, folder: Path) -> Picture:
    figure, axis = panels(1, figsize=NARROW)
    title = "Success while training"
    for key, colour, label in (("finished", GREEN, "not cut off, in training"),
                               ("success", GREY, "solved, in training")):
        lines = [line for line in run["metrics"] if line.get(key) is not None]
        if lines:
            axis.plot([line["step"] for line in lines], [line[key] for line in lines],
                      color=colour, lw=1.0, label=label)
    for mode, colour in (("greedy", ORANGE), ("sampled", BLUE)):
        lines = evaluations(run, mode)
        if lines:
            held_out_curve(axis, lines, colour, f"solved, held-out, {mode}")
            title = f"Held-out success, {mode}: {first_to_last(lines)}"
    axis.set(xlabel=step_label(run), ylabel="share of the answers",
             ylim=(0, 1.03), title=title)
    whole_steps(axis)
    legend_below(figure, axis, ncols=2)
    return save(figure, folder, "learning_curve",
                "Share of answers that solve their problem, in training and on held-out problems "
                "(with 95% intervals), and of answers that end before the limit")


def first_to_last(lines: list[dict]) -> str:
    start, end = lines[0]["success"], lines[-1]["success"]
    return f"{start:.1%} to {end:.1%}" if len(lines) > 1 else f"{end:.1%}"


def held_out_curve(axis, lines: list[dict], colour: str, label: str) -> None:
    success = np.array([line["success"] for line in lines])
    bounds = np.array([[line["success_low"], line["success_high"]] for line in lines])
    axis.errorbar([line["step"] for line in lines], success, np.abs(bounds.T - success),
                  color=colour, marker="o", ms=3, lw=1.4, capsize=2, label=label)


def curves_of(run: dict) -> dict[str, list[dict]]:
    """The lines of metrics that know a quantity, of the quantities that some line knows."""
    lines = {key: [line for line in run["metrics"] if line.get(key) is not None] for key in CURVES}
    return {key: known for key, known in lines.items() if known}


def length_and_entropy(run: dict, folder: Path) -> Picture:
    curves = curves_of(run)
    figure, axes = panels(len(curves), squeeze=False)
    for axis, (key, lines) in zip(axes[0], curves.items()):
        values = [line[key] for line in lines]
        count = min(len(values), SEVERAL_STEPS)
        start, end = np.mean(values[:count]), np.mean(values[-count:])
        axis.plot([line["step"] for line in lines], values, color=BLUE, lw=1.2)
        axis.set(xlabel=step_label(run), ylabel=CURVES[key], ylim=(0, None),
                 title=f"{key.capitalize()}: {start:.3g} in the first {count} steps, {end:.3g} in "
                       f"the last {count}")
    whole_steps(*axes[0])
    return save(figure, folder, "length_and_entropy",
                "Length of the answers and entropy of the policy over training")


def credit_by_kind(tally: Tally, folder: Path) -> Picture:
    """Share of the tokens beside share of the gradient."""
    tokens, gradient = tally.count("kind") / tally.tokens, shares(tally, "kind")
    used = np.flatnonzero(tokens)
    figure, axis = panels(1, figsize=NARROW)
    for offset, values, colour, label in ((-0.21, tokens, GREY, "share of the tokens"),
                                          (0.21, gradient, BLUE, "share of the gradient")):
        bars = axis.bar(np.arange(len(used)) + offset, values[used], 0.4, color=colour,
                        label=label)
        axis.bar_label(bars, [f"{value:.0%}" for value in values[used]], fontsize=8.5, padding=1)
    most = int(gradient.argmax())
    axis.set(xticks=range(len(used)), xticklabels=[KINDS[k] for k in used],
             ylabel="share of all tokens or gradient",
             title=f"{KINDS[most].capitalize()} tokens: {tokens[most]:.0%} of all tokens, "
                   f"{gradient[most]:.0%} of the gradient")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)
    legend_below(figure, axis, ncols=2)
    return save(figure, folder, "credit_by_kind",
                "Each kind of token: its share of all tokens, and of the summed sizes of the "
                f"gradient {size_label(tally.final)}")


def old_and_new(tally: Tally) -> tuple[tuple[str, str], ...]:
    """The two units that stand side by side, with their labels."""
    return (("contribution", "abs(A log p)"), (tally.final, size_label(tally.final)))


def position_bars(tally: Tally, folder: Path, name: str, unit: str) -> Picture:
    label = dict(old_and_new(tally))[unit]
    what = "The old unit" if unit == "contribution" else "The gradient"
    sizes, tokens = tally.drawn("position", unit)
    with np.errstate(invalid="ignore", divide="ignore"):
        reach = 1.96 * (sizes / tokens).std(0)
    mean = tally.mean("position", f"abs {unit}")
    figure, axis = panels(1, figsize=NARROW)
    axis.bar(range(1, 11), mean, 0.85, yerr=reach, color=ORANGE if unit == "contribution" else BLUE,
             error_kw={"lw": 0.8, "capsize": 2})
    largest = int(np.nanargmax(mean)) + 1
    axis.set(xlabel="tenth of the answer", ylabel=f"mean {label}", xticks=range(1, 11),
             title=f"{what} is largest in tenth {largest} of an answer")
    return save(figure, folder, name,
                f"Mean {label} in ten bins of relative position, 95% intervals over groups")


def histograms(tally: Tally, folder: Path) -> Picture:
    figure, axes = panels(2, sharey=True)
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
    legend_below(figure, axes[0], ncols=3, title="class by the regex")
    none = tally.histograms.zeros["contribution"] / tally.tokens
    return save(figure, folder, "histograms",
                f"How sizes are spread over tokens, old unit and gradient; the {none:.0%} that are "
                "exactly 0 (no advantage) left out, what is smaller than 1e-6 in the first bin")


def contributions(run: dict, tally: Tally, folder: Path) -> Picture:
    """Two pictures of the earlier experiment, on its axes; the gradient beside."""
    figure, (left, right) = panels(2)
    low = min(tally.sums.extremes[unit][0] for unit in tally.units)
    high = max(tally.sums.extremes[unit][1] for unit in tally.units)
    steps, tokens = [block.mean() for block in tally.blocks], by_block(tally, "all", "tokens")
    for (unit, label), colour in zip(old_and_new(tally), (ORANGE, BLUE)):
        name = LABELS[unit]
        left.stairs(*tally.histograms.signed_between(unit, low, high), color=colour, lw=1.4)
        size, mean = (by_block(tally, "all", measure) / tokens for measure in (f"abs {unit}", unit))
        right.plot(steps, size[:, 0], color=colour, lw=1.4, label=f"mean {label}")
        right.plot(steps, mean[:, 0], color=colour, lw=1.0, ls="--", label=f"mean {name}")
    left.axvline(0, color=GREY, lw=0.9, ls="--")
    smallest, largest = tally.sums.extremes["contribution"]
    left.set(xlabel="contribution A log p, and gradient with the sign of A", ylabel="tokens",
             yscale="log", title=f"A log p goes from {smallest:.3g} to {largest:.3g}")
    right.axhline(0, color=GREY, lw=0.9, ls="--")
    right.set(xlabel=step_label(run), ylabel="mean over the tokens",
              title="Sizes over training, and means with their sign")
    whole_steps(right)
    legend_below(figure, right, ncols=4)
    return save(figure, folder, "contributions",
                "Contributions as the earlier experiment drew them, the gradient beside: how often "
                "each value occurs (on a logarithmic axis; beyond 40 counted at 40), and the means "
                "over training")


def log_prob_and_gradient(tally: Tally, folder: Path) -> Picture:
    figure, (left, right) = panels(2)
    shade(figure, left, LOG_PROB_EDGES, ADVANTAGE_EDGES, tally.histograms.log_prob_and_advantage)
    left.set(xlabel="log p of the token", ylabel="advantage A",
             title="Log-prob and advantage, the earlier picture")
    shade(figure, right, LOG_PROB_EDGES, S_EDGES, tally.histograms.log_prob_and_s)
    log_p = np.linspace(-14, -1e-3, 400)
    rest = -np.expm1(log_p)
    right.plot(log_p, rest, color=ORANGE, lw=1.2,
               label="1 - p and sqrt(2) (1 - p): the limits of s")
    right.plot(log_p, rest * np.sqrt(2), color=ORANGE, lw=1.2)
    right.plot(log_p, -log_p, color="#000000", lw=1.2, ls="--", label="abs(log p): the old unit")
    right.set(xlabel="log p of the token", ylabel="size at A = 1", ylim=(0, 3),
              title="Rare tokens: the old unit has no limit")
    legend_below(figure, right, ncols=2)
    return save(figure, folder, "log_prob_and_gradient",
                "Why the old unit misleads: log-prob against advantage, and against the size of "
                "the gradient")


def entropy_and_gradient(tally: Tally, folder: Path) -> Picture:
    figure, (left, right) = panels(2)
    shade(figure, left, ENTROPY_EDGES, S_EDGES, tally.histograms.entropy_and_s)
    used = np.flatnonzero(tally.histograms.entropy_and_s.sum(1))
    top = ENTROPY_EDGES[used[-1] + 1] if len(used) else 1
    left.set(xlabel="entropy of the distribution", ylabel="gradient size s of the drawn token",
             title="Sure tokens have small gradients, unless a rare one was drawn",
             xlim=(0, top))
    enough = tally.histograms.by_entropy[0] >= FEWEST_TOKENS
    tokens, squares, theory = tally.histograms.by_entropy[:, enough]
    middle = (ENTROPY_EDGES[1:] + ENTROPY_EDGES[:-1])[enough] / 2
    off = np.abs((theory - squares) / tokens).max(initial=0)
    right.plot(middle, theory / tokens, color=ORANGE, lw=1.6, label="theory: E s^2 = 1 - sum p^2")
    right.plot(middle, squares / tokens, "o", color=BLUE, ms=3.5,
               label="mean s^2 of the recorded tokens")
    right.set(xlabel="entropy of the distribution", ylabel="mean s^2", xlim=(0, top),
              title=f"Mean s^2 of the recorded tokens is within {off:.2g} of theory")
    legend_below(figure, right, ncols=2)
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
    legend_below(figure, axes[0], ncols=2)
    return save(figure, folder, "class_by_position",
                "Filler and reasoning (by the regex) in five bins of relative position, old unit "
                "and gradient")


def over_training(run: dict, tally: Tally, folder: Path) -> Picture:
    figure, (left, right) = panels(2)
    steps = [block.mean() for block in tally.blocks]
    tokens = by_block(tally, "all", "tokens")[:, 0]
    mean = by_block(tally, "all", f"abs {tally.final}")[:, 0] / tokens
    left.plot(steps, mean, color=BLUE, lw=1.4)
    left.set(xlabel=step_label(run), ylim=(0, None),
             ylabel=f"mean {size_label(tally.final)}",
             title="The gradient of a token over training")
    of_kinds = by_block(tally, "kind", f"abs {tally.final}")
    of_kinds = of_kinds / of_kinds.sum(1, keepdims=True).clip(1e-300)
    for k in np.argsort(-of_kinds.mean(0)):
        if of_kinds[:, k].max() >= 0.01:
            right.plot(steps, of_kinds[:, k], color=COLOURS[k], lw=1.4, label=KINDS[k])
    most = KINDS[int(of_kinds.mean(0).argmax())]
    right.set(xlabel=step_label(run), ylabel="share of the gradient",
              ylim=(0, None), title=f"Most of the gradient went to {most} tokens")
    whole_steps(left, right)
    legend_below(figure, right, ncols=len(KINDS))
    return save(figure, folder, "over_training",
                "Mean size of the gradient over training, and the share of each kind of token "
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
              title="Mean weight by kind and section")
    legend_below(figure, right, ncols=3)
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
