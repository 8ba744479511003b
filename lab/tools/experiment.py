"""An experiment: your own table of arms, each trained with several seeds, and compared.

    python -m lab experiment my_plan.json                 # make the runs, then compare them
    python -m lab experiment notes_1                      # a plan of lab/plans

A plan is a file like this one:

    {"question": "Does a larger batch, or another advantage, train better than plain GRPO?",
     "common": "--questions 8 --answers 8 --eval_every 0 --checkpoint_every 0 --threads 1",
     "steps": 60,
     "seeds": [40, 46],
     "arms": {"none": "", "rloo": "--advantage rloo", "twice": "--questions 16"}}

`common` and the text of each arm are flags of `lab train`. An arm may have --steps of its own. The
seeds are 40 to 45: the first, and the one after the last. Runs of two arms with the same seed get
the same problems, and make a pair.

The runs are made seed by seed. So an experiment that is stopped early has almost the same seeds in
all arms, and the same command continues it. A run's folder is ARM-sSEED.

Each arm is compared with the first one as in `python -m lab compare`, which also draws the curves
of runs/PLAN/*. The interval is Student's over the pairs of runs, and p has Holm's correction for
all arms. It is of success in training, at equal cost, unless the plan names another "measure", such
as "held-out success at the end": then each arm is compared at its own end. A control, such as twice
the problems, is an arm like any other.
"""
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from lab.analysis.comparison import (AT_THE_END, GREEDY_AT_THE_END, MEASURES, Arms, comparable,
                                     say_gains)
from lab.analysis.run_folders import Run
from lab.engine.errors import PROJECT, UserError, read_json
from lab.harness.flags import Flag, read, words_of
from lab.harness.screen import python_command, say
from lab.harness.settings import LabSettings, make_settings, read_flags
from lab.probes.notes import print_metrics
from lab.tools.planned_runs import PROCESSES, PlannedRun, finished_run, make_runs, side_by_side

PLANS = PROJECT / "lab/plans"
OF_THE_PLAN = {"seed", "out", "resume", "continue"}  # flags that no arm may have
OF_ALL = {*OF_THE_PLAN, "steps"}  # nor --flags
FLAGS = {
    "seeds": Flag(0, "number of seeds of each arm. 0 means those of the plan", most=1000),
    "flags": Flag("", 'further flags of lab train for all runs, such as "--device cuda"'),
    "runs": Flag("runs", "folder in which the runs are kept, in a folder of the plan's name"),
    "processes": PROCESSES}


@dataclass(frozen=True)
class Plan:
    """What is trained: a file of JSON, or what its mistakes are."""
    name: str
    question: str
    steps: int
    seeds: list[int]      # the first, and the one after the last
    arms: dict[str, str]  # flags of lab train
    common: str = ""
    measure: str = ""     # by which the arms are judged; else their cost decides it

    def flags_of(self, arm: str, more: str = "") -> list[str]:
        return [*self.common.split(), *self.arms[arm].split(), *more.split()]

    def runs(self, args: SimpleNamespace) -> list[PlannedRun]:
        """Seed by seed. The flags are those that `settings_of_arms` has checked."""
        first, stop = self.seeds
        found = []
        for seed in range(first, first + args.seeds if args.seeds else stop):
            for arm in self.arms:
                name = arm.replace("--", "").replace(" ", "-")
                flags = self.flags_of(arm, args.flags)
                _, texts = words_of(flags)
                keeps = texts.get("checkpoint_every", "0") != "0"
                steps = int(texts.get("steps", self.steps))
                found.append(PlannedRun(arm, seed, Path(args.runs) / self.name / f"{name}-s{seed}",
                                        flags, steps, keeps_checkpoints=keeps))
        return found


def main(argv: list[str]) -> None:
    args = read(argv, "python -m lab experiment PLAN [flags]", __doc__, FLAGS, {
        "PLAN": f"a file as above, or the name of one of lab/plans: {', '.join(names_of_plans())}"})
    plan = read_plan(args.plan)
    refuse_flags_of_the_plan(plan, args.flags.split())
    kinds = settings_of_arms(plan, args.flags)
    planned = plan.runs(args)
    failed = make_runs(planned, python_command("-m", "lab", "experiment", *argv),
                       *side_by_side(kinds, args.processes))
    arms: dict[str, dict[int, Run]] = {}
    for one in planned:
        if run := finished_run(one):
            arms.setdefault(one.arm, {})[one.seed] = run
    compare(plan, arms, len(planned))
    if failed:
        raise UserError("; ".join(f"{arm} failed: {reason}" for arm, reason in failed.items()))


