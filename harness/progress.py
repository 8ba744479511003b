"""What a run prints for the person who watches it: a line a step, evaluations, and its outcome."""
import textwrap
from collections.abc import Sequence
from pathlib import Path

from harness.record import Json
from harness.screen import python_command, right_or_wrong, say

# The loss is not among these: its value says nothing about progress (docs/reading_a_run.md).
HEADER = ("    step  reward  success  format  length  finished  entropy  grad norm  tokens/s"
          "      left")
EXAMPLES, MOST_OF_ANSWER = 3, 300  # answers shown at an evaluation, and characters of each


def print_step(line: Json, steps: int, seconds_left: float, with_header: bool,
               with_format: bool) -> None:
    if with_header:
        say(HEADER if with_format else HEADER.replace("  format", ""))
    form = f"{line['reward_format']:8.2f}" if with_format else ""
    norm = "  skipped" if line["gradient_norm"] is None else f"{line['gradient_norm']:9.3f}"
    minutes, seconds = divmod(round(seconds_left), 60)
    say(f"{line['step']:4d}/{steps:<4d}{line['reward']:7.3f}{line['success']:9.1%}"
        f"{form}{line['length']:8.1f}{line['finished']:10.1%}"
        f"{line['entropy']:9.3f}  {norm}{line['tokens'] / line['seconds']:10.0f}"
        f"{minutes:7d}:{seconds:02d}")
    if line["skipped"]:
        say(f"          no update: {line['skipped']}")
    if line.get("weight_note"):
        say(f"          {line['weight_note']}")


def print_evaluation(line: Json, seconds: float, with_format: bool) -> None:
    """Print a line of evaluations.jsonl for people, and some of its sampled answers."""
    form = f"format {line['format_mean']:.2f}, " if with_format else ""
    say(f"  held-out, {line['mode']:7s} {line['success']:6.1%}  95% interval "
        f"{line['success_low']:.1%} to {line['success_high']:.1%}  "
        f"({len(line['answer'])} problems, {form}length "
        f"{line['length_mean']:.0f}, finished {line['finished_mean']:.0%}, {seconds:.0f} s)")
    for shown in line["shown"] if line["mode"] == "sampled" else []:
        text = f"{shown['problem']}: {shown['text']}"
        say(textwrap.shorten(text, MOST_OF_ANSWER, placeholder=" ..."),
            f"  {right_or_wrong(shown['answer'])}  ")


def most_varied(shown: list[str]) -> list[int]:
    """The indices of a few problems to print: those in which the fewest words repeat, because a
    problem such as 11 11 11 shows little. Of equally good ones the first are taken."""
    repeats = []
    for text in shown:
        words = text.split()
        repeats.append(len(words) - len(set(words)))
    return sorted(range(len(shown)), key=lambda number: repeats[number])[:EXAMPLES]


def print_outcome(path: Path, sampled: Sequence[Json], duration: float, done: int,
                  has_steps: bool = True) -> None:
    """Print how success has changed in the evaluations of sampled answers, how long that took
    (since step `done`, if the run was resumed), and what to look at next."""
    minutes, seconds = divmod(round(duration), 60)
    took = f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
    if done:
        took += f" since step {done}"
    if len(sampled) > 1:
        took = f"{change(sampled[0], sampled[-1])}, {took}"
    say(f"  {took}")
    # without a name the programs take the newest run in runs/
    named = [] if path.parent == Path("runs") else [path]
    say(f"{python_command('analyze.py', *named)}  makes tables, pictures and a page")
    if has_steps:
        say(f"{python_command('-m', 'tools.follow', *named)}  follows a token through a step")


def change(before: Json, after: Json) -> str:
    """Success before and after in words, as in
    23.1% (95% interval 21.0% to 25.3%) -> 48.9% (46.4% to 51.5%) of 1,500 held-out problems"""
    return (f"{before['success']:.1%} (95% interval {before['success_low']:.1%} to "
            f"{before['success_high']:.1%}) -> {after['success']:.1%} "
            f"({after['success_low']:.1%} to {after['success_high']:.1%}) of "
            f"{len(after['answer']):,} held-out problems")
