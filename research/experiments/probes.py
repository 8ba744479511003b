"""The probes with several seeds, before training and after a third of it.

    python -m research probes --dry_run         # every command, and what is measured already
    python -m research probes                   # measure what is missing, put seeds together
    python -m research probes --only rule

The interval that a probe prints is about the problems it drew. What the next model would show only
other seeds can say: seed n draws other problems and answers, and after a third of training it looks
at the run with seed n. Put together, a number is the median over the seeds, and its interval goes
from the lowest to the highest. Of five seeds that holds the median of all that could be drawn in 94
of 100 cases. The tables of all seeds lie in results/study-probes, a folder for each probe and time.
"""
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from harness.files import is_file, is_there, make_folder, read_json, replace_text
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.progress import python_command, say
from research.experiments.experiments import PLAIN, Experiment
from research.experiments.over_seeds import over_seeds
from research.experiments.pages import table_of
from research.experiments.plan import Planned, PlannedRun, State, plan_runs
from research.experiments.published import RESULTS, made_by, read_result
from research.experiments.runner import FLAGS as RUN_FLAGS
from research.experiments.runner import end_with, list_runs, make_runs, usable_cores

PROBED = Path("results/study-probes")  # where the seeds are put together
BEFORE, THIRD = "before", "third"      # training; of its steps

LOOKED_AT = Experiment(
    name="third",
    question="What is the model like after a third of its training?",
    common="--questions 8 --answers 8 --steps 20 --checkpoint_every 20 --eval_every 0",
    arms=PLAIN,
    seeds=5)

# of some less than one probe measures by itself, as the seeds together measure it better
PROBES = {"scoreboard": "--batches 20",
          "rule": "--only entropy_weighted,low_probability,by_kind,random,hindsight,free_pointer,"
                  "pointer,measured"}

FLAGS = {**RUN_FLAGS,
         "seeds": Flag(LOOKED_AT.seeds, "seeds of each probe", least=2, most=10_000),
         "only": Flag(None, "a single probe", choices=tuple(PROBES))}


@dataclass
class PlannedProbe(Planned):
    """One call of a probe, with the names that a PlannedRun has."""
    probe: str
    time: str
    seed: int
    model: Path | None  # None is the shipped one
    steps: int = 1      # it is measured, or it is not

    @property
    def arm(self) -> str:
        return f"{self.probe}-{self.time}"

    @property
    def folder(self) -> Path:
        return Path("results/probes", self.name)

    @property
    def command(self) -> list[str]:
        model = ["--model", str(self.model)] if self.model else []
        return ["-m", "research", self.probe, "--threads", "1", "--seed", str(self.seed), *model,
                *PROBES[self.probe].split(), "--out", str(self.folder)]

    @property
    def seconds_a_step(self) -> float:
        """As on file: of all seeds together."""
        path = RESULTS / f"{self.probe}.json"
        return read_result(path)["seconds"] / LOOKED_AT.seeds if is_file(path) else 0.0

    def evaluated_after(self, step: int) -> int:
        return 0

    def progress(self) -> tuple[int, float]:
        return 0, 0.0

    def state(self) -> State:
        """In trouble if the folder holds what was measured with other flags."""
        path, (*meant, _, _) = self.folder / "numbers.json", self.command  # without --out
        if not is_file(path):
            return State()
        numbers = read_json(path)
        if numbers["command"].endswith(f" {shlex.join(meant)}"):
            return State(1, numbers["seconds"], True)
        return State(trouble=f"{self.folder} was measured by `{numbers['command']}`, not by "
                             f"`{python_command(*meant)}`: remove it, and it is measured again")


def main(argv: list[str]) -> None:
    args = with_defaults(add_flags(Parser("python -m research probes [flags]", __doc__),
                                   FLAGS).read(argv), FLAGS)
    args.processes = args.processes or usable_cores()
    trained = plan_runs(LOOKED_AT, args.out, args.seeds)
    probes = plan_probes([args.only] if args.only else list(PROBES), trained)
    if args.dry_run:
        list_runs(trained, args.processes)
        return list_runs(probes, args.processes)
    go_on, failed = python_command("-m", "research", "probes", *argv), {}
    if not args.report_only:
        failed = make_runs(trained, args.processes, go_on)
        there = [probe for probe in probes if probe.model is None or is_there(probe.model)]
        failed |= make_runs(there, args.processes, go_on)
    gather(probes)
    end_with(failed)


def plan_probes(names: list[str], trained: list[PlannedRun]) -> list[PlannedProbe]:
    """All probes with seed 0, then all with seed 1, and so on."""
    probes = []
    for run in trained:
        checkpoint = run.folder / f"checkpoints/step_{run.steps:06d}"
        for name in names:
            probes += [PlannedProbe(name, BEFORE, run.seed, None),
                       PlannedProbe(name, THIRD, run.seed, checkpoint)]
    return probes


def gather(probes: list[PlannedProbe]) -> None:
    """A folder for each probe and time that at least two seeds have measured."""
    by_arm = {}
    for probe in probes:
        if probe.state().finished:
            by_arm.setdefault(probe.arm, []).append(probe)
    for arm, measured in by_arm.items():
        if len(measured) < 2:
            say(f"{arm}: only seed {measured[0].seed} is measured, so there is no interval yet")
        else:
            folder = write_together(measured)
            say(f"{arm}: {len(measured)} seeds; python -m research publish {folder}")
    if not by_arm:
        raise UserError("no probe is measured yet")


def write_together(measured: list[PlannedProbe]) -> Path:
    """numbers.json of the first, with the tables of all."""
    first, numbers = measured[0], {probe.name: read_json(probe.folder / "numbers.json")
                                   for probe in measured}
    of_seeds = zip(*(each["tables"] for each in numbers.values()), strict=True)
    tables = [over_seeds(list(map(table_of, stored))) for stored in of_seeds]
    folder = PROBED / first.arm
    make_folder(folder)
    together = {**numbers[first.name], "in_short": [],
                "name": first.probe if first.time == BEFORE else f"{first.probe}_{first.time}",
                "command": f"python -m research probes --only {first.probe}",
                "settings": {"made_by": made_by(numbers)},
                "seconds": sum(each["seconds"] for each in numbers.values()),
                "tables": [table.to_json() for table in tables]}
    replace_text(folder / "numbers.json", json.dumps(together, indent=1, allow_nan=False) + "\n")
    return folder
