"""Ctrl-C: once to stop after the current step, twice to stop at once. Several processes stop
together, after the same step."""
import os
import signal
import sys
import threading

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
            readable, writable = os.pipe()
            os.set_blocking(writable, False)
            signal.set_wakeup_fd(writable)  # gets a signal's number at once, whatever Python does
            from engine.several import end_after_signal
            threading.Thread(target=end_after_signal, args=(readable,), daemon=True).start()
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
