"""Say what the finished runs of an experiment show: printed, as a page, and as numbers.

One report serves every experiment: held-out success, each arm minus plain GRPO, what the runs cost
and how large their gradients were, and on which tokens the gradient lay. The leaderboard has a test
of all its arms together in the place of the differences (leaderboard.py).
"""
import itertools
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.tally import read_tokens
from analysis.statistics import holm, mean_over
from analysis.tables import Table, by_row
from engine.tokens import KINDS, SECTIONS
from harness.files import is_file, make_folder
from harness.progress import show_status
from research.experiments import leaderboard
from research.experiments.experiments import EXPERIMENTS, Experiment
from research.experiments.finished import (END, FEWEST_SEEDS, PRICES, START, OfArm, Study, Values,
                                           cost_of, late_success, numbers, paired, read_study,
                                           told_apart, values_of, verdict_on)
from research.experiments.pictures import IN_WORDS, draw, draw_board, draw_success
from research.experiments.plan import PlannedRun
from research.experiments.published import made_by
from research.probes.common import Findings, print_all, write_findings

# tables that need more than values; the last showed that no probe was seen to foretell the board
OF_RUNS = ("transcript", "cost", "credit", "correlation")
A_STEP = re.compile(r" *\d+/\d+ ")  # a line of a run's log


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
    print_all(findings)
    print(f"page: {folder / 'report.html'}; numbers: {folder / 'numbers.json'}")
    return study.failed


def report_on(study: Study, folder: Path) -> Findings:
    experiment = study.experiment
    values = {arm: {seed: values_of(run) for seed, run in runs.items()}
              for arm, runs in study.runs.items()}
    tables = tables_of_values(experiment, values)
    if experiment.is_board:
        picture = draw(draw_board, folder / "board.png", tables[0].to_json())
    else:
        picture = draw(draw_success, folder / "success.png", values)
    if len(experiment.arms) == 1:
        tables += transcript_table(study.planned[0])
    return Findings(experiment.name, study.intro(),
                    [*tables, cost_table(study), credit_table(study)], picture, values=values)


def tables_of_values(experiment: Experiment, values: Values) -> list[Table]:
    """Those that need no more than what a result keeps of its runs."""
    if experiment.is_board:
        tables = [leaderboard.board_table(values, experiment.arms)]
    else:
        tables = [success_table(values), differences_table(experiment, values)]
    return [*tables, *pairs_table(experiment, values), versus_table(experiment, values)]


def pairs_table(experiment: Experiment, values: Values) -> list[Table]:
    """Of those arms that the experiment holds against each other, where it does so."""
    late = {arm: {seed: late_success(curve) for seed, curve in curves.items()}
            for arm, curves in values.items()}
    pairs = [pair for pair in experiment.pairs if set(pair) <= set(late)]
    found = [paired(late[one], late[other]) for one, other in pairs]
    rows = [[*pair, each.value, each.interval, verdict_on(len(late[pair[0]]), each.value, p)]
            for pair, each, p in zip(pairs, found, holm([each.p for each in found]))]
    return [Table("pairs", "Late success, one arm minus another on the same seeds", by_row(
        {"arm": "", "against": "", "lead": "points", "95%": "points", "verdict": ""}, rows), "",
        ["by Student's t, the verdict by Holm over these rows"])] if rows else []


def made_again(result: dict) -> dict:
    """A published experiment with the tables that today's rules make of its values."""
    values = {arm: {int(seed): curve for seed, curve in curves.items()}
              for arm, curves in result["values"].items()}
    experiment = EXPERIMENTS[result["measured"].removeprefix("study-")]
    experiment = replace(experiment, arms=dict.fromkeys([*values, *experiment.arms], ""))
    tables = [table.to_json() for table in tables_of_values(experiment, values)]
    tables += [table for table in result["tables"] if table["name"] in OF_RUNS]
    said = [line for table in tables for line in table["finding"].splitlines()]
    return {**result, "in_short": list(dict.fromkeys(said)), "tables": tables}


