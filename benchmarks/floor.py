"""The floor of a step: the least that must be computed and moved, and what is kept on the device.

    python -m benchmarks.floor models/tiny
    python -m benchmarks.floor 1.5B --dtype bfloat16 --checkpointing --flops 1e14 --bandwidth 1e12
    python -m benchmarks.floor --worked      # the tables of benchmarks/README.md

Run it from the project's folder. It is arithmetic, no model is run: operations.py has what is
computed and moved, bytes_kept.py what is kept, both from the shapes in shapes.py.
"""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from analysis.tables import Table, by_row
from benchmarks.bytes_kept import kept, memory, total
from benchmarks.operations import Work, recomputed_work, rollout_work, update_work
from benchmarks.shapes import (NUMBER_BYTES, SHAPES, Batch, cached_bytes, multiplied_matrices,
                               parameters)
from engine.errors import UserError
from harness.files import is_folder
from harness.flags import Flag, Parser, add_flags, shortened, some_text, with_defaults
from harness.program import run_as_program
from qwen2_model import ModelConfig

FITS = 22e9        # bytes that a GPU of 24 GB leaves
FITS_LARGE = 78e9  # one of 80 GB


def giga(number: float) -> str:
    return f"{number / 1e9:,.3g}" if number < 1e9 else f"{number / 1e9:,.1f}"


def work_table(config: ModelConfig, batch: Batch, rate: float | None,
               bandwidth: float | None) -> Table:
    """Operations and bytes of each part of a step, and at a machine's rates its seconds."""
    of_update = update_work(config, batch) | recomputed_work(config, batch)
    works = {f"rollout: {name}": work for name, work in rollout_work(config, batch).items()}
    works |= {f"update: {name}": work for name, work in of_update.items()}
    rows = [[name, giga(work.operations), giga(work.bytes)] for name, work in works.items()]
    sums = [giga(sum(column)) for column in zip(*works.values())]
    rows.append(["sum", *sums])
    columns = {"": "", "10^9 operations": "", "GB moved": ""}
    if rate:
        columns |= {"seconds": "", "bound by": ""}
        add_seconds(rows, list(works.values()), rate, bandwidth)
    return Table("work", "Computed and moved in a step", by_row(columns, rows),
                 headings={"": "part of a step"})


def add_seconds(rows: list[list], works: list[Work], rate: float, bandwidth: float) -> None:
    """Add to each row its seconds and what they are due to; the last row is the sum."""
    seconds = [work.seconds(rate, bandwidth) for work in works]
    for row, work, duration in zip(rows, works, seconds):
        bound = "operations" if duration == work.operations / rate else "bytes"
        row += [f"{duration:.3g}", bound]
    rows[-1] += [f"{sum(seconds):.3g}", ""]


def memory_table(config: ModelConfig, batch: Batch) -> Table:
    moments = memory(config, batch)
    names = dict.fromkeys([*moments["rollout"], *moments["update"]])
    rows = []
    for name in names:
        cells = [giga(parts[name]) if name in parts else "" for parts in moments.values()]
        rows.append([name, *cells])
    rows.append(["sum", *(giga(total(parts)) for parts in moments.values())])
    columns = {"": "", "rollout": "", "update": ""}
    return Table("memory", "Kept on the device, GB", by_row(columns, rows),
                 headings={"": "what is kept", "rollout": "in the rollout",
                           "update": "in the update"})


def outside_the_device(config: ModelConfig, batch: Batch, ranks: int) -> list[str]:
    """Lines about what the device does not hold, or what leaves it."""
    n, lines = parameters(config), []
    if batch.offload_optimizer:
        gradients = batch.number_bytes * n * len(batch.micro_batches())
        lines.append(f"on the CPU {giga(16 * n)} GB: parameters, sum of gradients and moments "
                     "in float32")
        lines.append(f"to the CPU and back in an update: {giga(gradients)} GB of gradients, "
                     f"{giga(batch.number_bytes * n)} GB of parameters")
    if ranks > 1:
        what, numbers = "gradients", 4 * 2
        if batch.shards > 1:  # twice the parameters and once the gradient, each micro-batch
            what = "parameters and gradients"
            numbers = (2 * batch.number_bytes + 4) * len(batch.micro_batches())
        wire = numbers * n * (ranks - 1) / ranks
        lines.append(f"over the wire of each rank in an update: {giga(wire)} GB of {what}")
    return lines


WORKED_SIZES = ("0.5B", "1.5B", "3B", "7B")
WORKED_FLAGS = {
    "GB": {},
    "GB, --checkpointing": {"checkpointing": True},
    "GB, --offload_optimizer": {"offload_optimizer": True},
    "GB, both": {"checkpointing": True, "offload_optimizer": True},
}


SHARED_SIZES = ("7B", "14B")
SHARED_FLAGS = {
    "GB, whole on each": {},
    "GB, --shard": {"shards": 8},
    "GB, --shard --checkpointing": {"shards": 8, "checkpointing": True},
}


def worked_batch(device: str) -> Batch:
    """8 problems x 8 answers, prompts of 100 tokens, answers of 512."""
    return Batch([100] * 8, [512] * 64, micro_batch=8, device=device)


