"""What a run leaves, written and read: config.json, logs, a credit file a step, checkpoints.

Files and folders are written under another name, then renamed: after a kill each is whole or not
there. Lines are appended; a last one that was cut off is ignored. docs/what_a_run_leaves.md lists
the columns of a credit file: values stand end to end, one for each token, answer after answer, then
one for each answer, then one for each problem. `episode_start` says where an answer begins. Each
process of a run writes a file of its own problems; they are read as one.
"""
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import tokenizers
import torch

from engine import processes
from engine.errors import PROJECT, UserError, parse_object, read_json, read_text
from engine.rollouts import NOTHING, Forward, Problem, Rollouts
from engine.tokens import token_bytes

Json = dict[str, Any]  # an object in a JSON file
Columns = dict[str, np.ndarray]
Parsed = TypeVar("Parsed")
LOGS = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")
PART = "reward_"  # begins the column of a part of the reward: reward_answer, reward_format, ...
TYPES: dict[str, Any] = {  # of the columns that are not float32
    "section": np.uint8, "kind": np.uint8, "finished": np.bool_, **dict.fromkeys((
        "token_id", "episode_start", "group", "prompt_ids", "prompt_start", "trainer_step"),
        np.int32)}
COUNTS = {"episode_start": "token_id", "prompt_start": "prompt_ids", "group": "prompt_start"}


def find_folder(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    return Path(name) if Path(name).exists() or not (PROJECT / name).exists() else PROJECT / name


def read_lines(path: Path) -> list[Json]:
    """Of a log, if there is one, without a last line that a kill cut off."""
    texts = read_text(path).split("\n")[:-1] if path.exists() else []
    return [parse_object(text, f"{path}, line {number}") for number, text in enumerate(texts, 1)]


def read_given(name: str, what: str, parse: Callable[[str, str], Parsed]) -> list[Parsed]:
    """What `parse(line, where)` makes of each line of a file that a person brings."""
    found = [parse(line.strip(), f"{name}, line {number}") for number, line in
             enumerate(read_text(find_folder(name)).split("\n"), 1) if line.strip()]
    if not found:
        raise UserError(f"{name} holds no {what}")
    return found


def run_config(run: Path) -> Json:
    path = run / "config.json"
    config = read_json(path) if path.exists() else {}
    if "mitigation" not in config:
        raise UserError(f"{run} is not a run folder: it has no config.json of a run")
    return config


def is_complete(config: Json, metrics: Sequence[Json], evaluations: Sequence[Json]) -> bool:
    """Whether all steps are on record, and the evaluations after the last one."""
    steps, modes = config["steps"], 1 if config.get("eval_modes") == "sampled" else 2
    made = max((line["step"] for line in metrics), default=0)
    last = [line for line in evaluations if line["step"] == steps]
    return made >= steps and (not config.get("eval_every") or len(last) >= modes)


def provenance() -> Json:
    """The versions a run was made with, and the commit of this code (null outside a checkout)."""
    versions = {"python": platform.python_version()} | {
        package.__name__: package.__version__ for package in (torch, np, safetensors, tokenizers)}
    commit = None
    with suppress(FileNotFoundError, subprocess.CalledProcessError):  # no git, or no checkout
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=PROJECT, text=True,
                                         stderr=subprocess.DEVNULL).strip()
    return {"git_commit": commit, "versions": versions}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, or a folder that cannot be written, becomes one sentence that names the path."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}") from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Make a file or a folder whole or not at all: write the one that `with` names, which is then
    renamed."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path} exists already")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            os.replace(unfinished, path)
    finally:
        remove(unfinished)


def remove(path: Path) -> None:
    """A file, or a folder with all in it, if it is there."""
    if path.exists():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_text(path: Path, text: str) -> None:
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def locked(path: Path, alone: bool = True) -> Iterator[int]:
    """Lock a folder for this process, also when it is moved; a lock ends with its process."""
    import fcntl  # Windows has none, and can analyse runs
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if alone:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError:
        raise UserError(f"{path} is being written by another process") from None
    finally:
        os.close(descriptor)


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor,
                 of_file: Mapping[str, int] = {}, **more: torch.Tensor) -> None:
    """Write a batch's record. `more`: further (B, T); `of_file`: numbers of the file."""
    tokens = {"token_id": rollouts.ids, "log_prob": rollouts.log_prob, "entropy": rollouts.entropy,
              "collision": rollouts.collision, "weight": weight, "advantage": rollouts.advantage,
              **more, "section": rollouts.section, "kind": rollouts.kind}
    columns: dict[str, Any] = {name: values[rollouts.mask].cpu().numpy()
                               for name, values in tokens.items()}
    columns |= {column_of_part(part): s.cpu().numpy() for part, s in rollouts.scores.items()}
    columns |= {
        "episode_start": starts(rollouts.length.tolist()), "group": rollouts.group.cpu().numpy(),
        "finished": rollouts.finished.cpu().numpy(),
        "prompt_ids": np.concatenate(rollouts.prompt_ids),
        "prompt_start": starts([len(prompt) for prompt in rollouts.prompt_ids]),
        **{name: [value] for name, value in of_file.items()}}
    typed = {name: np.asarray(values, TYPES.get(name, np.float32))
             for name, values in columns.items()}
    with whole(path) as unfinished, open(unfinished, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **typed)


def starts(sizes: list[int]) -> np.ndarray:
    """Where each part begins when parts of these sizes stand end to end."""
    return np.cumsum([0, *sizes[:-1]])


def column_of_part(part: str) -> str:
    return part if part == "reward" else PART + part


def credit_path(run: Path, step: int, rank: int = 0) -> Path:
    """The file of a step. In a run of several processes each writes one, of its own problems."""
    return Path(run) / "credit" / f"step_{step:06d}{f'_rank{rank}' if rank else ''}.npz"


