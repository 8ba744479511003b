"""One file a step: what every token was given. docs/what_a_run_leaves.md lists the columns.

`write_credit` writes a file, harness/credit_reading.py reads and checks it. Each process of a run
writes a file of its own problems; they are read as one.

Values stand end to end: one for each token, answer after answer, then one for each answer, then one
for each problem. `episode_start` says where in the tokens an answer begins.
"""
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from engine import processes
from engine.tokens import KINDS, SECTIONS
from engine.rollouts import Rollouts
from harness.files import LARGEST, paths_in, whole_file

MOST = 2 ** 31 - 1


class Column(NamedTuple):
    per: str                  # what it has one value of: token, answer, problem, prompt token
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
    "prompt_ids": Column("prompt token", np.int32, 0, 2 ** 24),
    "prompt_start": Column("problem", np.int32, 0, MOST)}
OTHERS = {  # columns that not every file has
    "ratio": Column("token", np.float32, low=0),           # where a batch had several updates
    "true_credit": Column("token", np.float32),            # where a probe measured it
    "true_credit_se": Column("token", np.float32, low=0),
    "run_id": Column("byte of run_id", np.uint8, 0, 255),  # these three: where a file belongs
    "step": Column("file", np.int32, 0, MOST),
    "process": Column("rank and count", np.int32, 0, MOST),
    "trainer_step": Column("file", np.int32, 0, MOST)}     # another trainer's own number of it
PART = "reward_"  # begins the column of a part of the reward: reward_answer, reward_format, ...


def credit_path(run: Path, step: int, rank: int = 0) -> Path:
    """The file of a step. In a run of several processes each writes one, of its own problems."""
    suffix = f"_rank{rank}" if rank else ""
    return Path(run) / "credit" / f"step_{step:06d}{suffix}.npz"


def credit_files(run: Path) -> list[tuple[int, int]]:
    """Step and rank of every credit file. Names that people gave, of a backup say, do not count."""
    found = [re.fullmatch("step_([0-9]+)(_rank([0-9]+))?[.]npz", path.name)
             for path in paths_in(Path(run) / "credit")]
    return [(int(match[1]), int(match[3] or 0)) for match in found if match]


def checkpoint_folders(run: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by their step, oldest first."""
    folders = [(step_of(path), path) for path in paths_in(Path(run) / "checkpoints")]
    return dict(sorted((step, path) for step, path in folders if step))


def step_of(checkpoint: Path) -> int:
    """100 of step_000100; 0 for a name that people gave, of a backup say."""
    match = re.fullmatch("step_([0-9]+)", checkpoint.name)
    return int(match[1]) if match else 0


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor,
                 origin: Mapping[str, ArrayLike] = {}, **more: torch.Tensor) -> None:
    """Write a batch's record. `origin`: which run and step, or less; `more`: further (B, T)."""
    tokens = {"token_id": rollouts.ids, "log_prob": rollouts.log_prob, "entropy": rollouts.entropy,
              "collision": rollouts.collision, "weight": weight, "advantage": rollouts.advantage,
              **more, "section": rollouts.section, "kind": rollouts.kind}
    columns: dict[str, ArrayLike] = {name: values[rollouts.mask].cpu().numpy()
                                     for name, values in tokens.items()}
    columns |= {column_of_part(part): s.cpu().numpy() for part, s in rollouts.scores.items()}
    columns |= {
        "episode_start": starts(rollouts.length.tolist()), "group": rollouts.group.cpu().numpy(),
        "finished": rollouts.finished.cpu().numpy(),
        "prompt_ids": np.concatenate(rollouts.prompt_ids),
        "prompt_start": starts([len(prompt) for prompt in rollouts.prompt_ids]),
        "process": [processes.rank(), processes.count()],
        **{name: np.atleast_1d(value) for name, value in origin.items()}}
    if "run_id" in origin:
        columns["run_id"] = list(bytes.fromhex(str(origin["run_id"])))
    typed: dict[str, ArrayLike] = {name: np.asarray(values, column_of(name).dtype)
                                   for name, values in columns.items()}
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as unfinished, open(unfinished, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **typed)


def starts(sizes: list[int]) -> NDArray[np.int64]:
    """Where each part begins when parts of these sizes stand end to end."""
    return np.cumsum([0, *sizes[:-1]])


def column_of_part(part: str) -> str:
    return part if part == "reward" else PART + part


def column_of(name: str) -> Column:
    other = COLUMNS["reward"] if name.startswith(PART) else Column("token", np.float32)
    return {**COLUMNS, **OTHERS}.get(name, other)
