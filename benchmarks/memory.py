"""How much memory an update and a step take, and what each of three flags saves.

    python -m benchmarks.memory                      # tiny and small, some minutes on one core
    python -m benchmarks.memory --sizes 0.5B --device cuda --micro_batch 2

Run it from the project's folder. Each row is a process of its own. Its peak is what the process had
at most beyond its start (on a GPU: of tensors), with parameters, gradients and moments. On a CPU
--offload_optimizer puts aside nothing: it is there for a GPU.
"""
from dataclasses import replace

from analysis.tables import Table, by_row
from benchmarks.cases import DTYPES, MEBIBYTE, SHARED_FLAGS, Case, in_a_process, read_sizes
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.load import pick_device
from harness.program import run_as_program
from harness.progress import show_status

WORKS = ("update", "step")
VARIANTS = {
    "": {},
    "--checkpointing": {"checkpointing": True},
    "--offload_optimizer": {"offload_optimizer": True},
    "both": {"checkpointing": True, "offload_optimizer": True},
}
FLAGS = {**SHARED_FLAGS,
         "micro_batch": Flag(8, "answers in memory at once during the update", least=1,
                             most=1_000_000)}


def peak(case: Case) -> float:
    """MiB."""
    show_status(f"{case.size}, {case.what}, {case.dtype}")
    return in_a_process(case)["memory"] / MEBIBYTE


def rows_of(case: Case) -> list[list]:
    """A row for each type and variant."""
    rows = []
    for dtype in DTYPES:
        for name, flags in VARIANTS.items():
            peaks = [peak(replace(case, what=what, dtype=dtype, **flags)) for what in WORKS]
            rows.append([case.size, dtype, name, *peaks])
    return rows


def main(argv: list[str]) -> None:
    parser = Parser("python -m benchmarks.memory [flags]", __doc__)
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    sizes = read_sizes(given.sizes)
    pick_device(given.device)
    cases = [Case(size, "", given.questions, given.answers, given.new_tokens, given.device,
                  threads=given.threads, micro_batch=given.micro_batch) for size in sizes]
    rows = [row for case in cases for row in rows_of(case)]
    show_status("")
    columns = {"size": "", "computes in": "", "with": "", "update, MiB": ",.0f",
               "step, MiB": ",.0f"}
    print(Table("memory", "", by_row(columns, rows)).to_text())


if __name__ == "__main__":
    run_as_program("benchmarks.memory", main)
