"""What a run is beside its loop: its settings and its folder. A reader of train.py does not need
this file: apart from the settings, nothing here decides what is learned.

    runs/none-grpo-s0/
        code/                         the files that trained it, as they were
        config.json, tokenizer.json   the settings; the texts of the tokens
        metrics.jsonl                 a line for each step
        evaluations.jsonl             two lines for each evaluation
        credit/step_000001.npz        the numbers of every token of a step
        checkpoints/step_000025/      a model's folder; the newest two have trainer/

A file is written whole or not at all, and of a log a cut last line is ignored. So a run can be
killed at any time. The flags: `python train.py --help`.
"""
import argparse
import inspect
import json
import math
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from countdown_task import PROMPTS, Task
from grpo import ADVANTAGES, AdamW, Rollouts, place_of
from mitigations import MITIGATIONS
from qwen2_model import (Qwen2, UserError, read_json, read_tensors, refuse_pipe, save_model,
                         small_files)

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------------- the settings
@dataclass
class Settings:
    """Each field is a flag, and its comment is the help. The model's folder may have a recipe.json,
    whose values replace these. What was typed replaces both."""
    model: str = "models/tiny"     # folder of a Qwen2, Qwen2.5 or Qwen3 model
    mitigation: str = "none"       # the weighting: how much each token counts
    advantage: str = "grpo"        # how advantages are computed from rewards
    rescale: str = "mean"          # mean: a batch's weights get a mean of 1. none: they do not
    epochs: int = 1                # updates from each batch, all with the same advantages
    clip_low: float = 0.2          # with --epochs: clip the ratio at 1 minus this
    clip_high: float = 0.28        # with --epochs: clip the ratio at 1 plus this
    kl: float = 0.0                # coefficient of the KL divergence from the initial model
    steps: int = 100               # steps of training. With 0 the model is only evaluated
    questions: int = 8             # problems in each step
    answers: int = 8               # answers to each problem
    max_new_tokens: int = 512      # the most tokens of an answer
    learning_rate: float = 5e-6    # learning rate of AdamW
    weight_decay: float = 0.0      # weight decay of AdamW
    micro_batch: int = 8           # answers in memory at a time; changes nothing but rounding
    max_grad_norm: float = 1.0     # larger gradients are scaled down to this norm; 0 means never
    seed: int = 0                  # seed of the training problems and of sampling
    eval_every: int = 25           # steps between two evaluations; 0 means never
    eval_tasks: int = 500          # held-out problems in an evaluation
    change_every: int = 10         # steps between measurements of the tokens' change; 0 means never
    checkpoint_every: int = 25     # steps between two checkpoints; 0 means only at the end
    threads: int = 0               # CPU threads; 0 means one for every 64 hidden units
    device: str = "cpu"            # where to compute: cpu or cuda
    out: str = ""                  # folder of the run, by default runs/<its flags>-s<seed>
    keywords: dict[str, Any] = field(default_factory=dict)  # of task, weighting and advantage
    resume: str = ""

    def keywords_of(self, owner: Any) -> dict[str, Any]:
        return {name: self.keywords[name] for name in flags_of(owner) if name in self.keywords}


CHOICES: dict[str, Collection[str]] = {
    "mitigation": MITIGATIONS, "advantage": ADVANTAGES, "rescale": ("mean", "none"),
    "prompt": PROMPTS, "numbers": ("2", "3", "4", "3,4")}
AT_LEAST_1 = {"questions", "answers", "epochs", "max_new_tokens", "micro_batch", "eval_tasks"}
CHANGEABLE = {"steps", "threads", "checkpoint_every"}  # no number so far depends on them
UNNAMED = {"mitigation", "advantage", "seed", "out", "micro_batch", "threads", "change_every",
           "checkpoint_every"}  # the name of the folder has the first three anyway


def flags_of(owner: Any) -> dict[str, tuple[Any, str]]:
    """The flags of a dataclass (its fields, with their comments) or of a function (its keyword-only
    parameters): the default and the help of each."""
    if is_dataclass(owner):
        source = inspect.getsource(owner)  # type: ignore[arg-type]
        about = dict(re.findall(r"\n    (\w+): .*?  # (.*)", source))
        found = {one.name: (one.default, about.get(one.name, "")) for one in fields(owner)}
    else:
        found = {name: (one.default, f"of {owner.__name__}")
                 for name, one in inspect.signature(owner).parameters.items()
                 if one.kind is one.KEYWORD_ONLY}
    return {name: flag for name, flag in found.items()
            if type(flag[0]) in (int, float, str) and name != "resume"}


