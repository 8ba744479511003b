"""An experiment: your own table of arms, each trained with several seeds, and what each one gains.

    python -m lab experiment my_plan.json --dry_run       # list the runs that are missing
    python -m lab experiment my_plan.json                 # make them, then print the tables
    python -m lab experiment my_plan.json --report_only   # what the finished runs show
    python -m lab experiment later --report_only          # a plan of lab/plans

A plan is a file like this one:

    {"question": "Does a larger batch, or another advantage, train better than plain GRPO?",
     "common": "--questions 8 --answers 8 --eval_every 0 --checkpoint_every 0 --threads 1",
     "steps": 60,
     "seeds": [40, 46],
     "arms": {"none": {"flags": ""},
              "gdpo": {"flags": "--advantage gdpo", "beside": "none", "predicted": 0.5},
              "twice": {"flags": "--questions 16", "beside": "none", "control": true}}}

`common` and `flags` are flags of train.py. The seeds are 40 to 45: the first, and the one after the
last; an arm may have `seeds` of its own. An arm is compared with the one that it stands `beside`,
by the mean success of all answers sampled in training, for pairs of runs with the same seed, which
get the same problems. `predicted` is the gain in points that you expect before there are runs.

The runs are made seed by seed. So all arms have the same seeds whenever the time is out, and the
same command goes on. A run's folder is ARM-sSEED. `python analyze.py` compares such folders in all
other respects. The columns of the first table:

    gain      the mean over pairs, with Student's 95% interval
    p         is corrected by Holm's method for all arms of the plan that are compared, whether they
              have runs yet or not. That of a control, which is known to help or to fail, is not
    visible   the gain that 80 of 100 such experiments would see, if pairs differ as they do here
    cost      the processor's seconds of a step, over those of the arm beside it
    verdict   of these seeds alone. A method is called ahead if it is better on new seeds, too

A plan of lab/plans may name the published `result` whose runs it has. They are used again, but
with --afresh or --flags. An arm that is `last` in a commit has a method that was removed since, so
its runs can be compared, and not made.
"""
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from matplotlib.figure import Figure

from lab.analysis.gains import BETTER, WORSE, Gain, gain_over, mean_success, success_by_step
from lab.analysis.plots import BLUE, COLOURS, GREY, ORANGE, legend_below, plt, save
from lab.analysis.run_folders import Run
from lab.analysis.statistics import holm
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row
from lab.engine.errors import PROJECT, UserError, read_json
from lab.harness.flags import Flag, read, words_of
from lab.harness.screen import python_command, say
from lab.harness.settings import make_settings, read_flags
from lab.probes.common import Findings, command_of, print_findings, write_findings
from lab.publish.results import RESULTS, made_by, read_result
from lab.tools.helpers.runs import (PROCESSES, Arms, Experiment, Key, PlannedRun, kinds_of,
                                    side_by_side)

PLANS = PROJECT / "lab/plans"
OF_THE_PLAN = ("--seed", "--steps", "--out", "--resume", "--continue")  # no arm may have these
FLAGS = {
    "arms": Flag("", "the arms to make, separated by commas. By default they are all"),
    "seeds": Flag(0, "number of seeds of each arm. 0 means those of the plan", most=1000),
    "flags": Flag("", 'further flags of train.py for all runs, such as "--device cuda"'),
    "runs": Flag("runs", "folder in which the runs are kept, in a folder of the plan's name"),
    "processes": PROCESSES,
    "dry_run": Flag(False, "list the runs that are missing, and start none", requires=(
        lambda s: not s.report_only, "runs to start, and --report_only starts none")),
    "report_only": Flag(False, "print what the finished runs show, and start no run"),
    "afresh": Flag(False, "also make those runs that the published result has")}


@dataclass(frozen=True)
class Arm:
    """A row of a plan's table."""
    flags: str = ""
    beside: str = ""                      # the arm that it is compared with; a baseline has none
    control: bool = False                 # its p is not corrected
    predicted: float | str | None = None  # the gain in points, before there was a run
    seeds: tuple[int, ...] = ()           # where they are not those of the plan
    last: str = ""                        # the last commit that can train it, where this one cannot