def transcript_table(run: PlannedRun) -> list[Table]:
    """What a run printed at its beginning and at its end, if its log is there; under the name that
    its folder has without --out."""
    if not is_file(run.log):
        return []
    usual = str(replace(run.settings, out=None).folder)
    printed = run.log.read_text(encoding="utf-8").replace(str(run.folder), usual)
    lines = printed.splitlines()[1:]
    steps = [place for place, line in enumerate(lines) if A_STEP.match(line)]
    shown = [*lines[:steps[0] + 1], " ...", *lines[steps[-1]:]] if steps else lines
    return [Table("transcript", f"What {run.name} printed", {"line": ("", shown)})]


def success_table(values: Values) -> Table:
    rows = []
    for arm, curves in values.items():
        start, half, end = (list(success_at_place(curves, place).values())
                            for place in (START, middle(curves), END))
        # None where there is no spread to make it from
        interval = tuple(np.clip(mean_over(end).interval, 0, 1)) if np.ptp(end) else None
        rows.append([arm, len(curves), np.mean(start), np.mean(half) if half else None,
                     np.mean(end), interval, (min(end), max(end))])
    formats = {"arm": "", "seeds": "d", "start": ".1%", "middle": ".1%", "end": ".1%",
               "95%": ".1%", "ends": ".1%"}
    return Table("success", "Held-out success, sampled", by_row(formats, rows), "",
                 ["means over the seeds that are finished, the interval by Student's t"],
                 {"95%": "95% interval of the end", "ends": "ends of the seeds"})


def middle(curves: OfArm) -> int | None:
    """The place of the evaluation in the middle of training, if there is one."""
    count = len(next(iter(curves.values()))["steps"])
    return (count - 1) // 2 if count > 2 else None


def success_at_place(curves: OfArm, place: int | None) -> dict[int, float]:
    return {} if place is None else {seed: curve["success"][place]
                                     for seed, curve in curves.items()}


def differences_table(experiment: Experiment, values: Values) -> Table:
    rows, p = [], []
    for arm, mine in values.items():
        plain = experiment.plain_of(arm)
        seeds = len(set(mine) & set(values.get(plain, {})))
        if arm != plain and seeds:
            half, end = (paired(success_at_place(mine, place),
                                success_at_place(values[plain], place))
                         for place in (middle(mine), END))
            rows.append([arm, seeds, half.value, half.interval, end.value, end.interval])
            p.append(end.p if seeds >= FEWEST_SEEDS else np.nan)
    for row, corrected in zip(rows, holm(p)):
        row.append(verdict_on(row[1], row[4], corrected))
    formats = {"arm": "", "seeds": "d", "middle": "points", "middle 95%": "points",
               "end": "points", "95%": "points", "verdict": ""}
    finding = told_apart({arm: verdict for arm, *_, verdict in rows})
    return Table("differences", "Held-out success, sampled: each arm minus plain GRPO, in points",
                 by_row(formats, rows), "\n".join(finding),
                 ["paired by seed, by Student's t. The verdict is by Holm over all arms at the "
                  "end"],
                 {"middle": "in the middle", "middle 95%": "95% interval", "end": "at the end",
                  "95%": "95% interval"})


