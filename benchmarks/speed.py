"""How fast rollouts, updates and whole steps are, and how much memory they take.

    python -m benchmarks.speed                               # tiny, a few minutes
    python -m benchmarks.speed --size 0.5B --questions 2 --answers 4 --new_tokens 64
    python -m benchmarks.speed --size 0.5B --device cuda --dtype bfloat16
    python -m benchmarks.speed --count                       # what a GPU would do: count.py

benchmarks/cases.py says what the work is.
"""
from dataclasses import replace

from benchmarks import cases
from benchmarks.cases import Case, in_a_process
from benchmarks.count import show_counted
from engine.errors import UserError
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.load import pick_device
from harness.program import run_as_program
from harness.progress import show_status

FLAGS = {
    **cases.FLAGS,
    "count": Flag(False, "measure nothing, count what a GPU would do: 0.5B, bfloat16, 512 tokens "
                         "unless others are given"),
    "bandwidth": Flag(3.35, "with --count: TB a second; that of an H100 SXM", above=0, most=1000),
    "rate": Flag(989.0, "with --count: 10^12 operations a second in products, likewise", above=0,
                 most=1e6),
}
COUNTED = {"size": "0.5B", "dtype": "bfloat16", "new_tokens": 512}
# how far a gradient may be from the CPU's, as a share of its norm: both round, bfloat16 to 8 bits
SAME = {"float32": 1e-3, "bfloat16": 0.05}


def outcome(case: Case, most: float | None) -> str:
    """In words; also the error that a process ended with. It may print what is no JSON, or
    nothing."""
    try:
        found = in_a_process(case, most)
    except (UserError, ValueError, LookupError) as error:
        return f"FAILED: {error}"
    if case.what == "agreement":
        is_same = found["equal"] and found["gradient"] < SAME[case.dtype]
        return (f"{found['equal']} of {found['answers']} answers equal, their log-probs "
                f"{found['log_prob'] / max(1, found['tokens']):.0e} apart, the gradient "
                f"{found['gradient']:.0e} of its norm: {'as' if is_same else 'NOT AS'} on the CPU")
    return (f"{found['tokens'] / found['seconds']:,.0f} tokens a second, "
            f"{found['memory'] / 2 ** 20:,.0f} MiB")


def show_outcomes(parts: dict[str, Case], most: float | None = None) -> None:
    """A line for each, in a process that may take so many seconds."""
    for number, (name, case) in enumerate(parts.items()):
        show_status(f"{number + 1} of {len(parts)}: {name}")
        said = outcome(case, most)
        show_status("")
        print(f"{name:28}  {said}")


def main(argv: list[str]) -> None:
    typed = add_flags(Parser("python -m benchmarks.speed [flags]", __doc__), FLAGS).read(argv)
    given = with_defaults({**(COUNTED if typed.get("count") else {}), **typed}, FLAGS)
    pick_device(given.device)
    case = Case("", **{name: getattr(given, name) for name in cases.FLAGS})
    if given.count:
        return show_counted(case, {"bandwidth": given.bandwidth * 1e12, "rate": given.rate * 1e12})
    show_outcomes({what: replace(case, what=what) for what in ("rollout", "update", "step")})


if __name__ == "__main__":
    run_as_program("benchmarks.speed", main)
