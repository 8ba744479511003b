"""A run of the lab: what the loop of lab/harness/loop.py uses. Its folder is that of run.py, with
more in it: a lock, digests of all that has to match a checkpoint (trainer/state.json) and of what
the run is made of (config.json). Ctrl-C waits for the end of a step.
"""
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lab.engine.methods import refuse_other_values
from lab.engine.errors import (NotFinite, UserError, location_of, read_json, refuse_undefined,
                               say)
from lab.engine.model_folder import write_model_folder
from lab.engine.credited import advantage_of, drop_unfinished, rescaled_weight
from lab.engine.rollouts import Problem, Rollouts, has_format
from lab.engine.update import update
from lab.harness.flags import settle
from lab.harness.build import build, make_advantage, make_weighting
from lab.harness.kept import Kept
from lab.harness.made_of import made_of
from lab.harness.step_lines import with_all_metrics
from lab.harness.read_record import refuse_other, run_config, say_what_differs, steps_finished
from lab.harness.record import (Json, change_config, credit_path, digest_of, provenance,
                                read_lines, replace_text, write_credit)
from lab.harness.screen import printable, python_command
from lab.harness.settings import CHANGEABLE, CONTINUE, LabSettings, make_settings, read_flags
from lab.harness.tasks import score_again
from lab.harness.versions import differing
from lab.harness.versions import digest_of as digest_of_text
from qwen2_model import read_tensors, small_files
from run import (append, checkpoints, forget_after, lock, make_run, note_changes, own_files, remove,
                 whole)


def open_lab_run(argv: list[str]) -> "LabRun":
    """The run that a command line asks for."""
    given = read_flags(argv)
    unchangeable = given.keys() - {"resume", "continue", *CHANGEABLE}
    how = settle({name: given.pop(name) for name in CONTINUE if name in given}, CONTINUE)
    resume, config = how["resume"], how["config"]
    if resume:
        if unchangeable:
            raise UserError(f"--{min(unchangeable)} cannot be changed in a resumed run, only "
                            f"{', '.join(CHANGEABLE)}")
        run_config(Path(resume))  # refuses a folder that is none of a run
        config, given["out"] = str(Path(resume) / "config.json"), resume
    if config:
        given["config"] = config
    settings = make_settings(given)
    exists = settings.folder.exists()
    if exists and how["continue"]:
        refuse_other(settings.folder, settings, {"out", *CHANGEABLE} - {"steps"},
                     "name another folder with --out")
    elif exists and not resume:
        raise UserError(f"{settings.folder} exists already: continue it with --resume "
                        f"{shlex.quote(str(settings.folder))}, or name another folder with --out")
    return LabRun(settings, exists, may_begin_again=not resume)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a mean, by the normal distribution; of one value it is not known."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    half = 1.959964 * math.sqrt(squares / (len(values) - 1) / len(values)) if values[1:] else (
        math.nan)
    return mean - half, mean + half


