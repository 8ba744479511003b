"""The pictures that explain how GRPO works: drawn from a formula of grpo.py, or from one group that
was followed through a step (`python -m research group`)."""
import math

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.plots import (CHANGE_COLOUR, DOWN, GRADIENT_COLOUR, GREY, PUSH_COLOUR, TOKENS_COLOUR,
                            UP, legend_below, plt)
from countdown_task import between
from grpo import gradient_size, group_z_score, policy_loss

DIGITS = 4    # to which a formula's curve is compared with the picture that was drawn
GROUP = 16    # answers to a problem
LETTERS = 70  # in a line of an answer that is drawn
DARKEST = 0.6  # of 1, so that black letters can be read on any shade
CLIP = (0.2, 0.28)  # the defaults of --clip_low and --clip_high
ADVANTAGES = {"positive": 1.0, "negative": -1.0}
ALTERNATIVES = {  # where the rest of the probability is -> the sum of squares of its shares
    "at one other token": 1.0, "at three others, equally": 1 / 3, "spread over very many": 0.0}


def gradient_sizes() -> dict[str, list[float]]:
    """Curves of s over p, one for each way in which the rest of the probability may lie."""
    p = torch.linspace(0.002, 1, 500, dtype=torch.float64)
    curves = {"p": rounded(p)}
    for name, concentration in ALTERNATIVES.items():
        collision = p.square() + (1 - p).square() * concentration
        curves[name] = rounded(gradient_size(p.log(), collision))
    return curves


def z_scores() -> dict[str, list[float]]:
    """The advantages of right and of wrong answers, by how many answers of a group are right."""
    curves: dict[str, list[float]] = {"share": [], "right": [], "wrong": []}
    for right in range(1, GROUP):
        reward = torch.tensor([1.0] * right + [0.0] * (GROUP - right), dtype=torch.float64)
        score = group_z_score(reward, torch.zeros(GROUP, dtype=torch.long))
        curves["share"].append(right / GROUP)
        curves["right"].append(round(score[0].item(), DIGITS))
        curves["wrong"].append(round(score[-1].item(), DIGITS))
    return curves


def clipped_losses() -> dict[str, list[float]]:
    """The loss of one token and its derivative by log p, over the ratio of its new and its old
    probability: for an advantage of +1 and for one of -1. No ratio is a bound of the clip, because
    there the derivative would depend on rounding."""
    ratio = 1 + 0.003 * torch.arange(-200, 234, dtype=torch.float64)  # 0.4 to 1.699
    curves = {"ratio": rounded(ratio)}
    for name, value in ADVANTAGES.items():
        losses, derivatives = [], []
        for log_ratio in ratio.log():
            log_prob = log_ratio.clone().requires_grad_()
            loss = policy_loss(log_prob, torch.tensor(value), torch.tensor(1.0),
                               torch.tensor(True), total=1, old=torch.tensor(0.0), clip=CLIP)
            loss.backward()
            losses.append(loss.detach())
            derivatives.append(log_prob.grad)
        curves[f"{name}: loss"] = rounded(torch.stack(losses))
        curves[f"{name}: derivative"] = rounded(torch.stack(derivatives))
    return curves


def rounded(values: torch.Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]


def draw_gradient_size(curves: dict) -> Figure:
    """s against p: near 0 where the model was sure of the token that was drawn."""
    figure, axis = plt.subplots(figsize=(7.0, 3.9))
    for name, line in zip(ALTERNATIVES, ("-", "--", ":")):
        axis.plot(curves["p"], curves[name], line, color=GRADIENT_COLOUR, lw=2.4, label=name)
    axis.set(xlabel="p, the probability of the token that was drawn",
             ylabel="s, the gradient's size", xlim=(0, 1), ylim=(0, math.sqrt(2)),
             title="The size of the gradient of log p, at the logits")
    legend_below(figure, axis, ncols=3, title="where the rest of the probability is:")
    return figure


