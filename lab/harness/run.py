"""A run of the lab: what the loop of lab/harness/loop.py uses. Its folder is that of run.py, with
digests of all that has to match a checkpoint (trainer/state.json) and of the data that the run is
made of (config.json).
"""
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lab.engine.credited import advantage_of, drop_unfinished, rescaled_weight
from lab.engine.errors import NotFinite, UserError, refuse_undefined, say
from lab.engine.rollouts import Problem, Rollouts
from lab.engine.update import update
from lab.harness import memory
from lab.harness.asked_twice import AskedTwice
from lab.harness.build import build
from lab.harness.checkpoint import Checkpoints, refuse_damage
from lab.harness.flags import settle
from lab.harness.made_of import changed_data, files_of_run, made_of
from lab.harness.read_record import refuse_other, run_config, say_what_differs, steps_finished
from lab.harness.record import (Json, change_config, credit_path, provenance, replace_text,
                                write_credit)
from lab.harness.screen import python_command
from lab.harness.settings import CHANGEABLE, CONTINUE, LabSettings, make_settings, read_flags
from lab.harness.step_lines import with_all_metrics
from lab.harness.tasks import score_again
from lab.harness.versions import digest_of as digest_of_text
from run import (Run, append, checkpoints, forget_after, lock, make_run, note_changes, printable,
                 read_lines)


def open_lab_run(argv: list[str]) -> "LabRun | None":
    """The run that a command line asks for; None if it is finished."""
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
    s = make_settings(given)
    s.out = str(s.folder)
    if resume or how["continue"] and s.folder.exists():
        s.resume = s.out
        if not resume:
            refuse_other(s.folder, s, {*CHANGEABLE} - {"steps"},
                         "name another folder with --out")
        if is_finished(s):
            return None
        if not resume and keeps_nothing(s.folder):  # it begins again
            with closing(lock(s.folder)):
                forget_after(s.folder, 0)
    return LabRun(s)


def is_finished(s: LabSettings) -> bool:
    """Whether a run has made all of these steps; then it is said."""
    if steps_finished(s.folder) < s.steps:
        return False
    say(f"{s.out} is finished" + (". It kept nothing to continue it from" if keeps_nothing(s.folder)
                                  else ": a larger --steps continues it"))
    return True


def keeps_nothing(folder: Path) -> bool:
    """Whether a run has nothing to go on from, because it was told to keep no checkpoints."""
    return run_config(folder).get("checkpoint_every") == 0 and not checkpoints(folder)


