"""How fast is a step beside other busy processes? Threads that wait can spin or sleep.

    python -m benchmarks.neighbours

A step of the default run, in tokens a second, with one thread or two that wait in one of three
ways (engine/__init__.py asks for the middle one), alone or while other processes keep cores busy.
Each number is the median of turns taken one after another, since machines are noisy: compare within
a column.
"""
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from types import SimpleNamespace

from analysis.tables import Table, by_row
from benchmarks.cases import Case
from engine.errors import UserError
from harness.files import PROJECT
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.program import run_as_program
from harness.progress import show_status

FLAGS = {
    "neighbours": Flag(1, "busy processes beside the run", least=1, most=64),
    "repeats": Flag(3, "turns of every measurement", least=1, most=100)}
WAYS = {  # threads, and how often they look whether the other is ready before they sleep
    "1 thread": (1, 0), "2 threads that sleep at once": (2, 0),
    "2 threads that spin briefly": (2, 1000), "2 threads as OpenMP has them": (2, 300_000)}
FORMATS = {"": "", "alone": ",.0f", "beside {} busy": ",.0f", "of alone": ".0%"}


def main(argv: list[str]) -> None:
    parser = add_flags(Parser("python -m benchmarks.neighbours [flags]", __doc__), FLAGS)
    flags = with_defaults(parser.read(argv), FLAGS)
    speeds = measure(flags)
    rows = []
    for way in WAYS:
        alone, beside = (median(speeds[way, busy]) for busy in (False, True))
        rows.append([way, alone, beside, beside / alone])
    formats = {name.format(flags.neighbours): how for name, how in FORMATS.items()}
    print(f"tokens a second in a step of the default run, {os.cpu_count()} cores\n")
    print(Table("neighbours", "", by_row(formats, rows)).to_text())


def measure(flags: SimpleNamespace) -> dict[tuple[str, bool], list[float]]:
    """Tokens a second of every way, alone and beside others, turn by turn."""
    speeds = {(way, busy): [] for way in WAYS for busy in (False, True)}
    for turn in range(flags.repeats):
        for busy in (False, True):
            with neighbours(flags.neighbours if busy else 0):
                for way, (threads, spins) in WAYS.items():
                    show_status(f"turn {turn + 1} of {flags.repeats}: {way}")
                    speeds[way, busy].append(speed_of(threads, spins))
    show_status("")
    return speeds


def speed_of(threads: int, spins: int) -> float:
    case = Case("shipped", "step", questions=16, answers=16, new_tokens=176, threads=threads,
                micro_batch=32)
    command = [sys.executable, "-m", "benchmarks.speed", "--case", json.dumps(asdict(case))]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True,
                            env={**os.environ, "GOMP_SPINCOUNT": str(spins)})
    if result.returncode:
        raise UserError(f"{threads} threads: {result.stderr.strip().splitlines()[-1]}")
    found = json.loads(result.stdout.splitlines()[-1])
    return found["tokens"] / found["seconds"]


@contextmanager
def neighbours(count: int):
    """Processes that do nothing but keep a core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
                 for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    run_as_program("neighbours", main)
