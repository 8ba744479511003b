"""How fast sampling, updates and whole steps are, beside what this machine could do at most and beside `transformers`.

    python benchmarks/speed.py                                  # about half an hour on one core, most of it for 0.5B
    python benchmarks/speed.py --sizes tiny,shipped --repeats 5
    python benchmarks/speed.py --sizes none --sweep --picture speed.png   # over rows and over length
    python benchmarks/speed.py --device cuda --dtype bfloat16 --sizes 0.5B --sweep

Every measurement is a process of its own (that is how its peak memory is known), and they take turns, so that a busy
minute of the machine hits all alike: medians over the turns, and from the lowest to the highest. With one CPU thread, the default, the clock is the
processor's time: what others do on a shared machine then counts only by what it does to caches and memory.
8 questions x 8 answers of 128 tokens (0.5B on a CPU: 2 x 4 of 64), prompts of 60 to 100 random tokens.

    rollout        all answers have the same length
    unequal        each token ends its answer with a chance of 1 in 40
    step           rollout, advantage, update, credit file; of the shipped model train.py's own step on its own task
    of the limit   the time that floor.py's operations and bytes take at this machine's rates, as a share of the time taken
"""
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent

from benchmarks.cases import SIZES, WORK, Case, in_a_process, measure
from benchmarks.floor import NUMBER, Work
from engine.lab import pick_device
from mitigations import Bounds
from engine.errors import UserError
from analysis.tables import Table, by_row
from engine.files import writing
from engine.settings import Parser, check_value, flag_kind, run_as_program, underscores

RIVAL = {"rollout": "transformers", "rollout, unequal": "transformers, unequal"}


def cases_of(size: str, given) -> list[Case]:
    """0.5B on a CPU is cut down to what takes a minute. The shipped model's next token is too certain for `unequal`."""
    small = dict(questions=2, answers=4, new_tokens=64) if size == "0.5B" and given.device == "cpu" else {}
    names = [name for name in WORK if name != "limits" and not (size == "shipped" and name.endswith("unequal"))
             and (given.rival or not name.startswith("transformers"))]
    return [Case(size, name, **small, device=given.device, dtype=given.dtype, threads=given.threads) for name in names]


