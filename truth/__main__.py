"""What is true, measured: the numbers against which ways of spreading credit are judged.

    python -m truth.exact         every weighting and advantage in a world small enough to be listed
    python -m truth.scoreboard    which tokens earned the reward, and which weighting finds them
    python -m truth.noise         does the gradient of a single batch point the right way?
    python -m truth.phase1        a gradient that never saw a reward, and controls that expose it
    python -m truth.rank          is the gradient of rank 2, and does it become sparse?
    python -m truth.baseline      the best number to subtract, and what the group's mean costs
    python -m truth.length        does credit by token pay more as answers get longer?

Each prints its findings and writes a folder with a page, its pictures and numbers.json; --all
prints every table. On a CPU with the tiny model a probe takes minutes; with --quick it takes
seconds and only shows that it works. `python -m truth.rank --help` lists a probe's flags.
"""
from engine.errors import UserError
from engine.hints import python_command
from engine.program import run_as_program


def main(argv: list[str]) -> None:
    if argv and argv[0] not in ("-h", "--help"):
        command = python_command("-m", "truth")
        raise UserError(f"{argv[0]} is not taken: a probe is run as {command}.NAME, and {command} "
                        "lists the names")
    print(__doc__.strip())


if __name__ == "__main__":
    run_as_program("truth", main)
