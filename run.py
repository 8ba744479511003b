"""What a run is beside its loop: its settings and its folder. A reader of train.py does not need
this file: apart from the settings, nothing here decides what is learned.

    runs/none-grpo-s0/
        code/                         the files that train it, as they are when it begins
        code_after_000025/            the same, if a resumed run goes on with changed files
        config.json, tokenizer.json   the settings; the texts of the tokens
        lock                          held by the process that writes here
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
import operator
import os
import re
import shlex
import shutil
import sqlite3
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from countdown_task import PROMPTS, Task
from grpo import ADVANTAGES, AdamW, Rollouts, place_of
from mitigations import MITIGATIONS
from qwen2_model import Qwen2, UserError, read_json, read_tensors, save_model, small_files

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
    device: str = "cpu"            # where to compute
    out: str = ""                  # folder of the run, by default runs/<its flags>-s<seed>
    resume: str = ""               # go on with the run in this folder
    keywords: dict[str, Any] = field(default_factory=dict)  # of task, weighting and advantage

    def keywords_of(self, owner: Any) -> dict[str, Any]:
        return {name: self.keywords[name] for name in flags_of(owner) if name in self.keywords}


CHOICES: dict[str, Collection[str]] = {
    "mitigation": MITIGATIONS, "advantage": ADVANTAGES, "rescale": ("mean", "none"),
    "device": ("cpu", "cuda"), "prompt": PROMPTS, "numbers": ("2", "3", "4", "3,4")}
LEAST = {"answers": 2} | dict.fromkeys((  # the least values of these settings; of the others 0
    "questions", "epochs", "max_new_tokens", "micro_batch", "eval_tasks"), 1)
CHANGEABLE = {"steps", "threads", "checkpoint_every"}  # no number so far depends on them
UNNAMED = {"mitigation", "advantage", "seed", "out", "micro_batch", "threads", "change_every",
           "checkpoint_every"}  # the name of the folder has the first three anyway
NO_SETTING = {"keywords", "resume", "out", "torch"}  # the others are in config.json


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags; `python -m lab train` has more)")


def add_flags(parser: Parser, flags: dict[str, tuple[Any, str]]) -> None:
    for name, (default, about) in flags.items():
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        parser.add_argument(*spellings, dest=name, type=type(default), default=default,
                            choices=CHOICES.get(name), help=f"{about} ({default})")


@cache  # to find the comments, Python reads the whole file
def flags_of(owner: Any) -> dict[str, tuple[Any, str]]:
    """The flags of Settings and Task, which are their fields, or of a weighting or an advantage,
    which are its keyword-only parameters: the default of each, and the comment beside a field. What
    has another type of default is no flag."""
    about: dict[str, str] = {}
    if owner in (Settings, Task):
        about = dict(re.findall(r"\n    (\w+): .*?  # (.*)", inspect.getsource(owner)))
    flags = {}
    for name, one in inspect.signature(owner).parameters.items():
        is_flag = name in about or one.kind is one.KEYWORD_ONLY
        if is_flag and type(one.default) in (int, float, str):
            flags[name] = one.default, about.get(name, "")
    return flags


def about_functions() -> str:
    """The end of --help: each weighting and each advantage with its flags."""
    text = "--mitigation and --advantage, each with its own flags and their defaults:\n"
    for function in (*MITIGATIONS.values(), *ADVANTAGES.values()):
        words = [f"--{name} {default}" for name, (default, _) in flags_of(function).items()]
        text += f"\n{' '.join([function.__name__, *words])}\n    {function.__doc__ or ''}\n"
    return text


def read_settings(argv: list[str]) -> Settings:
    """The settings of a command line. What is not typed is as in the run that is resumed, or as the
    model's recipe says."""
    parser = Parser(prog="train.py", allow_abbrev=False, epilog=about_functions(),
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, flags_of(Settings) | flags_of(Task))
    if "" in argv or any(word.endswith("=") for word in argv):  # an empty variable: --resume "$RUN"
        parser.error("a flag has no value")
    first = parser.parse_known_args(argv)[0]
    file = Path(first.resume, "config.json") if first.resume else find(first.model) / "recipe.json"
    saved = read_json(file) if first.resume or file.exists() else {}
    words = [f"--{name}={value}" for name, value in saved.items() if name not in NO_SETTING]
    chosen = parser.parse_known_args(words if first.resume else [*words, *argv])[0]
    add_flags(parser, flags_of_functions(chosen.mitigation, chosen.advantage))
    usual = vars(parser.parse_args(words))
    values = vars(parser.parse_args([*words, *argv]))
    typed = {name: value for name, value in values.items() if value != usual[name]}
    if first.resume and (wrong := typed.keys() - CHANGEABLE - {"resume"}):
        parser.error(f"--{min(wrong)} cannot be changed in a resumed run")
    refuse_wrong_values(values)
    out = first.resume or values["out"] or default_folder(values, typed)
    values["out"] = os.path.normpath(out)
    own = {name: values.pop(name) for name in flags_of(Settings)}
    return Settings(**own, keywords=values)