def peak_memory() -> int | None:
    """In bytes; None on Windows, which has no `resource`."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class LabRun:
    """A run. Its steps up to `done` are on record, and `checkpoint` is the model after them."""
    largest_gap = math.inf   # bfloat16 rounds coarsely
    scores_agree = True      # so far, when answers were scored twice
    step, done = 0, 0
    stopping = False         # after this step, because of Ctrl-C
    is_finished = False
    locked: sqlite3.Connection | None = None
    lock_file: os.stat_result | None = None
    checkpoint: Path | None = None
    curves: Any = None       # --track
    step_seconds = 0.0       # of all steps

    def __init__(self, settings: LabSettings, is_resumed: bool = False,
                 may_begin_again: bool = False):
        self.settings, self.folder, self.is_new = settings, settings.folder, not is_resumed
        self.may_begin_again, self.start = may_begin_again, time.monotonic()
        self.evaluation_seconds: dict[str, float] = {}  # of the last evaluation, by its mode
        self.evaluations: list[Json] = []               # of sampled answers, for the last line
        self.handlers: dict[int, Any] = {}              # of Ctrl-C, before this run
        self.after_step: Callable[[], None] = lambda: None  # for a large model: returns memory
        self.drawn: Json = {}  # what dynamic sampling drew beyond the batch, in the last step
        self.took: dict[str, float] = {}  # seconds of the stages of this step
        try:
            if is_resumed:
                self.locked = lock(self.folder)  # lock the folder before reading it
                self.where_to_go_on()
            if not self.is_finished:
                self.make_parts()
        except Exception:  # a notebook goes on, and the error that it shows keeps this object
            self.close(failed=False)
            raise

    def where_to_go_on(self) -> None:
        """Find the newest checkpoint. A run that was stopped before its first checkpoint begins
        again, and loses its record; no other run does. One that keeps no checkpoints is finished or
        begins again, which --continue may do."""
        run, found = self.folder, checkpoints(self.folder)
        every = run_config(run).get("checkpoint_every")
        if every == 0 and not found:
            self.is_finished = steps_finished(run) >= self.settings.steps
            if self.is_finished:
                return say(f"{run} is finished. It kept nothing to continue it from")
            if self.may_begin_again:
                return
        lines = read_lines(run / "metrics.jsonl")
        self.done = max(found, default=0)
        self.checkpoint = found.get(self.done)
        is_removed = not (run / "checkpoints").exists()
        if not self.done and (is_removed and lines or len(lines) > (every or 0)):
            raise UserError(f"{run} has {len(lines)} steps on record, and no checkpoint to go on "
                            "from")
        self.is_finished = self.done > 0 and self.done >= self.settings.steps
        if self.is_finished:
            say(f"{run} is finished: a larger --steps continues it")
        steps = [line["step"] for line in lines if line["step"] <= self.done]
        if steps != [*range(1, self.done + 1)]:
            raise UserError(f"{run}/metrics.jsonl does not have one line for each of the steps 1 "
                            f"to {self.done}, in order")

    def make_parts(self) -> None:
        parts = build(self.settings, self.checkpoint, self.drawn)
        policy, self.parts, self.policy = parts.policy, parts, parts.policy
        self.task: Any = policy.task
        self.model, self.source = policy.model, policy.folder
        self.optimizer, self.trained = parts.optimizer, parts.parameters
        self.reference = parts.reference
        s = self.settings
        # in bfloat16, and on a GPU, whose kernels differ more, the gap is on record alone
        if (s.device, s.dtype, s.temperature) == ("cpu", "float32", 1):
            self.largest_gap = 0.01
        self.has_format = has_format(policy.task)
        self.kept = {axis: Kept(inspect.unwrap(method)) for axis, method in parts.methods.items()
                     if inspect.isfunction(method)}
        self.copied_files = small_files(policy.folder)
        if self.checkpoint:
            parts.put_back(self.read_state(self.checkpoint))

    @cached_property
    def held_out(self) -> list[Any]:
        return list(self.task.held_out_problems(self.settings.eval_tasks))

    def begin(self) -> None:
        """Make the folder of a new run, or go back to the last checkpoint of an old one. From now
        on Ctrl-C waits for the end of a step."""
        if self.is_new:
            self.make_folder()
            self.locked = lock(self.folder)
        else:
            say(f"continuing {self.folder} after step {self.done}")
            forget_after(self.folder, self.done)
            replace_text(self.folder / "config.json", json.dumps(self.config_going_on(), indent=2))
        self.handlers = {number: signal.signal(number, self.interrupt)
                         for number in (signal.SIGINT, signal.SIGTERM)}
        if any(line["success"] is None for line in read_lines(self.folder / "metrics.jsonl")):
            self.task.knows_success = False  # a reward of the steps before was no 0 and no 1
        self.lock_file = (self.folder / "lock").stat()
        s, model = self.settings, self.model
        if model.is_large:
            from lab.harness.memory import FreedMemory, keep_memory, should_keep_memory
            if should_keep_memory(model):
                keep_memory()
            self.after_step = FreedMemory().after_step
        if s.track != "none":
            from lab.harness.track import Curves
            self.curves = Curves(self.folder, self.done)
        if s.eval_every:  # the task remembers them, and refuses to train on one
            self.task.held_out_problems(s.eval_tasks)

    # ------------------------------------------------------------- what a step of train.py uses

    @contextmanager
    def clocked(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.took[stage] = self.took.get(stage, 0.0) + time.perf_counter() - start

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a number that is not finite in which step it came up, and how to go on."""
        try:
            yield
        except NotFinite as error:
            rate = f" at --learning_rate {self.settings.learning_rate:g}"
            if self.step == 0:  # the rate is not to blame
                rate = ""
            raise UserError(f"{error}, in step {self.step}{rate}; "
                            f"{self.last_good_model()}") from error

    def sample(self, problems: Sequence[Problem], answers: int, generator: torch.Generator,
               greedy: bool | None = None) -> Rollouts:
        """For training, or, if it is said whether greedily, for an evaluation, which samples at
        temperature 1, whatever training does."""
        at_one = replace(self.policy, settings=replace(self.settings, temperature=1.0))
        if greedy is not None:
            with self.explained():
                return at_one.ask(problems, answers, generator, greedy)
        with self.explained(), self.clocked("rollout_seconds"):
            rollouts = self.parts.sample(problems, answers, generator.initial_seed())
            rollouts = self.policy.score(rollouts)
        return replace(rollouts, forward=self.policy.extra_forward())

    def advantages(self, rollouts: Any) -> torch.Tensor:
        with self.clocked("credit_seconds"), self.asked_again("advantage", rollouts):
            return advantage_of(self.parts.advantage_method, self.settings, rollouts, self.policy)

    def weights(self, rollouts: Any) -> tuple[torch.Tensor, Json]:
        s, batch = self.settings, self.trained_on(rollouts)
        with self.clocked("credit_seconds"), self.asked_again("mitigation", batch):
            return rescaled_weight(self.parts.weighting, s.mitigation, batch, self.policy,
                                   s.rescale, s.placebo)

    @contextmanager
    def asked_again(self, axis: str, rollouts: Rollouts) -> Iterator[None]:
        """In the first two steps and at checkpoints a method is asked twice: a function before its
        values are computed, an object after that, because only then it says whether it samples."""
        s, policy, chosen = self.settings, self.policy, self.parts.methods[axis]
        make_another = {"advantage": make_advantage, "mitigation": make_weighting}[axis]
        is_saved = s.checkpoint_every and self.step % s.checkpoint_every == 0
        is_due, is_function = is_saved or self.step <= self.done + 2, inspect.isfunction(chosen)

        def ask() -> None:
            """Of a function also without what it has kept since the start, as a resumed run has it.
            """
            others = [lambda: chosen if policy.model.is_large else make_another(s, policy)]
            if is_function:
                others.append(lambda: self.kept[axis].forgetting(chosen))
            for another in others:
                refuse_other_values(chosen, another, f"--{axis} {getattr(s, axis)}", rollouts,
                                    policy)

        def size() -> float:
            return sum(float(p.detach().sum(dtype=torch.float64)) for p in self.model.parameters())

        before = size() if is_due else 0.0
        with self.explained():
            if is_due and is_function:
                ask()
            yield
            if is_due and not is_function:
                ask()
        if is_due and size() != before:
            raise UserError(f"--{axis} {getattr(s, axis)} ({location_of(chosen)}) changes the "
                            "model, which the update alone should do")

    def trained_on(self, rollouts: Rollouts) -> Rollouts:
        return drop_unfinished(rollouts) if self.settings.drop_unfinished else rollouts

    def update(self, rollouts: Any, weight: torch.Tensor, is_measured: bool = False
               ) -> tuple[Json, dict[str, torch.Tensor]]:
        with self.explained(), self.clocked("update_seconds"):
            found = update(self.model, self.optimizer, self.trained_on(rollouts), weight,
                           self.settings, self.reference, is_measured, self.largest_gap)
            refuse_undefined("after the update a parameter is", *self.trained.values())
            return found

    def config(self) -> Json:
        """config.json: the settings, and a digest of the held-out problems and of each file of
        data. `lab compare` tells runs apart in which these differ, or their code/."""
        s = self.settings
        shown = [self.task.show(problem) for problem in self.held_out] if s.eval_every else None
        return s.to_json() | provenance() | {
            "held_out_problems": digest_of_text(shown) if shown else None,
            "made_of": made_of(s), "model_config": asdict(self.model.config),
            "threads": torch.get_num_threads(), "reward": self.task.rewarded,
            "trained_parameters": sum(one.numel() for one in self.trained.values())}

    def config_going_on(self) -> Json:
        """config.json of a resumed run. What was recorded first stays, and what is another version
        since then is said, and kept with its digest before."""
        before, now = run_config(self.folder), self.config()
        changed = differing(before.get("made_of", {}), now["made_of"]) if self.done else {}
        if changed:
            named = ", ".join([*changed][:5]) + f" and {len(changed) - 5} more" * (len(changed) > 5)
            say(f"changed since the {self.done} steps were made: {named}. So what follows may not "
                "be what a run that was never stopped gives")
            now["changed"] = [*before.get("changed", []),
                              {"after_step": self.done, "files": changed}]
        if names := note_changes(self.folder, self.done, own_files()):
            say(f"changed since then: {', '.join(names)} (the old ones are in code/)")
        say_what_differs(self.folder, self.done)
        kept = (*CHANGEABLE, "made_of", "changed")
        return before | {name: now[name] for name in kept if name in now}

    def make_folder(self) -> None:
        s, trained = self.settings, sum(one.numel() for one in self.trained.values())
        size = sum(parameter.numel() for parameter in self.model.parameters())
        if s.lora:
            say(f"LoRA of rank {s.lora} trains {trained / 1e6:.2f} million parameters")
        if (s.device, s.dtype) != ("cpu", "float32"):
            say(f"computing on {s.device} in {s.dtype}")
        say(f"{s.model}: {size / 1e6:.2f} million parameters, {torch.get_num_threads()} threads; "
            f"{s.questions} problems x {s.answers} answers a step; writing to {self.folder}")
        if s.eval_every:
            say(f"before the first step, {len(self.held_out)} held-out problems are answered twice")
        make_run(self.folder, self.config(), self.source / "tokenizer.json", own_files())

    def interrupt(self, *_: object) -> None:
        if self.stopping or not self.step:  # in the first evaluation there is nothing to save
            raise KeyboardInterrupt
        self.stopping = True
        # not `print`, because Ctrl-C may have interrupted one
        with suppress(OSError):
            os.write(1, b"\nstopping after this step; Ctrl-C again stops at once\n")

    def is_here(self) -> bool:
        """Whether the folder still has its name, and no other one has taken it: the lock lies in
        the folder, and is moved with it."""
        path = self.folder / "lock"
        return self.lock_file is not None and path.exists() and os.path.samestat(
            path.stat(), self.lock_file)

    def refuse_other_folder(self) -> None:
        if not self.is_here():
            raise UserError(f"{self.folder} was moved or removed while this run was writing it. If "
                            "it was moved, --resume and its new name continue the run")

    def close(self, failed: bool) -> None:
        """Unlock the folder. If a new run failed in its first step, remove its folder, so that the
        next attempt can have its name."""
        if self.curves:
            self.curves.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        is_empty = not (self.folder / "metrics.jsonl").exists()
        if self.is_new and failed and self.is_here() and is_empty:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.locked:
            self.locked.close()

    def record(self, rollouts: Any, weight: torch.Tensor, columns: dict[str, torch.Tensor]
               ) -> None:
        """Write the credit file. Answers are scored once more (`score_again`): in the first step
        all of them, and then two in each step."""
        self.refuse_other_folder()
        with self.clocked("record_seconds"):
            write_credit(credit_path(self.folder, self.step), rollouts, weight, columns)
        if self.scores_agree:
            self.scores_agree = score_again(
                rollouts, self.task, self.settings.task, self.policy.environment,
                all_rows=self.step == self.done + 1)

    def log(self, line: Json) -> None:
        line = with_all_metrics(line, self.parts.advantage_method, self.parts.weighting)
        if not self.task.knows_success:
            line |= {"success": None, "reward_answer": None}
        line["learning_rate"] = self.optimizer.learning_rate
        line["peak_memory_bytes"] = peak_memory()
        if self.model.device.type == "cuda":
            line["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.model.device)
        for name, count in self.drawn.items():
            line[name] += count
        sampled = line["tokens"] + self.drawn.get("extra_tokens", 0)
        line |= self.took | {"rollout_tokens_per_second": sampled / self.took["rollout_seconds"]}
        self.took = {}
        self.refuse_other_folder()
        append(self.folder / "metrics.jsonl", line)
        self.say_step(line)
        if line["weight_note"]:
            say(f"          {line['weight_note']}")
        if self.curves:
            self.curves.add(line, "train")
        self.after_step()

    def say_step(self, line: Json) -> None:
        s, step, norm = self.settings, self.step, line["gradient_norm"]
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

    def log_evaluation(self, line: Json, seconds: float) -> None:
        self.refuse_other_folder()
        low, high = mean_interval(line["reward"])
        line = line | {"reward_low": low, "reward_high": high}
        if not self.task.knows_success:
            line |= dict.fromkeys(("success", "success_low", "success_high"))
        append(self.folder / "evaluations.jsonl", line)
        self.evaluation_seconds[line["mode"]] = seconds
        form = f"format {line['format_mean']:.2f}, " if self.has_format else ""
        say(f"  held-out, {line['mode']:7s} {self.success_of(line)}  ({len(line['answer'])} "
            f"problems, {form}length {line['length_mean']:.0f}, "
            f"finished {line['finished_mean']:.0%}, {seconds:.0f} s)")
        if line["mode"] == "sampled":
            self.evaluations.append(line)
            for shown in line["shown"]:
                text = " ".join(printable(f"{shown['problem']}: {shown['text']}").split())
                say(f"  {self.verdict_on(shown)}  {text[:300]}")
        if self.curves:
            self.curves.add(line, f"held_out/{line['mode']}")

    def success_of(self, line: Json) -> str:
        if self.task.knows_success:
            return ("{success:.1%} (95% interval {success_low:.1%} to {success_high:.1%})"
                    .format(**line))
        return ("reward {reward_mean:.3f} (95% interval {reward_low:.3f} to {reward_high:.3f})"
                .format(**line))

    def verdict_on(self, shown: Json) -> str:
        if self.task.knows_success:
            return "right" if shown["answer"] else "wrong"
        return f"reward {shown['reward']:.3f}"

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu().contiguous()
                for name, tensor in self.parts.state().items()}

    def digests(self, checkpoint: Path, step: int) -> dict[str, str]:
        """Hashes of everything that has to match a checkpoint."""
        s, task = self.settings, self.task
        problems = [*task.training_problems(s.seed, step, s.questions),
                    *(task.held_out_problems(s.eval_tasks) if s.eval_every else [])]
        settings = {name: value for name, value in s.to_json().items()
                    if name not in {"out", *CHANGEABLE}}
        return {"its number": str(step), "a setting in config.json": digest_of_text(settings),
                "the task's choice of problems": digest_of_text(
                    [(task.prompt_for(problem), task.show(problem)) for problem in problems]),
                "its model": digest_of(checkpoint / "model.safetensors"),
                "its trainer's state": digest_of(checkpoint / "trainer" / "state.safetensors")}

    def read_state(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        known = read_json(checkpoint / "trainer" / "state.json")
        for what, digest in self.digests(checkpoint, self.done).items():
            if known.get(what) != digest:
                raise UserError(f"{checkpoint}: {what} has changed since this checkpoint was made, "
                                "so the run cannot go on from it")
        return read_tensors(checkpoint / "trainer" / "state.safetensors")

    def save(self, step: int) -> None:
        """With --checkpoint_every 0 the model is written at the end, alone."""
        if step == self.settings.steps and not self.settings.checkpoint_every:
            return
        with self.explained():
            self.policy.refuse_broken_model()
            refuse_undefined("the state that a resumed run would continue from is",
                             *(value for value in self.parts.state().values()
                               if value.is_floating_point()))
        self.refuse_other_folder()
        with whole(self.folder / "checkpoints" / f"step_{step:06d}") as path:
            self.write_model(path)
            (path / "trainer").mkdir()
            save_file(self.state(), path / "trainer" / "state.safetensors")
            (path / "trainer" / "state.json").write_text(json.dumps(self.digests(path, step)))
        for old in [*checkpoints(self.folder).values()][:-2]:
            shutil.rmtree(old / "trainer")

    def write_model(self, folder: Path, parameters: Mapping[str, torch.Tensor] | None = None
                    ) -> None:
        """Write the model's folder. With --lora the additions are a part of its matrices."""
        if self.settings.lora:
            from lab.engine.adapter import write_lora_folder
            write_lora_folder(self.model, folder)
        else:
            write_model_folder(self.model, folder, parameters or self.trained)
        for name, content in self.copied_files.items():
            (folder / name).write_bytes(content)

    def last_good_model(self) -> str:
        """A clause about a way out of an error that a resumed run would make again."""
        if found := checkpoints(self.folder):
            return (f"the last good checkpoint is {found[max(found)]}, from which --model begins a "
                    "new run")
        return "there is no checkpoint before it"

    def save_model(self) -> None:
        """Write the trained model alone, with its matrices rounded to the type of the products. In
        products the run has used no more digits of them; only as inputs the embeddings had more.

        If a stopped run has kept its trainer's state, this is removed, because a later resume would
        go back to it and train past this model.
        """
        dtype = self.model.compute_dtype
        rounded = {}
        for name, parameter in self.trained.items():
            is_matrix = parameter.dim() > 1
            rounded[name] = parameter.detach().to(dtype) if is_matrix else parameter
        folder = self.folder / "checkpoints" / f"step_{self.settings.steps:06d}"
        if not folder.exists():  # a run that was stopped in its last step has a checkpoint there
            with whole(folder) as unfinished:
                self.write_model(unfinished, rounded)
        for folder in checkpoints(self.folder).values():
            remove(folder / "trainer")

    def end(self) -> None:
        s = self.settings
        if not self.stopping or self.step == s.steps:
            with self.explained():
                self.policy.refuse_broken_model()
            if s.steps and not s.checkpoint_every:
                self.save_model()
            if not (s.steps and s.checkpoint_every):  # no checkpoint says that it is finished
                change_config(self.folder, {"finished": s.steps})
        took = round(time.monotonic() - self.start)
        self.stopping &= self.step < s.steps  # a finished run was not stopped early
        go_on = python_command("-m", "lab", "train", "--resume", self.folder)
        say(f"{go_on} goes on from step {self.step}" if self.stopping else
            f"done. Everything is in {self.folder}")
        if len(self.evaluations) > 1:
            first, last = (self.success_of(self.evaluations[place]) for place in (0, -1))
            say(f"  {first} -> {last} on the held-out problems")
        say(f"  {took // 60} min {took % 60:02d} s\n{python_command('analyze.py', self.folder)}  "
            "makes tables, pictures and a page")
        if (memory := peak_memory()) is not None:
            say(f"  at most {memory / 1e9:.2f} GB of memory")
        say(f"{python_command('-m', 'lab', 'page', self.folder)}  makes a page to play with\n"
            f"{python_command('-m', 'lab', 'follow', self.folder)}  follows a token through a step")
