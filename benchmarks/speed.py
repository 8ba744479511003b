"""How fast rollouts, updates and whole steps are, beside those of transformers.

    python -m benchmarks.speed                               # tiny, a few minutes
    python -m benchmarks.speed --size 0.5B --questions 2 --answers 4 --new_tokens 64 --repeats 1
    python -m benchmarks.speed --size 0.5B --device cuda --dtype bfloat16
    python -m benchmarks.speed --count                       # what a GPU would do: count.py

Run it from the project's folder. benchmarks/cases.py says what the work is. The table shows medians
over the turns; a ratio is the median of the ratios within a turn.
"""
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

from analysis.tables import Table, by_row
from benchmarks import cases
from benchmarks.cases import MEBIBYTE, OURS, THEIRS, WORK, Case, in_a_process
from benchmarks.count import show_counted
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.load import pick_device
from harness.program import run_as_program
from harness.progress import show_status

FLAGS = {
    **cases.FLAGS,
    "repeats": Flag(3, "turns of every measurement", least=1, most=1000),
    "count": Flag(False, "measure nothing, count what a GPU would do: 0.5B, bfloat16, 512 tokens "
                         "unless others are given"),
    "bandwidth": Flag(3.35, "with --count: TB a second; that of an H100 SXM", above=0, most=1000),
    "rate": Flag(989.0, "with --count: 10^12 operations a second in products, likewise", above=0,
                 most=1e6),
}
COUNTED = {"size": "0.5B", "dtype": "bfloat16", "new_tokens": 512}
COLUMNS = {"what": "", "answers x tokens": "", "tokens a second": ",.0f",
           "times transformers": ".2f", "peak memory, MiB": ",.0f"}


def speed(turn: dict) -> float:
    return turn["tokens"] / turn["seconds"]


def take_turns(cases: list[Case], repeats: int) -> dict[str, list[dict]]:
    """What is measured of each, so many times. A busy minute of the machine then hits all alike."""
    found: dict[str, list[dict]] = {case.what: [] for case in cases}
    for turn in range(repeats):
        for case in cases:
            show_status(f"turn {turn + 1} of {repeats}: {case.what}")
            found[case.what].append(in_a_process(case))
    show_status("")
    return found


def row_of(case: Case, turns: list[dict], theirs: list[dict]) -> list:
    """`theirs` are the turns of transformers, which may be none."""
    ratios = [speed(ours) / speed(turn) for ours, turn in zip(turns, theirs)]
    rows = case.questions * case.answers
    return [case.what, f"{rows} x {turns[0]['tokens'] / rows:.0f}", median(map(speed, turns)),
            median(ratios) if ratios else None,
            median(turn["memory"] for turn in turns) / MEBIBYTE]


def main(argv: list[str]) -> None:
    typed = add_flags(Parser("python -m benchmarks.speed [flags]", __doc__), FLAGS).read(argv)
    given = with_defaults({**(COUNTED if typed.get("count") else {}), **typed}, FLAGS)
    pick_device(given.device)
    case = Case("", **{name: getattr(given, name) for name in cases.FLAGS})
    if given.count:
        return show_counted(case, {"bandwidth": given.bandwidth * 1e12, "rate": given.rate * 1e12})
    has_theirs = find_spec("transformers")
    each = [replace(case, what=what) for what in WORK
            if what.startswith(OURS) and (what in OURS or has_theirs)]
    turns = take_turns(each, given.repeats)
    rows = [row_of(replace(case, what=what), turns[what], turns.get(THEIRS.format(what), []))
            for what in OURS]
    print(f"{given.size}, {given.device}, {given.dtype}, {given.threads or 'all'} threads; "
          f"{given.repeats} turns\n")
    print(Table("speed", "", by_row(COLUMNS, rows)).to_text(limit=1000))


if __name__ == "__main__":
    run_as_program("benchmarks.speed", main)
