"""How every program begins and ends.

What it prints cannot steer the terminal, whatever a model wrote; and what ends it is one line,
unless it is a mistake in this code.
"""
import signal
import sys
from typing import NoReturn

import torch

from engine import processes
from engine.errors import LostProcess, OwnCodeError, UserError
from harness.progress import go_on_for_nobody, though_nobody_reads
from harness.terminal import Visible, visible

SMALLER = ("a smaller --micro_batch, --questions, --answers or --max_new_tokens needs less, and so "
           "does a smaller model")


def run_as_program(name: str, main, interrupted: str = "") -> None:
    """Run main(argv). An error that the user can put right is one line, and so is one of the
    system; `interrupted` is what to say after Ctrl-C."""
    sys.stdout = Visible(sys.stdout)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        may_be_alone = isinstance(error, (LostProcess, OwnCodeError))
        if not (may_be_alone or processes.is_main_process()):
            from engine.several import rank_0_says_so
            if rank_0_says_so():
                sys.exit(1)
        end_with(f"{name}: {visible(str(error))}")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends at once, without a traceback
        sys.exit(f"{name}: {interrupted}" if interrupted else 130)
    except BrokenPipeError:  # whoever read the output went away, which is no error
        go_on_for_nobody(sys.stdout)
    except (OSError, MemoryError, RuntimeError) as error:
        sentence = of_the_system(error)
        if sentence is None:
            raise
        end_with(f"{name}: {visible(sentence)}")
    finally:
        with though_nobody_reads(sys.stdout):
            sys.stdout.flush()
        processes.stop()


def end_with(sentence: str) -> NoReturn:
    """End with an error."""
    if processes.count() == 1:
        sys.exit(sentence)
    with though_nobody_reads(sys.stdout):
        sys.stdout.flush()
    from engine.several import leave_at_once
    leave_at_once(sentence)


def of_the_system(error: Exception) -> str | None:
    """A sentence about an error of the machine, the operating system or another process; None for
    a mistake in this code."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if processes.is_loss(error):  # within a layer that is shared out: engine/sharded.py
        return processes.about_loss(error)
    refused = (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, refused) or "can't allocate memory" in str(error):
        return f"there is not enough memory: {SMALLER}"
    return None