class LabRun(Run):
    """A run of run.py, with the parts that the loop of lab/harness/loop.py uses."""
    settings: LabSettings
    largest_gap = math.inf   # bfloat16 rounds coarsely
    scores_agree = True      # so far, when answers were scored twice
    step = 0                 # that is being made
    lock_file: os.stat_result | None = None
    curves: Any = None       # --track

    def __init__(self, s: LabSettings):
        super().__init__(s)
        self.drawn: Json = {}  # what dynamic sampling drew beyond the batch, in the last step
        self.took: dict[str, float] = {}  # seconds of the stages of this step
        try:
            if s.resume:
                self.refuse_holes()
            self.make_parts()
        except Exception:  # a notebook goes on, and the error that it shows keeps this object
            self.close(failed=False)
            raise

    def refuse_holes(self) -> None:
        """A run that was stopped before its first checkpoint begins again, and loses its record; no
        other run does. `checkpoint_every` is the number that the run had."""
        steps = [line["step"] for line in read_lines(self.folder / "metrics.jsonl")]
        if not self.done and len(steps) > (run_config(self.folder).get("checkpoint_every") or 0):
            raise UserError(f"{self.folder} has {len(steps)} steps on record, and no checkpoint to "
                            "go on from")
        planned = run_config(self.folder).get("steps")
        if self.settings.decay != "none" and planned != self.settings.steps:
            raise UserError(f"{self.folder} has --decay {self.settings.decay}, so its learning "
                            f"rates follow from --steps {planned}, and no other number goes on")
        if [step for step in steps if step <= self.done] != [*range(1, self.done + 1)]:
            raise UserError(f"{self.folder}/metrics.jsonl does not have one line for each of the "
                            f"steps 1 to {self.done}, in order")
        if self.done:
            refuse_damage(self.folder, self.done)

    def make_parts(self) -> None:
        s, checkpoint = self.settings, self.source if self.done else None
        self.parts = build(s, checkpoint, self.drawn)
        self.policy = self.parts.policy
        self.task: Any = self.policy.task
        self.asked_twice = AskedTwice(self.parts)
        self.checkpoints = Checkpoints(self.folder, self.parts)
        # in bfloat16, and on a GPU, whose kernels differ more, the gap is on record alone
        if (s.device, s.dtype, s.temperature) == ("cpu", "float32", 1):
            self.largest_gap = 0.01
        if checkpoint:
            self.checkpoints.put_back(self.done, checkpoint)

    @cached_property
    def held_out(self) -> list[Any]:
        """The task remembers these problems, and refuses to train on one."""
        return list(self.task.held_out_problems(self.settings.eval_tasks))

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
                            f"{self.checkpoints.last_good_model()}") from error

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
        return replace(rollouts, forward=self.policy.extra_forward())

    def advantages(self, rollouts: Rollouts) -> torch.Tensor:
        with self.credited("advantage", rollouts):
            return advantage_of(self.parts.advantage_method, self.settings, rollouts, self.policy)

    def weights(self, rollouts: Rollouts) -> tuple[torch.Tensor, Json]:
        s, batch = self.settings, self.trained_on(rollouts)
        with self.credited("mitigation", batch):
            return rescaled_weight(self.parts.weighting, s.mitigation, batch, self.policy,
                                   s.rescale, s.placebo)

    @contextmanager
    def credited(self, axis: str, rollouts: Rollouts) -> Iterator[None]:
        """In the first two steps and at checkpoints a method is asked twice."""
        every = self.settings.checkpoint_every
        is_saved = every and self.step % every == 0
        with self.clocked("credit_seconds"), self.explained(), ExitStack() as more:
            if is_saved or self.step <= self.done + 2:
                more.enter_context(self.asked_twice.asked(axis, rollouts))
            yield

    def trained_on(self, rollouts: Rollouts) -> Rollouts:
        return drop_unfinished(rollouts) if self.settings.drop_unfinished else rollouts

    @property
    def learning_rate(self) -> float:
        """Of this step: with --decay linear it falls to 0 after the last step."""
        s = self.settings
        left = 1 - (self.step - 1) / s.steps if s.decay == "linear" else 1.0
        return s.learning_rate * left

    def update(self, rollouts: Rollouts, weight: torch.Tensor, is_measured: bool = False
               ) -> tuple[Json, dict[str, torch.Tensor]]:
        parts = self.parts
        parts.optimizer.learning_rate = self.learning_rate
        with self.explained(), self.clocked("update_seconds"):
            found = update(self.policy.model, parts.optimizer, self.trained_on(rollouts), weight,
                           self.settings, parts.reference, is_measured, self.largest_gap)
            refuse_undefined("after the update a parameter is", *parts.parameters.values())
            return found

    # ------------------------------------------------------------------ its folder, and its record

    def begin(self) -> None:
        """Make the folder of a new run, or go back to the last checkpoint of an old one."""
        if not self.settings.resume:
            self.make_folder()
            self.locked = lock(self.folder)
        else:
            say(f"continuing {self.folder} after step {self.done}")
            forget_after(self.folder, self.done)
            replace_text(self.folder / "config.json", json.dumps(self.config_going_on(), indent=2))
        if any(line["success"] is None for line in read_lines(self.folder / "metrics.jsonl")):
            self.task.knows_success = False  # a reward of the steps before was no 0 and no 1
        self.lock_file = (self.folder / "lock").stat()
        self.after_step = memory.after_steps_of(self.policy.model)
        if self.settings.track != "none":
            from lab.harness.track import Curves
            self.curves = Curves(self.folder, self.done)

    def make_folder(self) -> None:
        s, model, trained = self.settings, self.policy.model, self.trained_parameters
        size = sum(parameter.numel() for parameter in model.parameters())
        if s.lora:
            say(f"LoRA of rank {s.lora} trains {trained / 1e6:.2f} million parameters")
        if (s.device, s.dtype) != ("cpu", "float32"):
            say(f"computing on {s.device} in {s.dtype}")
        say(f"{s.model}: {size / 1e6:.2f} million parameters, {torch.get_num_threads()} threads; "
            f"{s.questions} problems x {s.answers} answers a step; writing to {self.folder}")
        if s.eval_every:
            say(f"before the first step, {len(self.held_out)} held-out problems are answered twice")
        make_run(self.folder, self.config(), self.source / "tokenizer.json", files_of_run(s))

    @property
    def trained_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parts.parameters.values())

    def config(self) -> Json:
        """config.json: the settings, and a digest of the held-out problems and of each file of
        data. `lab compare` tells runs apart in which these differ, or their code/."""
        s = self.settings
        shown = [self.task.show(problem) for problem in self.held_out] if s.eval_every else None
        return s.to_json() | provenance() | {
            "held_out_problems": digest_of_text(shown) if shown else None,
            "made_of": made_of(s), "model_config": asdict(self.policy.model.config),
            "threads": torch.get_num_threads(), "reward": self.task.rewarded,
            "trained_parameters": self.trained_parameters}

    def config_going_on(self) -> Json:
        """config.json of a resumed run. What was recorded first stays, and what is another version
        since then is said; of files of data the digest before is kept."""
        before, now = run_config(self.folder), self.config()
        changed = changed_data(before.get("made_of", {}), now["made_of"]) if self.done else {}
        if changed:
            now["changed"] = [*before.get("changed", []),
                              {"after_step": self.done, "files": changed}]
        names = [*note_changes(self.folder, self.done, files_of_run(self.settings)), *changed]
        if names and self.done:
            named = ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
            say(f"changed since the {self.done} steps were made: {named}. So what follows may not "
                "be what a run that was never stopped gives (the old files are in code/)")
        say_what_differs(self.folder, self.done)
        kept = (*CHANGEABLE, "made_of", "changed")
        return before | {name: now[name] for name in kept if name in now}

    def refuse_other_folder(self) -> None:
        if not self.is_here():
            raise UserError(f"{self.folder} was moved or removed while this run was writing it. If "
                            "it was moved, --resume and its new name continue the run")

    def is_here(self) -> bool:
        """Whether the folder still has its name, and no other one has taken it: the lock lies in
        the folder, and is moved with it."""
        path = self.folder / "lock"
        return self.lock_file is not None and path.exists() and os.path.samestat(
            path.stat(), self.lock_file)

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
        """Write a line of metrics.jsonl, and print one, as the book does."""
        line = with_all_metrics(line, self.parts.advantage_method, self.parts.weighting)
        if not self.task.knows_success:
            line |= dict.fromkeys(("success", "reward_answer"), math.nan)
        line["learning_rate"] = self.learning_rate
        line["peak_memory_bytes"] = memory.peak_memory(self.policy.model.device)
        for name, count in self.drawn.items():
            line[name] += count
        sampled = line["tokens"] + self.drawn.get("extra_tokens", 0)
        line |= self.took | {"rollout_tokens_per_second": sampled / self.took["rollout_seconds"]}
        self.took = {}
        self.refuse_other_folder()
        super().log(line)
        if line["weight_note"]:
            say(f"          {line['weight_note']}")
        if self.curves:
            self.curves.add(line, "train")
        self.after_step()

    def log_evaluation(self, line: Json) -> None:
        self.refuse_other_folder()
        low, high = mean_interval(line["reward"])
        line = line | {"reward_low": low, "reward_high": high}
        if self.task.knows_success:
            super().log_evaluation(line)
        else:
            line |= dict.fromkeys(("success", "success_low", "success_high"))
            append(self.folder / "evaluations.jsonl", line)
            self.say_rewards(line)
        if self.curves:
            self.curves.add(line, f"held_out/{line['mode']}")

    def say_rewards(self, line: Json) -> None:
        """Of a task that does not say which answers are right."""
        reward = ("reward {reward_mean:.3f} (95% interval {reward_low:.3f} to {reward_high:.3f})"
                  .format(**line))
        say(f"  held-out, {line['mode']:7s} {reward}  ({len(line['answer'])} problems, length "
            f"{line['length_mean']:.0f})")
        if line["mode"] == "sampled":
            self.success.append(reward)
            for shown in line["shown"]:
                text = printable(f"{shown['problem']}: {shown['text']}")
                say(f"  reward {shown['reward']:.3f}  {text[:300]}")

    def save(self, step: int, *_: object) -> None:
        """With --checkpoint_every 0 the model is written at the end, alone."""
        if step == self.settings.steps and not self.settings.checkpoint_every:
            return
        self.refuse_other_folder()
        with self.explained():
            self.checkpoints.write(step)

    @property
    def is_stopped(self) -> bool:
        """Whether it ended before its last step, because of Ctrl-C."""
        return self.stopping and self.step < self.settings.steps

    def end(self) -> None:
        s = self.settings
        if not self.is_stopped:
            with self.explained():
                self.policy.refuse_broken_model()
            if s.steps and not s.checkpoint_every:
                self.checkpoints.write_last(s.steps)
            if not (s.steps and s.checkpoint_every):  # no checkpoint says that it is finished
                change_config(self.folder, {"finished": s.steps})
        if self.is_stopped:
            go_on = python_command("-m", "lab", "train", "--resume", self.folder)
            return say(f"{go_on} goes on from step {self.step}")
        super().end()
        skipped = [bool(line["skipped"]) for line in read_lines(self.folder / "metrics.jsonl")]
        if sum(skipped) > len(skipped) / 2:
            say(f"  {sum(skipped)} of {len(skipped)} steps had no update: "
                f"{python_command('-m', 'lab', 'try')} with the flags of this run shows prompts, "
                "answers and their rewards")
        if memory_taken := memory.peak_memory(self.policy.model.device):
            say(f"  at most {memory_taken / 1e9:.2f} GB of memory")
        say(f"{python_command('-m', 'lab', 'page', self.folder)}  makes a page to play with\n"
            f"{python_command('-m', 'lab', 'follow', self.folder)}  follows a token through a step")

    def close(self, failed: bool) -> None:
        """Unlock the folder. If a new run failed in its first step, remove its folder, so that the
        next attempt can have its name."""
        if self.curves:
            self.curves.close()
        is_empty = not (self.folder / "metrics.jsonl").exists()
        if not self.settings.resume and failed and self.is_here() and is_empty:
            shutil.rmtree(self.folder, ignore_errors=True)
        if "locked" in vars(self):
            self.locked.close()


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a mean, by the normal distribution; of one value it is not known."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    half = 1.959964 * math.sqrt(squares / (len(values) - 1) / len(values)) if values[1:] else (
        math.nan)
    return mean - half, mean + half
