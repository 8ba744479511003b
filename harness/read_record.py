"""The credit files of a run, read back: columns that are checked, or a whole batch."""
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch

from engine.errors import UserError, refuse_pipe
from engine.rollouts import UNSET, Forward, Problem, Rollouts
from engine.tokens import KINDS, SECTIONS, load_tokenizer, token_bytes
from harness.record import (PART, checkpoint_folders, credit_path, credit_steps, digest_of,
                            run_config)

Columns = dict[str, np.ndarray]
# the columns that every file has
NEEDED = ("token_id", "log_prob", "entropy", "collision", "weight", "advantage", "section", "kind",
          "episode_start", "group", "finished", "reward", "prompt_ids", "prompt_start")
# columns with a value for each answer, as the rewards have; others have one for each token
OF_ANSWER = ("episode_start", "group", "finished")
# columns of other lengths
OF_OTHERS = ("prompt_ids", "prompt_start", "step", "trainer_step")
# columns of indices, and the column that each of them points into
INDEX_INTO = {"episode_start": "token_id", "prompt_start": "prompt_ids", "group": "prompt_start"}


def read_columns(run: Path, step: int) -> Columns:
    """The columns of a step's credit file. Files of an earlier version do not say their step."""
    path = credit_path(run, step)
    columns = read_file(path)
    if "step" in columns and columns["step"].tolist() != [step]:
        raise UserError(f"{path} is of step {columns['step'][0]}: it was copied or renamed")
    return columns


def read_file(path: Path) -> Columns:
    refuse_pipe(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = dict(file)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from None
    if wrong := next(damages(columns), ""):
        raise UserError(f"{path} is damaged: {wrong}")
    return columns


def damages(columns: Columns) -> Iterator[str]:
    """What is wrong with the columns of a credit file: one that is missing, of another type or
    length, or that points beyond what it points into."""
    for name in NEEDED:
        if name not in columns:
            yield f"it has no column {name}"
    for name, values in columns.items():
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            yield f"its column {name} is no list of numbers"
    answers, tokens = len(columns["episode_start"]), len(columns["token_id"])
    if not answers or not tokens or not len(columns["prompt_start"]):
        yield "it has no answers"
    for name, values in columns.items():
        length = answers if name in OF_ANSWER or name.startswith("reward") else tokens
        if name not in OF_OTHERS and len(values) != length:
            yield f"its column {name} has {len(values)} values instead of {length}"
    yield from wrong_codes(columns)


def wrong_codes(columns: Columns) -> Iterator[str]:
    """Indices that are not in order, or point beyond what they point into, and unknown codes."""
    for name, target in INDEX_INTO.items():
        values, last = columns[name], len(columns[target])
        if name == "group":
            is_right = values.min() >= 0 and values.max() < last
        else:  # where each part begins
            is_right = values[0] == 0 and (np.diff(values) >= 0).all() and values[-1] <= last
        if not is_right:
            yield f"its column {name} points beyond {target}, or is not in order"
    if min(columns["token_id"].min(), columns["prompt_ids"].min(initial=0)) < 0:
        yield "it has tokens below 0"
    for name, count in (("section", len(SECTIONS)), ("kind", len(KINDS))):
        if columns[name].max() >= count:
            yield f"its column {name} has codes above {count - 1}"


def read_credit(run: Path, step: int, tokenizer: tokenizers.Tokenizer,
                problems: Sequence[Problem] = (), forward: Forward | None = None,
                generator: torch.Generator | None = None) -> Rollouts:
    """The batch of a step. A file has no problems, no model and no random numbers; a caller that
    needs them passes them."""
    columns = {name: torch.from_numpy(values) for name, values in read_columns(run, step).items()}
    tokens = columns["episode_start"].new_tensor([len(columns["token_id"])])
    lengths = torch.diff(columns["episode_start"], append=tokens)
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]

    def frame(name: str) -> torch.Tensor:
        values = columns[name]
        return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)

    texts, answers = [], []
    for ids in columns["token_id"].split(lengths.tolist()):
        pieces = token_bytes(tokenizer, ids.tolist())
        texts.append([piece.decode(errors="replace") for piece in pieces])
        answers.append(b"".join(pieces).decode(errors="replace"))
    prompts = columns["prompt_ids"].tensor_split(columns["prompt_start"][1:].long())
    scores = {name.removeprefix(PART): values for name, values in columns.items()
              if name.startswith("reward")}
    names = ("log_prob", "entropy", "collision", "section", "kind", "advantage")
    frames = {name: frame(name) for name in names}
    frames["true_credit"] = frame("true_credit") if "true_credit" in columns else UNSET
    return Rollouts(
        problems=problems, prompt_ids=[prompt.tolist() for prompt in prompts],
        group=columns["group"].long(), ids=frame("token_id").long(), mask=mask,
        finished=columns["finished"], step=step, forward=forward,
        generator=generator or torch.Generator(), answers=answers, texts=texts, scores=scores,
        **frames)


def read_tokenizer(run: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a run, which is that of the model that it began with."""
    path, known = Path(run) / "tokenizer.json", run_config(run).get("made_of")
    if known and path.is_file() and digest_of(path) not in known.values():
        raise UserError(f"{path} is not the tokenizer that the run was made with: its tokens would "
                        "be shown as other words")
    return load_tokenizer(run)


def sampling_models(run: Path, first: str) -> dict[int, str]:
    """For each step that has a credit file, the folder of the model that sampled it. Steps whose
    model was not kept are left out. `first` is the model that the run began with."""
    after = {0: first}  # the model after each step
    for step, folder in checkpoint_folders(run).items():
        after[step] = str(folder)
    return {step: after[step - 1] for step in credit_steps(run) if step - 1 in after}
