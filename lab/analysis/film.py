"""A moving picture of a run: its success rises step by step, and below the curve the checkpoints
answer one problem in turn. `python -m lab sample RUN PROBLEM --film FILE.gif` makes it."""
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

from lab.analysis.plots import BLUE, DPI, GREY, ORANGE

import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.ticker import PercentFormatter

from analyze import MEASURES
from lab.analysis.run_folders import Run
from lab.engine.errors import UserError
from run import whole

FRAMES, STANDING, A_SECOND = 50, 25, 10  # of the curve, at its end, and in a second
WIDTH = 84  # letters in a line of an answer


def write_film(folder: Path, path: Path, answers: Mapping[int, tuple[str, bool, str]]) -> None:
    """`answers` has of each checkpoint, by its step, a line about all its answers, whether the
    first one is right, and its text."""
    run = Run(folder)
    steps, sampled, in_step = run.metrics, run.evaluated(), run.measure
    held_out, *_ = MEASURES[in_step]
    if not steps:
        raise UserError(f"{folder} has no steps on record")
    figure, (curve, below) = plt.subplots(2, 1, height_ratios=(3, 1.2), figsize=(7.5, 4.0))
    below.axis("off")
    if in_step == "success":
        curve.yaxis.set_major_formatter(PercentFormatter(1))
    dots, = curve.plot([], [], ".", color=GREY, label=f"{in_step} in each step of training")
    line, = curve.plot([], [], "o-", color=BLUE, label="on problems that are never trained on")
    known = [one[in_step] for one in steps] + [one[held_out] for one in sampled]
    curve.set(xlim=(-1, steps[-1]["step"] + 1), ylim=(min(0, *known), 1.1 * max(0.01, *known)),
              xlabel="step")
    curve.legend(loc="upper left")
    title = below.text(0, 1, "", va="top", weight="bold", transform=below.transAxes)
    text = below.text(0, 0.74, "", va="top", family="monospace", transform=below.transAxes)

    def draw(until: int) -> None:
        made = [one for one in steps if one["step"] <= until]
        dots.set_data([one["step"] for one in made], [one[in_step] for one in made])
        evaluated = [one for one in sampled if one["step"] <= until]
        line.set_data([one["step"] for one in evaluated], [one[held_out] for one in evaluated])
        about, is_right, answer = answers[max(step for step in answers if step <= until)]
        title.set_text(about)
        text.set(text=textwrap.fill(" ".join(answer.split()), WIDTH),
                 color=BLUE if is_right else ORANGE)

    last = steps[-1]["step"]
    frames = [round(last * frame / FRAMES) for frame in range(FRAMES)] + [last] * STANDING
    film = FuncAnimation(figure, draw, frames=frames)
    with tempfile.TemporaryDirectory() as temporary, whole(path) as unfinished:
        film.save(Path(temporary) / path.name, PillowWriter(fps=A_SECOND), dpi=DPI)
        shutil.move(Path(temporary) / path.name, unfinished)
    plt.close(figure)