@dataclass(frozen=True)
class Plan:
    """What is trained: a file of JSON, or what its mistakes are."""
    name: str
    question: str
    steps: int
    seeds: tuple[int, ...]
    arms: dict[str, Arm] = field(default_factory=dict)
    common: str = ""
    result: str = ""

    def seeds_of(self, arm: str, count: int = 0) -> range:
        first, stop = self.arms[arm].seeds or self.seeds
        return range(first, first + count if count else stop)

    def keys(self, wanted: list[str], count: int = 0) -> list[Key]:
        """The runs of these arms, seed by seed."""
        seeds = sorted({seed for arm in wanted for seed in self.seeds_of(arm, count)})
        return [(arm, seed) for seed in seeds for arm in wanted
                if seed in self.seeds_of(arm, count)]

    @property
    def methods(self) -> list[str]:
        """The arms that are tested together."""
        return [name for name, arm in self.arms.items() if arm.beside and not arm.control]


def main(argv: list[str]) -> None:
    args = read(argv, "python -m lab experiment PLAN [flags]", __doc__, FLAGS, {
        "PLAN": f"a file as above, or the name of one of lab/plans: {', '.join(names_of_plans())}"})
    plan = read_plan(args.plan)
    wanted = wanted_arms(plan, args.arms)
    known = {} if args.afresh or args.flags else published_runs(plan)
    experiment = Experiment(partial(planned_run, plan, args), known=known)
    keys = plan.keys(wanted, args.seeds)
    failed: dict[str, str] = {}
    if not args.report_only:
        failed = make(plan, experiment, keys, args, python_command("-m", "lab", "experiment",
                                                                   *argv))
    if not args.dry_run:
        command = command_of(f"experiment {plan.name}", args.typed, ["runs"])
        report(plan, experiment.arms(keys), command)
    if failed:
        raise UserError("; ".join(f"{arm} failed: {reason}" for arm, reason in failed.items()))


# ------------------------------------------------------------------- the plan


def names_of_plans() -> list[str]:
    return sorted(path.stem for path in PLANS.glob("*.json"))


def read_plan(typed: str) -> Plan:
    """The plan of a file, or of a name in lab/plans."""
    path = Path(typed)
    if not path.exists() and typed in names_of_plans():
        path = PLANS / f"{typed}.json"
    if not path.exists():
        raise UserError(f"there is no file {typed}, and no plan of lab/plans has this name: "
                        f"{', '.join(names_of_plans())}")
    given = read_json(path)
    try:
        arms = {name: Arm(**arm) for name, arm in given.pop("arms").items()}
        plan = Plan(path.stem, arms=arms, **given)
    except (AttributeError, KeyError, TypeError) as error:
        reason = re.sub(r"\w+\.__init__\(\) ", "", str(error))
        raise UserError(f"{path} is no plan: {reason}. python -m lab experiment --help shows "
                        "one") from None
    refuse_mistakes(plan, str(path))
    return plan


def refuse_mistakes(plan: Plan, path: str) -> None:
    """End in an error where the table of arms cannot be compared."""
    if not isinstance(plan.steps, int) or plan.steps < 1:
        raise UserError(f"{path}: \"steps\" is {plan.steps!r}, and a run has at least one step")
    for name in plan.arms:
        refuse_mistakes_of_arm(plan, name, path)
    if not any(arm.beside for arm in plan.arms.values()):
        raise UserError(f"{path}: no arm is compared with another. Name the baseline of each arm, "
                        'as in {"flags": "--advantage rloo", "beside": "none"}')


