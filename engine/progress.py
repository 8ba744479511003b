"""What people see while something runs: lines that stay, and one that is overwritten by the next."""
import os
import sys
import time

from engine import processes


def say(text: str) -> None:
    """Print a line at once, from the first process. When nobody reads any more (`| head`), go on in silence."""
    try:
        if processes.speaks():
            print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_status(text: str) -> None:
    """Show a line that the next one overwrites, to people at a terminal only. An empty text clears it."""
    if sys.stderr.isatty() and processes.speaks():
        print(f"\r\033[K  {text[:90]}\r" if text else "\r\033[K", end="", file=sys.stderr, flush=True)


class Progress:
    """The share of the work that is done, and the time left, on stderr.

    At a terminal one line is overwritten; elsewhere a line is printed every half minute. `parts` are the stages
    and about how long each takes, in any unit.
    """

    def __init__(self, **parts: float):
        self.parts, self.start, self.last_line = parts, time.monotonic(), time.monotonic()

    def __call__(self, part: str, done: float = 0.0, text: str = "") -> None:
        now, share = time.monotonic(), self.share(part, done)
        line = f"{share:4.0%}  {text or part.replace('_', ' ')}"
        if share > 0.02:
            left = (now - self.start) * (1 - share) / share
            line += f", about {left / 60:.0f} min {left % 60:02.0f} s left"
        if sys.stderr.isatty():
            show_status(line)
        elif now - self.last_line > 30:
            print(f"  {line}", file=sys.stderr, flush=True)
            self.last_line = now

    def share(self, part: str, done: float) -> float:
        names = list(self.parts)
        before = sum(self.parts[name] for name in names[:names.index(part)])
        return (before + done * self.parts[part]) / sum(self.parts.values())
