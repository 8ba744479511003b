"""The record of a run, read back: its settings, whether all steps are there, and its credit files,
as columns that are checked or as a whole batch."""
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from lab.engine.errors import UserError, read_json, refuse_pipe
from lab.engine.rollouts import UNSET, Forward, Problem, Rollouts
from lab.engine.tokens import load_tokenizer, token_bytes
from lab.harness.record import (PART, Json, checkpoint_folders, credit_path, digest_of,
                                read_lines)
from run import checkpoints, of_steps

Columns = dict[str, np.ndarray]
# the columns that every file has
NEEDED = ("token_id", "log_prob", "entropy", "collision", "weight", "advantage", "section", "kind",
          "episode_start", "group", "finished", "reward", "prompt_ids", "prompt_start")
# columns with a value for each answer, as the rewards have; others have one for each token
OF_ANSWER = ("episode_start", "group", "finished")
MODES = 2  # lines of evaluations.jsonl for each evaluation: sampled and greedy
# columns of other lengths
OF_OTHERS = ("prompt_ids", "prompt_start", "step")
# entries of config.json that are no settings, which some files here and in analysis/ look into
ENTRIES = {"made_of": dict, "versions": dict, "changed": list, "finished": int}


def run_config(run: Path) -> Json:
    path = run / "config.json"
    config = read_json(path) if path.exists() else {}
    if "mitigation" not in config:
        raise UserError(f"{run} is not a run folder: it has no config.json of a run")
    for name, kind in ENTRIES.items():
        if not isinstance(config.get(name, kind()), kind):
            raise UserError(f"{path}: {name} is {config[name]!r:.80}, and should be another thing")
    return config


def steps_finished(run: Path) -> int:
    """The steps for which nothing is missing: those of the last checkpoint. A run that keeps no
    checkpoints leaves the model of its last step, and then writes their number. Until then it is
    -1."""
    config, kept = run_config(run), [*checkpoints(run)]
    if config.get("checkpoint_every") == 0 and config["steps"] in checkpoint_folders(run):
        kept.append(config["steps"])
    ended: int = config.get("finished", -1)
    return max([ended, *kept])


def is_complete(config: Json, metrics: Sequence[Json], evaluations: Sequence[Json]) -> bool:
    """Whether all steps are on record, and the evaluations after the last one."""
    steps = config["steps"]
    if max((line["step"] for line in metrics), default=0) < steps:
        return False
    if not config.get("eval_every"):
        return True
    return len([line for line in evaluations if line["step"] == steps]) >= MODES


def credit_steps(run: Path) -> list[int]:
    """The steps that have a credit file. Files with other names, as a backup, are left out."""
    return sorted(of_steps(Path(run).glob("credit/*.npz")))


def missing_steps(run: Path, done: int | None = None) -> Iterator[str]:
    """Sentences about what the record lacks up to step `done`, or up to the last one on record. A
    user may have removed the credit files, if it is all of them."""
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl")]
    last = max(steps, default=0) if done is None else done
    steps = [step for step in steps if step <= last]
    if len(steps) != last or steps != sorted(set(steps)):
        yield f"metrics.jsonl does not have one line for each of the steps 1 to {last}, in order"
    files = [step for step in credit_steps(run) if step <= last]
    if files and len(files) != last:
        yield f"not every one of the steps 1 to {last} has a credit file"
    config = run_config(run)
    evaluated = [line["step"] for line in read_lines(run / "evaluations.jsonl")]
    # a run that is being made has not evaluated its last step yet
    due = range(0, last + 1 if done else last, config.get("eval_every") or last + 1)
    if config.get("eval_every"):
        for at in due:
            if evaluated.count(at) != MODES:
                yield f"evaluations.jsonl does not have all lines of step {at}"
                break  # the first one is enough: there may be a damaged line of step 2 ** 40


@contextmanager
def opened_credit(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """The columns of a credit file by name. A column is read when it is asked for."""
    refuse_pipe(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is damaged, or no credit file"
        raise UserError(f"cannot read {path}: {reason}") from None


def has_column(run: Path, step: int, name: str) -> bool:
    with opened_credit(credit_path(run, step)) as file:
        return name in file


def read_columns(run: Path, step: int) -> Columns:
    """The columns of a step's credit file. Files of an earlier version do not say their step."""
    path = credit_path(run, step)
    with opened_credit(path) as file:
        columns = dict(file)
    if wrong := next(damages(columns, step), ""):
        raise UserError(f"{path} is damaged: {wrong}")
    return columns


def damages(columns: Columns, step: int) -> Iterator[str]:
    """What is wrong with the columns of a step's credit file: one that is missing, or of another
    length or step. What is damaged inside the file is noticed by zip itself."""
    for name in NEEDED:
        if name not in columns:
            yield f"it has no column {name}"
    if "step" in columns and columns["step"].tolist() != [step]:
        its_own = ", ".join(map(str, columns["step"])) or "none"
        yield f"its step is {its_own}, so it was copied or renamed"
    answers, tokens = len(columns["episode_start"]), len(columns["token_id"])
    if "own" in columns and not columns["own"].any():
        yield "its column own says that the model wrote no token"
    for name, values in columns.items():
        length = answers if name in OF_ANSWER or name.startswith("reward") else tokens
        if name not in OF_OTHERS and len(values) != length:
            yield f"its column {name} has {len(values)} values instead of {length}"


def read_credit(run: Path, step: int, tokenizer: tokenizers.Tokenizer,
                problems: Sequence[Problem] = (), forward: Forward | None = None,
                generator: torch.Generator | None = None) -> Rollouts:
    """The batch of a step. A file has no problems, no model and no random numbers; a caller that
    needs them passes them."""
    columns = {name: torch.from_numpy(values) for name, values in read_columns(run, step).items()}
    tokens = columns["episode_start"].new_tensor([len(columns["token_id"])])
    lengths = torch.diff(columns["episode_start"], append=tokens)
    written = torch.arange(int(lengths.max()))[None] < lengths[:, None]

    def frame(name: str) -> torch.Tensor:
        values = columns[name]
        return torch.zeros(written.shape, dtype=values.dtype).masked_scatter(written, values)

    texts, answers = [], []
    for ids in columns["token_id"].split(lengths.tolist()):
        pieces = token_bytes(tokenizer, ids.tolist())
        texts.append([piece.decode(errors="replace") for piece in pieces])
        answers.append(b"".join(pieces).decode(errors="replace"))
    prompts = columns["prompt_ids"].tensor_split(columns["prompt_start"][1:].long())
    scores = {name.removeprefix(PART): values for name, values in columns.items()
              if name.startswith("reward")}
    names = ("log_prob", "entropy", "collision", "section", "kind", "advantage")
    frames: dict[str, Any] = {name: frame(name) for name in names}
    frames["true_credit"] = frame("true_credit") if "true_credit" in columns else UNSET
    frames["of_turns"] = frame("paid") if "paid" in columns else UNSET
    mask = frame("own") if "own" in columns else written
    return Rollouts(
        problems=problems, prompt_ids=[prompt.tolist() for prompt in prompts],
        group=columns["group"].long(), ids=frame("token_id").long(), mask=mask, written=written,
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
