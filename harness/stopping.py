"""Ctrl-C: once to stop after the current step, twice to stop at once.

Several processes stop together, after the same step. torchrun also sends SIGTERM to those that are
left when one has died. They may wait for it in C++, where no Python code can react to a signal: so
a thread ends a process that has not ended by itself before torchrun would kill it in silence.
"""
import os
import signal
import sys
import threading
import time

from engine import processes
from harness.progress import though_nobody_reads

MESSAGE = b"\nstopping after this step (once more: at once, back to the last checkpoint)\n"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside `with`, Ctrl-C and SIGTERM set `asked` instead of ending the process."""
    asked = False

    def __enter__(self) -> "StopRequest":
        self.handlers_before = {name: signal.signal(name, self.handle) for name in SIGNALS}
        if processes.count() > 1:
            end_after_a_signal()
        return self

    def __exit__(self, *_) -> None:
        for name, handler in self.handlers_before.items():
            signal.signal(name, handler)

    def handle(self, *_) -> None:
        if self.asked and processes.count() == 1:  # torchrun passes on what the terminal has sent
            raise KeyboardInterrupt
        if not self.asked and processes.is_main_process():
            with though_nobody_reads(sys.stdout):
                os.write(sys.stdout.fileno(), MESSAGE)  # print may be busy at this moment
        self.asked = True


def end_after_a_signal() -> None:
    """Start the thread that ends this process some seconds after a signal. Python's C code writes
    the number of a signal to the wakeup descriptor at once, whatever the main thread is doing."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    threading.Thread(target=wait_for_a_signal, args=(readable,), daemon=True).start()


def wait_for_a_signal(readable: int) -> None:
    while os.read(readable, 1)[0] not in SIGNALS:
        pass
    seconds = seconds_to_stop()
    time.sleep(seconds)
    processes.leave_at_once(
        f"rank {processes.rank()} did not come to the end of its step within {seconds:.0f} s of "
        "the signal to stop: another process has ended, or a step takes longer "
        f"(TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 gives it more). {processes.WAY_OUT}")


def seconds_to_stop() -> float:
    """Two thirds of the time that torchrun gives before it kills."""
    given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return (int(given) if given.isdecimal() else 30) * 2 / 3
