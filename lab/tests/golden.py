"""Digits of the first step of a short run, which hold on any machine:
python -m lab.tests.golden --record

Before the first update nothing but rounding tells CPUs apart. So tests/digits/any.json holds of the
first step what is exact, such as the sampled tokens and the rewards, and the metrics, which
tests/test_book.py compares to almost three digits. A change that is meant to change digits records
them again.
"""
import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE)]  # with -m: the helpers are here

import numpy as np
import torch

from conftest import ANY, COMMON
from lab_runs import run
from runs import arrays, lines, timeless

EXACT = ("token_id", "episode_start", "group", "finished", "section", "kind", "reward",
         "reward_answer", "reward_format", "prompt_ids", "prompt_start")


def first_step() -> dict[str, dict[str, object]]:
    """Hashes of the columns that are exact, and the metrics, of a run of one step."""
    columns, metrics = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        run(*COMMON, "--steps", "1", "--out", f"{folder}/run")
        credit = arrays(Path(folder) / "run/credit/step_000001.npz")
        [line] = lines(Path(folder) / "run/metrics.jsonl")
    for name in EXACT:
        data = np.ascontiguousarray(credit[name]).tobytes()
        columns[name] = hashlib.sha256(data).hexdigest()[:12]
    for name, value in timeless(line).items():
        if isinstance(value, (int, float)):
            metrics[name] = float(f"{value:.5g}")
    return {"columns": columns, "metrics": metrics}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", required=True,
                        help="write tests/digits/any.json")
    parser.parse_args()
    torch.set_num_threads(1)
    ANY.write_text(json.dumps(first_step(), indent=1) + "\n")
