"""Draws pictures of the course, or those that are named: python -m docs.pictures z-score clip

    one-step    page 1    a group's rewards, and what one step changes
    spread      page 2    which way each of 20,000 groups would move the minus
    value       page 3    the expected reward after every token of an answer
    z-score     page 4    the advantage of right and of wrong answers
    step        page 6    what a step computes, and which function does it
    curves      page 8    six runs, each with five of its numbers
    clip        page 9    how hard a token is moved, by its ratio
    updates     page 9    success after one to fifty updates from each batch
    seeds       page 10   eight pairs of runs
    found       README    gains at equal steps, for as many tokens, in as much time

Numbers are computed here, or are those of lab/results. Letters are as large as a page's text.
"""
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from analyze import columns_in, tokens_of
from grpo import clipped_loss, group_z_score
from lab.analysis.plots import BLUE, GREY, ORANGE, plt, save
from lab.analysis.statistics import mean_over
from lab.probes.claim_rules import success_by_seed
from run import read_settings
from train import train

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "lab/results"
WIDTH = 7.6  # inches: as wide as a page shows a picture
plt.rcParams.update({"font.size": 11, "axes.titlesize": 11.5, "legend.fontsize": 11})


def one_step() -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(read_settings(["--questions", "1", "--answers", "16", "--steps", "1",
                             "--eval_every", "0", "--out", str(run)]))
        columns = columns_in(run / "credit/step_000001.npz")
        tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    tokens, reward = tokens_of(columns), columns["reward"]
    texts = [tokenizer.decode(tokens["token_id"][tokens["answer"] == row])
             .partition("<answer>")[2].partition("</answer>")[0] for row in range(16)]
    panels = {"reward": reward, "minus the mean": reward - reward.mean(),
              "change of log-prob": np.bincount(tokens["answer"], tokens["change"])}
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(WIDTH, 5.2))
    for axis, (title, values) in zip(axes, panels.items()):
        axis.barh(range(16), values, color=np.where(reward > 1, BLUE, ORANGE))
        axis.set(title=title, xticks=[], xlim=(1.6 * min(*values, 0) - 0.4, 1.5 * max(values)))
        axis.spines.left.set_visible(False)
        axis.tick_params(left=False)
        axis.grid(False)
        for row, value in enumerate(values):
            axis.text(value, row, f" {value:.2f} " if title == "reward" else f" {value:+.2f} ",
                      va="center", ha="left" if value >= 0 else "right")
        axis.axvline(0, color="black", lw=0.8)
    axes[0].set_yticks(range(16), texts, family="monospace")
    axes[0].set_ylim(15.6, -0.6)
    return figure


def spread() -> Figure:
    torch.manual_seed(0)  # as on the page
    p, right = torch.tensor([0.57, 0.43]), torch.tensor([0.44, 0.07])
    choice = torch.multinomial(p, 20000 * 16, replacement=True)
    reward = (0.1 + (torch.rand(len(choice)) < right[choice]).float()).view(20000, 16)
    arrow = ((choice == 0).float() - 0.57).view(20000, 16)
    factors = {"reward": reward, "reward + 10": reward + 10,
               "reward - mean": reward - reward.mean(1, keepdim=True)}
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(WIDTH, 4.4))
    for axis, (name, factor) in zip(axes, factors.items()):
        step = (factor * arrow).mean(1).numpy()
        _, _, bars = axis.hist(step, np.linspace(-3, 3, 121), color=BLUE)
        for bar in bars.patches[:60]:
            bar.set_facecolor(ORANGE)
        axis.set(title=f"{name}: {(step < 0).mean():.0%} of the groups go the wrong way", yticks=[])
    axes[-1].set_xlabel("step of the minus's logit (orange: the minus becomes less likely)")
    return figure


def value() -> Figure:
    stored = json.loads((RESULTS / "group/credit.json").read_text("utf-8"))
    tokenizer = Tokenizer.from_file(str(PROJECT / "models/tiny/tokenizer.json"))
    credit = np.array(stored["credit"])
    after = 1.1 - credit.sum() + credit.cumsum()
    figure, axis = plt.subplots(figsize=(WIDTH, 3.6))
    axis.stairs(after, np.arange(len(after) + 1) - 0.5, baseline=None, color=BLUE, lw=2)
    for t in np.argsort(-credit)[:5]:
        text = tokenizer.decode([stored["token_id"][t]]).strip()
        axis.text(t - 0.8, after[t], f"{text}   {credit[t]:+.2f}", ha="right")
    axis.set(xlabel="token of the answer", ylabel="value after it", ylim=(0, 1.25))
    return figure


