"""One file a step: what every token was given. docs/credit_files.md lists the columns.

`write_credit` writes a file, `read_columns` reads and checks it, `read_credit` makes a batch of it.
Each process of a run writes a file of its own problems; they are read as one.

Values stand end to end: one for each token, answer after answer, then one for each answer, then one
for each problem. `episode_start` says where in the tokens an answer begins.
"""
import io
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine import processes
from engine.errors import UserError
from engine.labels import KINDS, SECTIONS
from engine.rollouts import Rollouts
from engine.tokens import token_bytes
from harness.files import paths_in, whole_file
from harness.identity import check_origin, run_id_on_record

LARGEST = float(np.finfo(np.float32).max)
MOST = 2 ** 31 - 1
WORDS = {"i": "whole numbers", "f": "floating point numbers", "b": "yes or no"}  # by kind of dtype


class Column(NamedTuple):
    per: str                  # what it has one value of: token, answer, question, prompt token
    dtype: type               # as it is written
    low: float = -LARGEST     # the range of its values, rounding allowed for
    high: float = LARGEST
    may_be_unknown: bool = False  # then it is nan throughout: a run was imported without it


COLUMNS = {
    "token_id": Column("token", np.int32, 0, 2 ** 24),
    "log_prob": Column("token", np.float32, high=1e-3, may_be_unknown=True),
    "entropy": Column("token", np.float32, low=-1e-3, may_be_unknown=True),
    "collision": Column("token", np.float32, 0, 1.001, may_be_unknown=True),
    "weight": Column("token", np.float32, low=0),
    "advantage": Column("token", np.float32),
    "section": Column("token", np.uint8, 0, len(SECTIONS) - 1),
    "kind": Column("token", np.uint8, 0, len(KINDS) - 1),
    "episode_start": Column("answer", np.int32, 0, MOST),
    "group": Column("answer", np.int32, 0, MOST),
    "finished": Column("answer", np.bool_, 0, 1),
    "reward": Column("answer", np.float32, may_be_unknown=True),
    "reward_format": Column("answer", np.float32, may_be_unknown=True),
    "reward_answer": Column("answer", np.float32, may_be_unknown=True),
    "reward_reasoning": Column("answer", np.float32, may_be_unknown=True),
    "prompt_ids": Column("prompt token", np.int32, 0, 2 ** 24),
    "prompt_start": Column("question", np.int32, 0, MOST)}
OTHERS = {  # columns that not every file has
    "ratio": Column("token", np.float32, low=0),           # where a batch had several updates
    "true_credit": Column("token", np.float32),            # where a probe measured it
    "true_credit_se": Column("token", np.float32, low=0),
    "run_id": Column("byte of run_id", np.uint8, 0, 255),  # these three: where a file belongs
    "step": Column("file", np.int32, 0, MOST),
    "process": Column("rank and count", np.int32, 0, MOST)}
ORIGIN = ("run_id", "step", "process")
OF_FILE = {"byte of run_id": 8, "file": 1, "rank and count": 2}  # Column.per -> how many values
COUNTED_BY = {  # Column.per -> the column that has one entry for each of them
    "token": "token_id", "answer": "group", "question": "prompt_start",
    "prompt token": "prompt_ids"}
COUNTS = {  # a column that counts from 0 -> whose entries it counts; how far it rises each time
    "episode_start": ("token_id", 1, MOST), "prompt_start": ("prompt_ids", 1, MOST),
    "group": ("prompt_start", 0, 1)}
SCORES = {"reward": "reward", "reward_format": "format", "reward_answer": "answer",
          "reward_reasoning": "reasoning"}  # column: part of the score


def credit_path(run: Path, step: int, rank: int = 0) -> Path:
    """The file of a step. In a run of several processes each writes one, of its own problems."""
    suffix = f"_rank{rank}" if rank else ""
    return Path(run) / "credit" / f"step_{step:06d}{suffix}.npz"


