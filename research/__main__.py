"""What was found with the lab, and how to find it again.

    python -m research scoreboard    which tokens earned the reward, and which weighting finds them
    python -m research exact         every weighting and advantage in a world that can be listed
    python -m research pointer       what is it worth to know where an answer is decided?
    python -m research rule          which method will pay, on this model and this task?

These are probes: each asks one question of one model, prints its findings and writes a folder with
a page, its picture and numbers.json. On a CPU with the tiny model a probe takes minutes; --quick
takes seconds and only shows that it works. NAME --help lists the flags of one.

    python -m research probes            the probes with several seeds
    python -m research publish FOLDER    keep what was measured, beside the pages
    python -m research tables            make the tables of experiments again from what is kept
    python -m research pages             write its numbers into them
    python -m research pictures          draw its pictures

An experiment is many training runs; NAME makes them, NAME --dry_run lists them:
"""
from importlib import import_module

from engine.errors import UserError
from harness.program import run_as_program
from research.experiments import commands
from research.experiments.experiments import EXPERIMENTS
from research.probes.common import run_probe

PROBES = ("scoreboard", "exact", "pointer", "rule")
OTHERS = {"probes": "probes", "publish": "published", "pages": "pages", "pictures": "pictures"}


def main(argv: list[str]) -> None:
    name, *flags = argv or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__.strip() + "\n")
        commands.list_experiments()
    elif name in PROBES:
        probe = import_module(f"research.probes.{name}")
        run_probe(name, probe.__doc__, probe.FLAGS, probe.measure, flags)
    elif name == "tables":
        commands.make_tables(flags)
    elif name in OTHERS:
        import_module(f"research.experiments.{OTHERS[name]}").main(flags)
    elif name in EXPERIMENTS:
        commands.run_experiment(name, flags)
    else:
        raise UserError(f"there is no probe or experiment {name}, only "
                        f"{', '.join([*PROBES, *EXPERIMENTS, *OTHERS, 'tables'])}")


if __name__ == "__main__":
    run_as_program("research", main, interrupted="stopped at once; the same command goes on from "
                   "the last checkpoint of each run")
