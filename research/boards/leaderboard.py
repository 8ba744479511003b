"""What the leaderboards share: their runs are made stage by stage, published ones are used again,
and the finished ones become tables and a report.

A leaderboard is an experiment (analysis/experiment.py) whose arms are flags of train.py, by name.
Its file has a table of arms and the FLAGS of its command, and two functions: `plan` says which runs
there are, in which stages, and `report` makes tables of the finished ones.
"""
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from matplotlib.figure import Figure

from analysis.experiment import Arms, Experiment, Key
from analysis.gains import (Gain, chance_to_be_called, gain_table, mean_success,
                            success_by_step)
from analysis.runs import Run
from analysis.tables import Row, Table, by_row
from engine.errors import UserError, read_json
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.planned import PROCESSES, PlannedRun, kinds_of, side_by_side
from harness.screen import python_command, say
from research.probes.common import Findings, command_of, print_findings, write_findings
from research.publish.pictures import draw_published
from research.publish.results import RESULTS, made_by, read_result

AFRESH = {"afresh": Flag(False, "also make those runs again that the published result has")}
TRUE_GAINS = (0.01, 0.02, 0.04, 0.08)  # for which the power is told
Stages = Iterable[tuple[str, list[Key]]]  # a title, and the runs that are made then


def flags_of_runs(folder: str) -> dict[str, Flag]:
    return {"runs": Flag(folder, "folder in which the runs are kept"),
            "dry_run": Flag(False, "list the runs that are missing, and start none", requires=(
                lambda s: not s.report_only, "runs to start, and --report_only starts none")),
            "processes": PROCESSES,
            "report_only": Flag(False, "print what the finished runs show, and start no run")}


def run_leaderboard(name: str, doc: str, flags: dict[str, Flag],
                    plan: Callable[[SimpleNamespace], tuple[Experiment, Stages]],
                    report: Callable[[SimpleNamespace, Experiment, str], None],
                    argv: list[str]) -> None:
    """The command of a leaderboard: make the runs that are missing, and report the finished ones.
    `report` is given the command that was typed."""
    typed = make_parser(f"python -m research {name} [flags]", doc, flags).read(argv)
    args = with_defaults(typed, flags)
    experiment, stages = plan(args)
    failed: dict[str, str] = {}
    if not args.report_only:
        command = python_command("-m", "research", name, *argv)
        failed = make_stages(experiment, stages, args, command)
    if not args.dry_run:
        report(args, experiment, command_of(name, typed, ["runs"]))
    end_with(failed)


def make_stages(experiment: Experiment, stages: Stages, args: SimpleNamespace,
                command: str) -> dict[str, str]:
    """Make what each stage lacks; stop where runs failed, and return them. The runs of a stage may
    follow from those before it, so --dry_run ends with the first stage that lacks some."""
    for title, keys in stages:
        missing = experiment.missing(keys)
        say(f"{title}: {len(keys) - len(missing)} of {len(keys)} runs are finished")
        if missing and args.dry_run:
            list_missing(missing)
            return {}
        if missing:
            processes, threads = side_by_side(kinds_of(missing), args.processes)
            failed = experiment.make(keys, command, processes, threads)
            if failed:
                return failed
    return {}


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


def planner(folder: Path, arms: Mapping[str, str], common: list[str], steps: int,
            keeps_checkpoints: bool = True) -> Callable[[str, int], PlannedRun]:
    """What plans a run of an arm. Its folder is ARM-sSEED, and its flags are the common ones, then
    those of the arm."""
    def plan_run(arm: str, seed: int) -> PlannedRun:
        name = arm.replace("--", "").replace(" ", "-")
        return PlannedRun(arm, seed, folder / f"{name}-s{seed}", [*common, *arms[arm].split()],
                          steps, keeps_checkpoints=keeps_checkpoints)
    return plan_run


