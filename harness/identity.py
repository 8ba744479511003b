"""Which run, which step, which lines: every file of a run says it, and one function compares.

    config.json            "run_id": "9f2c61d0a8b3e457"
    metrics.jsonl, ...     the same in every line
    credit/step_N.npz      columns run_id, step and process
    a checkpoint           run_id and step in trainer/state.json, with a sha256 of its files

The run_id is a sha256 of all that makes a run what it is, so the same command has the same one, and
config.json can be compared with its own: a setting that was changed by hand no longer fits. A run
of an older version has none, in any of its files, and nothing of it is compared.

What a run was made of is a fingerprint, a sha256 of each file that a flag names: two of the same
name need not be the same problems.
"""
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
import safetensors
import tokenizers
import torch

from engine.errors import UserError
from harness.files import (LARGEST, PROJECT, Json, is_file, is_folder, is_there, paths_in,
                           read_json, sha256_of)
from harness.flags import Range, Share

CHANGES_ROUNDING = (
    "threads", "device", "micro_batch", "checkpointing", "offload_optimizer", "shard")
CHANGEABLE = (  # in a resumed run: how many steps it has and how it is made, not which run it is
    "steps", *CHANGES_ROUNDING, "rollouts", "rollouts_timeout", "sample_every", "change_every",
    "checkpoint_every")
# a name more or less in these makes another run_id of every config.json that has it
NOT_IN_RUN_ID = (*CHANGEABLE, "out", "ranks", "versions", "git_commit", "code", "imported",
                 "run_id")

MODES = {"both": ("sampled", "greedy"), "sampled": ("sampled",)}  # of an evaluation
Number = Annotated[float, Range(least=-LARGEST, most=LARGEST)]


class Line(TypedDict):  # of a log
    step: Annotated[int, Range(least=0, most=2 ** 31 - 1)]


class Example(TypedDict):
    """An answer of an evaluation, as a page shows it; its tokens are not in every older run."""
    problem: str
    text: str
    answer: Share
    texts: list[str] | None
    log_prob: list[Number] | None


class Evaluation(Line):  # of evaluations.jsonl
    mode: Annotated[str, Range(choices=MODES["both"])]
    success: Share
    success_low: Share
    success_high: Share
    finished_mean: Share
    format_mean: Number
    length_mean: Number
    answer: list[Share]  # of each held-out problem: 0 or 1 of a single answer
    format: list[Number] | None
    length: list[Number] | None
    shown: list[Example] | None


def run_id_of(config: Json) -> str:
    """What a path leads to counts, not the path: its fingerprint is in `made_of`."""
    paths = made_of if isinstance(made_of := config.get("made_of"), dict) else ()
    known = {name: value for name, value in config.items()
             if name not in NOT_IN_RUN_ID and name not in paths}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def run_id_on_record(run: Path) -> str | None:
    """That of the run in this folder; None of an older version, and where there is no run."""
    path = Path(run) / "config.json"
    run_id = read_json(path).get("run_id") if is_there(path) else None
    return None if run_id is None else str(run_id)


def check_origin(where: str | Path, found: Mapping[str, object],
                 wanted: Mapping[str, object]) -> None:
    """Compare what a file or a line says of itself with what its place says."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UserError(f"{where} does not belong there: its {name} is "
                            f"{found.get(name, 'missing')}, not {value}. Was something lost, "
                            "exchanged, or taken from another run?")


def make_seal(run: Path, checkpoint: Path, step: int) -> Json:
    inside = [*paths_in(checkpoint), *paths_in(checkpoint / "trainer")]
    files = {path.relative_to(checkpoint).as_posix(): sha256_of(path)
             for path in inside if is_file(path)}
    return {"run_id": run_id_on_record(run), "step": step, "files": files}


def provenance() -> Json:
    """The versions a run was made with, and the commit of this code (null outside a checkout)."""
    versions = {"python": platform.python_version()} | {
        package.__name__: package.__version__ for package in (torch, np, safetensors, tokenizers)}
    commit = None
    with suppress(FileNotFoundError, subprocess.CalledProcessError):  # no git, or no checkout
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=PROJECT, text=True,
                                         stderr=subprocess.DEVNULL).strip()
    return {"git_commit": commit, "versions": versions}


def code_in_use() -> dict[str, str]:
    """A sha256 of each file of this project that is loaded, by its path: the task and the methods
    that were chosen are among them."""
    here = {path.stem for path in paths_in(PROJECT)}
    names = [name for name in {"train", *sys.modules} if name.split(".")[0] in here]
    places = [PROJECT.joinpath(*name.split(".")) for name in names]
    files = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return {path.relative_to(PROJECT).as_posix(): sha256_of(path)
            for path in sorted(files) if is_file(path)}


def fingerprint(path: Path) -> str:
    """A sha256 of a file; of a model folder, one of its config, its tokenizer and its weights."""
    if not is_folder(path):
        return sha256_of(path)
    weights = [file.name for file in paths_in(path) if file.suffix == ".safetensors"]
    names = ["config.json", "tokenizer.json", *weights]
    parts = [f"{name} {sha256_of(path / name)}\n" for name in sorted(names)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()
