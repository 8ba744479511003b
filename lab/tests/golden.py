"""Digits of five short runs, recorded on a machine before a change and compared after it; and those
of their first step, which hold on any machine: python -m lab.tests.golden --record

Digits differ between CPUs, between torch's kernels for them and between versions of torch. So a
record is for one kind of all three (`kind_of_cpu`), it is written beside any.json, and git ignores
it: record before you change something that should leave the digits as they are, and
lab/tests/test_golden.py compares. Without a record that test is skipped. A change that is meant to
change digits records them again. ATEN_CPU_CAPABILITY=default, say, before the command records those
of torch's other kernels.

Before the first update nothing but rounding tells CPUs apart. So any.json holds of the first step
what is exact, such as the sampled tokens and the rewards, and the metrics, which are compared to
almost three digits. It is compared on every CPU, and is part of the project.
"""
import argparse
import hashlib
import json
import platform
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE)]  # with -m: the helpers are here

import numpy as np
import torch

from conftest import ANY, COMMON, ROOT
from lab_runs import run
from runs import arrays, lines, timeless

RECORDS = ROOT / "tests/digits"
ARMS = {"default": ["--mitigation", "none"],
        "gae": ["--advantage", "gae"],
        "learned_importance": ["--mitigation", "learned_importance", "--importance_warmup", "0"],
        "vine": ["--advantage", "vine", "--values_k", "1"],
        "reused": ["--mitigation", "by_kind", "--epochs", "2", "--kl", "0.1"]}
# vine continues the answers at every token, so after rounding some other token may be drawn
ON_ANY = [arm for arm in ARMS if arm != "vine"]
EXACT = ("token_id", "episode_start", "group", "finished", "section", "kind", "reward",
         "reward_answer", "reward_format", "prompt_ids", "prompt_start")


def kind_of_cpu() -> str:
    """The name of a file: the CPU, the kernels that torch chooses for it, and torch's version.

    In a virtual machine the CPU's name can be as vague as "Intel Xeon Processor". So its numbers
    are part of the name, and a hash of its vector instructions."""
    known = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text().partition("\n\n")[0]
        known = {name.strip(): value.strip() for name, _, value in
                 (line.partition(":") for line in first.splitlines())}
    model = known.get("model name") or platform.processor() or platform.machine()
    numbers = [known.get(name, "") for name in ("cpu family", "model", "stepping")]
    vectors = sorted(flag for flag in known.get("flags", known.get("Features", "")).split()
                     if flag.startswith(("sse", "avx", "amx", "fma", "asimd", "sve")))
    instructions = hashlib.sha256(" ".join(vectors).encode()).hexdigest()[:6]
    parts = [model, *filter(None, numbers), instructions,
             torch.backends.cpu.get_cpu_capability(), "torch", torch.__version__]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(parts).lower()).strip("-")


def digits_of(arm: str) -> dict[str, str]:
    """A hash of each column of the credit files and of each metric, over the three steps."""
    seen: dict[str, list[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run(*COMMON, *ARMS[arm], "--out", f"{folder}/run")
        for path in sorted(Path(folder).glob("run/credit/*.npz")):
            for name, column in arrays(path).items():
                data = str(column.dtype).encode() + np.ascontiguousarray(column).tobytes()
                seen.setdefault(f"column {name}", []).append(data)
        for line in lines(Path(folder) / "run/metrics.jsonl"):
            for name, value in timeless(line).items():
                seen.setdefault(f"metric {name}", []).append(json.dumps(value).encode())
    hashes = {}
    for name, steps in sorted(seen.items()):
        if set(steps) != {b"null"}:  # not defined in this arm
            hashes[name] = hashlib.sha256(b"\n".join(steps)).hexdigest()[:12]
    return hashes


def first_step(arm: str) -> dict[str, dict[str, object]]:
    """Hashes of the columns that are exact, and the metrics, of a run of one step."""
    columns, metrics = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        run(*COMMON, *ARMS[arm], "--steps", "1", "--out", f"{folder}/run")
        credit = arrays(Path(folder) / "run/credit/step_000001.npz")
        [line] = lines(Path(folder) / "run/metrics.jsonl")
    for name in EXACT:
        data = np.ascontiguousarray(credit[name]).tobytes()
        columns[name] = hashlib.sha256(data).hexdigest()[:12]
    for name, value in timeless(line).items():
        if isinstance(value, (int, float)):
            metrics[name] = float(f"{value:.5g}")
    return {"columns": columns, "metrics": metrics}


def write_record() -> None:
    path = RECORDS / f"{kind_of_cpu()}.json"
    record = {arm: digits_of(arm) for arm in ARMS}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


def write_any() -> None:
    ANY.write_text(json.dumps({arm: first_step(arm) for arm in ON_ANY}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", required=True,
                        help="write the digits of this CPU")
    parser.add_argument("--any", action="store_true",
                        help="write any.json instead, the digits that hold on any machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.any:
        write_any()
    else:
        write_record()