def sweep_cases(given) -> list[Case]:
    """Over the number of rows at 128 new tokens, and over the length at 64 rows."""
    size, rows = ("tiny", (8, 16, 32, 64, 128, 256)) if given.device == "cpu" else ("0.5B", (64, 128, 256, 512))
    shapes = [(count, 128) for count in rows] + [(64, length) for length in (256, 512)]
    return [Case(size, what, count // 8, 8, length, given.device, given.dtype, given.threads) for what in ("rollout", "update") for count, length in shapes]


def take_turns(cases: list[Case], limit: Case, repeats: int) -> dict[Case, list[dict]]:
    found = {case: [] for case in (limit, *cases)}
    for turn in range(repeats):
        for case in found:
            print(f"\r\033[Kturn {turn + 1} of {repeats}: {case.size}, {case.what}", end="", file=sys.stderr, flush=True)
            found[case].append(in_a_process(case, __file__))
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    return found


def speeds(found: list[dict]) -> list[float]:
    return [one["tokens"] / one["seconds"] for one in found]


def limit_seconds(one: dict, limit: dict) -> float:
    return sum(Work(*work).seconds(limit["rate"], limit["bandwidth"]) for work in one["floor"])


def bound_by(one: dict, limit: dict) -> str:
    """What most of the limit's time is due to."""
    longest = max((Work(*work) for work in one["floor"]), key=lambda work: work.seconds(limit["rate"], limit["bandwidth"]))
    return "operations" if longest.operations / limit["rate"] > longest.bytes / limit["bandwidth"] else "bytes"


def speed_row(case: Case, found: dict[Case, list[dict]], limit: list[dict]) -> list:
    ours, theirs = found[case], found.get(replace(case, what=RIVAL.get(case.what, "")))
    floor = "floor" in ours[0]
    rows = case.questions * case.answers
    return [case.size, case.what, f"{rows} x {ours[0]['tokens'] / rows:.0f}", median(speeds(ours)), (min(speeds(ours)), max(speeds(ours))),
            median(limit_seconds(a, b) / a["seconds"] for a, b in zip(ours, limit)) if floor else None, bound_by(ours[0], limit[0]) if floor else "",
            median(one["memory"] for one in ours) / 2 ** 20, median(a / b for a, b in zip(speeds(ours), speeds(theirs))) if theirs else None]


def speed_table(cases: list[Case], found, limit) -> Table:
    formats = {"size": "", "what": "", "answers": "", "tokens/s": ",.0f", "from to": ",.0f", "of the limit": ".0%", "set by": "",
               "peak memory, MiB": ",.0f", "times transformers": ".1f"}
    return Table("speed", "Tokens a second", by_row(formats, [speed_row(case, found, limit) for case in cases]))


def record_table(cases: list[Case], found) -> Table:
    rows = [[case.size, 1000 * median(one["record"] for one in found[case]), median(one["record"] / one["seconds"] for one in found[case]),
             median(one["record_bytes"] / one["tokens"] for one in found[case])] for case in cases if case.what == "step"]
    return Table("record", "The credit file of a step", by_row({"size": "", "ms": ".0f", "of a step": ".1%", "bytes a token": ".1f"}, rows))


def draw(cases: list[Case], found, limit, path: Path) -> None:
    """Measured, and the limit above it, over rows and over length."""
    from analysis.plots import BLUE, ORANGE, panels, plt
    figure, axes = panels(2, sharey=True)
    for axis, label, place, fixed in ((axes[0], "answers at once, of 128 tokens", lambda c: c.questions * 8, lambda c: c.new_tokens == 128),
                                      (axes[1], "tokens of an answer, 64 at once", lambda c: c.new_tokens, lambda c: c.questions == 8)):
        for what, colour in (("rollout", BLUE), ("update", ORANGE)):
            line = [case for case in cases if case.what == what and fixed(case)]
            x, ours = [place(case) for case in line], [speeds(found[case]) for case in line]
            most = [median(one["tokens"] / limit_seconds(one, b) for one, b in zip(found[case], limit)) for case in line]
            middle = [median(values) for values in ours]
            reach = [[m - min(v) for m, v in zip(middle, ours)], [max(v) - m for m, v in zip(middle, ours)]]
            axis.errorbar(x, middle, reach, color=colour, marker="o", ms=3, lw=1.4, capsize=2, label=what)
            axis.plot(x, most, color=colour, lw=1, ls="--", label=f"{what}, limit")
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, x)
        axis.set(yscale="log", xlabel=label)
    axes[0].set(ylabel="tokens a second", title=f"{line[0].size}, {line[0].dtype}, {line[0].device}: tokens a second and what limits them")
    axes[0].legend(loc="best")
    with writing(path):
        figure.savefig(path, dpi=120)
    plt.close(figure)


FLAGS = {  # name: type, default, bounds, help
    "sizes": (str, ",".join(SIZES), Bounds(), f"some of {', '.join(SIZES)}, or none"),
    "device": (str, "cpu", Bounds(), "cpu, cuda or cuda:N"),
    "dtype": (str, "float32", Bounds(), "numbers to compute with: float32 or bfloat16"),
    "threads": (int, 1, Bounds(least=0), "CPU threads; 0 is what PyTorch finds"),
    "repeats": (int, 3, Bounds(least=1), "turns of every measurement"),
    "sweep": (bool, False, Bounds(), "also over the number of answers and their length"),
    "picture": (str, None, Bounds(), "file for a picture of the sweep")}


def read_arguments(argv: list[str]):
    parser = Parser(usage="python benchmarks/speed.py [flags]", description=__doc__.split("\n")[0], allow_abbrev=False)
    for name, (kind, default, _, text) in FLAGS.items():
        parser.add_argument(f"--{name}", default=default, help=text + ("" if default in (None, False) else f" (default {default})"), **flag_kind(kind))
    given = parser.parse_args([underscores(argument) for argument in argv])
    for name, (kind, default, bounds, _) in FLAGS.items():
        check_value(name, getattr(given, name), kind, bounds, tuple(NUMBER) if name == "dtype" else (), default)
    given.sizes = [] if given.sizes == "none" else given.sizes.split(",")
    for size in given.sizes:
        check_value("sizes", size, str, Bounds(), SIZES)
    if given.picture and not given.sweep:
        raise UserError("--picture draws the sweep: give --sweep too")
    pick_device(given.device)
    return given


def main(argv: list[str]) -> None:
    if argv[:1] == ["--case"]:  # what in_a_process calls
        return print(json.dumps(measure(Case(**json.loads(argv[1])))))
    given = read_arguments(argv)
    given.rival = importlib.util.find_spec("transformers") is not None
    if not given.rival:
        print("transformers is not installed: nothing to compare with (pip install -r tests/requirements.txt)\n")
    cases, swept = [case for size in given.sizes for case in cases_of(size, given)], sweep_cases(given) if given.sweep else []
    limit = Case("", "limits", device=given.device, dtype=given.dtype, threads=given.threads)
    found = take_turns(list(dict.fromkeys(cases + swept)), limit, given.repeats)
    limits_found = found.pop(limit)
    print(f"{given.device}, {given.dtype}, {given.threads or 'all'} threads: at most {median(one['rate'] for one in limits_found) / 1e9:,.0f} * 10^9 operations "
          f"a second in a large product, {median(one['bandwidth'] for one in limits_found) / 1e9:,.1f} GB a second from memory; {given.repeats} turns")
    tables = [speed_table(some, found, limits_found) for some in (cases, swept) if some] + [record_table(cases, found)] * bool(cases)
    print("\n".join(f"\n## {table.title}\n\n{table.to_text(limit=1000)}" for table in tables))
    if given.picture:
        draw(swept, found, limits_found, Path(given.picture))


if __name__ == "__main__":
    run_as_program("speed.py", main)
