"""Ten minutes for whoever has a GPU: is it right, how fast is it, how much memory does it take?

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --size tiny --new_tokens 8 --out try.json  # only a trial

Does models/tiny sample the same answers as on the CPU, and get the same gradient; how many tokens a
second does a model of the size of 0.5B, with random weights in bfloat16, sample and train on, in
how much memory? `benchmarks.speed --count` says what is to be expected.

Each part is a process of its own, with a limit on its time. If one fails, its line says why, and
the others go on. All of it is also in a file, to send in.
"""
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from analysis.tables import Table, by_row
from benchmarks.cases import DTYPES, MEBIBYTE, SIZES, Case, in_a_process
from benchmarks.count import ROWS
from benchmarks.speed import speed
from engine.errors import UserError
from harness.files import is_there, replace_text
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.identity import provenance
from harness.load import pick_device
from harness.program import run_as_program
from harness.progress import say, show_status

LONGEST = 150  # seconds of a part
# how far a gradient may be from the CPU's, as a share of its norm: both round, bfloat16 to 8 bits
SAME = {"float32": 1e-3, "bfloat16": 0.05}


def parts_of(given: SimpleNamespace) -> dict[str, Case]:
    case = Case(given.size, "", 8, 8, given.new_tokens, given.device, "bfloat16", threads=0)
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


def attempt(case: Case) -> dict:
    """What is measured, or the error that it ended with; a process may also print what is no JSON,
    or nothing."""
    try:
        return in_a_process(case, LONGEST)
    except (UserError, ValueError, LookupError) as error:
        return {"error": str(error)}


def sentence(case: Case, found: dict) -> str:
    if "error" in found:
        return f"FAILED: {found['error']}"
    if case.what == "agreement":
        is_same = found["equal"] and found["gradient"] < SAME[case.dtype]
        return (f"{found['equal']} of {found['answers']} answers equal, their log-probs "
                f"{found['log_prob'] / max(1, found['tokens']):.0e} apart, the gradient "
                f"{found['gradient']:.0e} of its norm: {'as' if is_same else 'NOT AS'} on the CPU")
    return f"{speed(found):,.0f} tokens a second, {found['memory'] / MEBIBYTE:,.0f} MiB"


def show(parts: dict[str, Case], report: dict) -> None:
    show_status("")
    rows = [[name, sentence(parts[name], found)] for name, found in report["parts"].items()]
    print("\n" + Table("gpu", "", by_row({"part": "", "found": ""}, rows)).to_text())


FLAGS = {
    "device": Flag("cuda", "cuda, cuda:N, or cpu, which only tries this program"),
    "size": Flag("0.5B", "of the model that is timed", choices=tuple(SIZES)),
    "new_tokens": Flag(512, "tokens of an answer", least=2, most=100_000),
    "out": Flag("gpu_report.json", "a new file, for all that was found"),
}


def main(argv: list[str]) -> None:
    parser = Parser("python -m benchmarks.gpu [flags]", __doc__)
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here, so there is nothing to measure; `python -m "
                        "benchmarks.speed --count` says what one would do, by arithmetic")
    device = pick_device(given.device)
    if is_there(given.out):
        raise UserError(f"--out {given.out}: there is such a file already")
    parts = parts_of(given)
    say(f"In about ten minutes, on {given.device}, a process each: {'; '.join(parts)}. "
        f"All of it goes into {given.out}.")
    gpu = str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else "none"
    report = {**provenance(), "gpu": gpu, "parts": {}}
    try:
        for number, (name, case) in enumerate(parts.items()):
            show_status(f"{number + 1} of {len(parts)}: {name}")
            report["parts"][name] = attempt(case)
            replace_text(Path(given.out), json.dumps(report, indent=2))
    finally:  # after Ctrl-C, what there is
        show(parts, report)


if __name__ == "__main__":
    run_as_program("benchmarks.gpu", main)
