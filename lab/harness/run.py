"""A run beyond the book: the parts that train.py's loop uses in the place of the plain ones.

    part of run.Run        plain                      here
    make_parts             the tiny model, float32    lab/harness/build.py: devices, LoRA, --task
    sample                 grpo.sample                lab/engine/sampler.py, with replies
    advantages, weights    a function of the batch    also a class with a state, placebos, --rescale
    update                 grpo.update                with the parts of lab/engine/update.py
    where_to_go_on         a checkpoint               also what has changed since
    write_state            the optimizer              also digests of all that has to match it
    record, log, save      a run's folder             the same folder, with more in it
"""
import inspect
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import run as book
from lab.engine.methods import refuse_other_values
from lab.engine.errors import NotFinite, UserError, location_of, read_json, refuse_undefined
from lab.engine.model_folder import write_model_folder
from lab.engine.credited import advantage_of, drop_unfinished, rescaled_weight
from lab.engine.rollouts import Problem, Rollouts, has_format
from lab.engine.update import Learner
from lab.harness.flags import settle
from lab.harness.build import build, make_advantage, make_weighting
from lab.harness.kept import Kept
from lab.harness.made_of import made_of
from lab.harness.step_lines import with_all_metrics
from lab.harness.read_record import refuse_other, run_config, say_what_differs, steps_finished
from lab.harness.record import (Json, change_config, credit_path, digest_of, provenance,
                                read_lines, write_credit)
from lab.harness.screen import python_command, say
from lab.harness.settings import CHANGEABLE, CONTINUE, LabSettings, make_settings, read_flags
from lab.harness.tasks import score_again
from qwen2_model import small_files
from run import checkpoints, remove, whole
from train import Training


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


