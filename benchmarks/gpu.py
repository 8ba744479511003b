"""Ten minutes for whoever has a GPU: is it right, how fast is it, how much memory does it take?

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --size tiny --new_tokens 8   # only a trial

Does models/tiny sample the same answers as on the CPU, and get the same gradient; how many tokens a
second does a model of the size of 0.5B, with random weights in bfloat16, sample and train on, in
how much memory? `benchmarks.speed --count` says what is to be expected.

Each part is a process of its own, with a limit on its time. If one fails, its line says why, and
the others go on.
"""
from dataclasses import replace

import torch

from benchmarks import cases
from benchmarks.cases import DTYPES, Case
from benchmarks.count import ROWS
from benchmarks.speed import show_outcomes
from engine.errors import UserError
from harness.flags import Parser, add_flags, with_defaults
from harness.load import pick_device
from harness.program import run_as_program

LONGEST = 150  # seconds of a part
FLAGS = {name: replace(cases.FLAGS[name], default=default) for name, default in (
    ("device", "cuda"), ("size", "0.5B"), ("new_tokens", 512))}


def parts_of(case: Case) -> dict[str, Case]:
    update = replace(case, what="update")
    return {
        **{f"models/tiny, {dtype}": replace(case, what="agreement", dtype=dtype)
           for dtype in DTYPES},
        **{f"sample, {rows:,} answers": replace(case, what="rollout", answers=rows // 8)
           for rows in ROWS},
        "update": update,
        "update --checkpointing": replace(update, checkpointing=True),
        "update --offload_optimizer": replace(update, offload_optimizer=True),
        "step": replace(case, what="step")}


def main(argv: list[str]) -> None:
    parser = Parser("python -m benchmarks.gpu [flags]", __doc__)
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here, so there is nothing to measure; `python -m "
                        "benchmarks.speed --count` says what one would do, by arithmetic")
    device = pick_device(given.device)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else "no GPU"
    print(f"PyTorch {torch.__version__}, {gpu}\n")
    show_outcomes(parts_of(Case("", dtype="bfloat16", threads=0, **vars(given))), LONGEST)


if __name__ == "__main__":
    run_as_program("benchmarks.gpu", main)
