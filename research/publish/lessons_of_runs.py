"""The pictures that explain what results mean: drawn from published results, or from the step of a
real model that is recorded in docs/qwen-steps."""
import re
from collections.abc import Iterable
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

import mitigations
from analysis.plots import (BLUE, COLOURS, CREDIT_COLOUR, GRADIENT_COLOUR, GREY, ORANGE,
                            legend_below, plt, style_of)
from analysis.statistics import mean_over
from engine.errors import PROJECT
from engine.tokens import load_tokenizer
from grpo import gradient_size, rescaling
from harness.record import read_credit

RECORDED = PROJECT / "docs/qwen-steps/untrained"
DIGITS = 3    # to which the weights of the recorded tokens are compared with the drawn ones
BINS = 10     # of the probability of a token
BATCHES = np.array([1, 2, 4, 8, 16, 32, 64])
ESTIMATES = {"rloo": "one number for all tokens (rloo)", "one-step": "each token's true credit"}
SEEDS = range(40, 52)
SHOWN_ARMS = {  # arm and learning rate of the leaderboard -> its name
    "none-32x8 5e-4": "four times the answers", "measured 2.5e-4": "measured, the control",
    "gae 2.5e-4": "gae, a critic", "entropy_weighted 2.5e-4": "entropy_weighted"}
PLAIN = "none 2.5e-4"
SHOWN_WEIGHTINGS = ("none", "inverse_logprob", "equal_gradient", "low_probability",
                    "entropy_weighted", "entropy_masking")
STEP_LINE = re.compile(r" *(\d+)/\d+ +\S+ +([\d.]+)% +\S+ +\S+ +\S+ +([\d.]+) ")
HELD_OUT = re.compile(r" *held-out, sampled +([\d.]+)% +95% interval ([\d.]+)% to ([\d.]+)%")


def draw_noise(table: dict) -> Figure:
    """The noise-to-signal ratio of a gradient over the number of batches that are averaged, in
    units of one batch of rloo; and how many batches of rloo one batch with true credit is worth."""
    row_of = {row["advantage"]: row for row in table["rows"]}
    figure, axis = plt.subplots(figsize=(7.0, 4.2))
    for (advantage, name), colour in zip(ESTIMATES.items(), (GRADIENT_COLOUR, CREDIT_COLOUR)):
        times = row_of[advantage]["times"]
        axis.plot(BATCHES, times["value"] / BATCHES, "o-", color=colour, lw=2.4, ms=5, label=name)
        axis.fill_between(BATCHES, times["low"] / BATCHES, times["high"] / BATCHES, color=colour,
                          alpha=0.25, lw=0)
    share = row_of["one-step"]["times"]["value"]
    as_many = 1 / share
    axis.plot([1, as_many], [share, share], color="black", lw=1, ls="--")
    axis.plot([1, as_many], [share, share], "D", color="black", ms=5)
    axis.annotate(f"one batch with true credit:\nas noisy as {as_many:.1f} batches of rloo",
                  (as_many, share), (8, 6), textcoords="offset points", fontsize=8.5)
    axis.set(title="The variance of a gradient that is averaged over several batches",
             xlabel="batches that are averaged", xscale="log", yscale="log",
             ylabel="variance, divided by that of one batch of rloo",
             xlim=(0.93, BATCHES[-1]))
    axis.set_xticks(BATCHES, [str(count) for count in BATCHES])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    legend_below(figure, axis, ncols=2)
    return figure


def draw_seeds(values: dict) -> Figure:
    """The differences of single pairs of runs, beside their mean and its interval."""
    figure, axis = plt.subplots(figsize=(8.0, 3.9))
    for height, arm in enumerate(reversed(SHOWN_ARMS)):
        pairs = differences_by_seed(values, arm)
        gain = mean_over(pairs)
        axis.plot(100 * pairs, np.full(len(pairs), height + 0.12), "o", color=GREY, ms=5)
        axis.plot([100 * gain.low, 100 * gain.high], [height - 0.16] * 2, color=BLUE, lw=2.5)
        axis.plot(100 * gain.value, height - 0.16, "D", color=BLUE, ms=6)
    axis.plot([], [], "o", color=GREY, ms=5, label="one pair of runs with the same seed")
    axis.plot([], [], "D-", color=BLUE, lw=2.5, ms=6, label="mean of the twelve, 95% interval")
    axis.axvline(0, color="black", lw=0.8)
    axis.set_yticks(range(len(SHOWN_ARMS)), reversed(SHOWN_ARMS.values()))
    axis.grid(axis="y", visible=False)
    axis.set(title="Success in training minus that of plain GRPO",
             xlabel="percentage points", ylim=(-0.5, len(SHOWN_ARMS) - 0.5))
    legend_below(figure, axis, ncols=2)
    return figure


def differences_by_seed(values: dict, arm: str) -> np.ndarray:
    """Success in training minus that of plain GRPO with the same seed."""
    differences = []
    for seed in SEEDS:
        of_arm, of_plain = (mean_success(values["runs"][f"{name} {seed}"]) for name in (arm, PLAIN))
        differences.append(of_arm - of_plain)
    return np.array(differences)


def mean_success(stored: list) -> float:
    """Of a run as the leaderboard stores it: answers to a step, seconds, right answers by step."""
    answers, _, right = stored
    return sum(right) / (answers * len(right))


