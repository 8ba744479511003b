"""What a run is beside its loop: its settings, its folder, its checkpoints and its output. A reader
of train.py does not need this file: apart from the settings, nothing here decides what is learned.

    runs/none-grpo-s0/
        config.json, tokenizer.json   the settings; the texts of the tokens
        lock                          held by the process that writes here
        metrics.jsonl                 a line for each step
        evaluations.jsonl             two lines for each evaluation
        credit/step_000001.npz        the numbers of every token of a step
        checkpoints/step_000025/      a model's folder; the newest two have trainer/

A run can be killed at any time, because a file is written whole or not at all, and of a log the
last line is ignored if it is cut. The lab has its own run, with other parts for the same loop. The
flags: `python train.py --help`.
"""
import argparse
import ast
import hashlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import sqlite3
import sys
import time
import typing
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from countdown_task import END_OF_TURN, PROMPTS, Task
from grpo import ADVANTAGES, AdamW, Learner, Rollouts, place_of
from mitigations import MITIGATIONS
from qwen2_model import (UserError, load_model, load_tokenizer, read_json, read_tensors,
                         refuse_pipe, save_model, small_files)

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------------- the settings
@dataclass
class Settings:
    """Each field is a flag, and its comment is the help. The model's folder may have a recipe.json,
    whose values replace these. What was typed replaces both."""
    model: str = "models/tiny"     # folder of a Qwen2, Qwen2.5 or Qwen3 model
    task: str = "countdown_task"   # the problems and the reward
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
    out: str = ""                  # folder of the run, by default runs/<its flags>-s<seed>
    keywords: dict[str, Any] = field(default_factory=dict)  # of task, weighting and advantage
    typed: dict[str, Any] = field(default_factory=dict)     # the flags that were typed
    # the name of the folder has the first three anyway, and no result depends on the others
    unnamed: typing.ClassVar = {"mitigation", "advantage", "seed", "out", "micro_batch", "threads",
                                "change_every", "checkpoint_every"}

    @property
    def folder(self) -> Path:
        """Named by the flags, so that the same command finds it again, as
        runs/none-grpo-learning_rate0.001-s0."""
        flags = [("" if name in ("model", "task") else name) + Path(str(value)).name
                 for name, value in self.typed.items() if name not in self.unnamed]
        name = "-".join([self.mitigation, self.advantage, *flags, f"s{self.seed}"])
        return Path(self.out or os.path.relpath(HERE / "runs" / re.sub(r"[^\w.+-]", "_", name)))

    def keywords_of(self, function: Any) -> dict[str, Any]:
        return {name: self.keywords[name] for name in flags_of(function)}

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)
                if isinstance(one.default, KINDS)} | self.keywords


KINDS = int, float, str  # types of settings
METHODS = {"mitigation": MITIGATIONS, "advantage": ADVANTAGES}  # they have flags of their own
CHOICES: dict[str, Collection[str]] = {
    "task": ("countdown_task",), **METHODS,
    "rescale": ("mean", "none"), "prompt": PROMPTS, "numbers": ("2", "3", "4", "3,4")}
LEAST = {"answers": 2} | dict.fromkeys((  # the least values of these settings; of the others 0
    "epochs", "questions", "max_new_tokens", "micro_batch", "eval_tasks", "min_number",
    "max_number", "max_target", "max_result"), 1)
MOST = {"threads": 1024, "learning_rate": 10, "clip_low": 1}  # of the others 1e12
CHANGEABLE = {"steps", "threads", "checkpoint_every"}  # no number so far depends on them
NOT_READ = {"out", "versions", "held_out_problems", "functions", "made_of", "changed"}  # no flags