def refuse_mistakes_of_arm(plan: Plan, name: str, path: str) -> None:
    arm = plan.arms[name]
    if not re.fullmatch(r"[\w .=-]+", name) or not isinstance(arm.flags, str):
        raise UserError(f"{path}: {name!r:.80} should be letters, digits, spaces and . = _ - "
                        "alone, because it names folders, and its flags a text")
    seeds = arm.seeds or plan.seeds
    if not is_range(seeds):
        raise UserError(f"{path}: the seeds of {name} are {seeds!r}. They should be two numbers, "
                        "the first and the one after the last, as in [40, 46]")
    if seeds[1] - seeds[0] == 1:
        raise UserError(f"{path}: {name} has one seed, and an interval takes at least two")
    if arm.beside and arm.beside not in plan.arms:
        raise UserError(f"{path}: {name} is compared with {arm.beside}, which is no arm of it")
    if arm.beside == name:
        raise UserError(f"{path}: {name} is compared with itself")
    for flag in OF_THE_PLAN:
        if any(word.partition("=")[0] == flag for word in flags_of(plan, name)):
            raise UserError(f"{path}: {name} has {flag}, which the plan gives to every run")


def is_range(seeds: object) -> bool:
    """Whether this is [first, one after the last]."""
    if not isinstance(seeds, list) or len(seeds) != 2:
        return False
    return all(isinstance(seed, int) for seed in seeds) and 0 <= seeds[0] < seeds[1]


def flags_of(plan: Plan, arm: str, more: str = "") -> list[str]:
    return [*plan.common.split(), *plan.arms[arm].flags.split(), *more.split()]


def refuse_bad_arms(plan: Plan, arms: list[str], more: str) -> None:
    """End in an error where train.py does not take an arm's flags, or where two arms are the
    same."""
    known: dict[str, str] = {}
    for arm in arms:
        try:
            settings = make_settings(read_flags(flags_of(plan, arm, more)))
        except UserError as error:
            raise UserError(f"{plan.name}, {arm}: {error}") from None
        same = known.setdefault(repr(settings.to_json()), arm)
        if same != arm:
            raise UserError(f"{plan.name}: {arm} has the settings of {same}, so nothing differs")


def wanted_arms(plan: Plan, typed: str) -> list[str]:
    """The arms that --arms names, and those that they stand beside; all if it names none."""
    wanted = [name.strip() for name in typed.split(",")] if typed else list(plan.arms)
    for name in wanted:
        if name not in plan.arms:
            raise UserError(f"--arms: there is no arm {name!r}, only {', '.join(plan.arms)}")
    beside = {plan.arms[name].beside for name in wanted}
    return [name for name in plan.arms if name in wanted or name in beside]


# ------------------------------------------------------------------- the runs


def planned_run(plan: Plan, args: SimpleNamespace, arm: str, seed: int) -> PlannedRun:
    name = arm.replace("--", "").replace(" ", "-")
    flags = flags_of(plan, arm, args.flags)
    _, texts = words_of(flags)
    return PlannedRun(arm, seed, Path(args.runs) / plan.name / f"{name}-s{seed}", flags, plan.steps,
                      keeps_checkpoints=texts.get("checkpoint_every", "0") != "0")


def make(plan: Plan, experiment: Experiment, keys: list[Key], args: SimpleNamespace,
         command: str) -> dict[str, str]:
    """Train what is missing; with --dry_run, list it. Returns the arms that failed."""
    missing = experiment.missing(keys)
    gone = [run for run in missing if plan.arms[run.arm].last]
    missing = [run for run in missing if run not in gone]
    refuse_bad_arms(plan, list(dict.fromkeys(run.arm for run in missing)), args.flags)
    say(f"{len(keys) - len(missing) - len(gone)} of {len(keys)} runs are finished")
    for arm in dict.fromkeys(run.arm for run in gone):
        say(f"{arm} cannot be trained here: the last commit that can is {plan.arms[arm].last}")
    if args.dry_run:
        for run in missing:
            print(f"  {run.folder}\n    {python_command(*run.command)}")
        return {}
    if not missing:
        return {}
    processes, threads = side_by_side(kinds_of(missing), args.processes)
    made = [(run.arm, run.seed) for run in missing]
    return experiment.make(made, command, processes, threads)


