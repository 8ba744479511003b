"""train.py with the weightings of research/pointers.py among the choices of --mitigation.

    python -m research.train --mitigation pointer
"""
import mitigations  # noqa: F401  first: it fills the lists of choices, to which the next adds
import research.pointers  # noqa: F401
from harness.program import run_as_program
from train import main

if __name__ == "__main__":
    run_as_program("train.py", main, interrupted="stopped at once; --resume goes on from the last "
                   "checkpoint of a run that has one")