def draw_real_pairs(values: dict) -> Figure:
    """Every pair of runs of the real model's leaderboard, a row for each arm. The seed on which
    plain GRPO is farthest from its median has a colour of its own."""
    success: dict[str, dict[int, float]] = {}
    for name, stored in values["runs"].items():
        arm, _, seed = name.rpartition("-s")
        success.setdefault(arm, {})[int(seed)] = 100 * mean_success(stored)
    plain = success.pop("none")
    middle = np.median(list(plain.values()))
    special = max(plain, key=lambda seed: abs(plain[seed] - middle))
    gains = {}
    for arm, by_seed in success.items():
        gains[arm] = {seed: value - plain[seed] for seed, value in by_seed.items()}
    order = sorted(gains, key=lambda arm: fmean(gains[arm].values()))
    figure, axis = plt.subplots(figsize=(8.0, 1.5 + 0.3 * len(order)))
    for height, arm in enumerate(order):
        pairs = gains[arm]
        others = [gain for seed, gain in pairs.items() if seed != special]
        axis.plot(others, [height] * len(others), "o", color=GREY, ms=5)
        axis.plot(pairs[special], height, "s", color=ORANGE, ms=6)
        axis.plot(fmean(pairs.values()), height, "|", color=BLUE, ms=16, mew=2.5)
    axis.plot([], [], "o", color=GREY, ms=5, label="a pair of runs with the same seed")
    axis.plot([], [], "s", color=ORANGE, ms=6,
              label=f"seed {special}, where plain GRPO has {plain[special]:.0f}%")
    axis.plot([], [], "|", color=BLUE, ms=12, mew=2.5, label="mean of all")
    axis.axvline(0, color="black", lw=0.8)
    axis.set_yticks(range(len(order)), order)
    axis.grid(axis="y", visible=False)
    axis.set(title="Success in training minus that of plain GRPO", xlabel="percentage points")
    legend_below(figure, axis, ncols=3)
    return figure


def draw_real_run(table: dict) -> Figure:
    """The run of a real model: success in training and on held-out problems, and the entropy."""
    by_step, held_out = curves_of(row["line"] for row in table["rows"])
    steps, success, entropy = np.array(by_step).T
    at, value, low, high = np.array(held_out).T
    figure, axes = plt.subplots(1, 2, figsize=(10.0, 3.8), width_ratios=[1.7, 1])
    axes[0].plot(steps, success, "o", color=GREY, ms=4, label="64 answers of a step, in training")
    axes[0].errorbar(at, value, [value - low, high - value], fmt="D-", color=BLUE, lw=2, ms=6,
                     capsize=3, label="250 held-out problems, with 95% interval")
    axes[0].set(title="Success", xlabel="step", ylabel="%", ylim=(0, 103))
    axes[1].plot(steps, entropy, color=COLOURS[4], lw=2)
    axes[1].set(title="Entropy: how varied the answers are", xlabel="step", ylim=(0, None))
    legend_below(figure, axes[0], ncols=2)
    return figure


def curves_of(lines: Iterable[str]) -> tuple[list[list[float]], list[list[float]]]:
    """What a run printed: of each step its number, success and entropy; of each evaluation of
    sampled answers the step after which it was made, the success and the ends of its interval."""
    by_step: list[list[float]] = []
    held_out: list[list[float]] = []
    for line in lines:
        if match := STEP_LINE.match(line):
            by_step.append([float(number) for number in match.groups()])
        elif match := HELD_OUT.match(line):
            held_out.append([len(by_step), *(float(number) for number in match.groups())])
    return by_step, held_out


def weights_by_probability() -> dict[str, list[float]]:
    """Over the recorded tokens of an untrained real model, in bins of equal width of p: their
    number, and for each weighting, with its flags at their defaults, the means of c w and of
    c w s."""
    rollouts = read_credit(RECORDED, 1, load_tokenizer(RECORDED))
    mask = rollouts.mask
    p = rollouts.log_prob[mask].double().exp().numpy()
    s = gradient_size(rollouts.log_prob, rollouts.collision)[mask].double().numpy()
    place = np.minimum((BINS * p).astype(int), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    curves: dict[str, list[float]] = {"tokens": count.tolist()}
    for name in SHOWN_WEIGHTINGS:
        weight = getattr(mitigations, name)(rollouts) * mask
        rescaled = weight * rescaling(weight, rollouts, "mean")
        weights = rescaled[mask].double().numpy()
        curves[f"{name}: weight"] = means(weights, place, count)
        curves[f"{name}: gradient"] = means(weights * s, place, count)
    return curves


def means(values: np.ndarray, place: np.ndarray, count: np.ndarray) -> list[float]:
    """The mean of the values in each bin."""
    total = np.bincount(place, values, minlength=BINS)
    return [round(value, DIGITS) for value in (total / count).tolist()]


def draw_weights(curves: dict) -> Figure:
    """Left what each weighting gives a token by its probability; right what the gradient's size
    becomes."""
    middle = (np.arange(BINS) + 0.5) / BINS
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.4))
    for number, name in enumerate(SHOWN_WEIGHTINGS):
        for axis, what in zip(axes, ("weight", "gradient")):
            style = {"color": "black"} if name == "none" else style_of(number - 1)
            axis.plot(middle, curves[f"{name}: {what}"], marker="o", ms=4, lw=1.8,
                      label="none (plain GRPO)" if name == "none" else name, **style)
    axes[0].set(title="The weight of a token, c w (mean 1 over the batch)", ylabel="c w")
    axes[1].set(title="The size of its gradient, c w s (with advantage 1)", ylabel="c w s")
    for axis in axes:
        axis.set(xlabel="p, the probability of the token that was sampled", xlim=(0, 1),
                 ylim=(0, None))
    legend_below(figure, axes[0], ncols=3)
    return figure
