"""The files of a run as it writes them: config.json, logs, a credit file a step, checkpoints.
lab/harness/read_record.py reads them.

Files and folders are written under another name and then renamed, so that after a kill each is
whole or not there. Lines are appended; a last line that was cut off is ignored.

docs/a_run.md lists the columns of a credit file. A column has one value for each token,
answer after answer, or one for each answer, or one for each problem; `episode_start` says where an
answer begins.
"""
import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import tokenizers
import torch

from lab.engine.errors import PROJECT, UserError, parse_object, read_json, read_text, refuse_pipe
from lab.engine.rollouts import Rollouts

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Json = dict[str, Any]  # an object in a JSON file
LOCK = ".lock"  # on Windows, the file that locks the folder of a run
Parsed = TypeVar("Parsed")
LOGS = ("metrics.jsonl", "evaluations.jsonl")
PART = "reward_"  # the beginning of a column of the reward's parts: reward_answer, ...
TYPES: dict[str, Any] = {  # of the columns that are not float32
    "section": np.uint8, "kind": np.uint8, "finished": np.bool_, "own": np.bool_,
    "token_id": np.int32, "episode_start": np.int32, "group": np.int32, "prompt_ids": np.int32,
    "prompt_start": np.int32, "step": np.int32}


def find_folder(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    shipped = PROJECT / name
    return shipped if shipped.exists() and not Path(name).exists() else Path(name)


def read_lines(path: Path) -> list[Json]:
    """The lines of a log, without a last one that a kill cut off; none if there is no log."""
    if not path.exists():
        return []
    texts = read_text(path).split("\n")[:-1]
    return [parse_line(text, f"{path}, line {number}") for number, text in enumerate(texts, 1)]


def parse_line(text: str, where: str) -> Json:
    line = parse_object(text, where)
    if type(line.get("step")) is not int:
        raise UserError(f"{where} should have a whole number as its step")
    return line


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
def writing(path: Path) -> Iterator[None]:
    """Turn the error of a full disk, or of a folder that cannot be written, into one sentence that
    names the path."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}") from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Make a file or a folder whole or not at all. `with whole(path) as unfinished` gives another
    path to write to, which is renamed at the end."""
    if path.is_dir() and (not path.name or any(path.iterdir())):  # . and / have no name
        raise UserError(f"{path} exists already")
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield unfinished  # to what may be a whole program, whose errors can be of other files
        except (OSError, safetensors.SafetensorError) as error:
            if is_of_writing(error, unfinished):
                with writing(path):
                    raise
            raise
        with writing(path):
            os.replace(unfinished, path)
    finally:
        remove(unfinished)


def is_of_writing(error: Exception, unfinished: Path) -> bool:
    """Whether an error came from writing below this path. The error of a full disk often names no
    file."""
    named = getattr(error, "filename", None)
    if isinstance(named, str | os.PathLike):
        return Path(named).is_relative_to(unfinished)
    of_disk = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    return not isinstance(error, OSError) or error.errno in of_disk


def remove(path: Path) -> None:
    """Remove a file, or a folder with everything in it, if it exists."""
    if path.exists():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_text(path: Path, text: str) -> None:
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def locked(path: Path) -> Iterator[Callable[[], bool]]:
    """Lock a folder for this process, also when it is moved. `with` gives a function that tells
    whether the folder still has its name. On Windows, which has no fcntl, a file in the folder is
    the lock."""
    lock = path if fcntl else path / LOCK
    descriptor = take_lock(path, lock)

    def is_here() -> bool:
        return lock.exists() and os.path.samestat(lock.stat(), os.fstat(descriptor))

    try:
        yield is_here
    finally:
        own = not fcntl and is_here()
        os.close(descriptor)
        if own:
            lock.unlink()


def take_lock(path: Path, lock: Path) -> int:
    """The descriptor that holds the lock, or an error if another process holds it."""
    descriptor = None
    try:
        descriptor = os.open(lock, os.O_RDONLY if fcntl else os.O_CREAT | os.O_EXCL)
        if fcntl:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileExistsError, BlockingIOError):
        if descriptor is not None:
            os.close(descriptor)
        left = "" if fcntl else f", or one that was killed has left {lock}: then remove this file"
        raise UserError(f"{path} is being written by another process{left}") from None
    return descriptor


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor,
                 of_file: Mapping[str, int] = {}, **more: torch.Tensor) -> None:
    """Write a batch's record. `more` are further columns, tensors (B, T). `of_file` has numbers of
    the whole file. Where an environment has written, its tokens are there too, and the column `own`
    tells them from the model's."""
    frames = {"token_id": rollouts.ids, "log_prob": rollouts.log_prob, "entropy": rollouts.entropy,
              "collision": rollouts.collision, "weight": weight, "advantage": rollouts.advantage,
              **more, "section": rollouts.section, "kind": rollouts.kind}
    if not rollouts.written.equal(rollouts.mask):
        frames["own"] = rollouts.mask
    if rollouts.of_turns.dim():
        frames["paid"] = rollouts.of_turns
    columns: dict[str, Any] = {}
    for name, values in frames.items():
        columns[name] = values[rollouts.written].cpu().numpy()
    for part, score in rollouts.scores.items():
        columns[column_of_part(part)] = score.cpu().numpy()
    columns["episode_start"] = starts(rollouts.written.sum(1).tolist())
    columns["group"] = rollouts.group.cpu().numpy()
    columns["finished"] = rollouts.finished.cpu().numpy()
    columns["prompt_ids"] = np.concatenate(rollouts.prompt_ids)
    columns["prompt_start"] = starts([len(prompt) for prompt in rollouts.prompt_ids])
    for name, value in of_file.items():
        columns[name] = [value]
    typed = {name: np.asarray(values, TYPES.get(name, np.float32))
             for name, values in columns.items()}
    with whole(path) as unfinished, open(unfinished, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **typed)


