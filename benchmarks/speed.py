"""How fast rollouts, updates and whole steps are, beside those of transformers.

    python -m benchmarks.speed                               # tiny, a few minutes
    python -m benchmarks.speed --size 0.5B --questions 2 --answers 4 --new_tokens 64 --repeats 1
    python -m benchmarks.speed --size 0.5B --device cuda --dtype bfloat16
    python -m benchmarks.speed --count                       # what a GPU would do: count.py

Run it from the project's folder. benchmarks/cases.py says what the work is. The table shows medians
over the turns; a ratio is the median of the ratios within a turn.
"""
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median

from analysis.tables import Table, by_row
from benchmarks.cases import (DTYPES, MEBIBYTE, OURS, SIZES, THEIRS, WORK, Case, in_a_process,
                              take_turns)
from benchmarks.count import show_counted
from harness.flags import MOST_THREADS, Flag, Parser, add_flags, with_defaults
from harness.load import pick_device
from harness.program import run_as_program


def speed(turn: dict) -> float:
    return turn["tokens"] / turn["seconds"]


def row_of(case: Case, turns: list[dict], theirs: list[dict]) -> list:
    """`theirs` are the turns of transformers, which may be none."""
    speeds = list(map(speed, turns))
    ratios = [ours / speed(turn) for ours, turn in zip(speeds, theirs)]
    rows = case.questions * case.answers
    return [case.what, f"{rows} x {turns[0]['tokens'] / rows:.0f}", median(speeds),
            (min(speeds), max(speeds)), median(ratios) if ratios else None,
            median(turn["memory"] for turn in turns) / MEBIBYTE]


COLUMNS = {"what": "", "answers x tokens": "", "tokens a second": ",.0f",
           "lowest to highest": ",.0f", "times transformers": ".2f", "peak memory, MiB": ",.0f"}
FLAGS = {
    "size": Flag("tiny", "of the model", choices=tuple(SIZES)),
    "questions": Flag(8, "problems in a batch", least=1, most=10_000),
    "answers": Flag(8, "answers to each", least=1, most=1000),
    "new_tokens": Flag(128, "tokens of an answer", least=2, most=100_000),
    "device": Flag("cpu", "cpu, cuda or cuda:N"),
    "dtype": Flag("float32", "numbers to compute with", choices=DTYPES),
    "threads": Flag(1, "CPU threads; 0 is what PyTorch finds", least=0, most=MOST_THREADS),
    "micro_batch": Flag(8, "answers in memory at once during the update", least=1, most=10_000),
    "checkpointing": Flag(False, "as in train.py"),
    "offload_optimizer": Flag(False, "as in train.py; on a CPU it saves nothing"),
    "repeats": Flag(3, "turns of every measurement", least=1, most=1000),
    "count": Flag(False, "measure nothing, count what a GPU would do: 0.5B, bfloat16, 512 tokens "
                         "unless others are given"),
    "bandwidth": Flag(3.35, "with --count: TB a second; that of an H100 SXM", above=0, most=1000),
    "rate": Flag(989.0, "with --count: 10^12 operations a second in products, likewise", above=0,
                 most=1e6),
}
COUNTED = {"size": "0.5B", "dtype": "bfloat16", "new_tokens": 512}


def main(argv: list[str]) -> None:
    typed = add_flags(Parser("python -m benchmarks.speed [flags]", __doc__), FLAGS).read(argv)
    given = with_defaults({**(COUNTED if typed.get("count") else {}), **typed}, FLAGS)
    pick_device(given.device)
    case = Case(what="", **{name: getattr(given, name)
                            for name in vars(Case("", "")).keys() & FLAGS.keys()})
    if given.count:
        return show_counted(case, {"bandwidth": given.bandwidth * 1e12, "rate": given.rate * 1e12})
    cases = {what: replace(case, what=what) for what in WORK if what.startswith(OURS)
             and (what in OURS or find_spec("transformers"))}
    turns = take_turns({what: partial(in_a_process, case) for what, case in cases.items()},
                       given.repeats)
    rows = [row_of(cases[what], turns[what], turns.get(THEIRS.format(what), [])) for what in OURS]
    print(f"{given.size}, {given.device}, {given.dtype}, {given.threads or 'all'} threads; "
          f"{given.repeats} turns\n")
    print(Table("speed", "", by_row(COLUMNS, rows)).to_text(limit=1000))


if __name__ == "__main__":
    run_as_program("benchmarks.speed", main)
