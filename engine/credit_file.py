"""One file a step: what every token was given. Written by `write_credit`, read and checked by `read_columns`."""
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from countdown_task import KINDS, SECTIONS
from engine.errors import UserError
from engine.tokens import token_bytes
from engine.rollouts import Rollouts


def credit_path(run: Path, step: int, rank: int = 0) -> Path:
    """A run of several processes has one file each, of its own questions."""
    return Path(run) / "credit" / f"step_{step:06d}{f'_rank{rank}' if rank else ''}.npz"


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor, **more: torch.Tensor) -> None:
    """One step's record: a value a token (answers end to end), an answer, or a question. See the README. `more` are
    further (B, T) by name: the true credit, where it was measured."""
    mask, lengths = rollouts.mask, rollouts.length.cpu().numpy()

    def flat(values, dtype=np.float32):
        return values[mask].cpu().numpy().astype(dtype)

    def starts(sizes):
        return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)

    columns = {
        "token_id": flat(rollouts.ids, np.int32), "log_prob": flat(rollouts.log_prob),
        "entropy": flat(rollouts.entropy), "collision": flat(rollouts.collision),
        "weight": flat(weight), "advantage": flat(rollouts.advantage),
        "section": flat(rollouts.section, np.uint8), "kind": flat(rollouts.kind, np.uint8),
        **{name: flat(values) for name, values in more.items()},
        "episode_start": starts(lengths), "group": rollouts.group.cpu().numpy().astype(np.int32),
        "finished": rollouts.finished.cpu().numpy(),
        "reward": rollouts.reward.cpu().numpy(),
        **{f"reward_{name}": rollouts.scores[name].cpu().numpy() for name in ("format", "answer", "reasoning")},
        "prompt_ids": np.concatenate(rollouts.prompt_ids).astype(np.int32),
        "prompt_start": starts([len(prompt) for prompt in rollouts.prompt_ids])}
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        np.savez_compressed(file, **columns)
    os.replace(unfinished, path)


def read_credit(run: Path, step: int, tokenizer, problems=(), **known) -> Rollouts:
    """The batch that was written, as far as it is on record."""
    columns = read_columns(run, step)
    ends = np.append(columns["episode_start"][1:], len(columns["token_id"]))
    lengths = ends - columns["episode_start"]
    mask = torch.arange(int(lengths.max()))[None] < torch.from_numpy(lengths)[:, None]

    def frame(name, dtype=None):
        values = torch.from_numpy(columns[name])
        return torch.zeros(mask.shape, dtype=dtype or values.dtype).masked_scatter(mask, values.to(dtype or values.dtype))

    pieces = [token_bytes(tokenizer, row.tolist()) for row in np.split(columns["token_id"], ends[:-1])]
    return Rollouts(
        problems=problems, prompt_ids=[row.tolist() for row in np.split(columns["prompt_ids"], columns["prompt_start"][1:])],
        responses=[b"".join(row).decode(errors="replace") for row in pieces],
        texts=[[piece.decode(errors="replace") for piece in row] for row in pieces], mask=mask,
        group=torch.from_numpy(columns["group"]).long(), finished=torch.from_numpy(columns["finished"]),
        ids=frame("token_id", torch.long),
        **{name: frame(name) for name in ("log_prob", "entropy", "collision", "section", "kind", "advantage")},
        true_credit=frame("true_credit") if "true_credit" in columns else None, step=step,
        scores={name.removeprefix("reward_"): torch.from_numpy(columns[name])
                for name in ("reward", "reward_format", "reward_answer", "reward_reasoning")}, **known)
PER_TOKEN = {  # and between what their values lie, rounding allowed for
    "token_id": (0, 2 ** 24), "log_prob": (-np.inf, 1e-3), "entropy": (-1e-3, np.inf), "collision": (0, 1.001), "weight": (0, np.inf),
    "advantage": (-np.inf, np.inf), "section": (0, len(SECTIONS) - 1), "kind": (0, len(KINDS) - 1)}
PER_ANSWER = ("episode_start", "group", "finished", "reward", "reward_format", "reward_answer", "reward_reasoning")


def read_columns(run: Path, step: int) -> dict[str, np.ndarray]:
    """A step's record as it is: one file, or those of several ranks as if they were one."""
    found = len(list((Path(run) / "credit").glob(f"step_{step:06d}_rank*.npz")))
    return put_together([read_file(credit_path(run, step, rank)) for rank in range(1 + found)])


def put_together(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What is counted from 0 in each file (tokens, questions, the prompts' tokens) goes on where the last one ended."""
    for name, counts in (("episode_start", "token_id"), ("group", "prompt_start"), ("prompt_start", "prompt_ids")):
        ends = np.cumsum([0, *(len(part[counts]) for part in parts)])
        parts = [{**part, name: (part[name] + end).astype(part[name].dtype)} for part, end in zip(parts, ends)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_file(path: Path) -> dict[str, np.ndarray]:
    """One credit file, checked: a broken one, or one of something else, is named."""
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = dict(file)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not a credit file of this program: {error}") from None
    except ValueError:  # numpy's words would recommend what is never done here: to load it all the same
        raise UserError(f"{path} is not a credit file of this program: it holds other things than numbers") from None
    missing = [name for name in (*PER_TOKEN, *PER_ANSWER, "prompt_ids", "prompt_start") if name not in columns]
    if missing:
        raise UserError(f"{path} is not a credit file of this program: it has no column {missing[0]}")
    tokens, answers, starts = len(columns["token_id"]), len(columns["group"]), columns["episode_start"]
    uneven = [name for names, count in ((PER_TOKEN, tokens), (PER_ANSWER, answers)) for name in names if columns[name].shape != (count,)]
    if uneven or not answers or starts[0] != 0 or np.any(np.diff(np.append(starts, tokens)) < 1):
        raise UserError(f"{path} is broken: its {uneven[0] if uneven else 'episode_start'} does not fit the other columns")
    for name, (low, high) in {**PER_TOKEN, "group": (0, len(columns["prompt_start"]) - 1), "reward": (-np.inf, np.inf)}.items():
        values = columns[name]
        wrong = values[~(np.isfinite(values) & (values >= low) & (values <= high))]
        if len(wrong):
            raise UserError(f"{path} is broken: its {name} has the value {wrong[0]}")
    return columns
