"""The files of a run, as run.py writes them and lab/harness/read_record.py reads them, and what a
run beyond the book writes beside that. docs/reference/a_run.md lists the columns of a credit
file."""
import hashlib
import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import tokenizers
import torch

from lab.engine.errors import PROJECT, UserError, read_json, read_text, refuse_pipe
from lab.engine.rollouts import Rollouts
from run import find, of_steps, read_lines as read_lines, whole
from run import write_credit as write_columns

Json = dict[str, Any]  # an object in a JSON file
Parsed = TypeVar("Parsed")
find_folder = find  # a folder as it was typed, or the one of that name that ships with the project
PART = "reward_"  # the beginning of a column of the reward's parts: reward_answer, ...


def read_given(name: str, what: str, parse: Callable[[str, str], Parsed]) -> list[Parsed]:
    """Read a file that a person brings, each line by `parse(line, where)`; empty lines are left
    out."""
    found = []
    for number, line in enumerate(read_text(find_folder(name)).split("\n"), 1):
        if line.strip():
            found.append(parse(line.strip(), f"{name}, line {number}"))
    if not found:
        raise UserError(f"{name} holds no {what}")
    return found


def provenance() -> Json:
    """The versions a run was made with, and the commit of this code (null outside a checkout)."""
    versions = {"python": platform.python_version()}
    for package in (torch, np, safetensors, tokenizers):
        versions[package.__name__] = package.__version__
    commit = None
    with suppress(FileNotFoundError, subprocess.CalledProcessError):  # no git, or no checkout
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=PROJECT, text=True,
                                         stderr=subprocess.DEVNULL).strip()
    return {"git_commit": commit, "versions": versions}


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder whole or not at all, with the folders above it. That it cannot take its name is
    known at once."""
    if not path.name or path.is_file() or path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path} exists already")
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        with whole(path) as unfinished:
            try:
                unfinished.mkdir(parents=True)
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}") from None
            yield unfinished
    finally:
        for folder in made:
            with suppress(OSError):  # something lies in it
                folder.rmdir()


def replace_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def change_config(run: Path, values: Json) -> None:
    """Set these entries of a run's config.json."""
    path = run / "config.json"
    replace_text(path, json.dumps(read_json(path) | values, indent=2) + "\n")


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor,
                 columns: Mapping[str, torch.Tensor] = {}) -> None:
    """Write a batch's record. `columns` are further ones, tensors (B, T). Where an environment has
    written, its tokens are there too, and the column `own` tells them from the model's."""
    more = {name: values.float() for name, values in columns.items()}
    if not rollouts.written.equal(rollouts.mask):
        more["own"] = rollouts.mask
    if rollouts.of_turns.dim():
        more["paid"] = rollouts.of_turns.float()
    cpu = torch.device("cpu")
    more = {name: values.to(cpu) for name, values in more.items()}
    written = replace(rollouts, mask=rollouts.written).to(cpu)
    write_columns(path, written, weight.to(cpu), more)


def credit_path(run: Path, step: int) -> Path:
    return Path(run) / "credit" / f"step_{step:06d}.npz"


def digest_of(path: Path) -> str:
    refuse_pipe(path)
    facts = path.stat()
    return digest_of_file(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(10_000)  # the weights of a large model are read for seconds
def digest_of_file(path: Path, size: int, changed: int) -> str:
    """The digest of a file, which is kept. With another size or time of its last change (`changed`)
    it is computed again."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_folders(run: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by their step, oldest first. Folders with other names, as
    a backup, are left out."""
    return {step: path for step, path in of_steps(Path(run).glob("checkpoints/*")).items()
            if (path / "config.json").exists()}

