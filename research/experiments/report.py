"""Say what the finished runs of an experiment show: printed, as a page, and as numbers.

One report serves every experiment: held-out success, each arm minus plain GRPO, what the runs cost
and how large their gradients were, and on which tokens the gradient lay. The leaderboard has a test
of all its arms together in the place of the differences (leaderboard.py).
"""
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.plots import COLOURS, GREY, legend_below, panels, save, whole_steps
from analysis.sizes import lay_flat
from analysis.statistics import holm, mean_over
from analysis.tables import Table, by_row, show
from engine.labels import KINDS, SECTIONS
from harness.credit_file import read_columns
from harness.files import make_folder
from harness.progress import show_status
from research.experiments import leaderboard
from research.experiments.experiments import RACE_STEPS, Experiment
from research.experiments.finished import (END, FEWEST_SEEDS, START, Study, ahead, middle,
                                           moving_mean, numbers, read_study, success_by_seed,
                                           told_apart, verdict_on)
from research.experiments.plan import PlannedRun
from research.experiments.published import made_by
from research.probes.common import Findings, summary_of, write_findings


def write_report(experiment: Experiment, planned: list[PlannedRun], command: str) -> dict[str, str]:
    """Into results/study-NAME, where it takes the place of the one before. Returns the runs that
    cannot be read, with the reason."""
    start, folder = time.monotonic(), Path(f"results/study-{experiment.name}")
    study = read_study(experiment, planned)
    make_folder(folder)
    findings = report_on(study, folder)
    configs = {f"{arm}-s{seed}": run["config"] for arm, runs in study.runs.items()
               for seed, run in runs.items()}
    settings = SimpleNamespace(quick=False, seeds=len({run.seed for run in planned}),
                               common=experiment.common, arms=experiment.arms,
                               made_by=made_by(configs))
    seconds = time.monotonic() - start
    write_findings(folder, f"study-{experiment.name}", settings, findings, seconds, command)
    show([findings.title, *findings.intro], findings.tables, summary_of(findings))
    print(f"page: {folder / 'report.html'}; numbers: {folder / 'numbers.json'}")
    return study.failed


def report_on(study: Study, folder: Path) -> Findings:
    name = study.experiment.name
    everywhere = [cost_table(study), credit_table(study)]
    if study.experiment.is_board:
        tables, picture = leaderboard.report(study, folder)
        return Findings(name, study.intro(), [*tables, *everywhere], picture)
    tables = [success_table(study), differences_table(study), *everywhere]
    return Findings(name, study.intro(), tables, draw(study, folder))


def success_table(study: Study) -> Table:
    rows = []
    for arm, runs in study.runs.items():
        half = middle(next(iter(runs.values())))
        start, end = success_by_seed(runs, START), success_by_seed(runs, END)
        rows.append([arm, len(runs), np.mean(start),
                     None if half is None else np.mean(success_by_seed(runs, half)),
                     np.mean(end), interval_over_seeds(end), (min(end), max(end))])
    formats = {"arm": "", "seeds": "d", "start": ".1%", "middle": ".1%", "end": ".1%",
               "95%": ".1%", "ends": ".1%"}
    return Table("success", "Held-out success, sampled", by_row(formats, rows), "",
                 ["means over the seeds that are finished, the interval by Student's t"],
                 {"95%": "95% interval of the end", "ends": "ends of the seeds"})


def interval_over_seeds(shares: list[float]) -> tuple | None:
    """None where there is no spread to make it from."""
    return tuple(np.clip(mean_over(shares).interval, 0, 1)) if np.ptp(shares) else None


def differences_table(study: Study) -> Table:
    rows, at_end = [], {}
    for arm, runs in study.runs.items():
        plain = study.experiment.plain_of(arm)
        if arm == plain or not study.of(plain):
            continue
        for when, place in (("middle", middle(next(iter(runs.values())))), ("end", END)):
            seeds, estimate = ahead(study, arm, plain, place) if place is not None else (0, None)
            if estimate:
                rows.append([arm, when, seeds, estimate.value, estimate.interval, ""])
                at_end[arm] = (seeds, estimate, rows[-1])
    tested = {arm: found for arm, found in at_end.items() if found[0] >= FEWEST_SEEDS
              and np.isfinite(found[1].p)}
    corrected = dict(zip(tested, holm([found[1].p for found in tested.values()])))
    for arm, (seeds, estimate, row) in at_end.items():
        row[-1] = verdict_on(seeds, estimate.value, corrected.get(arm, np.nan))
    formats = {"arm": "", "when": "", "seeds": "d", "difference": "points", "95%": "points",
               "verdict": ""}
    finding = told_apart({arm: row[-1] for arm, (*_, row) in at_end.items()})
    return Table("differences", "Held-out success, sampled: each arm minus plain GRPO, in points",
                 by_row(formats, rows), "\n".join(finding),
                 ["paired by seed and by held-out problem; with one seed the interval is about "
                  "problems alone. The verdict is by Holm over all arms at the end"],
                 {"95%": "95% interval"})