def read_settings(argv: list[str]) -> Settings:
    """The settings of a command line. What is not typed is as in the run that is resumed, or as the
    model's recipe says. Weightings and advantages have flags of their own."""
    parser = argparse.ArgumentParser(
        prog="train.py", allow_abbrev=False, description="Train a model with GRPO.",
        epilog="python -m lab train has more flags, such as --lora and --device")
    parser.add_argument("--resume", default="", metavar="RUN", help="continue the run in this "
                        f"folder, perhaps with another value of {', '.join(sorted(CHANGEABLE))}")
    methods, known = [*MITIGATIONS.values(), *ADVANTAGES.values()], set[str]()
    owners: list[Any] = [Settings, Task, *methods]
    for owner in owners:
        group: Any = parser if is_dataclass(owner) else parser.add_argument_group(
            owner.__name__, owner.__doc__)
        for name, (default, about) in flags_of(owner).items():
            if owner in methods and name in known:
                continue  # two weightings have an epsilon
            if owner in methods and name in {"help", "resume"} | vars(Settings()).keys():
                raise UserError(f"{place_of(owner)} has a keyword {name}, but this name is taken: "
                                "rename it")
            known |= {name} if owner in methods else set()
            group.add_argument(
                f"--{name}", *{f"--{name.replace('_', '-')}"} - {f"--{name}"}, dest=name,
                type=type(default), default=None if owner in methods else default,
                choices=CHOICES.get(name), help=f"{about} ({default})".replace("%", "%%"))
    typed, _ = parser.parse_known_args(argv)
    if "" in argv or any(word.endswith("=") for word in argv):  # an empty variable: --resume "$RUN"
        parser.error("a flag has no value")
    file = Path(typed.resume, "config.json") if typed.resume else find(typed.model) / "recipe.json"
    saved = read_json(file) if typed.resume or file.exists() else {}
    parser.set_defaults(**{name: x for name, x in saved.items() if name in vars(typed)})
    values = vars(parser.parse_args(argv))
    changed = {name: value for name, value in values.items() if value != parser.get_default(name)}
    if values["resume"] and (wrong := changed.keys() - CHANGEABLE - {"resume"}):
        parser.error(f"--{min(wrong)} cannot be changed in a resumed run")
    if low := [name for name, x in values.items()
               if name in flags_of(Settings) and isinstance(x, int | float)
               and not x >= (name in AT_LEAST_1)]:
        parser.error(f"--{low[0]} {values[low[0]]}: should be {int(low[0] in AT_LEAST_1)} or more")
    words = [name * (name != "model") + Path(str(value)).name for name, value in changed.items()
             if name not in UNNAMED]
    name = "-".join([values["mitigation"], values["advantage"], *words, f"s{values['seed']}"])
    values["out"] = values["resume"] or values["out"] or os.path.relpath(HERE / "runs" / name)
    is_own = flags_of(Settings).keys() | {"resume"}
    own = {name: values.pop(name) for name in [*values] if name not in is_own}
    s = Settings(**values, keywords={name: x for name, x in own.items() if x is not None})
    taken = [Task, MITIGATIONS[s.mitigation], ADVANTAGES[s.advantage]]
    if wrong := s.keywords.keys() - {name for owner in taken for name in flags_of(owner)}:
        parser.error(f"--{min(wrong)} is no flag of --mitigation {s.mitigation}")
    return s


