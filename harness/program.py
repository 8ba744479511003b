"""How every program begins and ends.

What it prints cannot steer the terminal, whatever a model wrote; and what ends it is one line,
unless it is a mistake in this code. Ctrl-C: once to stop after the current step, twice to stop at
once; several processes stop together, after the same step.
"""
import os
import signal
import sys
import threading
from collections.abc import Callable

import torch

from engine import processes
from engine.errors import LostProcess, UserError
from harness.files import is_taken_away
from harness.flags import shortened
from harness.progress import Visible, go_on_for_nobody, though_nobody_reads, visible

SMALLER = ("a smaller --micro_batch, --questions, --answers or --max_new_tokens needs less, and so "
           "does a smaller model")
MESSAGE = b"\nstopping after this step (once more: at once, back to the last checkpoint)\n"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_as_program(name: str, main: Callable[[list[str]], object], interrupted: str = "") -> None:
    """Run main(argv). An error of the user or of the system is one line; so is `interrupted`."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # no file gets a closed stream's number
        pass
    os.close(number)
    for stream in ("stdout", "stderr"):  # None where it was closed: `>&-`
        setattr(sys, stream, Visible(getattr(sys, stream) or open(os.devnull, "w")))
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends at once, without a traceback
        sys.exit(f"{name}: {interrupted}" if interrupted else 130)
    except BrokenPipeError:  # whoever read the output went away, which is no error
        go_on_for_nobody(sys.stdout)
    except Exception as error:
        sentence = sentence_about(error)
        if sentence is None:
            raise
        is_lost = isinstance(error, LostProcess) or processes.is_loss(error)
        if not (is_lost or processes.is_main_process()):
            from engine.several import wait_for_rank0_error
            if wait_for_rank0_error():
                sys.exit(1)
        if processes.count() == 1:
            sys.exit(f"{name}: {visible(sentence)}")
        with though_nobody_reads(sys.stdout):
            sys.stdout.flush()
        from engine.several import hard_exit
        hard_exit(f"{name}: {visible(sentence)}")
    finally:
        with though_nobody_reads(sys.stdout):
            sys.stdout.flush()
        processes.stop()


def sentence_about(error: Exception) -> str | None:
    """One line, with the notes of harness/own_code.py; None for a mistake in this code."""
    notes = getattr(error, "__notes__", [])
    said = str(error) if isinstance(error, UserError) else of_the_system(error)
    if said is None and notes:
        said = f"{type(error).__name__}: {shortened(str(error), 300)}"
    return None if said is None else " ".join("; ".join([*notes, said]).split())


def of_the_system(error: Exception) -> str | None:
    """About an error of the machine, the system or another process, or a room taken away."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or str(error) or type(error).__name__}"
    if processes.is_loss(error):  # within a layer that is shared out: engine/sharded.py
        return processes.about_loss(error)
    if isinstance(error, ModuleNotFoundError):
        room = str(error.name).partition(".")[0]
        said = f"this needs {room}/, a folder of this project that is not here"
        return said if is_taken_away(room) else None
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    no_memory = no_memory or "can't allocate memory" in str(error)
    return f"there is not enough memory: {SMALLER}" if no_memory else None


class StopRequest:
    """Inside `with`, Ctrl-C and SIGTERM set `asked` instead of ending the process."""
    asked = False

    def __enter__(self) -> "StopRequest":
        self.handlers_before = {name: signal.signal(name, self.handle) for name in SIGNALS}
        if processes.count() > 1:
            readable, writable = os.pipe()
            os.set_blocking(writable, False)
            signal.set_wakeup_fd(writable)  # gets a signal's number at once, whatever Python does
            from engine.several import end_after_signal
            threading.Thread(target=end_after_signal, args=(readable,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # several processes keep them: of one that has lost another the error may still be on its
        # way to `run_as_program` when torchrun's SIGTERM comes
        for name, handler in self.handlers_before.items() if processes.count() == 1 else ():
            signal.signal(name, handler)

    def handle(self, *_: object) -> None:
        if self.asked and processes.count() == 1:  # torchrun passes on what the terminal has sent
            raise KeyboardInterrupt
        if not self.asked and processes.is_main_process():
            with though_nobody_reads(sys.stdout):
                os.write(sys.stdout.fileno(), MESSAGE)  # print may be busy at this moment
        self.asked = True