def cost_table(study: Study) -> Table:
    rows = []
    for arm, runs in study.runs.items():
        norms = numbers(runs, "gradient_norm")
        explained = [np.mean(values[-(len(values) // 3):])
                     for values in numbers(runs, "explained_variance") if len(values) > 2]
        norm = [np.mean(list(map(np.mean, norms))), max(map(max, norms))] if all(norms) else None
        rows.append([arm, mean_sum(runs, "seconds"), mean_sum(runs, "trained_tokens"),
                     tokens_beside(runs), *(norm or [None, None]),
                     np.mean(explained) if explained else None])
    formats = {"arm": "", "seconds": ",.0f", "tokens": ",.0f", "beside": ".1f", "norm": ".3f",
               "largest": ".3f", "explained": ".3f"}
    return Table("cost", "What a run took, and its gradient's norm before clipping",
                 by_row(formats, rows), "",
                 ["means over seeds, the largest norm of all steps. Seconds of all steps, with "
                  "other runs beside; tokens beside: sampled for the credit, by trained token; "
                  "explained: variance of the rewards that a critic explains in the last third"],
                 {"tokens": "trained tokens", "beside": "tokens beside", "norm": "mean norm",
                  "largest": "largest norm"})


def mean_sum(runs: dict[int, dict], key: str) -> float:
    return float(np.mean(list(map(sum, numbers(runs, key)))))


def tokens_beside(runs: dict[int, dict]) -> float:
    """Tokens sampled for the credit, for each token that was trained on."""
    extra, trained = mean_sum(runs, "extra_tokens"), mean_sum(runs, "trained_tokens")
    return extra / trained if trained else float("nan")


def credit_table(study: Study) -> Table:
    rows = [[arm, *np.mean(list(map(gradient_shares, runs.values())), axis=0)]
            for arm, runs in study.runs.items()]
    formats = {"arm": "", **dict.fromkeys((*SECTIONS, *KINDS), ".1%")}
    return Table("credit", "On which tokens the gradient lay: shares of abs(A) w s",
                 by_row(formats, rows), "",
                 ["by section and by kind, means over seeds of all steps. Arms that learned other "
                  "things write other texts, so this is not the weighting alone"])


def gradient_shares(run: dict) -> np.ndarray:
    """Of each section, then of each kind."""
    section, kind = np.zeros(len(SECTIONS)), np.zeros(len(KINDS))
    for step in run["steps"]:
        show_status(f"{run['folder'].name}: step {step}")
        tokens = lay_flat(read_columns(run["folder"], step))
        size = np.abs(tokens["advantage"]) * tokens["weight"] * tokens["s"]
        section += np.bincount(tokens["section"], size, len(section))
        kind += np.bincount(tokens["kind"], size, len(kind))
    show_status("")
    with np.errstate(invalid="ignore"):
        return np.concatenate([section / section.sum(), kind / kind.sum()])


def draw(study: Study, folder: Path):
    figure, axis = panels(1)
    for number, (arm, runs) in enumerate(study.runs.items()):
        curve = moving_mean(np.mean(numbers(runs, "success"), axis=0), RACE_STEPS)
        steps = np.arange(RACE_STEPS, RACE_STEPS + len(curve))
        colour = COLOURS[number] if number < len(COLOURS) else GREY
        axis.plot(steps, curve, color=colour, label=arm)
    axis.set(xlabel="step", ylabel="success in training", title="Success on the way")
    whole_steps(axis)
    legend_below(figure, axis, ncols=4)
    return save(figure, folder, "success",
                f"Mean over seeds of the success in training, over the last {RACE_STEPS} steps")
