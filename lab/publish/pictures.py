"""Draws the three pictures of the pages that join several sources: python -m lab.publish.pictures

    docs/answer.png   one answer, shaded by the push, the change and the credit of its tokens
    docs/step.png     a step of training: its tensors, and the files that compute them
    docs/found.png    what gained over plain GRPO, and what did not

The credit was measured by `python -m lab follow runs/one --step 1 --answer 15 --credit 4000
--keep`, after `python train.py --mitigation none --steps 1 --eval_every 0 --out runs/one`. A game
of three turns has no stored result: its gains are the last lines of `python examples/guess.py
--advantage NAME --seed 200 --pairs 8` (docs/turns.md). The other numbers are those of lab/results.
"""
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.analysis.plots import (BLUE, CREDIT_COLOUR, DOWN, GREY, ORANGE, PUSH_COLOUR, UP, plt, save)
from lab.engine.errors import PROJECT, read_json
from lab.publish.results import RESULTS, Results, fingerprint

LETTERS = 70   # in a line of the answer
FAINT = 0.15   # by which that is multiplied where 0 lies in the interval
Gain = tuple[str, str, float, float, float]  # what was tried, the verdict, points, 95% interval

GAME = [  # games won of a hundred
    ("the true credit of each turn", "ahead", 33.1, 28.1, 38.1),
    ("four times the games", "better", 24.0, 20.0, 28.0),  # in whole games
    ("the luck of the replies taken out", "ahead", 21.0, 15.6, 26.3)]
ARMS = {  # of a result with a table `board`: the arm, and what the picture calls it
    "board": {
        "none-32x8": "four times the answers", "none-16x8": "twice the answers",
        "measured": "the credit of each token, 2 samples",
        "outcome_conditional": "half the weight on thinking",
        "entropy_weighted": "more weight where unsure",
        "inverse_logprob": "weight 1 / abs(log p)",
        "entropy_masking": "the most unsure fifth alone"},
    "real_board_brief_8_gpu": {
        "four times": "four times the answers",
        "measured 16": "the credit of each token, 16 samples",
        "outcome_conditional 0.5": "half the weight on thinking",
        "entropy_weighted": "more weight where unsure",
        "by_kind without words": "no weight on words",
        "inverse_logprob": "weight 1 / abs(log p)"}}
COLOUR_OF_VERDICT = {"ahead": BLUE, "better": BLUE, "behind": ORANGE, "worse": ORANGE}
PANELS = ("A game of three turns", "Answers of one turn, tiny model",
          "Answers of one turn, real model that thinks first")


def draw_answer(tokens: dict, measured: dict) -> Figure:
    """The same answer three times: shaded by the push of each token, by what the step did to it,
    and by what it had earned."""
    rows = tokens["rows"]
    texts = [row["token"] for row in rows]
    push, change = (np.array([row[name] for row in rows]) for name in ("push", "change"))
    credit, low, high = (np.array(measured[name]) for name in ("credit", "low", "high"))
    seen = (low > 0) | (high < 0)
    figure, axes = plt.subplots(3, 1, figsize=(8.4, 3.9))
    write_shaded(axes[0], texts, push, PUSH_COLOUR, PUSH_COLOUR)
    write_shaded(axes[1], texts, change, UP, DOWN)
    write_shaded(axes[2], texts, np.where(seen, credit, FAINT * credit), CREDIT_COLOUR, GREY,
                 darkest=1.0)
    axes[0].set_title(f"What the loss asks of each token (push): at most {push.max():+.1f}")
    axes[1].set_title("What the step did to it (change): blue is more likely than before, at most "
                      f"{change.max():+.2f}; orange is less likely")
    axes[2].set_title(f"What it had earned (credit): pink, at most {credit.max():+.2f}; faint "
                      "where it cannot be told from nothing")
    return figure


def write_shaded(axis: Axes, texts: list[str], values: np.ndarray, above: str, below: str,
                 darkest: float = 0.6) -> None:
    """Write the tokens in lines, each on a box whose colour is the sign of its value, and whose
    shade is the size: the largest has the opacity `darkest`."""
    largest = np.abs(values).max()
    line, place = 0, 0
    for text, value in zip(texts, values):
        if place + len(text) > LETTERS:
            line, place = line + 1, 0
        colour = above if value > 0 else below
        axis.add_patch(Rectangle((place, line - 0.4), len(text), 0.8, lw=0, color=colour,
                                 alpha=darkest * abs(value) / largest))
        axis.text(place, line, text.rstrip("\n"), family="monospace", fontsize=14,
                  va="center_baseline")
        place += len(text)
        if text.endswith("\n"):
            line, place = line + 1, 0
    axis.set(xlim=(0, LETTERS), ylim=(line + 0.6, -0.6))
    axis.axis("off")


