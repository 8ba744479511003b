"""Many runs as one experiment: arms x seeds, made side by side, resumed, compared.

    python -m research                       # which experiments there are
    python -m research control --dry_run     # every run with its command, and about its time
    python -m research control               # make what is not finished, then say what it shows
    python -m research control --report_only

Ctrl-C stops the runs after their current step, and the same command goes on with them. The report
is printed and written to results/study-NAME; experiments.py says what each experiment is.
"""
from engine.errors import UserError
from harness.files import paths_in
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.progress import python_command, say
from research.experiments import published
from research.experiments.experiments import EXPERIMENTS
from research.experiments.plan import plan_runs
from research.experiments.runner import FLAGS as RUN_FLAGS
from research.experiments.runner import end_with, list_runs, make_runs, usable_cores
from research.probes.common import command_of

FLAGS = {
    **RUN_FLAGS,
    "seeds": Flag(0, "seeds of each arm; 0 is what the experiment has", least=0, most=10_000),
    "number": Flag(None, "make this run alone, as --dry_run counts them, and report nothing: for "
                         "an array of jobs on a cluster", least=0, kind=int)}


def run_experiment(name: str, argv: list[str]) -> None:
    typed = add_flags(Parser(f"python -m research {name} [flags]", __doc__), FLAGS).read(argv)
    args, experiment = with_defaults(typed, FLAGS), EXPERIMENTS[name]
    processes = args.processes or usable_cores()
    runs = plan_runs(experiment, args.out, args.seeds or experiment.seeds)
    if args.dry_run:
        return list_runs(runs, processes)
    go_on = python_command("-m", "research", name, *argv)
    if args.number is not None:
        if args.number >= len(runs):
            raise UserError(f"--number {args.number}: there are {len(runs)} runs, counted from 0")
        return end_with(make_runs([runs[args.number]], processes, go_on))
    failed = {} if args.report_only else make_runs(runs, processes, go_on)
    # matplotlib takes half a second to import
    from research.experiments.report import write_report
    end_with(write_report(experiment, runs, command_of(name, typed)) | failed)


def make_tables(argv: list[str]) -> None:
    """Of the published experiments, by today's rules, from what results keep of every run."""
    Parser("python -m research tables", make_tables.__doc__).read(argv)
    from research.experiments.report import made_again
    for path in (path for path in paths_in(published.RESULTS) if path.suffix == ".json"):
        result = published.read_result(path)
        if published.is_remade(result) and (again := made_again(result)) != result:
            published.write_result(path, again)
            say(f"made again: {path.stem}; python -m research pages writes its numbers into the "
                "pages")


def list_experiments() -> None:
    for experiment in EXPERIMENTS.values():
        count = len(experiment.arms) * experiment.seeds
        print(f"{experiment.name:12s}{count:4d} runs  {experiment.question}")
