"""train.py with two more files of choices: --mitigation of research/pointers.py, --advantage of
research/ideas.py.

    python -m research.train --mitigation pointer
"""
import research.ideas  # noqa: F401  its decorators make the choices
import research.pointers  # noqa: F401
from harness.program import run_as_program
from train import main

if __name__ == "__main__":
    run_as_program("train.py", main, interrupted="stopped at once; --resume goes on from the last "
                   "checkpoint of a run that has one")