def flags_of_functions(mitigation: str, advantage: str) -> dict[str, tuple[Any, str]]:
    flags: dict[str, tuple[Any, str]] = {}
    for function in (MITIGATIONS[mitigation], ADVANTAGES[advantage]):
        if not inspect.isfunction(function):
            raise UserError(f"{place_of(function)} is no function: `python -m lab train` takes it")
        flags |= flags_of(function)
    return flags


def refuse_wrong_values(values: dict[str, Any]) -> None:
    for name, (default, _) in [*flags_of(Settings).items(), *flags_of(Task).items()]:
        least = LEAST.get(name, 0)
        if not isinstance(default, str) and not least <= values[name] < math.inf:
            raise UserError(f"--{name} {values[name]}: should be {least} or more")
    if values["min_number"] > values["max_number"]:
        raise UserError("--min_number is above --max_number")
    if values["device"] == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no such GPU here")


def default_folder(values: dict[str, Any], typed: dict[str, Any]) -> str:
    """Named by the flags, so that the same command finds it again, as
    runs/none-grpo-learning_rate0.001-s0."""
    words = [("" if name == "model" else name) + Path(str(value)).name
             for name, value in typed.items() if name not in UNNAMED]
    name = "-".join([values["mitigation"], values["advantage"], *words, f"s{values['seed']}"])
    return os.path.relpath(HERE / "runs" / name)


