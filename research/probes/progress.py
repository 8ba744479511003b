"""How far a probe is, and how long it will take."""
import sys
import time

from harness.progress import show_status, though_nobody_reads


class Progress:
    """Show the share of the work that is done, and the time left, on stderr: in a line that is
    overwritten, or where there is no terminal in a line every half minute. `parts` are the stages
    and about how long each takes, in any unit."""

    def __init__(self, **parts: float) -> None:
        self.parts = parts
        self.start = self.last_line = time.monotonic()

    def __call__(self, part: str, done: float = 0.0, text: str = "") -> None:
        now, names = time.monotonic(), list(self.parts)
        before = sum(self.parts[name] for name in names[:names.index(part)])
        share = (before + done * self.parts[part]) / sum(self.parts.values())
        line = f"{share:4.0%}  {text or part}"
        if share > 0.02:
            left = (now - self.start) * (1 - share) / share
            line += f", about {left // 60:.0f} min {left % 60:02.0f} s left"
        if sys.stderr.isatty():
            show_status(line)
        elif now - self.last_line > 30:
            with though_nobody_reads(sys.stderr):
                print(f"  {line}", file=sys.stderr, flush=True)
            self.last_line = now