def z_score() -> Figure:
    figure, axis = plt.subplots(figsize=(WIDTH, 3.4))
    count = np.arange(1, 16)
    scores = [group_z_score((torch.arange(16) < n).float(), torch.zeros(16, dtype=torch.long))
              for n in count]
    axis.plot(count, [z[0] for z in scores], "o-", color=BLUE, label="a right answer")
    axis.plot(count, [z[-1] for z in scores], "s-", color=ORANGE, label="a wrong answer")
    axis.axhline(0, color="black", lw=0.8)
    axis.set(xlabel="right answers of 16", ylabel="advantage", xticks=[1, 4, 8, 12, 15])
    axis.legend(loc="upper center")
    return figure


BOXES = [  # what a step computes, where it stands, and which function then makes the next one
    ("16 problems", (0, 2), "grpo.py\nsample"),
    ("256 answers\n(B, T)", (1, 2), "countdown_task.py\nTask.score"),
    ("reward\n(B,)", (2, 2), "grpo.py\ngrpo"),
    ("advantage\n(B, T)", (2, 1), "mitigations.py\nweights"),
    ("weight\n(B, T)", (2, 0), "grpo.py\nlog_probs"),
    ("log_prob\n(B, T), with\ngradient", (1.33, 0), "policy_loss"),
    ("loss\none number", (0.67, 0), "update"),
    ("changed\nmodel", (0, 0), "train.py\nthe next step")]


def step() -> Figure:
    figure, axis = plt.subplots(figsize=(WIDTH, 3.7))
    boxes = [axis.text(x, y, name, ha="center", va="center", zorder=4, bbox={
        "boxstyle": "round", "facecolor": "white", "edgecolor": BLUE}) for name, (x, y), _ in BOXES]
    for number, (_, (x, y), function) in enumerate(BOXES):
        following = (number + 1) % len(BOXES)
        to_x, to_y = BOXES[following][1]
        axis.annotate("", (to_x, to_y), (x, y), arrowprops={
            "arrowstyle": "-|>", "color": GREY, "lw": 1.5, "shrinkA": 0, "shrinkB": 0,
            "patchA": boxes[number].get_bbox_patch(), "patchB": boxes[following].get_bbox_patch()})
        axis.text((x + to_x) / 2, (y + to_y) / 2 + 0.35 * (y == to_y), function, ha="center",
                  va="center", color=ORANGE, bbox={"facecolor": "white", "edgecolor": "none"})
    axis.set(xlim=(-0.3, 2.4), ylim=(-0.2, 2.5))
    axis.axis("off")
    return figure


def clip() -> Figure:
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(WIDTH, 3.2))
    ratio, one = torch.linspace(0.4, 1.7, 261), torch.ones(261)
    for axis, advantage in zip(axes, (1, -1)):
        log_prob = ratio.log().requires_grad_()
        clipped_loss(log_prob, 0 * one, advantage * one, one, one, 1, 0.2, 0.28).backward()
        push = -log_prob.grad.numpy()
        for part, colour in ((push != 0, BLUE), (push == 0, ORANGE)):
            axis.plot(ratio, np.where(part, push, np.nan), color=colour, lw=3)
        axis.plot(1, advantage, "o", color="black")
        axis.set(title=f"advantage {advantage:+}", xlabel="ratio", xticks=[0.5, 0.8, 1, 1.28, 1.5])
    axes[0].set_ylabel("moved by")
    return figure


OF_A_RUN = {"reward": "reward", "eval_success": "held-out\nright", "entropy": "entropy",
            "length": "length", "groups_without_spread": "equal\ngroups"}
LIMITS = {"eval_success": (-0.05, 1.05), "entropy": (-0.05, 1), "length": (36, 84),
          "groups_without_spread": (-0.05, 1.05)}


def curves() -> Figure:
    figure, axes = plt.subplots(5, 6, sharex="col", figsize=(WIDTH, 6.2))
    for run, column in zip("ABCDEF", axes.T):
        text = (RESULTS / f"curves/{run}.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        for axis, (name, title) in zip(column, OF_A_RUN.items()):
            known = [(line["step"], line[name]) for line in lines if name in line]
            axis.plot(*zip(*known), color=BLUE, lw=1.2, marker="." if len(known) < 12 else "")
            axis.set_ylim(LIMITS.get(name))
            axis.tick_params(labelleft=run == "A" or name == "reward", labelsize=8)
            if run == "A":
                axis.set_ylabel(title)
        column[0].set_title(run)
        column[-1].set_xlabel("step")
    return figure


LINES = {"ratio and clip": BLUE, "no ratio": ORANGE, "one update, k times the rate": GREY,
         "k updates, 1/k of the rate": "black"}


def updates() -> Figure:
    found = json.loads((RESULTS / "page_9/success.json").read_text(encoding="utf-8"))
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(WIDTH, 4.6),
                                          height_ratios=(3, 1))
    for name, colour in LINES.items():
        means = {int(count): np.mean(seeds) for count, seeds in found[name].items()}
        above.plot(means.keys(), means.values(), "o-", color=colour, label=name)
        for count, seeds in found[name].items():
            above.plot([int(count)] * len(seeds), seeds, ".", color=colour, ms=4)
    above.axhline(found["before"], color="black", lw=0.8, ls=":")
    above.set(ylabel="right, %", xscale="log")
    above.legend(loc="lower left")
    share = found["clipped_share"]
    below.plot([int(count) for count in share], share.values(), "o-", color=BLUE)
    counts = [1, 2, 4, 8, 16, 50]
    below.set(ylabel="clipped_share", xlabel="updates from each batch (k)", ylim=(-0.02, 0.5))
    below.set_xticks(counts, counts)
    below.minorticks_off()
    return figure