TENSORS = [  # what a step computes, where it stands, and which function then makes the next one
    ("16 prompts", (0, 1), "lab/engine/sampler.py\nsamples 16 answers each"),
    ("rollouts\nids, mask, log_prob\n(B, T) = (256, 58)", (1, 1), "countdown_task.py\nscore"),
    ("reward\n(B,)", (2, 1), "grpo.py\ngroup_z_score"),
    ("advantage\n(B, T)", (3, 1), "mitigations.py\nweight, times c"),
    ("c * weight\n(B, T)", (3, 0), "lab/engine/forward.py\ngrpo.py policy_loss"),
    ("loss\none number", (2, 0), "grpo.py update\nloss.backward()"),
    ("gradient of\nevery parameter", (1, 0), "lab/engine/optimizer.py\nAdamW"),
    ("changed\nmodel", (0, 0), "train.py\nthe next step")]


def draw_step() -> Figure:
    """A step of training as a loop: boxes are what is computed, arrows the files that compute the
    next box."""
    figure, axis = plt.subplots(figsize=(8.4, 3.4))
    boxes = [axis.text(x, y, name, ha="center", va="center", fontsize=9, bbox={
        "boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": BLUE, "lw": 1.5})
        for name, (x, y), _ in TENSORS]
    for number, (_, (x, y), by) in enumerate(TENSORS):
        following = (number + 1) % len(TENSORS)
        next_x, next_y = TENSORS[following][1]
        axis.annotate("", (next_x, next_y), (x, y), arrowprops={
            "arrowstyle": "-|>", "color": GREY, "lw": 1.5,
            "patchA": boxes[number].get_bbox_patch(), "patchB": boxes[following].get_bbox_patch()})
        above = 0.28 if y == next_y else 0
        axis.text((x + next_x) / 2, (y + next_y) / 2 + above, by, fontsize=8, ha="center",
                  va="center", color=ORANGE, bbox={"facecolor": "white", "edgecolor": "none"})
    axis.set(xlim=(-0.4, 3.4), ylim=(-0.3, 1.45))
    axis.axis("off")
    return figure


def draw_found(panels: dict[str, list[Gain]]) -> Figure:
    """A panel for each setting: what was tried, and its gain over plain GRPO with its 95%
    interval. The colour is the verdict, which takes all arms and a second look into account."""
    heights = [len(gains) for gains in panels.values()]
    figure, axes = plt.subplots(len(panels), 1, sharex=True, figsize=(8.4, 5.6),
                                height_ratios=heights)
    figure.suptitle("Credit of turns and more answers gain much; no weighting of tokens is ahead",
                    fontsize=11.5)
    for axis, (title, gains) in zip(axes, panels.items()):
        for place, (_, verdict, gain, low, high) in enumerate(gains):
            colour = COLOUR_OF_VERDICT.get(verdict.partition(",")[0], GREY)
            axis.plot([low, high], [place, place], color=colour, lw=2)
            axis.plot(gain, place, "o", color=colour, ms=5)
        axis.axvline(0, color="black", lw=0.8)
        axis.set_yticks(range(len(gains)), [name for name, *_ in gains])
        axis.set(ylim=(len(gains) - 0.4, -0.6), title=title)
    axes[-1].set_xlabel("gain over plain GRPO, in points of success (in the game: games won of a "
                        "hundred)")
    return figure


def gains_of(results: Results, name: str) -> list[Gain]:
    """The gains of a leaderboard's arms that the picture shows, in the order of ARMS."""
    rows = {row["arm"]: row for row in results.table(name, "board")["rows"]}
    found = []
    for arm, called in ARMS[name].items():
        gain = rows[arm]["gain"]
        value, low, high = (100 * gain[part] for part in ("value", "low", "high"))
        found.append((called, rows[arm]["verdict"], value, low, high))
    return found


def draw_all(folder: Path) -> None:
    results = Results()
    tokens = results.table("group", "tokens")
    measured = read_json(RESULTS / "group/credit.json")
    save(draw_answer(tokens, measured), folder, "answer", "", fingerprint(tokens))
    save(draw_step(), folder, "step", "")
    boards = [gains_of(results, name) for name in ARMS]
    panels = dict(zip(PANELS, [GAME, *boards], strict=True))
    save(draw_found(panels), folder, "found", "",
         fingerprint(results.table("real_board_brief_8_gpu", "board")))


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    draw_all(PROJECT / "docs")
