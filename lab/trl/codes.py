"""What do codes called GRPO optimise? Their own functions are called, and their gradient is read.

    python -m lab.trl.codes                 # the codes that are known
    python -m lab.trl.codes trl             # the installed TRL

An adapter lays the batch of lab/formula out as the code wants it, and calls the code. None of
the code's lines is in this repository: its functions are taken from where it is installed.
`adapters.py` has the adapters; lab/trl/codes.md has what was found, also of codes whose adapter is
not here any more, and how to write one.
"""
if not __package__:
    raise SystemExit("start it with: python -m lab.trl.codes")
import inspect
import textwrap

from lab.trl.adapters import ADAPTERS
from engine.errors import UserError
from harness.flags import read
from harness.screen import run_as_program
from lab.formula import find_formula, judge


def main(argv: list[str]) -> None:
    wanted = read(argv, "python -m lab.trl.codes [NAME]", __doc__, {},
                  {"[NAME]": "a code. Without it all are listed"}).name
    if wanted is None:
        for name, adapter in ADAPTERS.items():
            print(f"  {name:24s} {inspect.getdoc(adapter).splitlines()[0]}")
        return
    if wanted not in ADAPTERS:
        raise UserError(f"there is no adapter for {wanted}, only for {', '.join(ADAPTERS)}: "
                        "lab/trl/codes.md shows how to write one")
    losses = ADAPTERS[wanted]()
    for name, loss in losses.items():
        print(f"\n{name}")
        for sentence in judge(find_formula(loss)).in_words():
            print(textwrap.fill(sentence, 100, initial_indent="  ", subsequent_indent="    "))


if __name__ == "__main__":
    run_as_program("codes", main)
