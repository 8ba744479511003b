"""One file a step: what every token was given. docs/credit_files.md lists the columns.

`write_credit` writes a file, `read_columns` reads and checks it, `read_credit` makes a batch of it.

Values stand end to end: one for each token, answer after answer, then one for each answer, then one
for each question. `episode_start` says where in the tokens an answer begins.
"""
import os
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from countdown_task import KINDS, SECTIONS
from engine.errors import UserError
from engine.rollouts import Rollouts
from engine.tokens import token_bytes

PER_TOKEN = {  # and the range of their values, rounding allowed for
    "token_id": (0, 2 ** 24), "log_prob": (-np.inf, 1e-3), "entropy": (-1e-3, np.inf),
    "collision": (0, 1.001), "weight": (0, np.inf), "advantage": (-np.inf, np.inf),
    "section": (0, len(SECTIONS) - 1), "kind": (0, len(KINDS) - 1)}
SCORES = {"reward": "reward", "reward_format": "format", "reward_answer": "answer",
          "reward_reasoning": "reasoning"}  # column: part of the score
PER_ANSWER = ("episode_start", "group", "finished", *SCORES)
PER_QUESTION = ("prompt_ids", "prompt_start")
COUNTED_FROM_0 = {  # in each file: a column of numbers, and the column whose entries it counts
    "episode_start": "token_id", "group": "prompt_start", "prompt_start": "prompt_ids"}


def credit_path(run: Path, step: int, rank: int = 0) -> Path:
    """A run of several processes has one file each, of its own questions."""
    suffix = f"_rank{rank}" if rank else ""
    return Path(run) / "credit" / f"step_{step:06d}{suffix}.npz"


def credit_steps(run: Path) -> list[int]:
    """The steps that have a credit file."""
    steps = [step_of(path) for path in Path(run).glob("credit/step_*.npz")]
    return sorted(step for step in steps if step)


def step_of(path: Path) -> int | None:
    """100 of step_000100 or step_000100.npz; None for a name that people gave, a backup say."""
    match = re.fullmatch("step_([0-9]+)", path.stem)
    return int(match[1]) if match else None


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor,
                 **more: torch.Tensor) -> None:
    """Write a batch's record. `more` are further (B, T) by name, the true credit of a probe say."""
    per_token = {"log_prob": rollouts.log_prob, "entropy": rollouts.entropy,
                 "collision": rollouts.collision, "weight": weight,
                 "advantage": rollouts.advantage, **more}
    labels = {"section": rollouts.section, "kind": rollouts.kind}
    columns = {"token_id": flat(rollouts.ids, rollouts, np.int32)}
    columns |= {name: flat(values, rollouts, np.float32) for name, values in per_token.items()}
    columns |= {name: flat(values, rollouts, np.uint8) for name, values in labels.items()}
    columns["episode_start"] = starts(rollouts.length.tolist())
    columns["group"] = rollouts.group.cpu().numpy().astype(np.int32)
    columns["finished"] = rollouts.finished.cpu().numpy()
    columns |= {name: rollouts.scores[part].cpu().numpy() for name, part in SCORES.items()}
    columns["prompt_ids"] = np.concatenate(rollouts.prompt_ids).astype(np.int32)
    columns["prompt_start"] = starts([len(prompt) for prompt in rollouts.prompt_ids])
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        np.savez_compressed(file, **columns)
    os.replace(unfinished, path)


def flat(values: torch.Tensor, rollouts: Rollouts, dtype) -> np.ndarray:
    """(B, T) -> the values of all tokens, answer after answer."""
    return values[rollouts.mask].cpu().numpy().astype(dtype)


def starts(sizes: list[int]) -> np.ndarray:
    """Where each part begins when parts of these sizes stand end to end."""
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)


def read_credit(run: Path, step: int, tokenizer, problems=(), **known) -> Rollouts:
    """The batch that was written, as far as it is on record. `known` are further fields of it."""
    columns = {name: torch.from_numpy(values) for name, values in read_columns(run, step).items()}
    begins = columns["episode_start"]
    lengths = torch.diff(begins, append=begins.new_tensor([len(columns["token_id"])]))
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
        texts=[decoded(row) for row in pieces],
        scores={part: columns[name] for name, part in SCORES.items()}, **frames, **known)


def decoded(pieces: list[bytes]) -> list[str]:
    return [piece.decode(errors="replace") for piece in pieces]


def read_columns(run: Path, step: int) -> dict[str, np.ndarray]:
    """A step's record as it is: one file, or those of several processes as if they were one."""
    others = len(list((Path(run) / "credit").glob(f"step_{step:06d}_rank*.npz")))
    return joined([read_file(credit_path(run, step, rank)) for rank in range(1 + others)])


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Put files together: what each counts from 0 goes on where the last one ended."""
    for name, counted in COUNTED_FROM_0.items():
        sizes = [len(part[counted]) for part in parts]
        for part, offset in zip(parts, np.cumsum([0, *sizes])):
            part[name] = (part[name] + offset).astype(part[name].dtype)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Read and check one credit file; an error names a broken one, or one of another program."""
    other_file = f"{path} is not a credit file of this program"
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = dict(file)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{other_file}: {error}") from None
    except ValueError:  # numpy's own message recommends allow_pickle
        raise UserError(f"{other_file}: it holds other things than numbers") from None
    for name in (*PER_TOKEN, *PER_ANSWER, *PER_QUESTION):
        if name not in columns:
            raise UserError(f"{other_file}: it has no column {name}")
    check_sizes(path, columns)
    check_ranges(path, columns)
    return columns


def check_sizes(path: Path, columns: dict[str, np.ndarray]) -> None:
    tokens, answers = len(columns["token_id"]), len(columns["group"])
    wanted = dict.fromkeys(PER_TOKEN, tokens) | dict.fromkeys(PER_ANSWER, answers)
    for name, count in wanted.items():
        if columns[name].shape != (count,):
            raise UserError(f"{path} is broken: its {name} does not fit the other columns")
    begins = columns["episode_start"]
    if not answers or begins[0] != 0 or np.any(np.diff(np.append(begins, tokens)) < 1):
        raise UserError(f"{path} is broken: its episode_start does not fit the other columns")


def check_ranges(path: Path, columns: dict[str, np.ndarray]) -> None:
    questions = len(columns["prompt_start"])
    ranges = {**PER_TOKEN, "group": (0, questions - 1), "reward": (-np.inf, np.inf)}
    for name, (low, high) in ranges.items():
        values = columns[name]
        wrong = values[~(np.isfinite(values) & (values >= low) & (values <= high))]
        if len(wrong):
            raise UserError(f"{path} is broken: its {name} has the value {wrong[0]}")
