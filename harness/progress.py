"""What people see while something runs: lines that stay, and one that the next overwrites."""
import os
import sys
import textwrap
from contextlib import contextmanager
from statistics import mean

from engine import processes
from harness.terminal import put, right_or_wrong, visible

BARS = "▁▂▃▄▅▆▇█"
EXAMPLES, MOST_OF_ANSWER = 3, 300  # answers shown at an evaluation, and characters of each


def say(text: str, mark: str = "") -> None:
    """Print a line at once, from the first process. `mark` stands before it and is ours: it may be
    coloured."""
    show_status("")
    with though_nobody_reads(sys.stdout):
        if processes.is_main_process():
            put(mark + visible(text))


def show_status(text: str) -> None:
    """Show a line that the next one overwrites, at a terminal only. An empty text clears it."""
    with though_nobody_reads(sys.stderr):
        if sys.stderr.isatty() and processes.is_main_process():
            line = f"  {text[:90]}\r" if text else ""
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


@contextmanager
def though_nobody_reads(stream):
    """Print inside of it: if the reader went away (`| head`), or the log is on a full disk, the run
    goes on in silence."""
    try:
        yield
    except OSError:
        go_on_for_nobody(stream)


def go_on_for_nobody(stream) -> None:
    """From now on what is printed goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


# No loss among these: its value says nothing about progress (docs/questions.md).
HEADER = ("    step  reward  success  format  length  finished  entropy  grad norm  tokens/s"
          "      left")


def print_step(line: dict, steps: int, seconds_left: float, with_header: bool) -> None:
    """A line of metrics.jsonl, for people."""
    if with_header:
        say(HEADER)
    norm = "  skipped" if line["gradient_norm"] is None else f"{line['gradient_norm']:9.3f}"
    minutes, seconds = divmod(round(seconds_left), 60)
    say(f"{line['step']:4d}/{steps:<4d}{line['reward']:7.3f}{line['success']:9.1%}"
        f"{line['reward_format']:8.2f}{line['length']:8.1f}{line['finished']:10.1%}"
        f"{line['entropy']:9.3f}  {norm}{line['tokens'] / line['seconds']:10.0f}"
        f"{minutes:7d}:{seconds:02d}")
    if line["skipped"]:
        say(f"          no update: {line['skipped']}")
    if line.get("weight_note"):
        say(f"          {line['weight_note']}")


def sparkline(values: list[float], most: int = 40) -> str:
    """▁▃▅█ 22% to 41%, the lowest and the highest bar. Of many values, neighbours share a bar."""
    each = -(-len(values) // most)
    means = [mean(values[start:start + each]) for start in range(0, len(values), each)]
    low, high = min(means), max(means)
    bars = [BARS[round(7 * (value - low) / (high - low or 1))] for value in means]
    return f"{''.join(bars)} {low:.0%} to {high:.0%}"


def print_evaluation(line: dict, seconds: float) -> None:
    """A line of evaluations.jsonl, for people, and some of its sampled answers, each right or
    wrong."""
    say(f"  held-out, {line['mode']:7s} {line['success']:6.1%}  95% interval "
        f"{line['success_low']:.1%} to {line['success_high']:.1%}  "
        f"({len(line['answer'])} problems, format {line['format_mean']:.2f}, "
        f"length {line['length_mean']:.0f}, finished "
        f"{line['finished_mean']:.0%}, {seconds:.0f} s)")
    for shown in line["shown"] if line["mode"] == "sampled" else []:
        text = f"{shown['problem']}: {shown['text']}"
        say(textwrap.shorten(text, MOST_OF_ANSWER, placeholder=" ..."),
            f"  {right_or_wrong(shown['answer'])}  ")


def telling(shown: list[str]) -> list[int]:
    """The first problems with the fewest words that repeat: 11 11 11 shows little."""
    def repeats(place: int) -> int:
        words = shown[place].split()
        return len(words) - len(set(words))
    return sorted(range(len(shown)), key=repeats)[:EXAMPLES]
