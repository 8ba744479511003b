"""The tables and pictures of the experiment that this lab began with, of any run, or of several.

    python -m lab notes runs/none-grpo-s0
    python -m lab notes runs/none-grpo-s0 runs/inverse_logprob-grpo-s0
    python -m lab notes docs/qwen-steps/untrained

Each table has this run's numbers beside the published ones, both in the experiment's unit A log p
and as the size of the gradient, and a sentence on what the table can and cannot show. Of several
runs there are three tables: what the notes expected of each weighting and what these runs show, the
notes' summary table, and the shares of the classes. The four pictures of one run are written into
RUN/analysis/notes.png.
"""
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from lab.analysis import report
from lab.analysis.comparison import arms_of
from lab.analysis.html_page import Picture, make_output_folder
from lab.analysis.plots import COLOURS, GRADIENT_COLOUR, save, whole_steps
from lab.analysis.run_folders import Run, existing, read_run
from lab.analysis.tables import show
from lab.engine.errors import UserError
from lab.harness.flags import Flag, read
from lab.harness.screen import show_status
from lab.probes.notes_compared import notes_tables_of_arms
from lab.probes.notes_sums import ADVANTAGES, CLASSES, LOG_PROBS, UNDEFINED, VALUES, Notes
from lab.probes.notes_tables import notes_tables

FLAGS = {
    "output_dir": Flag(None, "folder for the picture. By default it is analysis/ in the run"),
    "baseline": Flag(None, "with several runs: the arm that the others are compared with")}
LEGEND = [
    "The earlier experiment (github.com/Ja-Crispy/GRPO-Zero) trained Qwen2.5-0.5B for 100 steps of "
    "Countdown, with 303,042 tokens. Its notes called A log p the contribution of a token and took "
    "it for the token's gradient. Here A is the advantage of a token, w its weight and p its "
    "probability. The gradient's size at the logits is abs(A) w s, with s = norm(onehot - p), and "
    "each table shows it, too. The published figures are those of that run."]


def main(argv: list[str]) -> None:
    import mitigations  # noqa: F401  makes known the methods that a run's settings name
    flags = read(argv, "python -m lab notes RUN ... [flags]", __doc__, FLAGS,
                 {"RUN ...": "run folders"})
    runs = [read_run(existing(name)) for name in flags.run]
    if len(runs) == 1:
        of_one_run(runs[0], Path(flags.output_dir or runs[0].folder / "analysis"))
        return
    print_tables([f"These are {len(runs)} runs."],
                 notes_tables_of_arms(arms_of(runs, flags.baseline)))


def of_one_run(run: Run, folder: Path) -> None:
    if not run.steps:
        raise UserError(f"{run.folder} has no credit files, which hold its tokens")
    notes = Notes(run)
    print_tables([report.describe(run)], notes_tables(notes))
    if notes.cloud.any():  # some log p is known
        make_output_folder(folder)
        path, _ = draw_notes(notes, folder)
        print(f"\nThe four pictures are in {path}")


def print_tables(intro: list[str], tables: list) -> None:
    show_status("")
    show([*intro, *LEGEND], tables)


@UNDEFINED
def draw_notes(notes: Notes, folder: Path) -> Picture:
    """The four published pictures, in both units."""
    figure, ((bars, histogram), (cloud, over_steps)) = plt.subplots(2, 2, figsize=(11, 7.6))
    draw_bins(bars, notes)
    draw_values(histogram, notes)
    draw_classes(over_steps, notes)
    for axis in (bars, histogram, over_steps):
        axis.legend(fontsize=7.5)
    counts = np.where(notes.cloud, notes.cloud, np.nan)  # what never occurs is not coloured
    drawn = cloud.pcolormesh(LOG_PROBS, ADVANTAGES, counts.T, cmap="viridis",
                             norm=LogNorm(1, max(2, notes.cloud.max())))
    figure.colorbar(drawn, ax=cloud, label="number of tokens", format="{x:g}")
    cloud.set(xlabel="log p of a token", ylabel="its advantage", title="Log p and advantage")
    return save(figure, folder, "notes", "The four pictures of the earlier experiment, with the "
                "contribution and with the gradient's size: the mean size by position, divided by "
                "that of all tokens; how often each value occurs; log p and advantage; the mean "
                "size of each class over training")


def draw_bins(axis: Axes, notes: Notes) -> None:
    heads = notes.heads
    for unit, head, colour, shift in (("contribution", "size", "black", -0.2),
                                      ("gradient", "new size", GRADIENT_COLOUR, 0.2)):
        relative = notes.mean("bin", f"abs {unit}") / notes.mean("all", f"abs {unit}")[0]
        axis.bar(np.arange(10) + shift, relative, 0.4, color=colour, label=heads[head])
    axis.set(xlabel="tenth of the answer", xticks=range(10),
             ylabel="mean size / that of all tokens", title="Size by position")


def draw_values(axis: Axes, notes: Notes) -> None:
    axis.stairs(notes.values["contribution"], VALUES, color="black", label=notes.heads["old"])
    axis.stairs(notes.values["gradient"], VALUES, color=GRADIENT_COLOUR, label=notes.heads["new"])
    axis.set(xlabel="value of a token (values beyond 5 are in the last bar)",
             ylabel="number of tokens", yscale="log", title="Values with their sign")
    axis.yaxis.set_major_formatter("{x:g}")


def draw_classes(axis: Axes, notes: Notes) -> None:
    steps = [block.mean() for block in notes.blocks]
    used = np.flatnonzero(notes.total("class", "tokens"))
    for unit, head, style in (("contribution", "size", "-"), ("gradient", "new size", ":")):
        of_block = notes.mean("class by block", f"abs {unit}").reshape(-1, 3)
        label = notes.heads[head].removeprefix("mean ")
        for c in used:
            axis.plot(steps, of_block[:, c], color=COLOURS[c], ls=style,
                      label=f"{CLASSES[c]}, {label}")
    axis.set(xlabel="step", ylabel="mean absolute value", ylim=(0, None),
             title="Size by class, over training")
    whole_steps(axis)
