"""train.py with the weightings of research/pointers.py among the choices of --mitigation.

    python -m research.train --mitigation pointer
"""
import research.pointers  # noqa: F401  its decorators make the choices
from harness.program import run_as_program
from train import main

if __name__ == "__main__":
    run_as_program("train.py", main, interrupted="stopped at once; --resume goes on from the last "
                   "checkpoint of a run that has one")
