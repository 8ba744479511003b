"""Credit files read: `read_columns` checks those of a step, `read_credit` makes a batch of them."""
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.errors import UserError
from engine.rollouts import NOTHING, Forward, Problem, Rollouts
from engine.tokens import token_bytes
from harness.credit_file import COLUMNS, MOST, PART, Column, column_of, credit_files, credit_path
from harness.files import reading
from harness.identity import check_origin, run_id_on_record

Columns = dict[str, np.ndarray]
WORDS = {"i": "whole numbers", "f": "floating point numbers", "b": "yes or no"}  # by kind of dtype
ORIGIN = ("run_id", "step", "process")
OF_FILE = {"byte of run_id": 8, "file": 1, "rank and count": 2}  # Column.per -> how many values
COUNTED_BY = {  # Column.per -> the column that has one entry for each of them
    "token": "token_id", "answer": "group", "problem": "prompt_start", "prompt token": "prompt_ids"}
COUNTS = {  # a column that counts from 0 -> whose entries it counts; how far it rises each time
    "episode_start": ("token_id", 1, MOST), "prompt_start": ("prompt_ids", 1, MOST),
    "group": ("prompt_start", 0, 1)}


def credit_steps(run: Path) -> list[int]:
    """The steps that have credit files. Rank 0 writes last: until then a step is being written."""
    return sorted(step for step, rank in credit_files(run) if rank == 0)


def read_credit(run: Path, step: int, tokenizer: Tokenizer, problems: Sequence[Problem] = (),
                forward: Forward | None = None, generator: torch.Generator | None = None
                ) -> Rollouts:
    """The batch of a step; a file holds neither problems nor a model nor random numbers."""
    columns = {name: torch.from_numpy(values) for name, values in read_columns(run, step).items()}
    answer_starts = columns["episode_start"]
    tokens = answer_starts.new_tensor([len(columns["token_id"])])
    lengths = torch.diff(answer_starts, append=tokens)
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


def read_columns(run: Path, step: int) -> Columns:
    """A step's record as it is: one file, or those of several processes as if they were one."""
    ranks = [rank for of_step, rank in credit_files(run) if of_step == step]
    paths = [credit_path(run, step, rank) for rank in range(max(1, len(ranks)))]
    parts = [read_file(path) for path in paths]
    run_id = run_id_on_record(run)
    for rank, (path, part) in enumerate(zip(paths, parts)):
        found = {name: part.pop(name).squeeze().tolist() for name in ORIGIN if name in part}
        if "run_id" in found:
            found["run_id"] = bytes(found["run_id"]).hex()
        wanted = {"run_id": run_id, "step": step, "process": [rank, len(parts)]}
        if run_id is None:  # an older version may have left out any of them
            wanted = {name: wanted[name] for name in ("run_id", *found)}
        check_origin(path, found, wanted)
    for name, (counted, *_) in COUNTS.items():  # what each file counts from 0 goes on
        sizes = [len(part[counted]) for part in parts]
        for part, offset in zip(parts, np.cumsum([0, *sizes])):
            part[name] = (part[name] + offset).astype(part[name].dtype)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_file(path: Path) -> Columns:
    with reading(path) as opened:
        try:
            file = zipfile.ZipFile(opened)  # each column to its end: then its checksum is compared
            columns = {name.removesuffix(".npy"): np.load(io.BytesIO(file.read(name)),
                                                          allow_pickle=False)
                       for name in file.namelist()}
        except Exception as error:  # zipfile, zlib and numpy have a dozen kinds of it for damage
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(f"{path} is not a credit file of this program: {reason}") from None
    return checked(path, columns)


def checked(path: Path, columns: Columns) -> Columns:
    """The columns of a file in the types that they are written in, if all is as it should be."""
    for name in (name for name in COLUMNS if name not in columns):
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
    """What is wrong with a column by itself; its numbers may have another size than as written."""
    kind = np.dtype(column.dtype).kind.replace("u", "i")
    if values.dtype.kind.replace("u", "i") != kind or values.dtype.itemsize > 8:
        return f"should hold {WORDS[kind]}, and holds {values.dtype}"
    if values.shape != (sizes[column.per],):
        return "does not fit the other columns"
    if column.may_be_unknown and np.isnan(values).all():
        return ""
    is_right = (values >= column.low) & (values <= column.high)  # NaN fails both comparisons
    return "" if is_right.all() else f"has the value {values[~is_right][0]}"
