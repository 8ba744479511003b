"""Run folders, read: the record that analyze.py reads, with checks of what the lab reads besides,
and a step's credit file as columns or as a whole batch.

analyze.py takes a record as it is. What a record should have is checked here.
"""
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

import analyze
from lab.engine.methods import METHODS
from lab.engine.errors import UserError, did_you_mean
from lab.engine.policy import Policy
from lab.engine.extra_forward import Forward
from lab.engine.rollouts import UNSET, Problem, Rollouts
from lab.engine.tokens import load_tokenizer, token_bytes
from lab.harness.build import load_policy
from lab.harness.flags import Flag, check_value, flags_of
from lab.harness.step_lines import METRICS
from lab.harness.read_record import MODES, run_config
from lab.harness.record import (PART, Json, checkpoint_folders, credit_path, digest_of,
                                find_folder)
from lab.harness.tasks import load_task
from lab.harness.settings import OPTIONS, make_settings

PLAIN_SETTINGS = {"mitigation": "none", "advantage": "grpo", "placebo": "none"}
TEXTS = {"weight_note", "skipped"}  # metrics that are sentences
OF_EVALUATIONS = ("format_mean", "finished_mean")  # numbers
# columns of a credit file that are not of tokens: of answers, of prompts, of the step
OF_ANSWERS = ("episode_start", "group", "finished", "reward")
OF_OTHERS = ("prompt_ids", "prompt_start", "step")
WHOLE = ("token_id", "section", "kind", "episode_start", "group")  # columns of whole numbers


class Run(analyze.Run):
    """A run of the book or of the lab. A metric that a line lacks is None."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        refuse_other_types(folder, run_config(folder))
        super().__init__(folder)
        for damage in self.damages():
            raise UserError(f"{folder}/{damage}")
        self.metrics = [dict.fromkeys(METRICS) | line for line in self.metrics]

    @property
    def steps(self) -> list[int]:
        """Those that have a credit file."""
        return sorted(self.credit)

    @property
    def models(self) -> dict[int, Path]:
        """The folders of the kept models by their step. At 0 is the first model, if not gone."""
        first = find_folder(str(self.config.get("model", "")))
        return {0: first, **checkpoint_folders(self.folder)}

    @property
    def sampled(self) -> dict[int, Path]:
        """For each step that has a credit file, the model that sampled it, if it was kept."""
        return {step: self.models[step - 1] for step in self.steps if step - 1 in self.models}

    def policy(self, step: int, **flags: Any) -> Policy:
        """The model after this step with its task, to be asked. `flags` are those of train.py. A
        run with LoRA keeps whole models, so they need no additions."""
        config = str(self.folder / "config.json")
        settings = make_settings({"config": config, "lora": 0, **flags})
        return load_policy(settings, self.models[step])

    @property
    def is_done(self) -> bool:
        """Whether all steps are on record, and the evaluations after the last one."""
        steps, config = self.config["steps"], self.config
        at_end = [line for line in self.evaluations if line["step"] == steps]
        return self.last_step >= steps and (not config.get("eval_every") or len(at_end) >= MODES)

    def evaluated(self, mode: str = "sampled") -> list[Json]:
        return [line for line in self.evaluations if line["mode"] == mode]

    def shown(self, value: float) -> str:
        """A mean of its measure, as people read it."""
        return f"{value:{self.form}}"

    def damages(self) -> Iterator[str]:
        for name in ("steps", "seed"):
            if not is_number(self.config.get(name)):
                yield f"config.json is damaged: {name} is {self.config.get(name)!r:.80}"
        for number, line in enumerate(self.metrics, 1):
            for name in METRICS.keys() - TEXTS:
                if line.get(name) is not None and not is_number(line[name]):
                    yield (f"metrics.jsonl, line {number} is damaged: {name} is "
                           f"{line[name]!r:.80}")
        for number, line in enumerate(self.evaluations, 1):
            where = f"evaluations.jsonl, line {number} is damaged:"
            for name in OF_EVALUATIONS:
                if not is_number(line.get(name)):
                    yield f"{where} {name} is {line.get(name)!r:.80}"
            if not isinstance(line.get("shown"), list):
                yield f"{where} shown is {line.get('shown')!r:.80}"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < math.inf


def existing(name: str | None = None) -> Path:
    """A run folder as it was typed; without a name the newest in runs/, which is printed."""
    if name:
        path = Path(name)
        if not path.exists():
            hint = did_you_mean(path) or ": python train.py --mitigation none makes a run"
            if (Path("runs") / path).exists():
                hint = f"; did you mean {Path('runs') / path}?"
            raise UserError(f"{path} does not exist{hint}")
        return path
    configs = list(Path("runs").glob("*/config.json"))
    if not configs:
        raise UserError("which run? There is none in runs/ yet: python train.py makes one")
    newest = max(configs, key=lambda path: path.stat().st_mtime).parent
    print(f"{newest}, the newest run")
    return newest


def check_exists(name: str, value: int, known: Sequence[int], whose: object) -> None:
    """Refuse a step, an answer or a token that does not exist."""
    if value not in known:
        raise UserError(f"--{name} {value}: {whose} has {name}s {known[0]} to {known[-1]}")


def refuse_other_types(folder: Path, config: Json) -> None:
    """Refuse a setting of another type than its flag has, as a config.json may have that somebody
    has edited. A user may have changed the type of a method's own flag since the run was made."""
    flags_of_run = flags_of_methods(config)
    for name, flag in OPTIONS.items():
        if name not in flags_of_run and name in config:
            try:  # a method may have gone since
                check_value(name, config[name], replace(flag, choices=()))
            except UserError as error:
                raise UserError(f"{folder / 'config.json'}: {error}") from None


