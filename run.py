"""A run: its settings and their flags, its parts, its folder, its checkpoints, and its output.
train.py is the loop, and nothing in this file decides what the model learns.

    runs/none-grpo-s0/
        config.json, tokenizer.json   the settings; the texts of the tokens
        lock                          held by the process that writes here
        metrics.jsonl                 a line for each step
        evaluations.jsonl             two lines for each evaluation
        credit/step_000001.npz        the numbers of every token of a step
        checkpoints/step_000025/      a model's folder; the newest two have trainer/

Every file is written whole or not at all, so a run can be killed at any time. The lab has its own
run, with other parts for the same loop.
"""
import argparse
import ast
import difflib
import fcntl
import hashlib
import inspect
import json
import math
import operator
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import textwrap
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from countdown_task import END_OF_TURN, Problem, Task, option
from grpo import ADVANTAGES, TWICE, AdamW, Metrics, Rollouts, update, update_with_change
from mitigations import MITIGATIONS, credit_of, errors_of, place_of, rescaled_weight
from qwen2_model import (UserError, generate, load_model, load_tokenizer, read_json,
                         read_tensors, save_model, spelling)

HERE = Path(__file__).resolve().parent
AXES: dict[str, dict[str, Any]] = {  # choices by name, which may have flags of their own
    "task": {"countdown_task": Task}, "mitigation": MITIGATIONS, "advantage": ADVANTAGES}
# entries of config.json that are no settings
NOT_SETTINGS = {"versions", "held_out_problems", "functions", "model_config"}
# settings that a resumed run may change, because no number so far depends on them
CHANGEABLE = {"steps", "threads", "checkpoint_every"}
TYPES = {int: "a whole number", float: "a finite number", str: "a text", bool: "yes or no"}


@dataclass
class Settings:
    """Each field is a flag. Defaults < the model folder's recipe.json < what was typed."""
    model: str = option("models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model")
    task: str = option("countdown_task", "the problems and the reward")
    mitigation: str = option("none", "the weighting: how much each token counts")
    advantage: str = option("grpo", "how advantages are computed from rewards")
    rescale: str = option("mean", "mean: the weights of a batch are multiplied by one number, so "
                          "that their mean is 1. none: they are not", choices=("mean", "none"))
    epochs: int = option(1, "updates from each batch, all with the same advantages", least=1)
    clip_low: float = option(0.2, "with --epochs: clip the ratio at 1 minus this", least=0, most=1)
    clip_high: float = option(0.28, "with --epochs: clip the ratio at 1 plus this", least=0)
    kl: float = option(0.0, "coefficient of the KL divergence from the initial model", least=0)
    steps: int = option(100, "steps of training. With 0 the model is only evaluated", least=0)
    questions: int = option(8, "problems in each step", least=1)
    answers: int = option(8, "answers to each problem", least=2)
    max_new_tokens: int = option(512, "the most tokens of an answer", least=1)
    learning_rate: float = option(5e-6, "learning rate of AdamW", above=0, most=10)
    weight_decay: float = option(0.0, "weight decay of AdamW", least=0)
    micro_batch: int = option(8, "answers that an update computes at a time. This changes memory, "
                              "speed and rounding, and nothing else", least=1)
    max_grad_norm: float = option(1.0, "larger gradients are scaled down to this norm; 0 means "
                                  "never", least=0)
    seed: int = option(0, "seed of the training problems and of sampling", least=0)
    eval_every: int = option(25, "steps between two evaluations; 0 means never", least=0)
    eval_tasks: int = option(500, "held-out problems in an evaluation", least=1)
    change_every: int = option(10, "steps between two measurements of each token's change, its "
                               "log-prob after the step minus before; 0 means never", least=0)
    checkpoint_every: int = option(25, "steps between two checkpoints; 0 means only at the end",
                                   least=0)
    threads: int = option(0, "CPU threads; 0 means one for every 64 hidden units", least=0,
                          most=1024)
    out: str | None = option(None, "folder of the run, by default runs/<its flags>-s<seed>")
    keywords: dict[str, Any] = field(default_factory=dict)  # of task, weighting and advantage
    typed: dict[str, Any] = field(default_factory=dict)     # the flags that were typed
    unnamed: typing.ClassVar = {"mitigation", "advantage", "seed", "micro_batch", "change_every",
                                *CHANGEABLE} - {"steps"}  # not in the name of a folder

    @property
    def folder(self) -> Path:
        """The same command names the same folder: runs/none-grpo-learning_rate0.001-s0."""
        if self.out:
            return Path(self.out)
        flags = [("" if name in ("model", "task") else name) + Path(str(value)).name
                 for name, value in self.typed.items() if name not in self.unnamed]
        name = "-".join([self.mitigation, self.advantage, *flags, f"s{self.seed}"])
        return from_here("runs") / re.sub(r"[^\w.+-]", "_", name)

    def keywords_of(self, function: Any) -> dict[str, Any]:
        return {name: self.keywords[name] for name in flags_of(function)}

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in flags_of(type(self))} | self.keywords


