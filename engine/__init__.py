"""What makes the lab fast and safe: sampling, packing, folders, settings, resume, processes.

Import it before torch. Two threads that share an operation wait for each other, hundreds of times a
training step. OpenMP lets them spin while they wait. On a core that another process wants, the one
that spins keeps the one that works from working, and the run slows down many times over. A thread
that sleeps at once takes long to wake. To spin for a moment and then sleep is nearly as fast alone,
and keeps much of the speed beside a busy process: python -m benchmarks.neighbours measures it
"""
import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # is read once, when torch is imported


def say_nothing_of_ctrl_c(kind: type, error: BaseException, trace) -> None:
    """Before engine/program.py takes over, Ctrl-C meets imports, and their traceback helps nobody.
    The exit status is still that of Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say_nothing_of_ctrl_c

import numpy  # noqa: F401, E402  torch would take Ctrl-C in this import for a missing numpy
