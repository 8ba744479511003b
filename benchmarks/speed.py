"""How fast sampling, updates and whole steps are, beside this machine's limits and `transformers`.

    python -m benchmarks.speed                     # half an hour on one core, mostly for 0.5B
    python -m benchmarks.speed --sizes tiny,shipped --repeats 5
    python -m benchmarks.speed --sizes none --sweep --picture speed.png   # over rows and length
    python -m benchmarks.speed --device cuda --dtype bfloat16 --sizes 0.5B --sweep

Run it from the project's folder. Every measurement is a process of its own, and they take turns,
so that a busy minute of the machine hits all alike. The table shows the median over the turns, the
lowest and the highest. 8 problems x 8 answers of 128 tokens (0.5B on a CPU: 2 x 4 of 64), prompts
of 60 to 100 random tokens.

    rollout        all answers have the same length
    unequal        each token ends its answer with a chance of 1 in 40
    step           rollout, advantage, update, credit file; of the shipped model train.py's own step
    of the limit   the time that floor.py's operations and bytes take at this machine's rates, as a
                   share of the time taken
"""
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from analysis.tables import Table, by_row
from benchmarks.cases import SIZES, Case, case_from, in_a_process, read_sizes
from benchmarks.operations import Work
from benchmarks.shapes import NUMBER_BYTES
from benchmarks.work import WORK, measure
from engine.errors import UserError
from harness.files import is_there, writing
from harness.flags import MOST_THREADS, Flag, Parser, add_flags, with_defaults
from harness.program import run_as_program
from harness.load import pick_device
from harness.progress import show_status

MEBIBYTE = 2 ** 20
PICTURES = (".png", ".svg", ".pdf")
RIVAL = {"rollout": "transformers", "rollout, unequal": "transformers, unequal"}
Results = dict[Case, list[dict]]  # of each case what its process printed, one dict a turn


def cases_of(size: str, given: SimpleNamespace, rival: bool) -> list[Case]:
    """All work on one model. 0.5B on a CPU is cut down to what takes a minute."""
    names = [name for name in WORK if name != "limits"]
    if size == "shipped":  # its next token is too certain for answers to end at random
        names = [name for name in names if not name.endswith("unequal")]
    if not rival:
        names = [name for name in names if not name.startswith("transformers")]
    shape = {}
    if size == "0.5B" and given.device == "cpu":
        shape = dict(questions=2, answers=4, new_tokens=64)
    return [Case(size, name, **shape, device=given.device, dtype=given.dtype,
                 threads=given.threads) for name in names]