class LabRun(Learner, Training):
    settings: LabSettings
    changeable = CHANGEABLE
    scores_agree = True  # so far, when answers were scored twice

    def __init__(self, settings: LabSettings, is_resumed: bool = False,
                 may_begin_again: bool = False):
        self.may_begin_again = may_begin_again
        self.after_step: Callable[[], None] = lambda: None  # for a large model: returns memory
        self.drawn: Json = {}  # what dynamic sampling drew beyond the batch, in the last step
        self.lock_file: os.stat_result | None = None
        self.curves: Any = None  # --track
        self.took: dict[str, float] = {}  # seconds of the stages of this step
        try:
            super().__init__(settings, is_resumed)
        except Exception:  # a notebook goes on, and the error that it shows keeps this object
            self.close(failed=False)
            raise

    def where_to_go_on(self) -> None:
        """A run that keeps no checkpoints is finished or begins again, which --continue may do."""
        every = run_config(self.folder).get("checkpoint_every")
        if every == 0 and not checkpoints(self.folder):
            self.is_finished = steps_finished(self.folder) >= self.settings.steps
            if self.is_finished:
                return say(f"{self.folder} is finished. It kept nothing to continue it from")
            if self.may_begin_again:
                return
        lines = read_lines(self.folder / "metrics.jsonl")
        super().where_to_go_on()
        steps = [line["step"] for line in lines if line["step"] <= self.done]
        if steps != [*range(1, self.done + 1)]:
            raise UserError(f"{self.folder}/metrics.jsonl does not have one line for each of the "
                            f"steps 1 to {self.done}, in order")

    def make_parts(self) -> None:
        parts = build(self.settings, self.checkpoint, self.drawn)
        policy, self.parts, self.policy = parts.policy, parts, parts.policy
        self.task, self.model, self.source = policy.task, policy.model, policy.folder
        self.optimizer, self.trained = parts.optimizer, parts.parameters
        self.reference = parts.reference
        s = self.settings
        # in bfloat16, and on a GPU, whose kernels differ more, the gap is on record alone
        if (s.device, s.dtype, s.temperature) == ("cpu", "float32", 1):
            self.largest_gap = Training.largest_gap
        self.has_format = has_format(policy.task)
        self.kept = {axis: Kept(inspect.unwrap(method)) for axis, method in parts.methods.items()
                     if inspect.isfunction(method)}
        self.copied_files = small_files(policy.folder)
        if self.checkpoint:
            parts.put_back(self.read_state(self.checkpoint))

    def begin(self) -> None:
        super().begin()
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
            found = super().update(self.trained_on(rollouts), weight, is_measured)
            refuse_undefined("after the update a parameter is", *self.trained.values())
            return found

    def config(self) -> Json:
        return super().config() | provenance() | {
            "model_config": asdict(self.model.config),
            "threads": torch.get_num_threads(), "reward": self.task.rewarded,
            "trained_parameters": sum(one.numel() for one in self.trained.values())}

    def made_of(self) -> dict[str, str]:
        return made_of(self.settings)

    def config_going_on(self) -> Json:
        found = super().config_going_on()
        say_what_differs(self.folder, self.done)
        return found

    def make_folder(self) -> None:
        s, trained = self.settings, sum(one.numel() for one in self.trained.values())
        say("a run of the lab: grpo.py makes its steps, with the parts of lab/engine/update.py")
        if s.lora:
            say(f"LoRA of rank {s.lora} trains {trained / 1e6:.2f} million parameters")
        if (s.device, s.dtype) != ("cpu", "float32"):
            say(f"computing on {s.device} in {s.dtype}")
        super().make_folder()

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
        if self.curves:
            self.curves.close()
        super().close(failed and self.is_here())

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
        super().log(line)
        if line["weight_note"]:
            say(f"          {line['weight_note']}")
        if self.curves:
            self.curves.add(line, "train")
        self.after_step()

    def log_evaluation(self, line: Json, seconds: float) -> None:
        self.refuse_other_folder()
        low, high = mean_interval(line["reward"])
        line = line | {"reward_low": low, "reward_high": high}
        if not self.task.knows_success:
            line |= dict.fromkeys(("success", "success_low", "success_high"))
        super().log_evaluation(line, seconds)
        if self.curves:
            self.curves.add(line, f"held_out/{line['mode']}")

    def success_of(self, line: Json) -> str:
        if self.task.knows_success:
            return super().success_of(line)
        return ("reward {reward_mean:.3f} (95% interval {reward_low:.3f} to {reward_high:.3f})"
                .format(**line))

    def verdict_on(self, shown: Json) -> str:
        if self.task.knows_success:
            return super().verdict_on(shown)
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
        return {"its number": str(step), "a setting in config.json": book.digest_of(settings),
                "the task's choice of problems": book.digest_of(
                    [(task.prompt_for(problem), task.show(problem)) for problem in problems]),
                "its model": digest_of(checkpoint / "model.safetensors"),
                "its trainer's state": digest_of(checkpoint / "trainer" / "state.safetensors")}

    def read_state(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        path = checkpoint / "trainer" / "state.json"
        if not path.exists() and "model_config" not in read_json(self.folder / "config.json"):
            return super().read_state(checkpoint)  # a run of the book keeps no digests
        known = read_json(path)
        for what, digest in self.digests(checkpoint, self.done).items():
            if known.get(what) != digest:
                raise UserError(f"{checkpoint}: {what} has changed since this checkpoint was made, "
                                "so the run cannot go on from it")
        return super().read_state(checkpoint)

    def write_state(self, path: Path, step: int) -> None:
        super().write_state(path, step)
        (path / "state.json").write_text(json.dumps(self.digests(path.parent, step)))

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
        super().save(step)

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
        super().end()
        if (memory := peak_memory()) is not None:
            say(f"  at most {memory / 1e9:.2f} GB of memory")
        say(f"{python_command('-m', 'lab', 'page', self.folder)}  makes a page to play with\n"
            f"{python_command('-m', 'lab', 'follow', self.folder)}  follows a token through a step")