def starts(sizes: list[int]) -> np.ndarray:
    """The index at which each part begins, if parts of these sizes follow one another."""
    return np.cumsum([0, *sizes[:-1]])


def column_of_part(part: str) -> str:
    return part if part == "reward" else PART + part


def credit_path(run: Path, step: int) -> Path:
    return Path(run) / "credit" / f"step_{step:06d}.npz"


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
    found = {}
    for path in Path(run).glob("checkpoints/*"):
        match = re.fullmatch("step_([0-9]+)", path.name)
        if match and (path / "config.json").exists():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def can_continue(checkpoint: Path) -> bool:
    """Whether a checkpoint has the trainer's state."""
    return (checkpoint / "trainer" / "state.safetensors").exists()


def make_run(path: Path, config: Json, tokenizer: Path) -> None:
    """Make the folder of a new run. If it has no checkpoints/ later, a user has removed it."""
    with whole(path) as unfinished:
        (unfinished / "checkpoints").mkdir(parents=True)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.copyfile(tokenizer, unfinished / "tokenizer.json")


class RunFolder:
    """The folder of a run that is written."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.is_here: Callable[[], bool] = lambda: True

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder: no other process writes it, and it is noticed if another folder takes
        its name. A lock follows a folder that is moved, a path does not."""
        with locked(self.path) as self.is_here:
            yield

    def at(self, name: str) -> Path:
        """The path to write to."""
        if not self.is_here():
            raise UserError(f"{self.path} was moved or removed while this run was writing it. If "
                            "it was moved, --resume and its new name continue the run")
        return self.path / name

    def append(self, name: str, line: Mapping[str, object]) -> None:
        """Append a line to a log. A number that is undefined becomes null."""
        known = {}
        for key, value in line.items():
            is_undefined = isinstance(value, float) and not math.isfinite(value)
            known[key] = None if is_undefined else value
        text = json.dumps(known, allow_nan=False)
        path = self.at(name)
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def change_config(self, values: Json) -> None:
        """Set these entries of config.json."""
        path = self.at("config.json")
        replace_text(path, json.dumps(read_json(path) | values, indent=2) + "\n")

    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints from which a run can continue, by their step."""
        return {step: folder for step, folder in checkpoint_folders(self.path).items()
                if can_continue(folder)}