def sweep_cases(given: SimpleNamespace) -> list[Case]:
    """Over the number of rows at 128 new tokens, and over the length at 64 rows."""
    if given.device == "cpu":
        size, row_counts = "tiny", (8, 16, 32, 64, 128, 256)
    else:
        size, row_counts = "0.5B", (64, 128, 256, 512)
    shapes = [(rows, 128) for rows in row_counts] + [(64, length) for length in (256, 512)]
    return [Case(size, what, rows // 8, 8, length, given.device, given.dtype, given.threads)
            for what in ("rollout", "update") for rows, length in shapes]


def limit_case(given: SimpleNamespace) -> Case:
    return Case("", "limits", device=given.device, dtype=given.dtype, threads=given.threads)


def take_turns(cases: list[Case], repeats: int) -> Results:
    results = {case: [] for case in cases}
    for turn in range(repeats):
        for case in results:
            show_status(f"turn {turn + 1} of {repeats}: {case.size}, {case.what}")
            results[case].append(in_a_process(case, "benchmarks.speed"))
    show_status("")
    return results


def speeds(turns: list[dict]) -> list[float]:
    """Tokens a second in each turn."""
    return [turn["tokens"] / turn["seconds"] for turn in turns]


def limit_seconds(turn: dict, limit: dict) -> float:
    works = [Work(*work) for work in turn["floor"]]
    return sum(work.seconds(limit["rate"], limit["bandwidth"]) for work in works)


def bound_by(turn: dict, limit: dict) -> str:
    """What most of the limit's time is due to."""
    rate, bandwidth = limit["rate"], limit["bandwidth"]
    works = [Work(*work) for work in turn["floor"]]
    longest = max(works, key=lambda work: work.seconds(rate, bandwidth))
    return "operations" if longest.operations / rate > longest.bytes / bandwidth else "bytes"


def speed_row(case: Case, results: Results, limit: list[dict]) -> list:
    turns = results[case]
    rows = case.questions * case.answers
    share, bound, times = None, "", None
    if "floor" in turns[0]:
        share = median(limit_seconds(turn, at_most) / turn["seconds"]
                       for turn, at_most in zip(turns, limit))
        bound = bound_by(turns[0], limit[0])
    theirs = results.get(replace(case, what=RIVAL.get(case.what, "")))
    if theirs:
        times = median(a / b for a, b in zip(speeds(turns), speeds(theirs)))
    return [case.size, case.what, f"{rows} x {turns[0]['tokens'] / rows:.0f}",
            median(speeds(turns)), (min(speeds(turns)), max(speeds(turns))), share, bound,
            median(turn["memory"] for turn in turns) / MEBIBYTE, times]


def speed_table(cases: list[Case], results: Results, limit: list[dict]) -> Table:
    columns = {"size": "", "what": "", "answers": "", "tokens/s": ",.0f", "from to": ",.0f",
               "of the limit": ".0%", "set by": "", "peak memory, MiB": ",.0f",
               "times transformers": ".1f"}
    rows = [speed_row(case, results, limit) for case in cases]
    headings = {"answers": "answers x tokens", "tokens/s": "tokens a second",
                "from to": "lowest to highest", "set by": "limit set by"}
    return Table("speed", "Tokens a second", by_row(columns, rows), headings=headings)


def record_table(cases: list[Case], results: Results) -> Table:
    rows = []
    for case in cases:
        if case.what == "step":
            turns = results[case]
            rows.append([case.size, 1000 * median(turn["record"] for turn in turns),
                         median(turn["record"] / turn["seconds"] for turn in turns),
                         median(turn["record_bytes"] / turn["tokens"] for turn in turns)])
    columns = {"size": "", "ms": ".0f", "of a step": ".1%", "bytes a token": ".1f"}
    return Table("record", "The credit file of a step", by_row(columns, rows),
                 headings={"ms": "milliseconds"})


def draw(cases: list[Case], results: Results, limit: list[dict], path: Path) -> None:
    """Draw tokens a second and the limit above them, over rows and over length."""
    from analysis.plots import panels, plain_log_ticks, plt
    figure, axes = panels(2, sharey=True)
    by_rows = [case for case in cases if case.new_tokens == 128]
    by_length = [case for case in cases if case.questions == 8]
    draw_panel(axes[0], by_rows, lambda case: case.questions * 8, results, limit)
    draw_panel(axes[1], by_length, lambda case: case.new_tokens, results, limit)
    first = cases[0]
    axes[0].set(xlabel="answers at once, of 128 tokens", ylabel="tokens a second",
                title=f"{first.size}, {first.dtype}, {first.device}: "
                      "tokens a second and what limits them")
    axes[1].set(xlabel="tokens of an answer, 64 at once")
    axes[0].legend(loc="best")
    plain_log_ticks(figure)
    with writing(path):
        figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_panel(axis, cases: list[Case], place, results: Results, limit: list[dict]) -> None:
    from analysis.plots import BLUE, ORANGE
    for what, colour in (("rollout", BLUE), ("update", ORANGE)):
        line = [case for case in cases if case.what == what]
        x = [place(case) for case in line]
        measured = [speeds(results[case]) for case in line]
        middle = [median(values) for values in measured]
        below = [m - min(values) for m, values in zip(middle, measured)]
        above = [max(values) - m for m, values in zip(middle, measured)]
        axis.errorbar(x, middle, [below, above], color=colour, marker="o", ms=3, lw=1.4, capsize=2,
                      label=what)
        at_most = [limit_speed(results[case], limit) for case in line]
        axis.plot(x, at_most, color=colour, lw=1, ls="--", label=f"{what}, limit")
    axis.set_xscale("log", base=2)
    axis.set_xticks(x, x)
    axis.set(yscale="log")


def limit_speed(turns: list[dict], limit: list[dict]) -> float:
    return median(turn["tokens"] / limit_seconds(turn, at_most)
                  for turn, at_most in zip(turns, limit))


FLAGS = {
    "sizes": Flag(",".join(SIZES), f"some of {', '.join(SIZES)}, or none"),
    "device": Flag("cpu", "cpu, cuda or cuda:N"),
    "dtype": Flag("float32", "numbers to compute with", choices=tuple(NUMBER_BYTES)),
    "threads": Flag(1, "CPU threads; 0 is what PyTorch finds", least=0, most=MOST_THREADS),
    "repeats": Flag(3, "turns of every measurement", least=1, most=1000),
    "sweep": Flag(False, "also over the number of answers and their length"),
    "picture": Flag(None, "file for a picture of the sweep"),
    "case": Flag(None, "measure this one case, given as JSON, and print JSON: what a process of "
                       "its own is started with"),
}


def read_arguments(argv: list[str]) -> SimpleNamespace:
    parser = Parser("python -m benchmarks.speed [flags]", __doc__)
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    given.sizes = read_sizes(given.sizes)
    if given.picture and not given.sweep:
        raise UserError("--picture draws the sweep: give --sweep too")
    if given.picture:
        check_picture(Path(given.picture))
    pick_device(given.device)
    return given


def check_picture(path: Path) -> None:
    """Before half an hour of work: can the picture be written there?"""
    if path.suffix not in PICTURES:
        raise UserError(f"--picture {path} should end in {', '.join(PICTURES)}")
    with writing(path):
        is_new = not is_there(path)
        path.open("ab").close()
        if is_new:
            path.unlink()


def main(argv: list[str]) -> None:
    given = read_arguments(argv)
    if given.case is not None:
        print(json.dumps(measure(case_from(given.case))))
        return
    rival = importlib.util.find_spec("transformers") is not None
    if not rival:
        print("transformers is not installed: nothing to compare with "
              "(pip install -r tests/requirements.txt)\n")
    cases = [case for size in given.sizes for case in cases_of(size, given, rival)]
    swept = sweep_cases(given) if given.sweep else []
    results = take_turns([limit_case(given), *cases, *swept], given.repeats)
    print_tables(given, cases, swept, results)
    if given.picture:
        draw(swept, results, results[limit_case(given)], Path(given.picture))


def print_tables(given: SimpleNamespace, cases: list[Case], swept: list[Case],
                 results: Results) -> None:
    limit = results[limit_case(given)]
    print(f"{given.device}, {given.dtype}, {given.threads or 'all'} threads: "
          f"at most {median(turn['rate'] for turn in limit) / 1e9:,.0f} * 10^9 operations a second "
          f"in a large product, {median(turn['bandwidth'] for turn in limit) / 1e9:,.1f} GB "
          f"a second from memory; {given.repeats} turns")
    tables = [speed_table(some, results, limit) for some in (cases, swept) if some]
    if cases:
        tables.append(record_table(cases, results))
    for table in tables:
        print(f"\n## {table.title}\n\n{table.to_text(limit=1000)}")


if __name__ == "__main__":
    run_as_program("benchmarks.speed", main)