# ------------------------------------------------------------------------------------------ the run
class Run:
    """The folder of a run. Its steps up to `done` are on record."""

    def __init__(self, s: Settings):
        self.settings, self.folder = s, Path(s.out)
        found = checkpoints(self.folder)
        self.done = max(found) if s.resume and found else 0
        made = len(read_lines(self.folder / "metrics.jsonl"))
        if s.resume and not found and made >= (s.checkpoint_every or s.steps):
            raise UserError(f"{s.resume} has {made} steps on record, and no checkpoint to go on "
                            "from")
        self.source = found[self.done] if self.done else find(s.model)  # of the model
        is_empty = (self.folder / "code").exists() and not read(self.folder / "metrics.jsonl")
        if self.folder.exists() and not s.resume and not is_empty:  # an attempt that failed
            raise UserError(f"{self.folder} exists already: continue it with --resume "
                            f"{self.folder}, or name another folder with --out")

    def begin(self) -> None:
        """Make the folder of a new run, or take an old one back to its last checkpoint."""
        s = self.settings
        self.small_files = small_files(self.source)
        if self.folder.exists():
            self.locked = lock(self.folder)  # until this process ends
        if not s.resume:
            remove(self.folder)
            config = vars(s) | s.keywords | {"torch": torch.__version__}
            make_run(self.folder, {name: x for name, x in config.items() if name not in NOT_KEPT},
                     self.source / "tokenizer.json")
            self.locked = lock(self.folder)
            return
        print(f"continuing {self.folder} after step {self.done}")
        if changed := note_changes(self.folder, self.done):
            print(f"changed since then: {', '.join(changed)} (the old ones are in code/)")
        forget_after(self.folder, self.done)

    def save(self, step: int, model: Qwen2, optimizer: AdamW) -> None:
        """Write a model's folder, with the optimizer's state in it. Then remove this state from all
        but the newest two checkpoints."""
        with whole(self.folder / "checkpoints" / f"step_{step:06d}") as path:
            save_model(model, path)
            for name, content in self.small_files.items():
                (path / name).write_bytes(content)
            (path / "trainer").mkdir()
            save_file(state_of(model, optimizer), path / "trainer/state.safetensors")
        for old in [*checkpoints(self.folder).values()][:-2]:
            shutil.rmtree(old / "trainer")

    def restore(self, model: Qwen2, optimizer: AdamW) -> None:
        if self.done:
            found = read_tensors(self.source / "trainer/state.safetensors")
            for name, own in state_of(model, optimizer).items():
                own.copy_(found[name])
            optimizer.steps = int(found["step"])

    def log(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and print one."""
        append(self.folder / "metrics.jsonl", line)
        s, step, norm = self.settings, line["step"], line["gradient_norm"]
        if step % 20 == 1 or step == self.done + 1:
            print("    step  reward  success  format  length  finished  entropy  grad norm"
                  "  tokens/s")
        print(f"{step:4d}/{s.steps:<4d}{line['reward']:7.3f}{line['success']:9.1%}"
              f"{line['reward_format']:8.2f}{line['length']:8.1f}{line['finished']:10.1%}"
              f"{line['entropy']:9.3f}  {'  skipped' if norm is None else f'{norm:9.3f}'}"
              f"{line['tokens'] / line['seconds']:10.0f}", flush=True)
        if line["skipped"]:
            print(f"          no update: {line['skipped']}")

    def log_evaluation(self, line: dict[str, Any]) -> None:
        append(self.folder / "evaluations.jsonl", line)
        print("  held-out, {mode:7s} {success:.1%} (95% interval {success_low:.1%} to "
              "{success_high:.1%})  (format {format_mean:.2f}, length {length_mean:.0f})"
              .format(**line), flush=True)
        for shown in line["shown"] if line["mode"] == "sampled" else ():
            text = printable(f"{shown['problem']}: {shown['text']}")
            print(f"  {'right' if shown['answer'] else 'wrong'}  {text[:300]}")

    def record(self, rollouts: Rollouts, weight: Tensor, columns: dict[str, Tensor]) -> None:
        write_credit(self.folder / "credit" / f"step_{rollouts.step:06d}.npz", rollouts, weight,
                     columns)


NOT_KEPT = {"keywords", "resume", "out"}  # of the settings, in config.json


def code_in_use() -> list[Path]:
    """The files of this project that are loaded."""
    files = {Path(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]}
    return sorted(path for path in files if path.is_relative_to(HERE)
                  and not path.is_relative_to(sys.prefix))


def note_changes(run: Path, done: int) -> list[str]:
    """Copy what is another version than in the run's code/. Returns its names."""
    changed = [path for path in code_in_use()
               if path.read_bytes() != read(run / "code" / path.relative_to(HERE))]
    copy_all(changed, run / f"code_after_{done:06d}")
    return [path.name for path in changed]


def state_of(model: Qwen2, optimizer: AdamW) -> dict[str, Tensor]:
    """The state of the optimizer, which a resumed run needs in addition to the model."""
    found = {"step": torch.tensor(optimizer.steps)}
    for (name, _), mean, square in zip(model.named_parameters(), optimizer.mean, optimizer.square):
        found |= {f"exp_avg.{name}": mean, f"exp_avg_sq.{name}": square}
    return found


# ------------------------------------------------------------------------------- files and folders
def write_credit(path: Path, rollouts: Rollouts, weight: Tensor, columns: dict[str, Tensor]
                 ) -> None:
    """Write the numbers of a step as columns. A column has a number for each token, answer after
    answer (`episode_start` says where an answer begins), or for each answer, or each problem."""
    of_tokens = {"token_id": rollouts.ids, "log_prob": rollouts.log_prob, "weight": weight,
                 "entropy": rollouts.entropy, "collision": rollouts.collision,
                 "advantage": rollouts.advantage, **columns, "section": rollouts.section,
                 "kind": rollouts.kind}
    found = {name: values[rollouts.mask].cpu().numpy() for name, values in of_tokens.items()}
    found |= {part if part == "reward" else f"reward_{part}": score.cpu().numpy()
              for part, score in rollouts.scores.items()}
    lengths, prompts = rollouts.length.tolist(), rollouts.prompt_ids
    found |= {"episode_start": np.cumsum([0, *lengths[:-1]]), "group": rollouts.group.cpu().numpy(),
              "finished": rollouts.finished.cpu().numpy(), "prompt_ids": np.concatenate(prompts),
              "prompt_start": np.cumsum([0, *map(len, prompts[:-1])]),
              "step": np.array([rollouts.step])}
    small: dict[str, Any] = {name: x.astype(np.int32) if x.dtype == np.int64 else x
                             for name, x in found.items()}
    with whole(path) as unfinished, open(unfinished, "wb") as file:
        np.savez_compressed(file, **small)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Make a file or a folder whole or not at all: it is written under another name and renamed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid():08x}.tmp")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        remove(unfinished)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def make_run(folder: Path, config: dict[str, Any], tokenizer: Path) -> None:
    with whole(folder) as path:
        for name in ("credit", "checkpoints"):
            (path / name).mkdir(parents=True)
        copy_all(code_in_use(), path / "code")
        (path / "config.json").write_text(json.dumps(config, indent=2))
        shutil.copy(tokenizer, path / "tokenizer.json")


