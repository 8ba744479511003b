"""What the experiments that are made of training runs share: finished runs, their short form in a
published result, the table of a leaderboard, and the report."""
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.gains import (Gain, chance_to_be_called, gain_table, mean_success,
                            success_by_step)
from analysis.runs import Run, is_done, read_run
from analysis.tables import Row, Table, by_row
from engine.errors import UserError, read_json
from harness.screen import python_command, say
from harness.flags import Flag
from harness.settings import make_settings, read_flags
from research.publish.results import RESULTS, made_by
from research.probes.common import Findings, print_findings, write_findings
from harness.planned import PROCESSES, PlannedRun

FLAGS_OF_RUNS = {
    "processes": PROCESSES,
    "report_only": Flag(False, "print what the finished runs show, and start no run")}
FLAGS_OF_LEADERBOARD = {
    "afresh": Flag(False, "also make those runs again that the published result has"),
    "dry_run": Flag(False, "list the runs that are missing, and start none")}
TRUE_GAINS = (0.01, 0.02, 0.04, 0.08)  # for which the power is told
Arms = dict[str, dict[int, Run]]  # finished runs, by arm and seed


def finished_run(planned: PlannedRun) -> Run | None:
    """The run of this plan, if it is finished. Its folder's name says which run it should be, its
    settings which it is."""
    if not (planned.folder / "config.json").exists():
        return None
    run = read_run(planned.folder)
    flags = [*planned.flags, "--steps", str(planned.steps), "--seed", str(planned.seed)]
    wanted, config = make_settings(read_flags(flags)).to_json(), run["config"]
    passed_over = {"out"} if wanted["threads"] else {"out", "threads"}  # 0: what suits the machine
    for name in wanted.keys() - passed_over:
        if config.get(name) != wanted[name]:
            raise UserError(f"{planned.folder} has --{name} {config.get(name)}, not "
                            f"{wanted[name]}: remove it, and the run is made again")
    return run if is_done(run) else None


def finished_arms(planned: list[PlannedRun], known: Mapping[tuple[str, int], Run] = {}) -> Arms:
    """The finished runs of a plan; `known` are published ones, which need no folder."""
    arms: Arms = {}
    for one in planned:
        run = known.get((one.arm, one.seed)) or finished_run(one)
        if run:
            arms.setdefault(one.arm, {})[one.seed] = run
    return arms


def by_run_name(arms: Arms) -> dict[str, Run]:
    """The runs of all arms by their names, ARM-sSEED."""
    runs = {}
    for arm, of_arm in arms.items():
        for seed, run in of_arm.items():
            runs[f"{arm}-s{seed}"] = run
    return runs


def list_missing(missing: list[PlannedRun]) -> None:
    """Print the folder and the command of each run, for --dry_run."""
    for run in missing:
        print(f"  {run.folder}\n    {python_command(*run.command)}")


def end_with(failed: dict[str, str]) -> None:
    """Say which arms failed, if any did, and end in an error."""
    for arm, reason in failed.items():
        say(f"failed: {arm}: {reason}")
    if failed:
        raise SystemExit(1)


def mean_step_seconds(runs: Iterable[Run]) -> float:
    """The processor's seconds for a step, which are the same whatever runs beside it."""
    return float(np.mean(step_seconds(runs, "processor_seconds")))


def total_seconds(runs: Iterable[Run], clock: str = "processor_seconds") -> float:
    return float(sum(step_seconds(runs, clock)))


def step_seconds(runs: Iterable[Run], clock: str) -> list[float]:
    """The seconds of every step of these runs."""
    seconds = []
    for run in runs:
        seconds += [line[clock] for line in run["metrics"]]
    return seconds


def success_by_parts(runs: Mapping[int, Run], parts: int) -> list[float]:
    """Success in each of so many equal parts of the training, means over seeds."""
    curve = np.mean([success_by_step(run) for run in runs.values()], 0)
    return [float(part.mean()) for part in np.array_split(curve, parts)]


def short_form(run: Run, answers: int) -> list:
    """A run as a published result keeps it: answers to a step, seconds a step, and how many answers
    of each step were right. A leaderboard is continued from these on another machine."""
    right = [round(answers * success) for success in success_by_step(run).tolist()]
    return [answers, round(mean_step_seconds([run]), 4), right]


def from_short_form(stored: list, result: dict, name: str) -> Run:
    """The run of this name that a published result has in short, as far as a leaderboard needs
    it."""
    answers, seconds, right = stored
    metrics = [{"success": count / answers, "processor_seconds": seconds} for count in right]
    made_it = [part for part in result["made_by"] if name in part.get("runs", [])]
    made_by = (made_it or result["made_by"])[0]
    config = {"git_commit": made_by["git_commit"], "versions": made_by["versions"],
              "questions": answers, "answers": 1}
    return {"folder": Path("published"), "steps": [], "evaluations": [], "metrics": metrics,
            "config": config}