# ------------------------------------------------------------------------------------------ the run
class Run:
    """The folder of a run. Its steps up to `done` are on record."""

    def __init__(self, s: Settings):
        self.settings, self.folder = s, Path(s.out)
        self.stopping = False         # after this step, because of Ctrl-C
        self.success: list[str] = []  # of sampled answers, in each evaluation
        if s.resume:
            self.locked = lock(self.folder)  # before anything in it is read
        elif self.folder.exists():
            raise UserError(f"{s.out} exists already: continue it with --resume "
                            f"{shlex.quote(s.out)}, or name another folder with --out")
        found, made = checkpoints(self.folder), len(read_lines(self.folder / "metrics.jsonl"))
        is_lost = made > 0 and not (self.folder / "checkpoints").exists()
        while found and (damage := damage_of(found[max(found)])):
            is_lost = len(found) == 1
            say(f"{found.pop(max(found))} is damaged, so the run does not go on from it: {damage}")
        if not found and (is_lost or made > (s.checkpoint_every or s.steps)):
            raise UserError(f"{s.out} has {made} steps on record, and no checkpoint to go on from")
        self.done = max(found, default=0)
        self.source = found[self.done] if found else find(s.model)  # of the model

    def begin(self) -> None:
        """Make the folder of a new run, or take an old one back to its last checkpoint."""
        s, path = self.settings, self.folder / "config.json"
        if self.done >= s.steps > 0:
            return say(f"{self.folder} is finished: a larger --steps continues it")
        self.small_files = small_files(self.source)
        config = {name: x for name, x in (vars(s) | s.keywords).items() if name not in NO_SETTING}
        if not s.resume:
            make_run(self.folder, config | {"torch": torch.__version__},
                     self.source / "tokenizer.json", own_files())
            self.locked = lock(self.folder)
            return say(f"{s.questions} problems x {s.answers} answers a step; writing to {s.out}")
        say(f"continuing {self.folder} after step {self.done}")
        forget_after(self.folder, self.done)
        write(path, json.dumps(read_json(path) | config, indent=2))
        if changed := note_changes(self.folder, self.done, own_files()):
            command = ["python", f"{code_folders(self.folder)[-2]}/train.py", "--resume", s.out]
            say(f"changed since then: {', '.join(changed)}. To go on with the files of then: "
                f"{shlex.join(command)}")

    def interrupt(self, *_: object) -> None:
        """What Ctrl-C does: the step is finished, and saved."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        with suppress(OSError):  # not `print`, because Ctrl-C may have interrupted one
            os.write(1, b"\nstopping after this step; Ctrl-C again stops at once\n")

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
        if step == self.done + 1:
            self.start_of_steps = time.monotonic() - line["seconds"]
        took = time.monotonic() - self.start_of_steps
        left = round(took / (step - self.done) * (s.steps - step))
        if step % 20 == 1 or step == self.done + 1:
            say("    step  reward  success  format  length  finished  entropy  grad norm"
                "  tokens/s      left")
        success = "not told" if math.isnan(line["success"]) else f"{line['success']:.1%}"
        say(f"{step:4d}/{s.steps:<4d}{line['reward']:7.3f}{success:>9}"
            f"{line['reward_format']:8.2f}{line['length']:8.1f}{line['finished']:10.1%}"
            f"{line['entropy']:9.3f}  {'  skipped' if norm is None else f'{norm:9.3f}'}"
            f"{line['tokens'] / line['seconds']:10.0f}{left // 60:7d}:{left % 60:02d}")
        if line["skipped"]:
            say(f"          no update: {line['skipped']}")

    def log_evaluation(self, line: dict[str, Any]) -> None:
        append(self.folder / "evaluations.jsonl", line)
        success = ("{success:.1%} (95% interval {success_low:.1%} to {success_high:.1%})"
                   .format(**line))
        say(f"  held-out, {line['mode']:7s} {success}  ({len(line['answer'])} problems, format "
            f"{line['format_mean']:.2f}, length {line['length_mean']:.0f})")
        if line["mode"] == "sampled":
            self.success.append(success)
            for shown in line["shown"]:
                text = printable(f"{shown['problem']}: {shown['text']}")
                say(f"  {'right' if shown['answer'] else 'wrong'}  {text[:300]}")

    def end(self) -> None:
        self.locked.close()
        say(f"done. Everything is in {self.folder}")
        if len(self.success) > 1:
            say(f"  {self.success[0]} -> {self.success[-1]} on the held-out problems")
        say(f"python analyze.py {shlex.quote(str(self.folder))}  makes tables, pictures and a page")


def state_of(model: Qwen2, optimizer: AdamW) -> dict[str, Tensor]:
    """The state of the optimizer, which a resumed run needs in addition to the model."""
    found = {"step": torch.tensor(optimizer.steps)}
    for (name, _), mean, square in zip(model.named_parameters(), optimizer.mean, optimizer.square):
        found |= {f"exp_avg.{name}": mean, f"exp_avg_sq.{name}": square}
    return found


# ----------------------------------------------------------------------------- the code of a run
def own_files() -> dict[str, Path]:
    """The loaded files of this project and of yours, each with its name in a copy. Python's own and
    installed packages are left out."""
    loaded = {Path(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]}
    own = [path.resolve() for path in loaded if path.suffix == ".py" and path.is_file()
           and not path.is_relative_to(Path(os.__file__).parent)
           and not {"site-packages", "dist-packages"} & {*path.parts}]
    return {name_in_copy(path).as_posix(): path for path in sorted(own)}


def name_in_copy(path: Path) -> Path:
    if path.is_relative_to(HERE):
        return path.relative_to(HERE)
    return Path("elsewhere", *path.parts[1:])


def copy_files(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)


def code_folders(run: Path) -> list[Path]:
    """The copies of the code that made a run: one more for each resume with changed files."""
    return [*run.glob("code"), *sorted(run.glob("code_after_*"))]


def note_changes(run: Path, done: int, files: dict[str, Path]) -> list[str]:
    """Copy the files again if others made the steps until `done`. Returns what differs."""
    name = f"code_after_{done:06d}" if done else "code"
    for folder in code_folders(run):
        if folder.name >= name:
            remove(folder)  # no step that is left was made by it
    now = {file: path.read_bytes() for file, path in files.items()}
    before: dict[str, bytes] = {}
    for last in code_folders(run)[-1:]:
        before = {path.relative_to(last).as_posix(): path.read_bytes()
                  for path in last.rglob("*.py")}
    changed = [file for file in sorted(now | before) if now.get(file) != before.get(file)]
    if changed:
        with whole(run / name) as path:
            copy_files(files, path)
    return changed if before else []


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
    """Make a file or a folder whole or not at all: it is written under another name and renamed,
    after all of it is on the disk, where a power cut leaves it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid():08x}.tmp")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        for written in filter(Path.is_file, (unfinished, *unfinished.rglob("*"))):
            number = os.open(written, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
            os.fsync(number)
            os.close(number)
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is not written: {error}") from None
    finally:
        remove(unfinished)


def write(path: Path, text: str) -> None:
    with whole(path) as unfinished:
        unfinished.write_text(text)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has ended; the run goes on
        sys.stdout = open(os.devnull, "w")


def make_run(folder: Path, config: dict[str, Any], tokenizer: Path, files: dict[str, Path]
             ) -> None:
    with whole(folder) as path:
        for name in ("credit", "checkpoints"):
            (path / name).mkdir(parents=True)
        copy_files(files, path / "code")
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


def forget_after(run: Path, step: int) -> None:
    """Remove everything that a stopped run wrote after its last checkpoint."""
    for log in filter(Path.exists, (run / "metrics.jsonl", run / "evaluations.jsonl")):
        kept = [line for line in read_lines(log) if step and line["step"] <= step]
        write(log, "".join(json.dumps(line) + "\n" for line in kept))
    made = *of_steps(run.glob("credit/*.npz")).items(), *of_steps(run.glob("checkpoints/*")).items()
    for path in (*run.rglob(".*.tmp"), *(path for known, path in made if known > step)):
        remove(path)


def append(path: Path, line: dict[str, Any]) -> None:
    known = {name: None if isinstance(value, float) and not math.isfinite(value) else value
             for name, value in line.items()}
    with open(path, "a") as file:
        file.write(json.dumps(known, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without a last one that a kill cut off."""
    texts = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    found = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            found.append(line | {"step": operator.index(line["step"])})  # a whole number
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError(f"{path}, line {number} is damaged: {text[:80]}") from None
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


def damage_of(checkpoint: Path) -> str:
    """What is wrong in a checkpoint's files, as after a power cut; empty if nothing is. A file that
    may not be read is no damage: that error ends the program, and the checkpoint stays."""
    try:
        for path in checkpoint.rglob("*.json"):
            json.loads(path.read_text(encoding="utf-8"))
        for path in checkpoint.rglob("*.safetensors"):
            with safe_open(path, "pt"):
                pass
    except (ValueError, SafetensorError) as error:
        return f"{path.name}: {error}"
    return ""


def find(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    return HERE / name if (HERE / name).exists() and not Path(name).exists() else Path(name)


def printable(text: str) -> str:
    """A line without characters that could steer a terminal: a model may have written it."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


if __name__ == "__main__":
    print(str(__doc__).split("\n\n")[1], "\n\nThe flags: python train.py --help")
