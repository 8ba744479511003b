"""Arms side by side: success on the way, each arm minus the first one, what it sampled beside.

This is also the report of an experiment that has none of its own.
"""
import numpy as np

from analysis.plots import COLOURS, GREY, legend_below, panels, save, whole_steps
from analysis.tables import Table, by_row
from research.experiments.experiments import RACE_STEPS
from research.experiments.finished import (END, START, Study, ahead, mean_success, middle, moving_mean,
                            training_success)
from research.probes.common import Findings


def report(study: Study) -> Findings:
    plain = next(iter(study.experiment.arms))
    tables = [success_table(study), differences_table(study, plain)]
    return Findings(f"{study.experiment.name}: arms against {plain}", study.intro(), tables,
                    ("differences",), pictures=[draw(study)], places={"success": ("success",)})


def success_table(study: Study) -> Table:
    rows = []
    for arm, runs in study.runs.items():
        half = middle(next(iter(runs.values())))
        success = [mean_success(runs, place) for place in (START, half, END)]
        rows.append([arm, len(runs), *success, tokens_beside(runs)])
    formats = {"arm": "", "seeds": "d", "start": ".1%", "middle": ".1%", "end": ".1%",
               "beside": ".1f"}
    return Table("success", "Held-out success, sampled", by_row(formats, rows), "",
                 ["means over the seeds that are finished; beside: tokens sampled for credit, by "
                  "trained token"], {"beside": "tokens beside"})


def tokens_beside(runs: dict[int, dict]) -> float:
    """Tokens sampled for the credit, for each token that was trained on."""
    extra = trained = 0.0
    for run in runs.values():
        extra += sum(line.get("extra_tokens") or 0 for line in run["metrics"])
        trained += sum(line.get("trained_tokens") or 0 for line in run["metrics"])
    return extra / trained if trained else float("nan")


def differences_table(study: Study, plain: str) -> Table:
    rows, findings = [], []
    for arm in study.runs:
        if arm == plain or not study.of(plain):
            continue
        half = middle(next(iter(study.of(arm).values())))
        for when, place in (("middle", half), ("end", END)):
            seeds, estimate = ahead(study, arm, plain, place)
            if estimate is None:
                continue
            rows.append([arm, when, seeds, estimate.value, estimate.interval])
            if when == "end":
                findings.append(in_words(arm, plain, seeds, estimate))
    formats = {"arm": "", "when": "", "seeds": "d", "difference": "points",
               "95%": "points"}
    return Table("differences", f"Held-out success, sampled: each arm minus {plain}, in points",
                 by_row(formats, rows), "\n".join(findings),
                 ["paired by seed and by held-out problem; with one seed the interval is about "
                  "problems alone"], {"95%": "95% interval"})


def in_words(arm: str, plain: str, seeds: int, estimate) -> str:
    return (f"At the end {arm} is {100 * estimate.value:+.1f} points from {plain} "
            f"({100 * estimate.low:+.1f} to {100 * estimate.high:+.1f}, {seeds} seeds).")


def draw(study: Study):
    figure, axis = panels(1)
    for number, (arm, runs) in enumerate(study.runs.items()):
        curves = [training_success(run) for run in runs.values()]
        curve = moving_mean(np.mean(curves, axis=0), RACE_STEPS)
        steps = np.arange(RACE_STEPS, RACE_STEPS + len(curve))
        colour = COLOURS[number] if number < len(COLOURS) else GREY
        axis.plot(steps, curve, color=colour, label=arm)
    axis.set(xlabel="step", ylabel="success in training", title="Success on the way")
    whole_steps(axis)
    legend_below(figure, axis, ncols=4)
    return save(figure, study.folder, "success",
                f"Mean over seeds of the success in training, over the last {RACE_STEPS} steps")