def named_arms(typed: str, known: Collection[str]) -> list[str]:
    """The arms that --arms names, with commas between them; all if it names none."""
    wanted = [name.strip() for name in typed.split(",")] if typed else list(known)
    for name in wanted:
        if name not in known:
            raise UserError(f"--arms: there is no arm {name!r}, only {', '.join(known)}")
    return wanted


def require_two(arm: str, arms: Arms, folder: str) -> None:
    """End in an error where plain GRPO, which is `arm`, has fewer than two finished seeds."""
    if len(arms.get(arm, {})) < 2:
        raise UserError(f"{folder} does not yet have two finished seeds of plain GRPO ({arm})")


def run_name(arm: str, seed: int) -> str:
    return f"{arm}-s{seed}"


def by_run_name(arms: Arms) -> dict[str, Run]:
    """The runs of all arms by their names, ARM-sSEED."""
    runs = {}
    for arm, of_arm in arms.items():
        for seed, run in of_arm.items():
            runs[run_name(arm, seed)] = run
    return runs


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


def short_form(run: Run) -> list:
    """A run as a published result keeps it: answers to a step, seconds a step, and how many answers
    of each step were right. A leaderboard is continued from these on another machine."""
    answers = run["config"]["questions"] * run["config"]["answers"]
    right = [round(answers * success) for success in success_by_step(run).tolist()]
    return [answers, round(mean_step_seconds([run]), 4), right]


def from_short_form(stored: list | dict, result: dict, name: str) -> Run:
    """The run of this name that a published result has in short, as far as a leaderboard needs
    it. A result that keeps more of a run has it `in_short` among the rest."""
    answers, seconds, right = stored["in_short"] if isinstance(stored, dict) else stored
    metrics = [{"success": count / answers, "processor_seconds": seconds} for count in right]
    made_it = [part for part in result["made_by"] if name in part.get("runs", [])]
    made_by = (made_it or result["made_by"])[0]
    config = {"git_commit": made_by["git_commit"], "versions": made_by["versions"],
              "questions": answers, "answers": 1}
    return {"folder": Path("published"), "steps": [], "evaluations": [], "metrics": metrics,
            "config": config}


def arm_and_key(stored_as: str) -> tuple[str, Key]:
    """random-s3 -> random, (random, 3): the arm of a stored run, and the run."""
    arm, _, seed = stored_as.rpartition("-s")
    return arm, (arm, int(seed))


def published_runs(name: str, settings: dict, arms: Mapping[str, str],
                   read_name: Callable[[str], tuple[str, Key]] = arm_and_key) -> dict[Key, Run]:
    """The runs of a published leaderboard that was made with these settings, of the arms whose
    flags are still the same."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    result = read_result(path)
    require_same_plan(name, result, settings)
    flags_then, runs = result["settings"]["arms"], {}
    for stored_as, stored in result["values"]["runs"].items():
        arm, key = read_name(stored_as)
        if arms.get(arm) == flags_then.get(arm):
            runs[key] = from_short_form(stored, result, run_name(*key))
    return runs


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


def write_report(name: str, measured: str, findings: Findings, settings: dict,
                 made: dict[str, Run], command: str, clock: str = "processor_seconds",
                 picture: tuple[str, Callable[[dict], Figure], dict] | None = None) -> None:
    """Write the report into results/NAME, where it takes the place of the one before, and print
    what was found. `made`: the runs by name. `picture`: its file, who draws it, and what it
    shows."""
    folder = Path("results") / name
    folder.mkdir(parents=True, exist_ok=True)
    if picture:
        file, drawing, shown = picture
        draw_published(drawing, folder / file, shown)
    codes = made_by({run: one["config"] for run, one in made.items()})
    known = SimpleNamespace(**settings, made_by=codes)
    seconds = total_seconds(made.values(), clock)
    write_findings(folder, measured, known, findings, seconds, command)
    print_findings(findings)
    as_name = "" if name == measured else f" --name {name.replace('-', '_')}"
    print(f"The picture and all numbers are in {folder}. To publish them:\n"
          f"  python -m research publish {folder}{as_name}")