def require_same_plan(name: str, result: dict, wanted: dict) -> None:
    """End in an error where a published result was made in another way than the plan says."""
    for setting, value in wanted.items():
        if result["settings"][setting] != value:
            raise UserError(f"{name}.json was made with other settings. Its {setting} is "
                            f"{result['settings'][setting]}, and here it is {value}. --afresh "
                            "makes all runs again")


def predictions(name: str) -> dict:
    """What was predicted before any run of this experiment was made."""
    path = RESULTS / f"{name}/predictions.json"
    return read_json(path) if path.exists() else {}


def leaderboard(found: Mapping[str, Gain], predicted: Mapping[str, float],
                cost: Mapping[str, float], verdicts: Mapping[str, str] | None = None,
                beside: Mapping[str, tuple[str, dict]] | None = None) -> Table:
    """The arms, the largest gain first. `cost`: seconds of a step over plain GRPO's; `beside`:
    further columns, a format and a value for each arm."""
    order = sorted(found, key=lambda arm: -found[arm].estimate.value)
    of_arms = {**(beside or {}), "predicted": ("points", predicted), "seconds": (".2f", cost)}
    columns = {}
    for name, (spec, values) in of_arms.items():
        columns[name] = spec, list(map(values.get, order))
    gains_in_order = {arm: found[arm] for arm in order}
    return gain_table(
        "board", "Mean success in training: the gain of each arm over plain GRPO, in points",
        gains_in_order, columns,
        verdicts=[verdicts[arm] for arm in order] if verdicts else None,
        notes=["Runs are compared in pairs with the same seed, and the interval is Student's t "
               "over these pairs. p and the verdict have Holm's correction over the methods. The p "
               "of a control or a larger batch is not corrected. Where no difference is seen, the "
               "interval says how large a gain or a loss may still be. The cost of a step is its "
               "processor time, divided by that of plain GRPO"],
        headings={"predicted": "predicted gain", "seconds": "cost of a step",
                  "rate": "learning rate"})


def pairs_table(family: Mapping[str, tuple[Mapping[int, Run], Mapping[int, Run]]],
                title: str) -> Table:
    """The gain in training of every pair: a row for each arm, a column for each seed. `family` has
    the runs of an arm and those that it is compared with, by seed."""
    seeds = sorted({seed for mine, theirs in family.values() for seed in mine.keys() & theirs})
    rows: list[Row] = []
    for name, (mine, theirs) in family.items():
        row: Row = [name]
        for seed in seeds:
            is_there = seed in mine and seed in theirs
            row.append(mean_success(mine[seed]) - mean_success(theirs[seed]) if is_there else None)
        rows.append(row)
    formats = {"arm": "", **{f"seed {seed}": "points" for seed in seeds}}
    return Table("pairs", title, by_row(formats, rows))


def power_table(found: Mapping[str, Gain], controls: Collection[str]) -> Table:
    """How often the leaderboard's rule would call true gains of some sizes, with pairs that differ
    as much as those of each arm. `found`: the gains of the leaderboard."""
    seen = [arm for arm, gain in found.items() if gain.is_seen and arm not in controls]
    methods = len(found.keys() - set(controls))
    rows: list[Row] = []
    for arm, gain in found.items():
        tests, others_called = methods, len([other for other in seen if other != arm])
        if arm in controls:
            tests, others_called = 1, 0
        known = gain.spread > 0  # pairs that all differ alike say nothing of others
        chances = [chance_to_be_called(size, gain.spread, gain.pairs, tests, others_called)
                   if known else None for size in TRUE_GAINS]
        rows.append([arm, gain.pairs, gain.spread if known else None, tests - others_called,
                     *chances])
    sizes = {f"{100 * size:g}": ".0%" for size in TRUE_GAINS}
    formats = {"arm": "", "pairs": "d", "spread": "size", "tests": "d", **sizes}
    headings = {"spread": "standard deviation of the pairs, points", "tests": "Holm's divisor"}
    headings |= {size: f"a true gain of {size} {'point' if size == '1' else 'points'} is called"
                 for size in sizes}
    return Table(
        "power", "What the leaderboard could have seen", by_row(formats, rows), "",
        ["A share says in how many of such experiments an arm with this true gain would be called "
         "better, if its pairs differ as much as they do here. The test is Student's t, two-sided, "
         "at the level 0.05 divided by Holm's divisor: the number of methods, less those others "
         "that are called here. A control has the divisor 1. To be called ahead takes this twice"],
        headings)


def write_report(folder: Path, measured: str, findings: Findings, settings: dict,
                 made: dict[str, Run], seconds: float, command: str) -> None:
    """Write numbers.json into the folder, and print what was found. `made`: the runs by name."""
    codes = made_by({name: run["config"] for name, run in made.items()})
    known = SimpleNamespace(**settings, made_by=codes)
    write_findings(folder, measured, known, findings, seconds, command)
    print_findings(findings)
    as_name = "" if folder.name == measured else f" --name {folder.name.replace('-', '_')}"
    print(f"The picture and all numbers are in {folder}. To publish them:\n"
          f"  python -m research publish {folder}{as_name}")
