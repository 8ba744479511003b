"""What a training step computes: sampling, the packed forward pass, the optimizer, processes.

Import it before torch: it sets how torch's threads wait for each other, hundreds of times a step.
By default they spin, which beside a busy process makes a run many times slower, and one that sleeps
at once takes long to wake. Here they spin for a moment and then sleep.
"""
import os
import sys
from types import TracebackType

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # is read once, when torch is imported


def say_nothing_of_ctrl_c(kind: type[BaseException], error: BaseException,
                          trace: TracebackType | None) -> None:
    """No traceback for Ctrl-C during the imports; afterwards harness/program.py handles it."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say_nothing_of_ctrl_c

import numpy  # noqa: F401, E402  torch would take Ctrl-C in this import for a missing numpy
