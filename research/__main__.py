"""What was found with the lab, and how to find it again.

    python -m research board         which way of spreading credit is ahead of plain GRPO?

It is made of many training runs, which can be stopped and gone on with at any moment.

    python -m research scoreboard    which tokens earned the reward, and which weighting finds them
    python -m research large         the same of a model for which that takes days
    python -m research exact         every weighting and advantage in a world that can be listed
    python -m research dial          where does credit by token pay? a world with dials
    python -m research law           what should it be worth there? predicted from the noise

These are probes: each asks one question, prints its findings and writes a folder with numbers.json
and its picture. On a CPU a probe takes minutes. NAME --help lists the flags of one.

    python -m research publish FOLDER    keep what was measured, beside the pages
    python -m research pages             write its numbers into them
    python -m research pictures          draw its pictures
"""
from importlib import import_module

from engine.errors import UserError
from harness.program import run_as_program
from research.probes.common import run_probe

PROBES = ("scoreboard", "large", "exact", "dial", "law")
OTHERS = {"board": "board", "publish": "published", "pages": "pages", "pictures": "pictures"}


def main(argv: list[str]) -> None:
    name, *flags = argv or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__.strip())
    elif name in PROBES:
        probe = import_module(f"research.probes.{name}")
        run_probe(name, probe.__doc__, probe.FLAGS, probe.measure, flags)
    elif name in OTHERS:
        import_module(f"research.experiments.{OTHERS[name]}").main(flags)
    else:
        raise UserError(f"there is no {name} here, only {', '.join([*PROBES, *OTHERS])}")


if __name__ == "__main__":
    run_as_program("research", main, interrupted="stopped at once; the same command of the "
                   "board goes on, a probe begins again")