def token_table(batch: Batch) -> Table:
    """A token's share, with the activations of one micro-batch."""
    part = batch.micro_batches()[0]
    variants = [part, replace(part, number_bytes=2), replace(part, checkpointing=True)]
    rows = []
    for name in WORKED_SIZES:
        config = SHAPES[name]
        kept_kilobytes = [total(kept(config, one)) / (100 + sum(part.fed)) / 1000
                          for one in variants]
        rows.append([name, parameters(config) / 1e6, 2 * multiplied_matrices(config) / 1e9,
                     cached_bytes(config, 2) / 1000, *kept_kilobytes])
    columns = {"model": "", "million parameters": ",.0f", "10^9 operations": ".1f",
               "cache, kB in bfloat16": ".0f", "kept, kB in float32": ",.0f",
               "in bfloat16": ",.0f", "float32, --checkpointing": ",.0f"}
    return Table("token", "", by_row(columns, rows))


def most_table(batch: Batch, sizes: tuple, variants: dict[str, dict], fits: float) -> Table:
    """The most that a device holds in a step, and whether it fits."""
    rows = []
    for name in sizes:
        for dtype, number_bytes in NUMBER_BYTES.items():
            computing = replace(batch, number_bytes=number_bytes)
            cells = [most_held(SHAPES[name], replace(computing, **flags), fits)
                     for flags in variants.values()]
            rows.append([name, dtype, *cells])
    columns = {"model": "", "computes in": ""} | dict.fromkeys(variants, "")
    return Table("most", "", by_row(columns, rows))


def most_held(config: ModelConfig, batch: Batch, fits: float) -> str:
    most = max(total(parts) for parts in memory(config, batch).values())
    return f"{giga(most)} fits" if most < fits else giga(most)


FLAGS = {
    "questions": Flag(8, "problems a step, of all ranks together", least=1, most=10_000),
    "answers": Flag(8, "answers to each problem", least=1, most=1000),
    "prompt": Flag(100, "tokens of a prompt", least=1, most=1_000_000),
    "new_tokens": Flag(512, "tokens of an answer", least=2, most=1_000_000),
    "micro_batch": Flag(8, "answers in memory at once during the update", least=1,
                        most=1_000_000),
    "dtype": Flag("float32", "numbers to compute with", choices=tuple(NUMBER_BYTES)),
    "ranks": Flag(1, "devices, each with its share of the problems, and with the whole model or "
                     "its part", least=1, most=10_000),
    "shard": Flag(False, "each of the ranks keeps a part of the model"),
    "device": Flag("cuda", "whose memory", choices=("cpu", "cuda")),
    "flops": Flag(None, "operations a second of a large product, for the seconds",
                  kind=float, above=0, most=1e24),
    "bandwidth": Flag(None, "bytes a second from memory, for the seconds", kind=float, above=0,
                      most=1e24),
    "checkpointing": Flag(False, "a layer's inside is made again in the backward pass "
                                 "instead of being kept"),
    "offload_optimizer": Flag(False, "the optimizer lives on the CPU, the device keeps parameters "
                                     "in the computing type only"),
    "worked": Flag(False, "the tables of benchmarks/README.md instead"),
}


def read_arguments(argv: list[str]) -> SimpleNamespace:
    parser = Parser("python -m benchmarks.floor MODEL [flags]", __doc__)
    parser.add_argument("model", nargs="?", default=None, type=some_text,
                        help=f"a model folder, or one of {', '.join(SHAPES)}")
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    if (given.flops is None) != (given.bandwidth is None):
        raise UserError("--flops and --bandwidth go together: "
                        "a step takes as long as the slower of the two needs")
    if given.shard and (given.ranks == 1 or given.offload_optimizer):
        raise UserError("--shard is for several --ranks, without --offload_optimizer")
    if given.ranks > given.questions:
        raise UserError(f"--ranks {given.ranks} is more than there are problems to share, "
                        f"{given.questions}")
    return given


def read_shape(name: str | None) -> ModelConfig:
    known = f"known shapes: {', '.join(SHAPES)}"
    if name is None:
        raise UserError(f"no model given; {known}")
    if name in SHAPES:
        return SHAPES[name]
    if not is_folder(name):
        raise UserError(f"there is no model folder {shortened(name)}; {known}")
    return ModelConfig.from_folder(Path(name))


def batch_of(given: SimpleNamespace) -> Batch:
    """The batch of the rank that has most problems."""
    questions = -(-given.questions // given.ranks)
    return Batch([given.prompt] * questions, [given.new_tokens] * questions * given.answers,
                 given.micro_batch, NUMBER_BYTES[given.dtype], given.checkpointing,
                 given.offload_optimizer, given.device, given.ranks if given.shard else 1)


def main(argv: list[str]) -> None:
    given = read_arguments(argv)
    if given.worked:
        batch = worked_batch(given.device)
        print(token_table(batch).to_text(limit=1000))
        for variants in ((WORKED_SIZES, WORKED_FLAGS, FITS),
                         (SHARED_SIZES, SHARED_FLAGS, FITS_LARGE)):
            print("\n" + most_table(batch, *variants).to_text(limit=1000))
        return
    config, batch = read_shape(given.model), batch_of(given)
    shared = f" on each of {given.ranks} ranks" if given.ranks > 1 else ""
    print(f"{given.model}: {parameters(config) / 1e6:,.2f} million parameters, {given.dtype}; "
          f"{len(batch.prompts)} problems x {given.answers} answers{shared}, "
          f"prompts of {given.prompt} tokens, answers of {given.new_tokens}")
    tables = [work_table(config, batch, given.flops, given.bandwidth), memory_table(config, batch)]
    for table in tables:
        print(f"\n## {table.title}\n\n{table.to_text(limit=1000)}")
    print("".join(f"\n{line}" for line in outside_the_device(config, batch, given.ranks)))


if __name__ == "__main__":
    run_as_program("benchmarks.floor", main)
