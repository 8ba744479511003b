"""Which of these runs' methods is better? Runs that differ in nothing but their seed are one arm.

    python -m lab compare runs/*
    python -m lab compare runs/* --baseline "mitigation random"

Each arm is compared with plain GRPO, or with the arm that is named, in pairs of runs with the same
seed: in training at equal steps, at equal sampled tokens and at equal processor time
(lab/analysis/cost.py), and on held-out problems at the newest evaluation that all have. The
p-values have Holm's correction for all arms of the table, and the verdict is that of `lab idea`
after one look: what is ahead once may still be luck, which new seeds show.

Another setting, other code or data, and a run whose files have changed while it was stopped are
arms of their own; so are a run of train.py and one of the lab. The code is compared as a whole
(lab/harness/versions.py says what counts). An arm is named by what most runs do not have. The last
table has the notes' four metrics, from the credit files. Two runs of one arm with one seed are
refused, and so is a record with a damaged line or a hole. The curves are drawn into --output_dir.
"""
import textwrap
from pathlib import Path

import numpy as np

from analyze import MEASURES as COLUMNS
from lab.analysis.comparison import (AT_THE_END, Arms, arms_of, comparable, doubt_about_training,
                                     in_words, of_runs, refuse_holes, say_gains)
from lab.analysis.plots import COLOURS, legend_below, plt, save
from lab.analysis.run_folders import Run, existing
from lab.engine.errors import UserError
from lab.harness.flags import Flag, read
from lab.harness.screen import say
from lab.probes.notes import print_metrics

FLAGS = {
    "baseline": Flag(None, "the arm that the others are compared with, by its name in the table. "
                           "By default it is plain GRPO, or the first arm"),
    "output_dir": Flag(None, "folder for the picture. By default it is comparison/ beside the "
                             "first run")}


def main(argv: list[str]) -> None:
    flags = read(argv, "python -m lab compare RUN RUN ... [flags]", __doc__, FLAGS,
                 {"RUN ...": "run folders; other folders are left out"})
    runs = runs_in([existing(name) for name in flags.run])
    refuse_holes(runs)
    whole = arms_of(runs, flags.baseline)
    arms, notes = comparable(whole)
    measure = ""
    if doubt := doubt_about_training(runs):
        measure = AT_THE_END
        notes.append(f"The verdict is on the {in_words(measure, runs)}, because {doubt}")
    for note in notes:
        say(textwrap.fill(f"{note}.", 100))
    say_gains(arms, measure)
    print_metrics(arms)
    folder = Path(flags.output_dir or runs[0].folder.parent / "comparison")
    folder.mkdir(parents=True, exist_ok=True)
    picture, _ = draw(whole, folder)
    say(f"The curves: {picture}")


def runs_in(folders: list[Path]) -> list[Run]:
    """The runs of these folders, at least two. runs/* also has folders that are no runs."""
    found = []
    for folder in folders:
        if any(folder.glob("*.jsonl")):
            found.append(Run(folder))
        else:
            say(f"left out, because it is no run: {folder}")
    if len(found) < 2:
        raise UserError("it takes at least two runs to compare. python analyze.py RUN shows one")
    return found


def draw(arms: Arms, folder: Path) -> tuple[Path, str]:
    """Success, or reward, in training, thin, of each run; and the mean of each arm on held-out
    problems, at the steps after which all its runs were evaluated."""
    figure, axis = plt.subplots()
    what = of_runs(run for arm in arms.values() for run in arm.values())
    mean, *_ = COLUMNS[what]
    for number, (name, arm) in enumerate(arms.items()):
        colour = COLOURS[number % len(COLOURS)]
        by_step: dict[int, list[float]] = {}
        for run in arm.values():
            in_training = np.array([line[what] for line in run.metrics], float)
            axis.plot([line["step"] for line in run.metrics], in_training, color=colour, lw=0.7,
                      alpha=0.35)
            for line in run.evaluated():
                by_step.setdefault(line["step"], []).append(line[mean])
        of_all = {step: np.mean(known) for step, known in sorted(by_step.items())
                  if len(known) == len(arm)}
        axis.plot([*of_all], [*of_all.values()], color=colour, marker="o", ms=3,
                  label=f"{name} ({len(arm)} runs)")
    axis.set(xlabel="step", ylabel=f"mean {what}",
             title=f"{what.capitalize()} on held-out problems (thin: in training)")
    if what == "success":
        axis.set(ylabel="share of right answers", ylim=(0, 1))
    axis.locator_params(axis="x", integer=True)  # whole steps
    legend_below(figure, axis, ncols=1)
    return save(figure, folder, "learning_curve", f"{what.capitalize()} of each arm")
