"""Say what the finished runs of an experiment show: printed, as a page, and as numbers."""
import time
from pathlib import Path
from types import SimpleNamespace

from analysis.tables import show
from harness.files import make_folder
from research.experiments import control, leaderboard, regime, subject, variants
from research.experiments.experiments import Experiment
from research.experiments.finished import read_study
from research.experiments.plan import PlannedRun
from research.experiments.witness import watched
from research.probes.common import summary_of, write_findings

REPORTS = {"subject": subject.report, "regime": regime.report, "leaderboard": leaderboard.report,
           "discount": variants.with_ratios,
           **dict.fromkeys(("inverse", "attention", "short_steps", "updates"), variants.report)}


def write_report(experiment: Experiment, planned: list[PlannedRun], command: str) -> None:
    """Into results/study-NAME, where it takes the place of the one before."""
    start, folder = time.monotonic(), Path(f"results/study-{experiment.name}")
    study = read_study(experiment, planned, folder)
    make_folder(folder)
    findings = REPORTS.get(experiment.name, control.report)(study)
    seeds = len({run.seed for run in planned})
    first_steps = {arm: watched(runs[0]["metrics"][0]) for arm, runs in study.runs.items()
                   if 0 in runs}
    settings = SimpleNamespace(quick=False, seeds=seeds, common=experiment.common,
                               arms=experiment.arms, first_steps=first_steps)
    seconds = time.monotonic() - start
    write_findings(folder, f"study-{experiment.name}", settings, findings, seconds, command)
    show([findings.title, *findings.intro], findings.tables, summary_of(findings))
    print(f"page: {folder / 'report.html'}; numbers: {folder / 'numbers.json'}")