class Unknown(UserError):
    """A command line that these files do not understand; the lab may."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise Unknown(f"{message} (--help lists the flags)")


def read_settings(argv: list[str]) -> tuple[Settings, bool]:
    """The settings of a command line, and whether it resumes a run. The weighting and the advantage
    bring flags of their own. So the line is read once to find these two, and then with their flags.
    """
    argv = [with_underscores(word) for word in argv]
    owners: list[Any] = [Settings, Task]
    if wrong := flags_of(Settings).keys() & flags_of(Task).keys():
        raise UserError(f"Task (countdown_task.py) has a field {min(wrong)}: rename it")
    parser = parser_for(owners)
    typed = vars(parser.parse_known_args(argv)[0])
    if empty := [name for name, value in typed.items() if value == "" and name != "help"]:
        raise UserError(f"--{empty[0]} needs a value")  # also an empty variable: --resume "$RUN"
    resume, topic = typed.get("resume", ""), typed.get("help")
    saved = saved_settings(resume, typed.get("model", Settings.model))
    # what was saved is read as if it had been typed before
    saved_words = [f"--{name}={value}" for name, value in saved.items()]
    chosen = vars(parser.parse_known_args([*saved_words, *argv])[0])
    for axis, choices in METHODS.items():
        name = chosen.get(axis, getattr(Settings, axis))
        function = choices[topic if topic in choices else name]  # --help my_idea
        if not inspect.isfunction(function):
            raise Unknown(f"--{axis} {name} is no function")
        taken = {*NOT_READ, "help", "resume"}.union(*map(flags_of, owners))
        if wrong := taken & flags_of(function).keys():
            raise UserError(f"{place_of(function)} has a keyword {min(wrong)}, but this name is "
                            "taken: rename it")
        owners.append(function)
    parser = parser_for(owners, saved)
    typed, given = vars(parser.parse_args(argv)), vars(parser.parse_args([*saved_words, *argv]))
    if topic is not None:
        say(parser.format_help())
        raise SystemExit(0)
    if resume and (wrong := typed.keys() - CHANGEABLE - {"resume"}):
        raise UserError(f"--{min(wrong)} cannot be changed in a resumed run")
    own = flags_of(Settings)
    values = {name: given.get(name, default) for owner in owners
              for name, (default, _) in flags_of(owner).items()}
    for name, value in values.items():
        least = LEAST.get(name, 0 if name in own else -1e12)
        most = MOST.get(name, 1e12)
        if not isinstance(value, str) and not least <= value <= most:
            raise UserError(f"--{name} {value}: should be from {least:g} to {most:g}")
    typed = {name: value for name, value in values.items() if name in typed}
    keywords = {name: values.pop(name) for name in [*values] if name not in own}
    return Settings(**values | {"out": resume or values["out"]}, keywords=keywords,
                    typed=typed), bool(resume)


def with_underscores(word: str) -> str:
    """A word of a command line, in which --learning-rate becomes --learning_rate."""
    name, sign, value = word.partition("=")
    is_flag = name.startswith("--") and " " not in name
    return "--" + name[2:].replace("-", "_") + sign + value if is_flag else word


def parser_for(owners: Iterable[Any], saved: dict[str, Any] = {}) -> Parser:
    """A parser of the flags of these dataclasses and functions. Its result has only the flags that
    were typed. Its help says which value the others have."""
    parser = Parser(usage="python train.py [--flag value ...]", add_help=False, allow_abbrev=False,
                    description="Train a model with GRPO.", argument_default=argparse.SUPPRESS,
                    epilog="More flags, such as --lora 1, are in the lab: --help all")
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="NAME",
                        choices=["", *MITIGATIONS, *ADVANTAGES],
                        help="this text, with the flags of the weighting or advantage NAME")
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder, if you "
                        f"like with another value of {', '.join(sorted(CHANGEABLE))}")
    for owner in owners:
        group: Any = parser if is_dataclass(owner) else parser.add_argument_group(
            owner.__name__, owner.__doc__)
        for name, (default, about) in flags_of(owner).items():
            text = f"{about} ({saved.get(name, default)})".replace("%", "%%")
            group.add_argument(f"--{name}", type=type(default), choices=CHOICES.get(name),
                               metavar=" | ".join(CHOICES.get(name, ())), help=text)
    return parser


@cache  # to find the comments, Python reads the whole file
def flags_of(owner: Any) -> dict[str, tuple[Any, str]]:
    """The flags of a dataclass (its fields, with their comments) or of a function (its keyword-only
    parameters): the default and the help of each. What has another type of default is no flag."""
    if is_dataclass(owner):
        source = inspect.getsource(owner)  # type: ignore[arg-type]
        about = dict(re.findall(r"\n    (\w+): .*?  # (.*)", source))
        return {one.name: (one.default, about.get(one.name, ""))
                for one in fields(owner) if type(one.default) in KINDS}
    return {name: (one.default, f"of {owner.__name__}")
            for name, one in inspect.signature(owner).parameters.items()
            if one.kind is one.KEYWORD_ONLY and type(one.default) in KINDS}


def saved_settings(resume: str, model: str) -> dict[str, Any]:
    """The settings of the run that is resumed, or those that suit the model."""
    file = Path(resume, "config.json") if resume else find(model) / "recipe.json"
    saved = read_json(file) if resume or file.exists() else {}
    if resume and "mitigation" not in saved:
        raise UserError(f"{resume} is not the folder of a run")
    return {name: value for name, value in saved.items() if name not in NOT_READ}


def refuse_wrong_task(task: Any, s: Settings) -> None:
    """Refuse a changed task whose methods return what no run can use."""
    problems = task.training_problems(s.seed, 1, s.questions)
    held_out = task.held_out_problems(1) if s.eval_every else [None]
    prompts = [task.prompt_for(problem) for problem in problems or []]
    labels = task.label(["1", " +"])
    codes = [[code in range(7) for code in part] for part in labels or []]
    for method, found, is_right in (
            (task.training_problems, problems, isinstance(problems, list) and problems),
            (task.held_out_problems, held_out, isinstance(held_out, list) and held_out),
            (task.prompt_for, prompts, all(isinstance(one, str) and one for one in prompts)),
            (task.label, labels, codes == [[True, True], [True, True]])):
        if not is_right:
            raise UserError(f"{place_of(method)} returns {found!r:.100}, which no run can use")


# ------------------------------------------------------------------------------------------ the run
class Run(Learner):
    """A run. Its steps up to `done` are on record, and `checkpoint` is the model after them."""
    settings: Settings
    changeable: Collection[str] = CHANGEABLE
    has_format = True  # the task scores the format of an answer

    def __init__(self, settings: Settings, is_resumed: bool = False):
        self.settings, self.folder, self.is_new = settings, settings.folder, not is_resumed
        self.start, self.step, self.done = time.monotonic(), 0, 0
        self.step_seconds = 0.0                           # of all steps
        self.evaluation_seconds = dict[str, float]()      # of the last evaluation, by its mode
        self.stopping = False                        # after this step, because of Ctrl-C
        self.evaluations: list[dict[str, Any]] = []  # of sampled answers, for the last line
        self.handlers: dict[int, Any] = {}           # of Ctrl-C, before this run
        self.locked: sqlite3.Connection | None = None
        self.checkpoint: Path | None = None
        self.is_finished = False
        if is_resumed:
            self.locked = lock(self.folder)  # lock the folder before reading it
            self.where_to_go_on()
        elif self.folder.exists():
            raise UserError(f"{self.folder} exists already: continue it with --resume "
                            f"{self.folder}, or name another folder with --out")
        if not self.is_finished:
            self.make_parts()

    def where_to_go_on(self) -> None:
        """Find the newest checkpoint. A run that was stopped before its first checkpoint begins
        again, and loses its record; no other run does."""
        run, found = self.folder, checkpoints(self.folder)
        self.done = max(found, default=0)
        self.checkpoint = found.get(self.done)
        made = len(read_lines(run / "metrics.jsonl"))
        is_removed = not (run / "checkpoints").exists()
        every = read_json(run / "config.json").get("checkpoint_every", 0)
        if not self.done and (is_removed and made or made > every):
            raise UserError(f"{run} has {made} steps on record, and no checkpoint to go on from")
        self.is_finished = self.done > 0 and self.done >= self.settings.steps
        if self.is_finished:
            say(f"{run} is finished: a larger --steps continues it")

    def make_parts(self) -> None:
        """Make the parts that a step uses. In a resumed run they get back their state."""
        s = self.settings
        self.task: Any = Task(**s.keywords_of(Task))
        self.source = self.checkpoint or find(s.model)
        try:
            self.model: Any = load_model(self.source)
            self.tokenizer = load_tokenizer(self.source)
        except UserError as error:  # the lab knows what else a folder may be
            raise Unknown(str(error)) from None
        self.copied_files = small_files(self.source)
        ends = [self.tokenizer.token_to_id(token) for token in END_OF_TURN]
        self.stop = tuple({*self.model.config.eos_token_id, *filter(None, ends)})
        self.reference = load_model(find(s.model)).requires_grad_(False) if s.kl else None
        self.trained = dict(self.model.named_parameters())
        self.optimizer: Any = AdamW(self.trained.values(), s.learning_rate, s.weight_decay)
        torch.set_num_threads(s.threads or min(torch.get_num_threads(), max(
            1, self.model.config.hidden_size // 64)))
        refuse_wrong_task(self.task, s)
        for problem in self.task.training_problems(s.seed, 1, s.questions):
            self.encode(self.task.prompt_for(problem))  # refused before the run has a folder
        if self.checkpoint:
            self.put_back(self.read_state(self.checkpoint))

    def encode(self, prompt: str) -> list[int]:
        s, most = self.settings, self.model.config.max_position_embeddings
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if self.tokenizer.decode(ids, skip_special_tokens=False) != prompt:
            raise UserError(f"the tokenizer of {s.model} cannot spell the prompt {prompt[-80:]!r}: "
                            "take another --prompt, or smaller numbers")
        if len(ids) + s.max_new_tokens > most:
            raise UserError(f"--max_new_tokens {s.max_new_tokens}: the model takes {most} tokens, "
                            f"and a prompt has {len(ids)}")
        return ids

    @cached_property
    def held_out(self) -> list[Any]:
        return list(self.task.held_out_problems(self.settings.eval_tasks))

    # --------------------------------------------------------------- its folder and its checkpoints
    def begin(self) -> None:
        """Make the folder of a new run, or go back to the last checkpoint of an old one. From now
        on Ctrl-C waits for the end of a step."""
        if self.is_new:
            self.make_folder()
            self.locked = lock(self.folder)
        else:
            say(f"continuing {self.folder} after step {self.done}")
            forget_after(self.folder, self.done)
            with whole(self.folder / "config.json") as path:
                path.write_text(json.dumps(self.config_going_on(), indent=2))
        self.handlers = {number: signal.signal(number, self.interrupt)
                         for number in (signal.SIGINT, signal.SIGTERM)}

    def config(self) -> dict[str, Any]:
        """config.json: the settings, a digest of the held-out problems, and one of each definition
        that the run can reach. `lab compare` tells runs apart in which these differ."""
        s = self.settings
        shown = [self.task.show(problem) for problem in self.held_out] if s.eval_every else None
        return s.to_json() | {
            "held_out_problems": digest_of(shown) if shown else None,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "made_of": self.made_of()}

    def made_of(self) -> dict[str, str]:
        s, loaded = self.settings, [getattr(one, "__file__", "") for one in [*sys.modules.values()]]
        files = {path for path in map(Path, filter(None, loaded))
                 if path.parent == HERE and path.name != "analyze.py"}  # a notebook may load it
        texts = texts_of(sorted(files), {"train", "Training", s.mitigation, s.advantage})
        return {label: digest_of(text) for label, text in texts.items()}

    def config_going_on(self) -> dict[str, Any]:
        """config.json of a resumed run. What was recorded first stays, and what is another version
        since then is said, and kept with its digest before."""
        before, now = read_json(self.folder / "config.json"), self.config()
        changed = differing(before.get("made_of", {}), now["made_of"]) if self.done else {}
        if changed:
            named = ", ".join([*changed][:5]) + f" and {len(changed) - 5} more" * (len(changed) > 5)
            say(f"changed since the {self.done} steps were made: {named}. So what follows may not "
                "be what a run that was never stopped gives")
            now["changed"] = [*before.get("changed", []),
                              {"after_step": self.done, "files": changed}]
        kept = (*self.changeable, "made_of", "changed")
        return before | {name: now[name] for name in kept if name in now}

    def make_folder(self) -> None:
        s, size = self.settings, sum(parameter.numel() for parameter in self.model.parameters())
        say(f"{s.model}: {size / 1e6:.2f} million parameters, {torch.get_num_threads()} threads; "
            f"{s.questions} problems x {s.answers} answers a step; writing to {self.folder}")
        if s.eval_every:
            say(f"before the first step, {len(self.held_out)} held-out problems are answered twice")
        make_run(self.folder, self.config(), self.source / "tokenizer.json")

    def interrupt(self, *_: object) -> None:
        if self.stopping or not self.step:  # in the first evaluation there is nothing to save
            raise KeyboardInterrupt
        self.stopping = True
        # not `print`, because Ctrl-C may have interrupted one
        with suppress(OSError):
            os.write(1, b"\nstopping after this step; Ctrl-C again stops at once\n")

    def close(self, failed: bool) -> None:
        """Unlock the folder. If a new run failed in its first step, remove its folder, so that the
        next attempt can have its name."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.is_new and self.locked and failed and not (self.folder / "metrics.jsonl").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.locked:
            self.locked.close()

    def state(self) -> dict[str, Tensor]:
        """The state of the optimizer, which a resumed run needs in addition to the model."""
        found = {"step": torch.tensor(self.optimizer.steps)}
        for name, mean, square in zip(self.trained, self.optimizer.mean, self.optimizer.square):
            found |= {f"exp_avg.{name}": mean, f"exp_avg_sq.{name}": square}
        return found

    def read_state(self, checkpoint: Path) -> dict[str, Tensor]:
        return read_tensors(checkpoint / "trainer" / "state.safetensors")

    def put_back(self, found: dict[str, Tensor]) -> None:
        for name, own in self.state().items():
            own.copy_(found[name])
        self.optimizer.steps = int(found["step"])

    def save(self, step: int) -> None:
        """Write a model's folder, with the trainer's state in it. Then remove this state from all
        but the newest two checkpoints."""
        if not all(one.isfinite().all() for one in self.trained.values()):
            raise UserError("the model has numbers that are not finite: a smaller --learning_rate "
                            f"may help; {self.last_good_model()}")
        with whole(self.folder / "checkpoints" / f"step_{step:06d}") as path:
            self.write_model(path)
            self.write_state(path / "trainer", step)
        for old in [*checkpoints(self.folder).values()][:-2]:
            shutil.rmtree(old / "trainer")

    def write_model(self, path: Path) -> None:
        save_model(self.model, path)
        for name, content in self.copied_files.items():
            (path / name).write_bytes(content)

    def write_state(self, path: Path, step: int) -> None:
        path.mkdir()
        save_file(self.state(), path / "state.safetensors")

    def last_checkpoint(self) -> str:
        return (f"python train.py --resume {shlex.quote(str(self.folder))} goes on from step "
                f"{self.step}")

    def last_good_model(self) -> str:
        """A clause about a way out of an error that a resumed run would make again."""
        if found := checkpoints(self.folder):
            return (f"the last good checkpoint is {found[max(found)]}, from which --model begins a "
                    "new run")
        return "there is no checkpoint before it"

    # ------------------------------------------------------------------ its record and its output
    def record(self, rollouts: Rollouts, weight: Tensor, columns: dict[str, Tensor]) -> None:
        write_credit(self.folder / "credit" / f"step_{rollouts.step:06d}.npz", rollouts, weight,
                     columns)

    def log(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and print one."""
        s, step, norm = self.settings, self.step, line["gradient_norm"]
        append(self.folder / "metrics.jsonl", line | {
            "learning_rate": self.optimizer.learning_rate})
        self.step_seconds += line["seconds"]
        left = round(self.seconds_left())
        if step % 20 == 1 or step == self.done + 1:
            say(f"    step  reward  success{'  format' * self.has_format}  length  finished"
                "  entropy  grad norm  tokens/s      left")
        success = "not told" if line["success"] is None else f"{line['success']:.1%}"
        form = f"{line['reward_format']:8.2f}" if self.has_format else ""
        say(f"{step:4d}/{s.steps:<4d}{line['reward']:7.3f}{success:>9}{form}"
            f"{line['length']:8.1f}{line['finished']:10.1%}{line['entropy']:9.3f}  "
            f"{'  skipped' if norm is None else f'{norm:9.3f}'}"
            f"{line['tokens'] / line['seconds']:10.0f}{left // 60:7d}:{left % 60:02d}")
        if line["skipped"]:
            say(f"          no update: {line['skipped']}")

    def seconds_left(self) -> float:
        """If the other steps take as long as those so far, and the evaluations as the last one."""
        s, step = self.settings, self.step
        left = self.step_seconds / (step - self.done) * (s.steps - step)
        if s.eval_every:
            evaluations = math.ceil(s.steps / s.eval_every) - (step - 1) // s.eval_every
            left += sum(self.evaluation_seconds.values()) * evaluations
        return left

    def log_evaluation(self, line: dict[str, Any], seconds: float) -> None:
        append(self.folder / "evaluations.jsonl", line)
        self.evaluation_seconds[line["mode"]] = seconds
        form = f"format {line['format_mean']:.2f}, " if self.has_format else ""
        say(f"  held-out, {line['mode']:7s} {self.success_of(line)}  ({len(line['answer'])} "
            f"problems, {form}length {line['length_mean']:.0f}, "
            f"finished {line['finished_mean']:.0%}, {seconds:.0f} s)")
        if line["mode"] == "sampled":
            self.evaluations.append(line)
            for shown in line["shown"]:
                text = printable(f"{shown['problem']}: {shown['text']}")
                say(f"  {self.verdict_on(shown)}  {text[:300]}")

    def success_of(self, line: dict[str, Any]) -> str:
        return ("{success:.1%} (95% interval {success_low:.1%} to {success_high:.1%})"
                .format(**line))

    def verdict_on(self, shown: dict[str, Any]) -> str:
        return "right" if shown["answer"] else "wrong"

    def end(self) -> None:
        took = round(time.monotonic() - self.start)
        self.stopping &= self.step < self.settings.steps  # a finished run was not stopped early
        say(self.last_checkpoint() if self.stopping else f"done. Everything is in {self.folder}")
        if len(self.evaluations) > 1:
            first, last = (self.success_of(self.evaluations[place]) for place in (0, -1))
            say(f"  {first} -> {last} on the held-out problems")
        say(f"  {took // 60} min {took % 60:02d} s\n"
            f"python {os.path.relpath(HERE / 'analyze.py')} {self.folder}  makes tables, pictures "
            "and a page")


def digest_of(what: object) -> str:
    return hashlib.sha256(repr(what).encode(errors="surrogatepass")).hexdigest()[:12]


def printable(text: str) -> str:
    """A line without characters that could steer a terminal: a model may have written it."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has ended; the run goes on
        sys.stdout = open(os.devnull, "w")


# -------------------------------------------------------------------------- what a run is made of
def texts_of(files: Iterable[Path], start: Collection[str], without: Collection[str] = (),
             root: Path = HERE) -> dict[str, str]:
    """The text of each definition that a run can reach, as "policy_loss (grpo.py)": what `start`
    names, what these texts name, and so on. Comments and docstrings are left out."""
    known, found = {"", *start}, dict[str, str]()
    parts = [(name, f"{label} ({where})", node)
             for path in files for where in [shown(path, root)]
             for name, label, node in definitions(path.read_text(encoding="utf-8"))]
    waiting = [one for one in parts if one[1] not in without]
    while reached := [one for one in waiting if one[0] in known]:
        waiting = [one for one in waiting if one[0] not in known]
        for _, label, node in reached:
            text, names = text_and_names(node)
            found[label] = found.get(label, "") + text + "\n"
            known |= names
    return found


def shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


@lru_cache(1000)
def definitions(file: str) -> list[tuple[str, str, ast.stmt]]:
    """The statements of a file's text, each with the name by which it is reached and a label. A
    method is reached with its class. What has no name runs whenever the file is imported."""
    found: list[tuple[str, str, ast.stmt]] = []
    for one in ast.parse(file).body:
        if isinstance(one, ast.ClassDef):
            methods = [part for part in one.body if isinstance(part, ast.FunctionDef)]
            found += [(one.name, f"{one.name}.{part.name}", part) for part in methods]
            one.body = [part for part in one.body if part not in methods] or [ast.Pass()]
        target = one.targets[0] if isinstance(one, ast.Assign) else getattr(one, "target", one)
        name = getattr(target, "name", getattr(target, "id", ""))
        is_text = isinstance(getattr(one, "value", None), ast.Constant)
        if name or not (is_text or isinstance(one, ast.Import | ast.ImportFrom | ast.If | ast.Try)):
            found.append((name, name or "when imported", one))
    return found


@lru_cache(10_000)
def text_and_names(node: ast.stmt) -> tuple[str, set[str]]:
    """A text without docstrings, and the names that it uses, as f in f(x) and in grpo.f(x), but not
    those of its local variables."""
    for one in ast.walk(node):
        if isinstance(one, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(one) is not None:
            one.body = one.body[1:] or [ast.Pass()]
    parts = [*ast.walk(node)]
    names = [part for part in parts if isinstance(part, ast.Name)]
    local = {part.arg for part in parts if isinstance(part, ast.arg)}
    local |= {part.id for part in names if isinstance(part.ctx, ast.Store)}
    of_modules = {part.attr for part in parts if isinstance(part, ast.Attribute)
                  and isinstance(part.value, ast.Name) and part.value.id not in local}
    return ast.unparse(node), of_modules | {part.id for part in names} - local


def differing(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """What is another version now, with its digest before; a file also if it is gone. A definition
    that is gone is named no more, so that which named it differs, or the settings do."""
    return {label: digest for label, digest in sorted(before.items())
            if now.get(label, digest if label.endswith(")") else "") != digest}


# ------------------------------------------------------------------------------- files and folders
def write_credit(path: Path, rollouts: Rollouts, weight: Tensor, columns: dict[str, Tensor]
                 ) -> None:
    """Write the numbers of a step as columns. A column has a number for each token, answer after
    answer (`episode_start` says where an answer begins), or for each answer, or each problem."""
    of_tokens = {"token_id": rollouts.ids, "log_prob": rollouts.log_prob, "weight": weight,
                 "entropy": rollouts.entropy, "collision": rollouts.collision,
                 "advantage": rollouts.advantage, **columns, "section": rollouts.section,
                 "kind": rollouts.kind}
    found = {name: values[rollouts.mask].numpy() for name, values in of_tokens.items()}
    found |= {part if part == "reward" else f"reward_{part}": score.numpy()
              for part, score in rollouts.scores.items()}
    lengths, prompts = rollouts.length.tolist(), rollouts.prompt_ids
    found |= {"episode_start": np.cumsum([0, *lengths[:-1]]), "group": rollouts.group.numpy(),
              "finished": rollouts.finished.numpy(), "prompt_ids": np.concatenate(prompts),
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
    remove(unfinished)  # left by a killed process that had this number
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        remove(unfinished)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_run(folder: Path, config: dict[str, Any], tokenizer: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole(folder) as path:
        for name in ("credit", "checkpoints"):
            (path / name).mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, indent=2))
        shutil.copyfile(tokenizer, path / "tokenizer.json")


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


def forget_after(run: Path, step: int) -> None:
    """Remove everything that a stopped run wrote after its last checkpoint."""
    for log in filter(Path.exists, (run / "metrics.jsonl", run / "evaluations.jsonl")):
        kept = [line for line in read_lines(log) if step and line["step"] <= step]
        with whole(log) as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    made = *of_steps(run.glob("credit/*.npz")).items(), *of_steps(run.glob("checkpoints/*")).items()
    for path in (*run.rglob(".*.tmp"), *(path for known, path in made if known > step)):
        remove(path)


def find(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    return HERE / name if (HERE / name).exists() and not Path(name).exists() else Path(name)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"run.py trains nothing: python train.py {shlex.join(sys.argv[1:])}")
    print(str(__doc__).split("\n\n")[1], "\n\nThe flags: python train.py --help")