def published_runs(plan: Plan) -> dict[Key, Run]:
    """The runs of the result that the plan names, as far as an experiment needs them."""
    if not plan.result:
        return {}
    result = read_result(RESULTS / f"{plan.result}.json")
    runs = {}
    for name, stored in result["values"]["runs"].items():
        arm, _, seed = name.rpartition("-s")
        if arm in plan.arms and int(seed) in plan.seeds_of(arm):
            runs[arm, int(seed)] = from_short_form(stored, result)
    return runs


def short_form(run: Run) -> list:
    """A run as a result keeps it: answers in a step, the processor's seconds for a step, and a text
    with the number of right answers of each step."""
    answers = run["config"]["questions"] * run["config"]["answers"]
    right = [str(round(answers * success)) for success in success_by_step(run).tolist()]
    return [answers, round(step_seconds(run), 4), " ".join(right)]


def from_short_form(stored: list, result: dict) -> Run:
    """The run again, with what this experiment reads of it."""
    answers, seconds, right = stored
    metrics = [{"success": int(count) / answers, "processor_seconds": seconds}
               for count in right.split()]
    config = {"questions": answers, "answers": 1, "git_commit": result["git_commit"],
              "versions": result["versions"]}
    return {"folder": Path("published"), "steps": [], "evaluations": [], "metrics": metrics,
            "config": config}


def step_seconds(run: Run) -> float:
    """The processor's seconds for a step, which are the same whatever else it computes."""
    return float(np.mean([line["processor_seconds"] for line in run["metrics"]]))


# ------------------------------------------------------------------- what they show


def report(plan: Plan, arms: Arms, command: str) -> None:
    """Print the tables, and write them with a picture into results/NAME."""
    findings = Findings(plan.question, [sentence_about_runs(plan, arms)], tables_of(plan, arms),
                        {"runs": {}})
    made = {f"{arm}-s{seed}": run for arm, runs in arms.items() for seed, run in runs.items()}
    findings.values["runs"] = {name: short_form(run) for name, run in made.items()}
    codes = made_by({name: run["config"] for name, run in made.items()})
    settings = SimpleNamespace(plan=plan.name, common=plan.common, steps=plan.steps,
                               arms={name: arm.flags for name, arm in plan.arms.items()},
                               made_by=codes)
    folder = Path("results") / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    save(draw_gains(plan, gains_of(plan, arms)), folder, "gains", "")
    seconds = sum(step_seconds(run) * len(run["metrics"]) for run in made.values())
    write_findings(folder, "experiment", settings, findings, seconds, command)
    print_findings(findings)
    print(f"\nThe picture and all numbers are in {folder}")


def sentence_about_runs(plan: Plan, arms: Arms) -> str:
    count = sum(map(len, arms.values()))
    return f"{count} runs of {plan.name} are finished, each of {plan.steps} steps."


def gains_of(plan: Plan, arms: Arms) -> dict[str, Gain]:
    """The gain of each arm that has two pairs over the arm beside it. An arm without runs counts as
    a test, because it was planned as one: otherwise p would depend on when one stops."""
    tests = len(plan.methods)
    found = {}
    for name, arm in plan.arms.items():
        if arm.beside:
            found[name] = gain_over(arms.get(name, {}), arms.get(arm.beside, {}),
                                    tests=1 if arm.control else tests)
    corrected = holm([1.0 if np.isnan(found[name].p) else found[name].p for name in plan.methods])
    p_of = dict(zip(plan.methods, corrected))
    return {name: Gain(gain.seeds, gain.estimate, p_of.get(name, gain.p))
            for name, gain in found.items() if gain.pairs > 1}


def tables_of(plan: Plan, arms: Arms) -> list[Table]:
    found = gains_of(plan, arms)
    if not found:
        raise UserError("there are not yet two finished seeds of an arm and of the one beside it")
    order = sorted(found, key=lambda name: -found[name].estimate.value)
    return [gains_table(plan, arms, {name: found[name] for name in order}),
            pairs_table(plan, arms, order), quarters_table(arms)]