ARMS = {"none-32x8": "four times the answers", "measured": "sampled credit",
        "gae": "PPO's critic", "entropy_weighted": "more where unsure"}


def seeds() -> Figure:
    plain = success_by_seed("board", "none")
    figure, axis = plt.subplots(figsize=(WIDTH, 3.6))
    for row, arm in enumerate(ARMS):
        own = success_by_seed("board", arm)
        gain = [100 * (own[f"{n}"].mean() - plain[f"{n}"].mean()) for n in range(40, 48)]
        found = mean_over(gain)
        colour = BLUE if found.low > 0 else ORANGE if found.high < 0 else GREY
        axis.plot(gain, [row - 0.15] * 8, "o", color="black", mfc="white")
        axis.plot([found.low, found.high], [row + 0.15] * 2, color=colour, lw=4)
        axis.plot(found.value, row + 0.15, "D", color=colour, ms=9)
    axis.axvline(0, color="black", lw=0.8)
    axis.set_yticks(range(len(ARMS)), ARMS.values())
    axis.set(ylim=(len(ARMS) - 0.5, -0.5), xlabel="gain over plain GRPO, points")
    return figure


GAINS = "steps", "tokens", "time"  # at equal


def found() -> Figure:
    rows = json.loads((RESULTS / "equal_cost.json").read_text("utf-8"))["rows"]
    panels = {panel: [row for row in rows if row["panel"] == panel]
              for panel in dict.fromkeys(row["panel"] for row in rows)}
    figure, axes = plt.subplots(len(panels), 3, sharex=True, figsize=(WIDTH, 8.6), height_ratios=[
        len(of_panel) + 1 for of_panel in panels.values()])
    for of_panel, own in zip(axes, panels.values()):
        for column, axis in zip(GAINS, of_panel):
            for number, row in enumerate(own):
                draw_gain(axis, number, row["gains"].get(column), row["words"].get(column))
            axis.axvline(0, color="black", lw=0.8)
            axis.set(ylim=(len(own) - 0.5, -0.5), xlim=(-45, 45), xticks=(-40, 0, 40))
            axis.set_yticks(range(len(own)), [])
        of_panel[0].set_yticklabels([row["name"] for row in own])
        of_panel[0].set_title(own[0]["panel"], x=-1.5, ha="left", fontweight="bold")
    for column, axis in zip(GAINS, axes[0]):
        axis.annotate(f"equal {column}", (0.5, 1), (0, 18), xycoords="axes fraction", ha="center",
                      textcoords="offset points")
    axes[-1][1].set_xlabel("points over plain GRPO")
    return figure


def draw_gain(axis: Axes, number: int, gain: list[float] | None, word: str | None) -> None:
    if gain is None:
        axis.text(0, number, "?", ha="center", va="center", zorder=4,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
        return
    colour = {"ahead": BLUE, "ahead once": BLUE, "behind": ORANGE}.get(str(word), GREY)
    value, *ends = (100 * end for end in gain)
    axis.plot(ends, [number] * 2, color=colour, lw=3)
    axis.plot(value, number, "o", color=colour, ms=6, mfc="white" if word == "ahead once" else None)


def drawn(figure: Figure) -> str:
    """The numbers of its lines. They are kept in the file, so that a test can compare them."""
    return json.dumps([[np.round(line.get_xdata(), 2).tolist(), str(line.get_color())]
                       for axis in figure.axes for line in axis.lines])


PICTURES = {"one-step": one_step, "spread": spread, "value": value, "z-score": z_score,
            "step": step, "clip": clip, "curves": curves, "updates": updates, "seeds": seeds,
            "found": found}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        picture = PICTURES[name]()
        save(picture, PROJECT / "docs", name, "", drawn(picture) if name == "found" else "")