def draw_z_scores(curves: dict) -> Figure:
    """The advantage of a right and of a wrong answer, by the share of right answers."""
    figure, axis = plt.subplots(figsize=(7.0, 3.9))
    axis.plot(curves["share"], curves["right"], "o-", color=UP, ms=5, label="a right answer")
    axis.plot(curves["share"], curves["wrong"], "s-", color=DOWN, ms=5, label="a wrong answer")
    axis.axhline(0, color="black", lw=0.8)
    axis.set(xlabel=f"share of the {GROUP} answers that are right", ylabel="advantage",
             xlim=(0, 1), title="The advantage that GRPO gives to each answer of a group")
    axis.legend()
    return figure


def draw_clipped_losses(curves: dict) -> Figure:
    """The loss above and its derivative below, grey where the clip leaves no gradient."""
    figure, axes = plt.subplots(2, 2, figsize=(8.0, 5.2), sharex=True, sharey="row")
    ratio = np.array(curves["ratio"])
    start = curves["ratio"].index(1.0)
    for column, name in zip(axes.T, ADVANTAGES):
        derivative = np.array(curves[f"{name}: derivative"])
        has_gradient = derivative != 0
        for axis, values in zip(column, (np.array(curves[f"{name}: loss"]), derivative)):
            axis.axhline(0, color="black", lw=0.8, zorder=1)
            for bound in (1 - CLIP[0], 1 + CLIP[1]):
                axis.axvline(bound, color="black", lw=0.8, ls=":")
            for shown, colour, label in ((has_gradient, GRADIENT_COLOUR, "it has a gradient"),
                                         (~has_gradient, GREY, "it has none: far enough")):
                axis.plot(ratio, np.where(shown, values, np.nan), color=colour, lw=3, label=label)
            axis.plot(1, values[start], "o", color="black", ms=5.5,
                      label="before the first update")
        ticks = [0.6, 1 - CLIP[0], 1, 1 + CLIP[1], 1.5]
        column[1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        column[1].set(xlabel="ratio of new to old probability", xlim=(ratio[0], ratio[-1]))
    axes[0][0].set(title="Advantage +1: the token should become likelier",
                   ylabel="loss of the token")
    axes[0][1].set(title="Advantage -1: it should become less likely")
    axes[1][0].set(ylabel="its derivative by log p")
    legend_below(figure, axes[0][0], ncols=3)
    return figure


def draw_one_step(table: dict) -> Figure:
    """From the rewards of one group to what the step did to its answers: a row for each answer."""
    rows, places = table["rows"], np.arange(len(table["rows"]))
    reward, advantage, change = (np.array([row[name] for row in rows])
                                 for name in ("reward", "advantage", "change"))
    colours = [UP if value > 0 else DOWN for value in advantage]
    figure, axes = plt.subplots(1, 4, figsize=(12.0, 5.2), sharey=True,
                                width_ratios=[1.0, 1.0, 2.1, 1.3])
    axes[0].barh(places, reward, color=colours)
    axes[1].barh(places, advantage, color=colours)
    for place, row in zip(places, rows):
        shade = 0.3 + 0.7 * abs(row["advantage"]) / np.abs(advantage).max()
        axes[2].barh([place] * row["tokens"], 0.8, left=range(row["tokens"]), height=0.7,
                     color=UP if row["advantage"] > 0 else DOWN, alpha=shade)
    axes[3].barh(places, change, color=CHANGE_COLOUR)
    for axis, values, form in ((axes[0], reward, "{:.1f}"), (axes[1], advantage, "{:+.2f}"),
                               (axes[3], change, "{:+.2f}")):
        axis.bar_label(axis.containers[0], [form.format(value) for value in values], padding=3,
                       fontsize=8)
    axes[0].set_xlim(0, 1.35 * reward.max())
    axes[1].set_xlim(advantage.min() - 0.4 * advantage.max(), 1.4 * advantage.max())
    room = 0.3 * np.abs(change).max()  # for the numbers beside the bars
    axes[3].set_xlim(change.min() - room, change.max() + room)
    for axis in axes:
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.axvline(0, color="black", lw=0.8)
    problem = table["title"].removeprefix("The answers to ")
    axes[0].set_yticks(places, [(between(row["text"], "<answer>", "</answer>") or "").strip()
                                for row in rows], family="monospace", fontsize=8.5)
    axes[0].invert_yaxis()
    axes[0].set(title="1. Reward", xlabel="reward", ylabel=f"{len(rows)} answers to {problem}")
    axes[1].set(title="2. Advantage", xlabel="standard deviations")
    axes[2].set(title="3. Each token of an answer gets its advantage",
                xlabel="token (dark: a large advantage)")
    axes[3].set(title="4. What the step did",
                xlabel="change of its log-prob\n(left: less likely, right: more likely)")
    figure.supxlabel("loss = -sum(weight * advantage * log_prob) / N    "
                     "Between 3 and 4: one step on this group and those of the other problems",
                     fontsize=9.5)
    return figure


def draw_shaded_answer(table: dict) -> Figure:
    """The same answer twice: shaded by the push of each token, and by what the step did to it."""
    texts = [row["token"] for row in table["rows"]]
    push, change = (np.array([row[name] for row in table["rows"]]) for name in ("push", "change"))
    figure, axes = plt.subplots(2, 1, figsize=(8.4, 2.6))
    write_shaded(axes[0], texts, push, PUSH_COLOUR, PUSH_COLOUR)
    write_shaded(axes[1], texts, change, UP, DOWN)
    axes[0].set_title("What the loss asks of each token (push): the darker, the harder it is "
                      "pushed up")
    axes[1].set_title("What the step did to each token (change): blue is more likely than before, "
                      "orange is less likely")
    return figure


def write_shaded(axis: Axes, texts: list[str], values: np.ndarray, above: str, below: str) -> None:
    """Write the tokens in lines, each on a box whose colour is the sign of its value, and whose
    shade is the size."""
    largest = np.abs(values).max()
    line, place = 0, 0
    for text, value in zip(texts, values):
        if place + len(text) > LETTERS:
            line, place = line + 1, 0
        axis.add_patch(Rectangle((place, line - 0.4), len(text), 0.8, lw=0,
                                 color=above if value > 0 else below,
                                 alpha=DARKEST * abs(value) / largest))
        axis.text(place, line, text.rstrip("\n"), family="monospace", fontsize=14,
                  va="center_baseline")
        place += len(text)
        if text.endswith("\n"):
            line, place = line + 1, 0
    axis.set(xlim=(0, LETTERS), ylim=(line + 0.6, -0.6))
    axis.axis("off")


def draw_one_answer(table: dict) -> Figure:
    """Each token's push above, and what the step did to it below."""
    rows, places = table["rows"], np.arange(len(table["rows"]))
    figure, axes = plt.subplots(2, 1, figsize=(11.0, 4.6), sharex=True)
    axes[0].bar(places, [row["push"] for row in rows], color=PUSH_COLOUR)
    axes[1].bar(places, [row["change"] for row in rows], color=CHANGE_COLOUR)
    axes[0].set(title="Push: what the token's own term of the loss asks for",
                ylabel="push (log p, unit step)")
    axes[1].set(title="Change: what the step did to its log-probability", ylabel="change of log p",
                xlim=(-0.7, len(rows) - 0.3))
    names = [row["token"].replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
             for row in rows]
    axes[1].set_xticks(places, names, rotation=90, family="monospace")
    for axis in axes:
        axis.axhline(0, color="black", lw=0.8)
        axis.grid(axis="x", visible=False)
    return figure


def draw_push_and_change(table: dict) -> Figure:
    """For each category of token, its share of the tokens, of the push and of the change."""
    rows = [row for row in table["rows"] if row["tokens"] >= 0.005]
    places = np.arange(len(rows))
    figure, axis = plt.subplots(figsize=(8.0, 4.0))
    for number, (name, colour) in enumerate(
            {"tokens": TOKENS_COLOUR, "push": PUSH_COLOUR, "change": CHANGE_COLOUR}.items()):
        values = [100 * row[name] for row in rows]
        bars = axis.bar(places + 0.27 * (number - 1), values, 0.25, color=colour,
                        label=f"of the {name}")
        axis.bar_label(bars, [f"{value:.0f}" for value in values], padding=2, fontsize=8,
                       color=GREY if name == "tokens" else colour)
    axis.set_xticks(places, [row["kind"] for row in rows])
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.1)
    axis.set(ylabel="share, %", title="Each category's share of the tokens of a step, of the sizes "
             "of their pushes, and of their changes")
    legend_below(figure, axis, ncols=3)
    return figure