def compare(plan: Plan, arms: Arms, planned: int) -> None:
    """Print the gain of each arm over the first one, from the runs that are finished."""
    baseline, *others = plan.arms
    family = {name: arms.get(name, {}) for name in plan.arms}
    if not any(family[name].keys() & family[baseline].keys() for name in others):
        raise UserError(f"{plan.name} has no finished pair of runs yet, of {baseline} and of "
                        "another arm with the same seed")
    count = sum(map(len, arms.values()))
    say(f"{plan.question}\n{count} of {planned} runs are finished")
    at_ends = plan.measure in (AT_THE_END, GREEDY_AT_THE_END)
    parts, notes = comparable(family, at_ends)
    for note in notes:
        say(textwrap.fill(f"{note}.", 100))
    say_gains(parts, plan.measure)
    print_metrics({name: arm for name, arm in family.items() if arm})


# ------------------------------------------------------------------- the plan


def names_of_plans() -> list[str]:
    return sorted(path.stem for path in PLANS.glob("*.json"))


def read_plan(typed: str) -> Plan:
    """The plan in the file `typed`, or the plan of this name in lab/plans."""
    path = Path(typed)
    if not path.exists() and typed in names_of_plans():
        path = PLANS / f"{typed}.json"
    if not path.exists():
        raise UserError(f"there is no file {typed}, and no plan of lab/plans has this name: "
                        f"{', '.join(names_of_plans())}")
    try:
        plan = Plan(path.stem, **read_json(path))
    except TypeError as error:
        reason = re.sub(r"\w+\.__init__\(\) ", "", str(error))
        raise UserError(f"{path} is no plan: {reason}. python -m lab experiment --help shows "
                        "one") from None
    refuse_mistakes(plan, str(path))
    return plan


def refuse_mistakes(plan: Plan, path: str) -> None:
    """End in an error where the table of arms cannot be trained and compared."""
    if not isinstance(plan.steps, int) or plan.steps < 1:
        raise UserError(f"{path}: \"steps\" is {plan.steps!r}, and a run has at least one step")
    if not is_range(plan.seeds):
        raise UserError(f"{path}: the seeds are {plan.seeds!r}. They should be two numbers, the "
                        "first and the one after the last, as in [40, 46]")
    if not all(isinstance(text, str) for text in (plan.question, plan.common)):
        raise UserError(f"{path}: the question and the common flags should be texts")
    if plan.measure not in ("", *MEASURES):
        raise UserError(f"{path}: the measure is {plan.measure!r:.80}, and should be one of "
                        f"{'; '.join(MEASURES)}")
    if not isinstance(plan.arms, dict) or len(plan.arms) < 2:
        raise UserError(f"{path}: it has no two arms to compare, with their flags as texts")
    if "steps" in words_of(plan.common.split())[1]:
        raise UserError(f"{path}: the common flags have --steps, which the plan gives as \"steps\"")
    for name, flags in plan.arms.items():
        if not re.fullmatch(r"[\w .=-]+", name) or not isinstance(flags, str):
            raise UserError(f"{path}: {name!r:.80} should be letters, digits, spaces and . = _ - "
                            "alone, because it names folders, and its flags a text")
        if given := OF_THE_PLAN & words_of(plan.flags_of(name))[1].keys():
            raise UserError(f"{path}: {name} has --{min(given)}, which the plan gives to every run")


def refuse_flags_of_the_plan(plan: Plan, typed: list[str]) -> None:
    """End in an error where --flags has what the plan says: it would be overruled silently."""
    if given := OF_ALL & words_of(typed)[1].keys():
        raise UserError(f"--flags has --{min(given)}, which the plan {plan.name} gives to every "
                        "run: change it in a copy of the plan, and name that file")


def is_range(seeds: object) -> bool:
    """Whether this is [first, one after the last]."""
    if not isinstance(seeds, list) or len(seeds) != 2:
        return False
    return all(isinstance(seed, int) for seed in seeds) and 0 <= seeds[0] < seeds[1]


def settings_of_arms(plan: Plan, more: str) -> list[LabSettings]:
    """The settings of each arm. It is an error if lab train does not take an arm's flags, or if two
    arms are the same."""
    known: dict[str, str] = {}
    found = []
    for arm in plan.arms:
        try:
            found.append(make_settings(read_flags(plan.flags_of(arm, more))))
        except UserError as error:
            raise UserError(f"{plan.name}, {arm}: {error}") from None
        if found[-1].steps < 1:
            raise UserError(f"{plan.name}, {arm}: --steps {found[-1].steps}, and a run has at "
                            "least one step")
        same = known.setdefault(repr(found[-1].to_json()), arm)
        if same != arm:
            raise UserError(f"{plan.name}: {arm} has the settings of {same}, so nothing differs")
    return found