def lock(folder: Path) -> sqlite3.Connection:
    """Keep other processes out of the folder until this one closes what is returned, or ends. It is
    the lock of an empty SQLite file. Every system has it, and releases it also after kill -9, which
    a file that merely says *locked* would survive."""
    try:
        opened = sqlite3.connect(folder / "lock", timeout=0, isolation_level=None)
        opened.execute("PRAGMA journal_mode=OFF")  # no second file
        opened.execute("BEGIN EXCLUSIVE")
    except sqlite3.DatabaseError as error:
        raise UserError(f"another process writes to {folder}, or the lock cannot be opened: "
                        f"{error}") from None
    return opened


def copy_all(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        (folder / file.relative_to(HERE)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.relative_to(HERE))


def forget_after(run: Path, step: int) -> None:
    """Remove everything that a stopped run wrote after its last checkpoint."""
    for log in filter(Path.exists, (run / "metrics.jsonl", run / "evaluations.jsonl")):
        kept = [line for line in read_lines(log) if step and line["step"] <= step]
        with whole(log) as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    made = *of_steps(run.glob("credit/*.npz")).items(), *of_steps(run.glob("checkpoints/*")).items()
    for path in (*run.rglob(".*.tmp"), *(path for known, path in made if known > step)):
        remove(path)


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def append(path: Path, line: dict[str, Any]) -> None:
    known = {name: None if isinstance(value, float) and not math.isfinite(value) else value
             for name, value in line.items()}
    with open(path, "a") as file:
        file.write(json.dumps(known, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without a last one that a kill cut off."""
    refuse_pipe(path)
    texts = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    found = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            has_step = type(line["step"]) is int
        except (ValueError, TypeError, KeyError, RecursionError):
            has_step = False
        if not has_step:
            raise UserError(f"{path}, line {number} is damaged: {text[:80]}")
        found.append(line)
    return found


def of_steps(paths: Iterable[Path]) -> dict[int, Path]:
    """Credit files or checkpoints by their step, without those of other names, such as a backup
    step_000006.best."""
    return {int(path.name[5:].removesuffix(".npz")): path for path in sorted(paths)
            if re.fullmatch(r"step_[0-9]+(\.npz)?", path.name)}


def checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints from which a run can go on."""
    return {step: path for step, path in of_steps(run.glob("checkpoints/*")).items()
            if all((path / name).exists() for name in ("config.json", "trainer/state.safetensors"))}


def find(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    return HERE / name if (HERE / name).exists() and not Path(name).exists() else Path(name)


def printable(text: str) -> str:
    """A line without characters that could steer a terminal: a model may have written it."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


if __name__ == "__main__":
    print(str(__doc__).split("\n\n")[1], "\n\nThe flags: python train.py --help")