def credit_files(run: Path) -> list[tuple[int, int]]:
    """Step and rank of every credit file. Names that people gave, of a backup say, do not count."""
    found = [re.fullmatch("step_([0-9]+)(_rank([0-9]+))?[.]npz", path.name)
             for path in Path(run).glob("credit/*")]
    return sorted((int(match[1]), int(match[3] or 0)) for match in found if match)


def credit_steps(run: Path) -> list[int]:
    """The steps that have credit files. Rank 0 writes last: until then a step is being written."""
    return [step for step, rank in credit_files(run) if rank == 0]


def read_columns(run: Path, step: int) -> Columns:
    """A step's record as it is: one file, or those of several processes as if they were one."""
    ranks = [rank for of_step, rank in credit_files(run) if of_step == step]
    parts = [read_file(credit_path(run, step, rank)) for rank in ranks or [0]]
    for name, counted in COUNTS.items():  # what each file counts from 0 goes on
        for part, offset in zip(parts, np.cumsum([0, *(len(part[counted]) for part in parts)])):
            part[name] = part[name] + offset.astype(part[name].dtype)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_file(path: Path) -> Columns:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from None


def read_credit(run: Path, step: int, tokenizer: tokenizers.Tokenizer,
                problems: Sequence[Problem] = (), forward: Forward | None = None,
                generator: torch.Generator | None = None) -> Rollouts:
    """The batch of a step; a file holds neither problems nor a model nor random numbers."""
    columns = {name: torch.from_numpy(values) for name, values in read_columns(run, step).items()}
    tokens = columns["episode_start"].new_tensor([len(columns["token_id"])])
    lengths = torch.diff(columns["episode_start"], append=tokens)
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]

    def frame(name: str) -> torch.Tensor:
        values = columns[name]
        return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)

    answers = columns["token_id"].split(lengths.tolist())
    pieces = [token_bytes(tokenizer, ids.tolist()) for ids in answers]
    prompts = columns["prompt_ids"].tensor_split(columns["prompt_start"][1:].long())
    return Rollouts(
        problems=problems, prompt_ids=[prompt.tolist() for prompt in prompts],
        group=columns["group"].long(), ids=frame("token_id").long(), mask=mask,
        finished=columns["finished"], log_prob=frame("log_prob"), entropy=frame("entropy"),
        collision=frame("collision"), section=frame("section"), kind=frame("kind"), step=step,
        advantage=frame("advantage"), forward=forward, generator=generator or torch.Generator(),
        true_credit=frame("true_credit") if "true_credit" in columns else NOTHING,
        answers=[b"".join(row).decode(errors="replace") for row in pieces],
        texts=[[piece.decode(errors="replace") for piece in row] for row in pieces],
        scores={name.removeprefix(PART): values for name, values in columns.items()
                if name.startswith("reward")})


def checkpoint_folders(run: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by their step, oldest first; no backups of other names."""
    found = [(re.fullmatch("step_([0-9]+)", path.name), path)
             for path in Path(run).glob("checkpoints/*")]
    return dict(sorted((int(match[1]), path) for match, path in found
                       if match and (path / "config.json").exists()))


def make_run(path: Path, config: Json, tokenizer: Path) -> None:
    """The folder of a new run."""
    with whole(path) as unfinished:
        unfinished.mkdir()
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.copyfile(tokenizer, unfinished / "tokenizer.json")
        if config.get("checkpoint_every") or config.get("save_model"):
            # where this folder is missing, somebody has removed it
            (unfinished / "checkpoints").mkdir()


class RunFolder:
    """Of several processes rank 0 writes; the others write their own credit, and nothing else."""

    def __init__(self, path: Path):
        self.path, self.writes = Path(path), processes.rank() == 0
        self.descriptor: int | None = None

    @contextmanager
    def opened(self) -> Iterator["RunFolder"]:
        """No other process writes it, and it is noticed when another folder takes its name."""
        with locked(self.path, self.writes) as self.descriptor:
            yield self

    def is_here(self) -> bool:
        """A lock follows its folder when that is moved, a path does not: under the old name there
        may be another run by now."""
        return self.descriptor is None or (self.path.exists() and os.path.samestat(
            self.path.stat(), os.fstat(self.descriptor)))

    def at(self, name: str) -> Path:
        """Where to write."""
        if not self.is_here():
            raise UserError(f"{self.path} was moved or removed while this run was writing it. "
                            "Where it is now, --resume goes on with it")
        return self.path / name

    def append(self, name: str, line: Mapping[str, object]) -> None:
        """A number that is undefined becomes null."""
        line = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in line.items()}
        if self.writes:
            path, text = self.at(name), json.dumps(line, allow_nan=False)
            with writing(path), open(path, "a", encoding="utf-8") as file:
                file.write(text + "\n")

    def checkpoints(self) -> dict[int, Path]:
        """Those that a run can go on from, by their step."""
        return {step: folder for step, folder in checkpoint_folders(self.path).items()
                if (folder / "trainer" / "state.safetensors").exists()}

    def forget_after(self, step: int) -> None:
        """Remove what a stopped run wrote past its last checkpoint: it will be made again."""
        for name in LOGS:
            kept = [line for line in read_lines(self.path / name) if line["step"] <= step]
            if (self.path / name).exists():
                replace_text(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))
        for known, rank in credit_files(self.path):
            if known > step:
                remove(credit_path(self.path, known, rank))
        for known, folder in checkpoint_folders(self.path).items():
            if known > step:  # it has lost its trainer's state
                remove(folder)
        for folder in (self.path, self.path / "credit", self.path / "checkpoints"):
            for path in folder.glob(".*.tmp"):
                remove(path)