def credit_steps(run: Path) -> list[int]:
    """The steps that have credit files. Rank 0 writes last: while the last step has no file of
    rank 0 it is still being written, and is left out."""
    ranks = {}
    for step, rank in credit_files(run):
        ranks.setdefault(step, set()).add(rank)
    being_written = max(ranks, default=0)
    for step in sorted(ranks):
        if 0 not in ranks[step] and step != being_written:
            raise UserError(f"{credit_path(run, step)} is missing, while files of other processes "
                            f"of step {step} are there")
    return sorted(step for step in ranks if 0 in ranks[step])


def credit_files(run: Path) -> list[tuple[int, int]]:
    """Step and rank of every credit file. Names that people gave, of a backup say, do not count."""
    files = []
    for found in paths_in(Path(run) / "credit"):
        match = re.fullmatch("step_([0-9]+)(_rank([0-9]+))?[.]npz", found.name)
        if match:
            files.append((int(match[1]), int(match[3] or 0)))
    return files


def checkpoint_folders(run: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by their step, oldest first."""
    folders = {step_of(path): path for path in paths_in(Path(run) / "checkpoints")}
    folders.pop(None, None)
    return dict(sorted(folders.items()))


def step_of(path: Path) -> int | None:
    """100 of step_000100 or step_000100.npz; None for a name that people gave, a backup say."""
    match = re.fullmatch("step_([0-9]+)([.]npz)?", path.name)
    return int(match[1]) if match else None


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor, origin: dict = {},
                 **more: torch.Tensor) -> None:
    """Write a batch's record. `origin` has the run_id and the step, if it is of a run, and the
    process where one writes for all; `more` are further (B, T) by name, the true credit of a probe
    say."""
    tokens = {"token_id": rollouts.ids, "log_prob": rollouts.log_prob, "entropy": rollouts.entropy,
              "collision": rollouts.collision, "weight": weight, "advantage": rollouts.advantage,
              **more, "section": rollouts.section, "kind": rollouts.kind}
    columns = {name: values[rollouts.mask].cpu().numpy() for name, values in tokens.items()}
    columns["episode_start"] = starts(rollouts.length.tolist())
    columns["group"] = rollouts.group.cpu().numpy()
    columns["finished"] = rollouts.finished.cpu().numpy()
    columns |= {name: rollouts.scores[part].cpu().numpy() for name, part in SCORES.items()}
    columns["prompt_ids"] = np.concatenate(rollouts.prompt_ids)
    columns["prompt_start"] = starts([len(prompt) for prompt in rollouts.prompt_ids])
    columns["process"] = origin.get("process", [processes.rank(), processes.count()])
    if "run_id" in origin:
        columns["step"] = [origin["step"]]
        columns["run_id"] = list(bytes.fromhex(origin["run_id"]))
    columns = {name: np.asarray(values, column_of(name).dtype) for name, values in columns.items()}
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as unfinished, open(unfinished, "wb") as file:
        np.savez_compressed(file, **columns)


def starts(sizes: list[int]) -> np.ndarray:
    """Where each part begins when parts of these sizes stand end to end."""
    return np.cumsum([0, *sizes[:-1]])


def read_credit(run: Path, step: int, tokenizer, problems=(), **known) -> Rollouts:
    """The batch of a step as Rollouts, with the fields that its file holds. `known` are further
    fields."""
    columns = {name: torch.from_numpy(values) for name, values in read_columns(run, step).items()}
    answer_starts = columns["episode_start"]
    tokens = answer_starts.new_tensor([len(columns["token_id"])])
    lengths = torch.diff(answer_starts, append=tokens)
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]

    def frame(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)

    names = ["log_prob", "entropy", "collision", "section", "kind", "advantage"]
    if "true_credit" in columns:
        names.append("true_credit")
    frames = {name: frame(columns[name]) for name in names}
    answers = columns["token_id"].split(lengths.tolist())
    pieces = [token_bytes(tokenizer, ids.tolist()) for ids in answers]
    prompts = columns["prompt_ids"].tensor_split(columns["prompt_start"][1:].long())
    return Rollouts(
        problems=problems, prompt_ids=[prompt.tolist() for prompt in prompts],
        group=columns["group"].long(), ids=frame(columns["token_id"].long()), mask=mask,
        finished=columns["finished"], step=step,
        responses=[b"".join(row).decode(errors="replace") for row in pieces],
        texts=[[piece.decode(errors="replace") for piece in row] for row in pieces],
        scores={part: columns[name] for name, part in SCORES.items()}, **frames, **known)


def read_columns(run: Path, step: int) -> dict[str, np.ndarray]:
    """A step's record as it is: one file, or those of several processes as if they were one."""
    ranks = [rank for of_step, rank in credit_files(run) if of_step == step]
    paths = [credit_path(run, step, rank) for rank in range(max(1, len(ranks)))]
    parts = [read_file(path) for path in paths]
    run_id = run_id_on_record(run)
    for rank, (path, part) in enumerate(zip(paths, parts)):
        found = take_origin(part)
        wanted = {"run_id": run_id, "step": step, "process": [rank, len(parts)]}
        if run_id is None:  # an older version may have left out any of them
            wanted = {name: wanted[name] for name in ("run_id", *found)}
        check_origin(path, found, wanted)
    return joined(parts)


def take_origin(part: dict[str, np.ndarray]) -> dict:
    """Take out of the columns what the file says of its origin."""
    found = {name: part.pop(name).tolist() for name in ORIGIN if name in part}
    if "run_id" in found:
        found["run_id"] = bytes(found["run_id"]).hex()
    if "step" in found:
        [found["step"]] = found["step"]
    return found


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Put the columns of several files end to end. What each file counts from 0 goes on where the
    file before it ended."""
    for name, (counted, *_) in COUNTS.items():
        sizes = [len(part[counted]) for part in parts]
        for part, offset in zip(parts, np.cumsum([0, *sizes])):
            part[name] = (part[name] + offset).astype(part[name].dtype)
    columns = {}
    for name in parts[0]:
        columns[name] = np.concatenate([part[name] for part in parts])
    return columns


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Read and check one credit file; an error names a broken one, or one of another program."""
    try:
        columns = unpacked(path)
    except Exception as error:  # zipfile, zlib and numpy have a dozen kinds of it for damage
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a credit file of this program: {reason}") from None
    return checked(path, columns)


def unpacked(path: Path) -> dict[str, np.ndarray]:
    """The arrays in an .npz file. Each column is read to its end: only then is its checksum
    compared."""
    columns = {}
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            column = np.load(io.BytesIO(file.read(name)), allow_pickle=False)
            columns[name.removesuffix(".npy")] = column
    return columns


def column_of(name: str) -> Column:
    return {**COLUMNS, **OTHERS}.get(name, Column("token", np.float32))


def checked(path: Path, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of a file in the types that they are written in, if all is as it should be."""
    for name in COLUMNS:
        if name not in columns:
            raise UserError(f"{path} is not a credit file of this program: it has no column {name}")
    sizes = {per: columns[name].size for per, name in COUNTED_BY.items()} | OF_FILE
    for name, values in columns.items():
        flaw = flaw_of(column_of(name), values, sizes)
        if not flaw and name in COUNTS:
            counted, least, most = COUNTS[name]
            rises = np.diff(values.astype(np.int64), append=columns[counted].size)
            fits = (values.size and values[0] == 0 and rises[-1] >= 1
                    and rises.min() >= least and rises.max() <= most)
            flaw = "" if fits else "does not fit the other columns"
        if flaw:
            raise UserError(f"{path} is broken: its {name} {flaw}")
    return {name: values.astype(column_of(name).dtype, copy=False)
            for name, values in columns.items()}


def flaw_of(column: Column, values: np.ndarray, sizes: dict[str, int]) -> str:
    """What is wrong with a column by itself; empty if nothing is. Its numbers may have another size
    than they are written with."""
    kind = np.dtype(column.dtype).kind.replace("u", "i")
    if values.dtype.kind.replace("u", "i") != kind or values.dtype.itemsize > 8:
        return f"should hold {WORDS[kind]}, and holds {values.dtype}"
    if values.shape != (sizes[column.per],):
        return "does not fit the other columns"
    if column.may_be_unknown and np.isnan(values).all():
        return ""
    is_right = (values >= column.low) & (values <= column.high)  # NaN fails both comparisons
    return "" if is_right.all() else f"has the value {values[~is_right][0]}"