def share_seen_before(run: Run) -> float:
    """The share of the training problems that the model had seen before, by their prompts in the
    credit files. A few may repeat by luck, many where a list of problems is read again. Problems
    that all have one prompt, as games with a secret, differ in something else: none is repeated."""
    prompts: list[bytes] = []
    for step in run.steps:
        columns = read_columns(run.folder, step)
        ends = columns["prompt_start"][1:]
        prompts += [ids.tobytes() for ids in np.split(columns["prompt_ids"], ends)]
    different = len(set(prompts))
    return 1 - different / len(prompts) if different > 1 else 0.0


def task_named(config: Mapping[str, Any]) -> str:
    """The module of a run's task; empty if it is not on record. No setting of a run of the book
    names its only task."""
    return str(config.get("task", "countdown_task" if "numbers" in config else ""))


def task_of(config: Mapping[str, object]) -> type | None:
    """The class of a run's task; None if the task is not on record, or its module is not there any
    more."""
    try:
        return load_task(task_named(config)) if task_named(config) else None
    except (UserError, OSError):  # a name that no file can have
        return None


def flags_of_methods(config: Mapping[str, object]) -> dict[str, Flag]:
    """The flags of a run's weighting and advantage, if these exist here."""
    flags: dict[str, Flag] = {}
    for axis, choices in METHODS.items():
        name = str(config.get(axis))  # the defaults have no flags
        if name in choices:
            flags |= flags_of(choices[name])
    return flags


def read_columns(run: Path, step: int) -> dict[str, np.ndarray]:
    """The columns of a step's credit file."""
    path = credit_path(run, step)
    columns = analyze.columns_in(path)
    for wrong in damages_of(columns):
        raise UserError(f"{path} is damaged: {wrong}")
    return columns


def damages_of(columns: Mapping[str, np.ndarray]) -> Iterator[str]:
    """What is wrong with the columns."""
    for name in {*OF_ANSWERS, *analyze.COLUMNS} - columns.keys():
        yield f"it has no column {name}"
    for name, values in columns.items():
        is_of_answers = name in OF_ANSWERS or name.startswith("reward")
        length = len(columns["episode_start" if is_of_answers else "token_id"])
        is_right = values.shape == (length,) and values.dtype.kind in (
            "iu" if name in WHOLE else "biuf")
        if name not in OF_OTHERS and not is_right:
            yield f"its column {name} is {values.dtype} {values.shape} instead of {length} numbers"
    if "own" in columns and not columns["own"].any():
        yield "its column own says that the model wrote no token"
    for name in ("prompt_ids", "prompt_start"):
        if name not in columns:
            yield f"it has no column {name}"
        if columns[name].ndim != 1 or columns[name].dtype.kind not in "iu":
            yield f"its column {name} is {columns[name].dtype} {columns[name].shape}"
    starts, end = columns["prompt_start"], len(columns["prompt_ids"])
    if not len(starts) or starts[0] or (np.diff([*starts, end]) < 0).any():
        yield "its prompts do not begin one after the other"
    if not {*columns["group"].tolist()} <= {*range(len(starts))}:
        yield f"its column group names problems beyond its {len(starts)} prompts"


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
    path, known = Path(run) / "tokenizer.json", run_config(run).get("made_of", {})
    of_model = [digest for name, digest in known.items() if name.endswith("tokenizer.json")]
    if of_model and path.is_file() and digest_of(path) not in of_model:
        raise UserError(f"{path} is not the tokenizer that the run was made with: its tokens would "
                        "be shown as other words")
    return load_tokenizer(run)
