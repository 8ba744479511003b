"""What a training step computes: sampling, the packed forward pass, the optimizer, processes.

Import it before torch: it sets how torch's threads wait for each other, which they do hundreds of
times in a training step. By default a waiting thread spins. When another process wants the same
core, the spinning thread takes it from the one that still works, and the run becomes many times
slower. A thread that sleeps at once takes long to wake. So here a thread spins for a moment and
then sleeps. On an idle machine this is nearly as fast as spinning, and beside a busy process the
run keeps much of its speed.
"""
import os
import sys
from types import TracebackType

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # is read once, when torch is imported


def say_nothing_of_ctrl_c(kind: type[BaseException], error: BaseException,
                          trace: TracebackType | None) -> None:
    """Print no traceback for Ctrl-C during the imports; afterwards harness/program.py handles it.
    The exit status is still that of Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say_nothing_of_ctrl_c

import numpy  # noqa: F401, E402  torch would take Ctrl-C in this import for a missing numpy