def cost_table(study: Study) -> Table:
    rows = []
    for arm, runs in study.runs.items():
        whole = [[cost_of(run, price)[-1] for run in runs.values()] for price in PRICES]
        norms = numbers(runs, "gradient_norm")
        explained = [np.mean(values[-(len(values) // 3):])
                     for values in numbers(runs, "explained_variance") if len(values) > 2]
        norm = [None] * 4
        if all(norms):
            parts = [norms, [values[:10] for values in norms], [values[-10:] for values in norms]]
            norm = [*(np.mean(list(map(np.mean, part))) for part in parts), max(map(max, norms))]
        rows.append([arm, *map(np.mean, whole), tokens_beside(runs), *norm,
                     np.mean(explained) if explained else None])
    formats = {"arm": "", **dict.fromkeys(PRICES, ",.0f"), "beside": ".1f", "norm": ".3f",
               "first": ".3f", "last": ".3f", "largest": ".3f", "explained": ".3f"}
    return Table("cost", "What a run took, and its gradient's norm before clipping",
                 by_row(formats, rows), "",
                 ["means over seeds, the largest norm of all steps; processor seconds, sampled "
                  "tokens and scored answers are those of training alone; tokens beside: sampled "
                  "for the credit, by trained token; explained: variance of the rewards that a "
                  "critic explains in the last third"],
                 {"seconds": "processor seconds", "tokens": "sampled tokens",
                  "rewards": "scored answers", "beside": "tokens beside", "norm": "mean norm",
                  "first": "first ten steps", "last": "last ten", "largest": "largest norm"})


def tokens_beside(runs: dict[int, dict]) -> float:
    """Tokens sampled for the credit, for each token that was trained on."""
    extra, trained = (sum(map(sum, numbers(runs, key)))
                      for key in ("extra_tokens", "trained_tokens"))
    return extra / trained if trained else float("nan")


def versus_table(experiment: Experiment, values: Values) -> Table:
    """Each arm and plain GRPO at the highest price that the runs of both have paid."""
    compared = []
    for arm, price in itertools.product(values, IN_WORDS):
        plain = experiment.plain_of(arm)
        cost, mine, theirs = at_one_price(values[arm], values.get(plain, {}), price)
        found = paired(mine, theirs)
        if arm != plain and cost > 0 and np.isfinite(found.value):
            compared.append((arm, IN_WORDS[price], cost, mine, theirs, found))
    rows = [[arm, words, cost, np.mean(list(mine.values())), np.mean(list(theirs.values())),
             found.value, found.interval, verdict_on(len(mine), found.value, p)]
            for (arm, words, cost, mine, theirs, found), p in zip(
                compared, holm([found.p for *_, found in compared]))]
    finding = []
    for words in IN_WORDS.values():
        of_price = {row[0]: row[-1] for row in rows if row[1] == words}
        if of_price:
            finding += [f"By {words}:", *told_apart(of_price)]
    formats = {"arm": "", "price": "", "cost": ",.0f", "success": ".1%", "plain": ".1%",
               "difference": "points", "95%": "points", "verdict": ""}
    return Table("versus", "Held-out success for what both have paid: each arm minus plain GRPO",
                 by_row(formats, rows), " ".join(finding),
                 ["straight between evaluations, at the last price that all runs of both arms have "
                  "reached; paired by seed, by Student's t, the verdict by Holm over all rows"],
                 {"cost": "paid", "plain": "plain GRPO", "95%": "95% interval"})


def at_one_price(mine: OfArm, plain: OfArm, price: str) -> tuple[float, dict, dict]:
    """What the runs of both have paid, and the success of each by seed, straight between
    evaluations; undefined where the price is not known."""
    seeds = sorted(set(mine) & set(plain))
    both = [{seed: curves[seed] for seed in seeds} for curves in (mine, plain)]
    cost = min((curve[price][-1] for curves in both for curve in curves.values()
                if price in curve), default=np.nan)
    return cost, *({seed: np.interp(cost, curve[price], curve["success"]) if price in curve
                    else np.nan for seed, curve in curves.items()} for curves in both)


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
        tokens = read_tokens(run["folder"], step)
        size = np.abs(tokens["advantage"]) * tokens["weight"] * tokens["s"]
        section += np.bincount(tokens["section"], size, len(section))
        kind += np.bincount(tokens["kind"], size, len(kind))
    show_status("")
    with np.errstate(invalid="ignore"):
        return np.concatenate([section / section.sum(), kind / kind.sum()])