def gains_table(plan: Plan, arms: Arms, found: dict[str, Gain]) -> Table:
    rows: list[Row] = []
    for name, gain in found.items():
        arm = plan.arms[name]
        p = None if np.isnan(gain.p) else gain.p
        rows.append([name, arm.beside, gain.pairs, gain.estimate, p, gain.could_see,
                     in_words(arm.predicted), cost(arms[name], arms[arm.beside]), gain.verdict])
    formats = {"arm": "", "beside": "", "pairs": "d", "gain": "points", "p": "p", "visible": "size",
               "predicted": "", "cost": ".2f", "verdict": ""}
    return Table("gains", "Mean success in training: the gain over the arm beside it, in points",
                 by_row(formats, rows), "",
                 ["p has Holm's correction over the arms that are no controls. The plan has "
                  f"{len(plan.methods)} of them"],
                 {"gain": f"gain{WITH_INTERVAL}"})


def in_words(predicted: float | str | None) -> str:
    """A prediction: a number of points, a range as it was typed, or none."""
    if predicted is None:
        return "-"
    return predicted if isinstance(predicted, str) else f"{predicted:+.1f}"


def cost(mine: dict[int, Run], theirs: dict[int, Run]) -> float:
    """The processor's seconds of a step over those of the other arm, on all seeds."""
    seconds = [float(np.mean([step_seconds(run) for run in runs.values()]))
               for runs in (mine, theirs)]
    return seconds[0] / seconds[1]


def pairs_table(plan: Plan, arms: Arms, order: list[str]) -> Table:
    """The gain of every pair: a row for each arm, a column for each seed."""
    seeds = sorted({seed for runs in arms.values() for seed in runs})
    rows: list[Row] = []
    for name in order:
        mine, theirs = arms[name], arms[plan.arms[name].beside]
        row: Row = [name]
        for seed in seeds:
            is_pair = seed in mine and seed in theirs
            row.append(mean_success(mine[seed]) - mean_success(theirs[seed]) if is_pair else None)
        rows.append(row)
    return Table("pairs", "The gain of every pair, in points",
                 by_row({"arm": "", **{f"seed {seed}": "points" for seed in seeds}}, rows))


def quarters_table(arms: Arms) -> Table:
    """Success as a whole and in each quarter of the training, means over seeds."""
    rows: list[Row] = []
    for name, runs in arms.items():
        curve = np.mean([success_by_step(run) for run in runs.values()], 0)
        quarters = [float(part.mean()) if len(part) else None for part in np.array_split(curve, 4)]
        rows.append([name, len(runs), float(curve.mean()), *quarters])
    names = ("all", "first", "second", "third", "last")
    return Table("curve", "Success in training, as a whole and in each quarter, means over seeds",
                 by_row({"arm": "", "seeds": "d", **dict.fromkeys(names, ".1%")}, rows))


def draw_gains(plan: Plan, found: dict[str, Gain]) -> Figure:
    """A line for each arm, the largest gain at the top."""
    figure, axis = plt.subplots(figsize=(8.0, 1.5 + 0.27 * len(found)))
    colours = {BETTER: BLUE, WORSE: ORANGE, "no difference seen": GREY, "a control": COLOURS[3]}
    for word, colour in colours.items():
        axis.plot([], [], "o-", color=colour, lw=2, ms=5, label=word)
    order = sorted(found, key=lambda name: found[name].estimate.value)
    for height, name in enumerate(order):
        gain, arm = found[name].estimate, plan.arms[name]
        word = "a control" if arm.control else found[name].verdict
        colour = colours.get(word, GREY)
        axis.plot([100 * gain.low, 100 * gain.high], [height, height], color=colour, lw=2)
        axis.plot(100 * gain.value, height, "o", color=colour, ms=5)
        if isinstance(arm.predicted, int | float):
            axis.plot(arm.predicted, height, "kx", ms=6)
    axis.axvline(0, color="black", lw=0.8)
    axis.set_yticks(range(len(order)), order)
    axis.set(title="Gain over the arm beside it", xlabel="mean success in training, points")
    axis.plot([], [], "kx", ms=6, label="predicted")
    legend_below(figure, axis, ncols=3, title="A line is the 95% interval of one arm alone. Its "
                 "colour is the verdict,\nfor which p is corrected for the number of arms")
    return figure
