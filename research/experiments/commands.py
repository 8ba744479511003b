"""Many runs as one experiment: arms x seeds, made side by side, resumed, compared.

    python -m research                       # which experiments there are
    python -m research control --dry_run     # every run with its command, and about its time
    python -m research control               # make what is not finished, then say what it shows
    python -m research control --report_only

    python -m research probes                # the probes with several seeds
    python -m research publish FOLDER        # keep what was measured, beside the pages
    python -m research pages                 # write its numbers into them

Ctrl-C stops the runs after their current step, and the same command goes on with them. The report
is printed and written to results/study-NAME; experiments.py says what each experiment is.
"""
from engine.errors import UserError
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.hints import python_command
from research.experiments import pages, probes, published
from research.experiments.experiments import EXPERIMENTS, Experiment
from research.experiments.plan import PlannedRun, plan_runs
from research.experiments.runner import PROCESSES, end_with, list_runs, make_runs, usable_cores

FLAGS = {
    "processes": PROCESSES,
    "seeds": Flag(0, "seeds of each arm; 0 is what the experiment has", least=0, most=10_000),
    "out": Flag("runs/study", "folder of the runs; each experiment has its own below it"),
    "number": Flag(None, "make this run alone, as --dry_run counts them, and report nothing: for "
                         "an array of jobs on a cluster", least=0, kind=int),
    "dry_run": Flag(False, "list the runs, and start none"),
    "report_only": Flag(False, "say what the finished runs show, and start none")}


OTHERS = {"probes": probes.main, "publish": published.main, "pages": pages.main}


def main(argv: list[str]) -> None:
    if argv[:1] and argv[0] in OTHERS:
        return OTHERS[argv[0]](argv[1:])
    parser = add_flags(Parser("python -m research [NAME] [flags]", __doc__), FLAGS)
    parser.add_argument("name", nargs="?", help="an experiment: " + ", ".join(EXPERIMENTS)
                        + "; or probes, publish, pages")
    typed = parser.read(argv)
    name = typed.pop("name", None)
    args = with_defaults(typed, FLAGS)
    if name is None and not typed:
        return list_experiments()
    experiment = choose(name)
    refuse_two_wishes(typed)
    args.seeds = args.seeds or experiment.seeds
    args.processes = args.processes or usable_cores()
    runs = plan_runs(experiment, args.out, args.seeds)
    for run in runs:
        run.refuse_another()
    if args.dry_run:
        return list_runs(runs, args.processes)
    command = python_command("-m", "research", *argv)
    chosen = runs if args.number is None else [numbered(runs, args.number)]
    failed = [] if args.report_only else make_runs(chosen, args.processes, command)
    if args.number is None:
        # matplotlib takes half a second to import
        from research.experiments.report import write_report
        write_report(experiment, runs, command)
    end_with(failed)


def refuse_two_wishes(typed: dict) -> None:
    """Each of these says what to do instead of the usual."""
    wishes = [f"--{name}" for name in ("number", "dry_run", "report_only") if name in typed]
    if len(wishes) > 1:
        raise UserError(f"{' and '.join(wishes)} exclude each other: leave one out")


def numbered(runs: list[PlannedRun], number: int) -> PlannedRun:
    if number >= len(runs):
        raise UserError(f"--number {number}: there are {len(runs)} runs, counted from 0")
    return runs[number]


def list_experiments() -> None:
    for experiment in EXPERIMENTS.values():
        count = sum(experiment.seeds_of(arm, experiment.seeds) for arm in experiment.arms)
        print(f"{experiment.name:12s}{count:4d} runs  {experiment.question}")
    command = python_command("-m", "research")
    print(f"\n{command} NAME makes the runs of one, {command} probes asks the probes "
          "with several seeds, --help lists the flags")


def choose(name: str | None) -> Experiment:
    if name is None:
        raise UserError(f"name an experiment: {', '.join(EXPERIMENTS)}")
    if name not in EXPERIMENTS:
        raise UserError(f"there is no experiment {name}, only {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]

