"""What people see: lines that stay, and one that the next overwrites; colours of ours, where a
terminal has them, and nothing that a model wrote can steer it; at the end, what changed."""
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from engine import processes
from engine.choices import Metrics
from harness.identity import Evaluation
from harness.own_code import number

EXAMPLES, MOST_OF_ANSWER = 3, 300  # answers shown at an evaluation, and characters of each
BOLD, GREEN, RED = "1", "1;32", "1;31"


def say(text: str, mark: str = "") -> None:
    """Print a line at once, from the first process. `mark` before it is ours, maybe coloured."""
    show_status("")
    with though_nobody_reads(sys.stdout):
        if processes.is_main_process():
            put(mark + visible(text))


def show_status(text: str) -> None:
    """Show a line that the next one overwrites, at a terminal only. An empty text clears it."""
    with though_nobody_reads(sys.stderr):
        if sys.stderr.isatty() and processes.is_main_process():
            line = f"  {text[:90]}\r" if text else ""
            put(f"\r\033[K{line}", sys.stderr, end="")


@contextmanager
def though_nobody_reads(stream: TextIO) -> Iterator[None]:
    """Print inside: if the reader went away (`| head`) or the disk is full, the run goes on."""
    try:
        yield
    except OSError:
        go_on_for_nobody(stream)


def go_on_for_nobody(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


# No loss among these: its value says nothing about progress (docs/reading_a_run.md).
HEADER = ("    step  reward  success  format  length  finished  entropy  grad norm  tokens/s"
          "      left")


def print_step(line: Metrics, steps: int, seconds_left: float, with_header: bool) -> None:
    if with_header:
        say(HEADER)
    norm = "  skipped" if line["gradient_norm"] is None else f"{line['gradient_norm']:9.3f}"
    minutes, seconds = divmod(round(seconds_left), 60)
    say(f"{line['step']:4d}/{steps:<4d}{line['reward']:7.3f}{line['success']:9.1%}"
        f"{line['reward_format']:8.2f}{line['length']:8.1f}{line['finished']:10.1%}"
        f"{line['entropy']:9.3f}  {norm}{number(line, 'tokens') / number(line, 'seconds'):10.0f}"
        f"{minutes:7d}:{seconds:02d}")
    if line["skipped"]:
        say(f"          no update: {line['skipped']}")
    if line.get("weight_note"):
        say(f"          {line['weight_note']}")


def print_evaluation(line: Evaluation, seconds: float) -> None:
    """A line of evaluations.jsonl, for people, and some of its sampled answers."""
    say(f"  held-out, {line['mode']:7s} {line['success']:6.1%}  95% interval "
        f"{line['success_low']:.1%} to {line['success_high']:.1%}  "
        f"({len(line['answer'])} problems, format {line['format_mean']:.2f}, length "
        f"{line['length_mean']:.0f}, finished {line['finished_mean']:.0%}, {seconds:.0f} s)")
    for shown in line["shown"] or [] if line["mode"] == "sampled" else []:
        text = f"{shown['problem']}: {shown['text']}"
        say(textwrap.shorten(text, MOST_OF_ANSWER, placeholder=" ..."),
            f"  {right_or_wrong(shown['answer'])}  ")


def most_varied(shown: list[str]) -> list[int]:
    """The first problems with the fewest words that repeat: 11 11 11 shows little."""
    repeats = [len(words) - len(set(words)) for words in map(str.split, shown)]
    return sorted(range(len(shown)), key=repeats.__getitem__)[:EXAMPLES]


def has_colour() -> bool:
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return sys.stdout.isatty() and wanted


def styled(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m" if style and has_colour() else text


def right_or_wrong(is_right: float) -> str:
    return styled("right", GREEN) if is_right else styled("wrong", RED)


def put(line: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print a line whose escape sequences are ours: what a model wrote is `visible` before."""
    stream = stream or sys.stdout
    print(line, file=getattr(stream, "stream", stream), end=end, flush=True)


def visible(text: str) -> str:
    """The text with control characters written out, as \\x1b; new lines and tabs stay."""
    return "".join(character if character.isprintable() or character in "\n\t"
                   else character.encode("unicode_escape").decode() for character in text)


class Visible:
    """A text stream for people. Our own escape sequences go to `.stream` itself."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        if hasattr(stream, "reconfigure"):  # there are characters that no terminal can show
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        return self.stream.write(visible(text))

    def close(self) -> None:
        """Nothing: somebody's weighting may say so, and the program still prints."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def python_command(*words: object) -> str:
    """A command to paste: python_command("train.py", "--resume", folder)."""
    return shlex.join(["python", *map(str, words)])


def tell_outcome(path: Path, evaluations: list[Evaluation], duration: float, done: int) -> None:
    """`done` steps were there before."""
    sampled = [line for line in evaluations if line["mode"] == "sampled"]
    since = f" since step {done}" if done else ""
    minutes, seconds = divmod(round(duration), 60)
    took = (f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s") + since
    say(f"  {change(sampled[0], sampled[-1])}, {took}" if len(sampled) > 1 else f"  {took}")
    say("What every token got, and what one of them got:")
    say(f"  {python_command('analyze.py', path)}")
    say(f"  {python_command('-m', 'tools.follow', path)}")


def change(before: Evaluation, after: Evaluation) -> str:
    """23.1% (95% interval 21.0% to 25.3%) -> 48.9% (46.4% to 51.5%) of 1,500 held-out problems"""
    return (f"{before['success']:.1%} (95% interval {before['success_low']:.1%} to "
            f"{before['success_high']:.1%}) -> {after['success']:.1%} "
            f"({after['success_low']:.1%} to {after['success_high']:.1%}) of "
            f"{len(after['answer']):,} held-out problems")
