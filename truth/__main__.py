"""What is true, measured: the numbers against which ways of spreading credit are scored.

    python probes.py scoreboard     # which tokens earned the reward, and which weighting knows it
    python probes.py phase1         # a gradient that never saw a reward, and the controls that expose it
    python probes.py rank           # is the gradient of rank 2, and does it become sparse?
    python probes.py baseline       # what is the best number to subtract, and what does the group's mean cost?
    python probes.py length         # does credit by token pay more as answers get longer?

Each writes a folder with a page, its pictures and numbers.json, and takes some minutes on a CPU with the tiny model;
--quick takes seconds and shows only that everything works. `python probes.py rank --help` lists a probe's flags. The
world small enough to be enumerated is in exact.py.
"""
import argparse

from engine.settings import Parser, run_as_program, underscores
from truth import baseline, length, phase1, rank, scoreboard
from truth.common import COMMON, add_flags, carry_out, with_defaults

PROBES = {"scoreboard": scoreboard, "phase1": phase1, "rank": rank, "baseline": baseline, "length": length}


def make_parser() -> Parser:
    parser = Parser(usage="python probes.py PROBE [flags]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    probes = parser.add_subparsers(dest="probe", metavar="PROBE", required=True, parser_class=Parser)
    for name, module in PROBES.items():
        one = probes.add_parser(name, usage=f"python probes.py {name} [flags]", description=module.__doc__, help=module.__doc__.splitlines()[0],
                                formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        add_flags(one, {**COMMON, **module.FLAGS}, f"{name}-<model>-s<seed>")
    return parser


def main(argv: list[str]) -> None:
    if not argv:
        return make_parser().print_help()
    given = make_parser().parse_args([underscores(argument) for argument in argv])
    module = PROBES[given.probe]
    carry_out(given.probe, with_defaults(given, {**COMMON, **module.FLAGS}), module.measure)


if __name__ == "__main__":
    run_as_program("probes.py", main)
