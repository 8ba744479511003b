"""Is the account of an update's memory in bytes_kept.py right? Beside it, what was counted.

    python -m benchmarks.memory                      # ten minutes on one core, mostly for 0.5B
    python -m benchmarks.memory --sizes tiny,small

Run it from the project's folder. 32 answers of 128 tokens to 4 problems, or with 0.5B 16 of 32
to 2, on the CPU.

    kept     tensors that autograd keeps of the largest micro-batch: exact, no allocator in it
    peak     the most bytes of tensors at once during an update, beyond parameters and moments
    process  by how much an update raised the process's peak memory: with gaps in the allocator's
             blocks and what the kernels take for themselves (Linux)
"""
import json
from dataclasses import replace

import torch

from analysis.tables import Table, by_row
from benchmarks.bytes_kept import fullest, kept, total
from benchmarks.cases import (SIZES, Case, case_from, floor_batch, in_a_process, make_batch,
                              make_model, read_sizes)
from benchmarks.counting import Living, kept_by_autograd, resident
from benchmarks.program import optimizer_of, peak_of_process, train_on
from benchmarks.shapes import Batch, parameters
from engine.errors import UserError
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.program import run_as_program
from engine.forward import response_log_probs
from harness.load import pick_device
from harness.progress import show_status
from qwen2_model import ModelConfig

MEBIBYTE = 2 ** 20


def make_moments(optimizer) -> None:
    """As after a first step, one gradient at a time, so that they leave little room behind them."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
        optimizer.step()
        p.grad = None


def count(case: Case) -> dict:
    """Bytes of an update, counted and by the account. A first one is for the process's peak."""
    if case.what != "update" or case.size == "":
        raise UserError(f"--case: only updates are counted, not {case.what!r} on the size "
                        f"{case.size!r}")
    pick_device(case.device)
    torch.set_num_threads(1)
    model = make_model(case)
    batch = make_batch(case, model.config.vocab_size)
    optimizer = optimizer_of(model, case.device, case.offload_optimizer)
    make_moments(optimizer)
    before = resident()
    train_on(model, optimizer, batch, case.micro_batch)
    process = peak_of_process(model.device) - before
    optimizer.zero_grad()
    with Living([*model.parameters(), *moments_of(optimizer)]) as living:
        train_on(model, optimizer, batch, case.micro_batch)
    parts = floor_batch(case, batch.prompt_ids, batch.mask).micro_batches()
    kept_of_parts = [total(kept(model.config, part)) for part in parts]
    largest = kept_of_parts.index(max(kept_of_parts))
    rows = torch.arange(len(batch.mask)).split(case.micro_batch)[largest]
    counted = kept_by_autograd(lambda: response_log_probs(model, batch, rows), model)
    return {"kept": counted, "peak": living.most, "process": process,
            "kept, floor": kept_of_parts[largest], "peak, floor": peak_of(model.config, parts)}


def moments_of(optimizer) -> list:
    return [value for state in optimizer.state.values() for value in state.values()]


def peak_of(config: ModelConfig, parts: list[Batch]) -> int:
    gradient = 4 * parameters(config)
    return gradient + max(total(fullest(config, part)) for part in parts)


def cases_of(size: str) -> list[Case]:
    """Two sizes of micro-batches with and without checkpointing; smaller models in bfloat16 too."""
    if size == "0.5B":
        shape, micro_batches = (2, 8, 32), (2, 8)
    else:
        shape, micro_batches = (4, 8, 128), (4, 16)
    cases = [Case(size, "update", *shape, micro_batch=micro_batch, checkpointing=checkpointing)
             for micro_batch in micro_batches for checkpointing in (False, True)]
    if size == "0.5B":
        return cases
    bfloat16 = [replace(case, dtype="bfloat16") for case in cases]
    return cases + bfloat16 + [replace(case, offload_optimizer=True) for case in bfloat16]


def row(case: Case) -> list:
    show_status(f"{case.size}, {case.dtype}, micro-batches of {case.micro_batch}")
    counts = {name: value / MEBIBYTE
              for name, value in in_a_process(case, "benchmarks.memory").items()}
    flags = [name for name in ("checkpointing", "offload_optimizer") if getattr(case, name)]
    return [case.size, case.dtype, str(case.micro_batch), " ".join(flags),
            counts["kept, floor"], counts["kept"], counts["peak, floor"], counts["peak"],
            counts["process"]]


COLUMNS = {"size": "", "computes in": "", "micro-batch": "", "with": "", "kept, floor": ",.1f",
           "counted": ",.1f", "peak, floor": ",.1f", "peak, counted": ",.1f", "process": ",.0f"}
HEADINGS = {"with": "flags", "kept, floor": "kept, by the account", "counted": "kept, counted",
            "peak, floor": "peak, by the account", "process": "peak of the process"}
FLAGS = {
    "sizes": Flag("tiny,small,0.5B", f"some of {', '.join(SIZES)}"),
    "case": Flag(None, "count this one case, given as JSON, and print JSON: what a process of its "
                       "own is started with"),
}


def main(argv: list[str]) -> None:
    parser = Parser("python -m benchmarks.memory [flags]", __doc__)
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    if given.case is not None:
        print(json.dumps(count(case_from(given.case))))
        return
    sizes = read_sizes(given.sizes)
    rows = [row(case) for size in sizes for case in cases_of(size)]
    show_status("")
    table = Table("memory", "", by_row(COLUMNS, rows), headings=HEADINGS)
    print(f"MiB\n\n{table.to_text()}")


if __name__ == "__main__":
    run_as_program("benchmarks.memory", main)