class Run:
    """A run. Its first `done` steps are recorded, up to `checkpoint`."""
    has_format = True  # the task scores the format of an answer
    changeable = CHANGEABLE

    def __init__(self, settings: Settings, is_resumed: bool = False):
        self.settings, self.folder, self.is_new = settings, settings.folder, not is_resumed
        self.start, self.step, self.done = time.monotonic(), 0, 0
        self.stopping = False                        # after this step, because of Ctrl-C
        self.evaluations: list[dict[str, Any]] = []  # of sampled answers, for the last line
        self.handlers: dict[int, Any] = {}           # of Ctrl-C, before this run
        self.locked: typing.IO[str] | None = None
        self.checkpoint: Path | None = None
        self.is_finished = False
        if is_resumed:
            self.locked = lock(self.folder)  # lock the folder before reading it
            self.where_to_go_on()
            refuse_holes(self.folder, self.done)
        if not self.is_finished:
            self.make_parts()

    def where_to_go_on(self) -> None:
        """Find the newest checkpoint. Only a run that was stopped before its first checkpoint
        begins again and loses its whole record."""
        run, found = self.folder, checkpoints(self.folder)
        self.done = max(found, default=0)
        self.checkpoint = found.get(self.done)
        made = len(read_lines(run / "metrics.jsonl"))
        is_removed = not (run / "checkpoints").exists()
        every = read_json(run / "config.json").get("checkpoint_every", 0)
        if not self.done and (is_removed and made or made > every):
            raise UserError(f"{run} has {made} steps on record, and no checkpoint to go on from")
        self.is_finished = self.done >= self.settings.steps > 0
        if self.is_finished:
            say(f"{run} is finished: a larger --steps continues it")

    def make_parts(self) -> None:
        """Make the parts that a step uses. In a resumed run they get back their state."""
        s, checkpoint = self.settings, self.checkpoint
        self.task: Any = Task(**s.keywords_of(Task))
        self.source = checkpoint or find(s.model)
        self.model: Any = load_model(self.source)
        self.tokenizer = load_tokenizer(self.source)
        ends = [self.tokenizer.token_to_id(token) for token in END_OF_TURN]
        self.stop = tuple({*self.model.config.eos_token_id, *filter(None, ends)})
        self.reference = load_model(find(s.model)).requires_grad_(False) if s.kl else None
        self.trained = {name: parameter for name, parameter in self.model.named_parameters()
                        if parameter.requires_grad}
        self.optimizer: Any = AdamW(self.trained.values(), s.learning_rate, s.weight_decay)
        self.advantage = self.method(ADVANTAGES[s.advantage])    # rollouts -> (B, T)
        self.weighting = self.method(MITIGATIONS[s.mitigation])  # rollouts -> (B, T)
        torch.set_num_threads(s.threads or min(torch.get_num_threads(), max(
            1, self.model.config.hidden_size // 64)))
        self.look_at_prompts()
        if checkpoint:
            self.put_back(self.read_state(checkpoint))

    def look_at_prompts(self) -> None:
        """Refuse problems that cannot be asked, before the run has a folder."""
        s = self.settings
        try:
            problems = self.task.training_problems(s.seed, 1, s.questions)
        except ValueError as error:
            raise UserError(str(error)) from None
        for problem in problems:
            with errors_of(self.task.prompt_for):
                prompt = self.task.prompt_for(problem)
            self.encode(prompt)

    def method(self, function: Callable[..., Tensor]) -> Callable[[Rollouts], Tensor]:
        """A weighting or an advantage, with the values of its flags. It is called twice in each
        of the first two steps and at each checkpoint."""
        s, keywords = self.settings, self.settings.keywords_of(function)

        def credit(rollouts: Rollouts) -> Tensor:
            is_saved = s.checkpoint_every and rollouts.step % s.checkpoint_every == 0
            return credit_of(function, rollouts, bool(is_saved or rollouts.step <= self.done + 2),
                             **keywords)
        return credit

    def steps(self) -> Iterator[int]:
        for self.step in range(self.done + 1, self.settings.steps + 1):
            yield self.step

    def batch(self, step: int) -> Rollouts:
        """New problems and new answers to them, with their rewards."""
        s = self.settings
        problems = self.task.training_problems(s.seed, step, s.questions)
        return self.ask(problems, s.answers, generator_of("train", s.seed, step))

    def ask(self, problems: list[Problem], answers: int, generator: torch.Generator,
            greedy: bool = False) -> Rollouts:
        """Sample answers to each problem, score them, and label their tokens."""
        prompts = [self.encode(self.task.prompt_for(problem)) for problem in problems]
        sampled = generate(self.model, prompts, answers, self.settings.max_new_tokens, self.stop,
                           generator, greedy)
        if not sampled.log_prob.isfinite().all():
            raise UserError(f"the model's probabilities are not finite. {self.last_checkpoint()}")
        # answers to the first problem come first: 0 0 ... 1 1 ...
        group = torch.arange(len(problems)).repeat_interleave(answers)               # (B,)
        section, kind = torch.zeros(2, *sampled.mask.shape, dtype=torch.uint8)       # (B, T)
        texts, answered, scores = [], [], []
        for row, length in enumerate(sampled.mask.sum(1).tolist()):
            ids = sampled.ids[row, :length].tolist()
            texts.append([spelling(self.tokenizer, token) for token in ids])
            answered.append(self.tokenizer.decode(ids, skip_special_tokens=False))
            with errors_of(self.task.score):
                scores.append(self.task.score(problems[row // answers], answered[row]))
            codes = torch.tensor(self.task.label(texts[row]), dtype=torch.uint8)
            section[row, :length], kind[row, :length] = codes
        return Rollouts(problems, prompts, group, **sampled._asdict(), texts=texts,
                        answers=answered, section=section, kind=kind, scores=columns_of(scores))

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

    def weigh(self, rollouts: Rollouts) -> tuple[Tensor, Metrics]:
        """The weight (B, T) of each token in the loss."""
        s = self.settings
        return rescaled_weight(self.weighting(rollouts), rollouts, s.rescale,
                               place_of(MITIGATIONS[s.mitigation]))

    def update(self, rollouts: Rollouts, weight: Tensor, is_measured: bool
               ) -> tuple[Metrics, dict[str, Tensor]]:
        return (update_with_change if is_measured else update)(self, rollouts, weight)

    def state(self) -> dict[str, Tensor]:
        """The state of the optimizer, which a resumed run needs in addition to the model."""
        found = {"step": torch.tensor(self.optimizer.steps)}
        for name, mean, square in zip(self.trained, self.optimizer.mean, self.optimizer.square):
            found |= {f"exp_avg.{name}": mean, f"exp_avg_sq.{name}": square}
        return found

    def put_back(self, found: dict[str, Tensor]) -> None:
        for name, own in self.state().items():
            own.copy_(found[name])
        self.optimizer.steps = int(found["step"])

    def save(self, step: int) -> None:
        """Write a model's folder, with the trainer's state in it. Only when it is complete are the
        states of older checkpoints removed."""
        with whole(self.folder / "checkpoints" / f"step_{step:06d}") as path:
            self.write_model(path)
            (path / "trainer").mkdir()
            save_file(self.state(), path / "trainer" / "state.safetensors")
            (path / "trainer" / "state.json").write_text(json.dumps(self.digests(path, step)))
        for old in [*checkpoints(self.folder).values()][:-2]:
            shutil.rmtree(old / "trainer")

    def digests(self, checkpoint: Path, step: int) -> dict[str, str]:
        """Hashes of everything that has to match a checkpoint."""
        s, task = self.settings, self.task
        problems = [*task.training_problems(s.seed, step, s.questions),
                    *(task.held_out_problems(s.eval_tasks) if s.eval_every else [])]
        settings = {name: value for name, value in s.to_json().items()
                    if name not in {"out", *self.changeable}}
        return {"its number": str(step), "a setting in config.json": digest_of(settings),
                "the task's choice of problems": digest_of(
                    [(task.prompt_for(problem), task.show(problem)) for problem in problems]),
                "its model": digest_of(checkpoint / "model.safetensors"),
                "its trainer's state": digest_of(checkpoint / "trainer" / "state.safetensors")}

    def read_state(self, checkpoint: Path) -> dict[str, Tensor]:
        known = read_json(checkpoint / "trainer" / "state.json")
        for what, digest in self.digests(checkpoint, self.done).items():
            if known.get(what) != digest:
                raise UserError(f"{checkpoint}: {what} has changed since this checkpoint was made, "
                                "so the run cannot go on from it")
        return read_tensors(checkpoint / "trainer" / "state.safetensors")

    def write_model(self, path: Path) -> None:
        save_model(self.model, path)
        for name in ("tokenizer.json", "tokenizer_config.json", "recipe.json"):
            if (self.source / name).exists():
                shutil.copyfile(self.source / name, path / name)

    def last_checkpoint(self) -> str:
        if found := checkpoints(self.folder):
            return (f"python train.py --resume {shlex.quote(str(self.folder))} goes on from step "
                    f"{max(found)}")
        return "there is no checkpoint to go on from"

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
                path.write_text(json.dumps(self.config(), indent=2))
        self.handlers = {number: signal.signal(number, self.interrupt)
                         for number in (signal.SIGINT, signal.SIGTERM)}

    def config(self) -> dict[str, Any]:
        s = self.settings
        return s.to_json() | {
            "held_out_problems": digest_of(
                [self.task.show(problem) for problem in self.task.held_out_problems(s.eval_tasks)]
            ) if s.eval_every else None,
            "functions": self.functions(AXES),
            "model_config": asdict(self.model.config),
            "versions": {"torch": torch.__version__, "numpy": np.__version__}}

    def functions(self, axes: Any) -> dict[str, str]:
        """Digests of the chosen functions, so that runs of two versions are not compared as one."""
        chosen = {axis: getattr(self.settings, axis) for axis in ("mitigation", "advantage")}
        return {axis: digest_of(source_of(axes[axis][name])) for axis, name in chosen.items()
                if name in axes[axis]}

    def make_folder(self) -> None:
        s, size = self.settings, sum(parameter.numel() for parameter in self.model.parameters())
        say(f"{s.model}: {size / 1e6:.2f} million parameters, {torch.get_num_threads()} threads; "
            f"{s.questions} problems x {s.answers} answers a step; writing to {self.folder}")
        make_run(self.folder, self.config(), self.source / "tokenizer.json")

    def interrupt(self, *_: object) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        # `print` may fail here, if Ctrl-C interrupted another `print`; Ctrl-C also ends a reader
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

    def record(self, rollouts: Rollouts, weight: Tensor, columns: dict[str, Tensor]) -> None:
        write_credit(self.folder / "credit" / f"step_{rollouts.step:06d}.npz", rollouts, weight,
                     columns)

    def log(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and print one."""
        s, step = self.settings, self.step
        line["learning_rate"] = self.optimizer.learning_rate
        append(self.folder / "metrics.jsonl", line)
        left = round((time.monotonic() - self.start) / (step - self.done) * (s.steps - step))
        if step % 20 == 1 or step == self.done + 1:
            say(f"    step  reward  success{'  format' * self.has_format}  length  finished"
                "  entropy  grad norm  tokens/s      left")
        norm = line["gradient_norm"]
        form = f"{line['reward_format']:8.2f}" if self.has_format else ""
        say(f"{step:4d}/{s.steps:<4d}{line['reward']:7.3f}{line['success']:9.1%}{form}"
            f"{line['length']:8.1f}{line['finished']:10.1%}{line['entropy']:9.3f}  "
            f"{'  skipped' if norm is None else f'{norm:9.3f}'}"
            f"{line['tokens'] / line['seconds']:10.0f}{left // 60:7d}:{left % 60:02d}")
        skipped = line["skipped"] and f"no update: {line['skipped']}"
        if note := skipped or line["weight_note"]:
            say(f"          {note}")

    def log_evaluation(self, line: dict[str, Any], seconds: float) -> None:
        append(self.folder / "evaluations.jsonl", line)
        form = f"format {line['format_mean']:.2f}, " if self.has_format else ""
        say(f"  held-out, {line['mode']:7s} {line['success']:6.1%}  95% interval "
            f"{line['success_low']:.1%} to {line['success_high']:.1%}  ({len(line['answer'])} "
            f"problems, {form}length {line['length_mean']:.0f}, "
            f"finished {line['finished_mean']:.0%}, {seconds:.0f} s)")
        if line["mode"] == "sampled":
            self.evaluations.append(line)
            for shown in line["shown"]:
                text = " ".join(f"{shown['problem']}: {shown['text']}".split())
                say(f"  {'right' if shown['answer'] else 'wrong'}  {text[:300]}")

    def end(self) -> None:
        took, memory = round(time.monotonic() - self.start), peak_memory() / 1e9
        self.stopping &= self.step < self.settings.steps  # a finished run was not stopped early
        say(self.last_checkpoint() if self.stopping else f"done. Everything is in {self.folder}")
        if len(self.evaluations) > 1:
            before, after = self.evaluations[0], self.evaluations[-1]
            say(f"  {before['success']:.1%} (95% interval {before['success_low']:.1%} to "
                f"{before['success_high']:.1%}) -> {after['success']:.1%} "
                f"({after['success_low']:.1%} to {after['success_high']:.1%}) of "
                f"{len(after['answer']):,} held-out problems")
        say(f"  {took // 60} min {took % 60:02d} s, {memory:.2f} GB of memory\n"
            f"python {from_here('analyze.py')} {self.folder}  makes tables, pictures and a page")


class Clock:
    """The clock of a step; `mark` ends a stage."""

    def __init__(self) -> None:
        self.begin = self.last = time.perf_counter()
        self.stages = dict[str, float]()

    def mark(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[f"{stage}_seconds"], self.last = now - self.last, now

    def metrics(self, tokens: int) -> Metrics:
        return {**self.stages, "seconds": time.perf_counter() - self.begin,
                "rollout_tokens_per_second": tokens / self.stages["rollout_seconds"],
                "peak_memory_bytes": peak_memory()}


def columns_of(scores: list[dict[str, float]]) -> dict[str, Tensor]:
    """(B,) the reward of each answer, and each of its parts."""
    for score in scores:
        if (not isinstance(score, dict) or not {"reward", "format", "answer"} <= score.keys()
                or score.keys() != scores[0].keys() or not all(map(is_number, score.values()))):
            raise UserError(f"Task.score should return a dict with a finite number for reward, "
                            f"format and answer, the same names each time, and not {score!r}")
    return {part: torch.tensor([float(score[part]) for score in scores]) for part in scores[0]}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def generator_of(*parts: object) -> torch.Generator:
    """A random generator whose seed depends on these parts alone."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")
    return torch.Generator().manual_seed(seed)


def digest_of(what: object) -> str:
    """A short hash of an object's text, or of a file's content."""
    if isinstance(what, Path):
        with open(what, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return hashlib.sha256(repr(what).encode(errors="surrogatepass")).hexdigest()[:12]


def source_of(function: Callable[..., Any]) -> dict[str, str]:
    """The text of a function without comments, and of the functions, numbers and texts of its file
    that it names."""
    known, found, waiting = vars(sys.modules[function.__module__]), dict[str, str](), [function]
    for one in waiting:
        with suppress(OSError):  # it was typed at a prompt
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
            found[one.__name__] = ast.unparse(tree)
            for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
                value = known.get(name)
                is_code = inspect.isfunction(value) or inspect.isclass(value)
                if is_code and value.__module__ == function.__module__ and name not in found:
                    waiting.append(value)
                elif isinstance(value, (int, float, str)):
                    found[name] = repr(value)
    return dict(sorted(found.items()))


def printable(text: str) -> str:
    """A text without characters that could steer a terminal: a model may have written it."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def say(text: str) -> None:
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has ended; the run goes on
        sys.stdout = open(os.devnull, "w")


def write_credit(path: Path, rollouts: Rollouts, weight: Tensor, columns: dict[str, Tensor]
                 ) -> None:
    """Write the numbers of a step: columns with a number for each token, answer after answer
    (`episode_start` says where one begins), for each answer, or for each problem."""
    found: dict[str, np.ndarray] = {}
    for name, values in {"token_id": rollouts.ids, "log_prob": rollouts.log_prob,
                         "entropy": rollouts.entropy, "collision": rollouts.collision,
                         "weight": weight, "advantage": rollouts.advantage, **columns,
                         "section": rollouts.section, "kind": rollouts.kind}.items():
        found[name] = values[rollouts.mask].numpy()
    for part, score in rollouts.scores.items():
        found[part if part == "reward" else f"reward_{part}"] = score.numpy()
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
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def make_run(folder: Path, config: dict[str, Any], tokenizer: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole(folder) as path:
        for name in ("credit", "checkpoints"):
            (path / name).mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, indent=2))
        shutil.copyfile(tokenizer, path / "tokenizer.json")


def append(path: Path, line: dict[str, Any]) -> None:
    known = {name: None if isinstance(value, float) and not math.isfinite(value) else value
             for name, value in line.items()}
    with open(path, "a") as file:
        file.write(json.dumps(known, allow_nan=False) + "\n")


def lock(folder: Path) -> typing.IO[str]:
    """Keep other processes out of the folder until this one ends."""
    file = open(folder / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another process writes to {folder}") from None
    return file


def of_steps(paths: Iterable[Path]) -> dict[int, Path]:
    """Files or folders by their step, without those of other names, such as step_6_best."""
    return {int(path.stem[5:]): path for path in sorted(paths)
            if re.fullmatch("step_[0-9]+", path.stem)}


def checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints from which a run can go on."""
    return {step: path for step, path in of_steps(run.glob("checkpoints/*")).items()
            if all((path / name).exists() for name in ("config.json", "trainer/state.safetensors"))}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without a last one that a kill cut off."""
    if path.exists() and not path.is_file():  # a pipe waits for ever, /dev/zero never ends
        raise UserError(f"{path} is no regular file")
    texts = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    found = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            has_step = type(line["step"]) is int
        except (ValueError, TypeError, KeyError):
            has_step = False
        if not has_step:
            raise UserError(f"{path}, line {number} is damaged: {text[:80]}")
        found.append(line)
    return found


def refuse_holes(run: Path, done: int) -> None:
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if line["step"] <= done]
    if steps != [*range(1, done + 1)]:
        raise UserError(f"{run}/metrics.jsonl does not have one line for each of the steps 1 to "
                        f"{done}, in order")


def forget_after(run: Path, step: int) -> None:
    """Remove everything that a stopped run wrote after its last checkpoint."""
    for log in filter(Path.exists, (run / "metrics.jsonl", run / "evaluations.jsonl")):
        kept = [line for line in read_lines(log) if step and line["step"] <= step]
        with whole(log) as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    made = *of_steps(run.glob("credit/*.npz")).items(), *of_steps(run.glob("checkpoints/*")).items()
    for path in (*run.rglob(".*.tmp"), *(path for known, path in made if known > step)):
        remove(path)


class Unknown(UserError):
    """A flag, a setting, a task or a method that is not in these files."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def from_here(name: str) -> Path:
    """The path to a file of this project from the current folder; outside it, the name itself."""
    is_inside = Path.cwd().is_relative_to(HERE)
    return Path(os.path.relpath(HERE / name)) if is_inside else Path(name)


def find(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    return HERE / name if (HERE / name).exists() and not Path(name).exists() else Path(name)


def flags_of(owner: Any) -> dict[str, tuple[Any, type, dict[str, Any]]]:
    """The flags of a dataclass (its options), or of a method (its keyword-only parameters): for
    each name the default, the type and its limits."""
    if is_dataclass(owner):
        return {one.name: (one.default, str if one.default is None else type(one.default),
                           dict(one.metadata)) for one in fields(owner) if one.metadata}
    found = {}
    for name, one in inspect.signature(owner).parameters.items():
        if one.kind is one.KEYWORD_ONLY:
            hint = type(one.default) if one.annotation is one.empty else one.annotation
            of_flag, limits = (typing.get_args(hint) if hasattr(hint, "__metadata__")
                               else (hint, {}))  # Annotated[type, limits], or a type
            is_known = of_flag in (int, float, str) and isinstance(limits, dict)
            if one.default is one.empty or not is_known:
                raise UserError(f"the keyword {name} of {place_of(owner)} should be a whole "
                                "number, a number or a text with a default. Its limits are a dict")
            found[name] = one.default, of_flag, {"help": f"of {owner.__name__}", **limits}
    return found


def checked_value(name: str, value: Any, wanted: Any, limits: dict[str, Any]) -> Any:
    """The value of a flag, typed or from a file, if it has the right type and keeps the limits."""
    if wanted is float and type(value) is int and abs(value) < 1e300:
        value = float(value)
    if type(value) is not wanted or wanted is float and not math.isfinite(value):
        raise UserError(f"--{name} {value!r:.80}: should be {TYPES[wanted]}")
    if value not in limits.get("choices", [value]):
        raise Unknown(f"--{name} {value!r:.80}: choose from {', '.join(limits['choices'])}"
                      f"{did_you_mean(value, limits['choices'])}")
    keeps: dict[str, Any] = {"least": operator.ge, "above": operator.gt, "most": operator.le}
    for limit, is_kept in keeps.items():
        if limit in limits and not is_kept(value, limits[limit]):
            word = "above" if limit == "above" else f"at {limit}"
            raise UserError(f"--{name} {value!r:.80}: should be {word} {limits[limit]}")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f". Did you mean {close[0]}?" if close else ""


def flags_known(chosen: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """All flags, with those of the chosen task, weighting and advantage; and their docstrings."""
    flags, about = flags_of(Settings), ""
    for axis, choices in AXES.items():
        name = str(chosen.get(axis) or getattr(Settings, axis))
        if name not in choices:
            where = [f", which is an --{other}" for other in AXES if name in AXES[other]]
            raise Unknown(f"--{axis} {name!r}{''.join(where)}: choose from {', '.join(choices)}"
                          f"{did_you_mean(name, choices)}")
        if inspect.isclass(choices[name]) and choices[name] is not Task:
            raise Unknown(f"{name} is a class, as methods with a state are")
        if name in TWICE:
            raise UserError(f"there are two functions {name} for --{axis}: one needs another name")
        own = flags_of(choices[name])
        if twice := own.keys() & {*flags, *NOT_SETTINGS, "help", "resume"}:
            raise UserError(f"{name} has a keyword {min(twice)}, but this name is taken: "
                            "rename it")
        flags[axis][2]["help"] += f". One of {', '.join(choices)}; --help NAME shows its flags"
        about += f"{name}: {' '.join((choices[name].__doc__ or '').split())}\n\n"
        flags |= own
    return flags, about


def parse(argv: list[str], flags: dict[str, Any], saved: dict[str, Any], about: str = ""
          ) -> tuple[dict[str, Any], list[str], str]:
    """The values of these flags in argv, the rest of argv, and the text of the help."""
    parser = Parser(description="Train a model with GRPO.", add_help=False, allow_abbrev=False,
                    epilog=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, of_flag, limits) in flags.items():
        text = f"{limits['help']} ({saved.get(name, default)})".replace("%", "%%")
        parser.add_argument(f"--{name}", type=of_flag, metavar=of_flag.__name__, help=text)
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder from its "
                        f"last checkpoint; {', '.join(sorted(CHANGEABLE))} may be changed")
    parser.add_argument("--help", "-h", nargs="?", metavar="NAME", const="", help="this text; with "
                        "the name of a task, a weighting or an advantage also its flags")
    known, unknown = parser.parse_known_args(argv)
    typed = {name: value for name, value in vars(known).items() if value is not None}
    return typed, unknown, parser.format_help()


def recipe_in(file: Path) -> dict[str, Any]:
    """The settings that suit a model. They may name neither a model nor a run's folder."""
    recipe = read_json(file) if file.exists() else {}
    if wrong := recipe.keys() & {"model", "out"}:
        raise UserError(f"{file} sets {min(wrong)}, which the recipe of a model may not")
    return recipe


def read_settings(argv: list[str]) -> tuple[Settings, bool]:
    """The settings of a command line, and whether it resumes a run."""
    argv = [re.sub("^--[a-z-]+", lambda found: "--" + found[0][2:].replace("-", "_"), word)
            for word in argv]
    chosen, *_ = parse(argv, flags_of(Settings), {})  # these decide which flags there are
    if name := chosen.get("help"):
        chosen |= {axis: name for axis in AXES if name in AXES[axis]} or {"mitigation": name}
    if resume := chosen.get("resume"):
        file = Path(resume) / "config.json"
        saved = read_json(file)
        if "mitigation" not in saved:
            raise UserError(f"{resume} is not the folder of a run")
    else:
        file = find(chosen.get("model", Settings.model)) / "recipe.json"  # what suits the model
        saved = recipe_in(file)
    flags, about = flags_known(saved | chosen)
    if beyond := saved.keys() - flags.keys() - NOT_SETTINGS:
        raise Unknown(f"{file} has a setting {min(beyond)}, which is none of these: "
                      f"{', '.join(flags)}{did_you_mean(min(beyond), flags)}")
    typed, unknown, about_flags = parse(argv, flags, saved, about)
    if unknown:
        raise Unknown(f"unknown flag {unknown[0]}{did_you_mean(unknown[0].strip('-'), flags)} "
                      "(--help lists them)")
    if "help" in typed:
        say(about_flags)
        raise SystemExit(0)
    typed.pop("resume", None)
    if resume and (wrong := typed.keys() - CHANGEABLE):
        raise UserError(f"--{min(wrong)} cannot be changed in a resumed run")
    settings = make_settings(typed, saved, flags)
    if resume:
        settings.out = resume
    elif settings.folder.exists():
        raise UserError(f"{settings.folder} exists already: continue it with --resume "
                        f"{settings.folder}, or name another folder with --out")
    return settings, bool(resume)


def make_settings(typed: dict[str, Any], saved: dict[str, Any], flags: dict[str, Any]
                  ) -> Settings:
    """The settings: a typed value comes before one on file, and that before the default."""
    values: dict[str, Any] = {}
    for name, (default, of_flag, limits) in flags.items():
        given = typed.get(name, saved.get(name, default))
        values[name] = (None if given is None and default is None
                        else checked_value(name, given, of_flag, limits))
    typed = {name: values[name] for name in typed}
    if typed.keys() & {"clip_low", "clip_high"} and values["epochs"] == 1:
        raise UserError("--clip_low and --clip_high need --epochs above 1")
    own = {name: values.pop(name) for name in flags_of(Settings)}
    return Settings(**own, keywords=values, typed=typed)
