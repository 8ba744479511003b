"""A run beyond the book: the parts that train.py's loop uses in the place of the plain ones.

    part of run.Run        plain                      here
    batch, ask             qwen2_model.generate       lab/engine/sampler.py, replies, --task
    advantage, weigh       a function of the batch    also a class with a state, placebos, --rescale
    update                 grpo.update                lab/engine/update.py
    record, log, save      a run's folder             the same folder, with more in it
"""
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from lab.engine.methods import refuse_other_values
from lab.engine.errors import BadCredit, NotFinite, UserError, refuse_undefined
from lab.engine.model_folder import read_tensors, write_model_folder, write_tensors
from lab.engine.optimizer import rate_of_step
from lab.credit.weightings import advantage_of, drop_unfinished, rescaled_weight
from lab.engine.policy import derived_seed
from lab.engine.rollouts import Problem, Rollouts, has_format
from lab.engine.update import update, update_with_change
from lab.harness.flags import settle
from lab.harness.build import build, make_advantage, make_weighting
from lab.harness.made_of import made_of
from lab.harness.step_lines import (print_evaluation, print_outcome, print_step,
                                    with_all_metrics)
from lab.harness.record import (Json, RunFolder, credit_path, make_run, provenance, read_lines,
                                remove, whole, write_credit)
from lab.harness.screen import StopRequest, python_command, say
from lab.harness.settings import CHANGEABLE, CONTINUE, Settings, make_settings, read_flags
from lab.harness.tasks import score_again
from run import digest_of_problems

COPIED_FILES = (  # from the folder of the model into every checkpoint
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "recipe.json")


def open_lab_run(argv: list[str]) -> "Run":
    """The run that a command line asks for."""
    given = read_flags(argv)
    how = settle({name: given.pop(name) for name in CONTINUE if name in given}, CONTINUE)
    resume, config = how["resume"], how["config"]
    if resume:
        from lab.harness.read_record import run_config
        refuse_unchangeable({**given, "config": config} if config else given)
        run_config(Path(resume))  # refuses a folder that is none of a run
        config, given["out"] = Path(resume) / "config.json", resume
    if config:
        given["config"] = config
    settings = make_settings(given)
    exists = settings.folder.exists()
    run = Run(settings)
    if exists:
        run.look_into_folder(bool(resume), how["continue"])
    return run


def refuse_unchangeable(given: Json) -> None:
    for name in sorted(given.keys() - {*CHANGEABLE}):
        others = ", ".join(f"--{flag}" for flag in CHANGEABLE if flag != "steps")
        raise UserError(f"--{name} cannot be changed in a resumed run. Only --steps can, and the "
                        f"flags that say how a run is computed or recorded: {others}")


class Run:
    """A run, of which `done` steps are on record, up to `checkpoint`. A new one has no folder until
    it begins."""

    def __init__(self, settings: Settings):
        self.settings, self.folder = settings, RunFolder(settings.folder)
        self.checkpoint: Path | None = None
        self.step = self.done = 0
        self.is_finished, self.is_new, self.scores_agree = False, True, True
        self.after_step: Callable[[], None] = lambda: None  # for a large model: returns memory
        self.seconds: deque[float] = deque(maxlen=20)  # of the last steps
        self.drawn: Json = {}  # what dynamic sampling drew beyond the batch, in the last step
        self.copied_files: dict[str, bytes] = {}  # files of the model's folder, by name
        self.tracker: Callable[[Json, int], object] | None = None  # --track
        self.start, self.cleanup = time.monotonic(), ExitStack()

    def look_into_folder(self, is_resumed: bool, may_continue: bool) -> None:
        """Find out how far the run in this folder is, and whether it may be continued."""
        from lab.harness.resume import last_state, refuse_other
        if not is_resumed:
            refuse_other(self.settings, may_continue)
        self.is_new = False
        self.cleanup.enter_context(self.folder.opened())
        self.done, self.checkpoint, self.is_finished = last_state(
            self.settings, self.folder, may_begin_again=not is_resumed)

    def begin(self) -> None:
        """Make the parts of the run and its folder. If it is resumed, the parts get back their
        state from its checkpoint. From now on Ctrl-C waits for the end of a step."""
        self.parts = build(self.settings, self.checkpoint, self.drawn)
        policy = self.policy = self.parts.policy
        self.task = policy.task
        if self.settings.lora:
            from lab.engine.adapter import name_of_model
            self.base = name_of_model(policy.folder)
        # read now, because a user may remove the folder meanwhile: it can be an old checkpoint
        for name in COPIED_FILES:
            if (policy.folder / name).exists():
                self.copied_files[name] = (policy.folder / name).read_bytes()
        if self.is_new:
            self.begin_folder()
        else:
            self.read_back()
        if policy.model.is_large:
            from lab.harness.memory import FreedMemory, keep_memory, should_keep_memory
            if should_keep_memory(policy.model):
                keep_memory()
            self.after_step = FreedMemory().after_step
        if self.settings.track != "none":
            from lab.harness.track import tracking
            self.tracker = self.cleanup.enter_context(tracking(
                self.settings.track, self.folder.path, self.done, self.settings.to_json()))
        self.stop = self.cleanup.enter_context(StopRequest())
        if self.settings.eval_every:  # the task remembers them, and refuses to train on one
            policy.task.held_out_problems(self.settings.eval_tasks)

    # ------------------------------------------------------------- what a step of train.py uses

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a number that is not finite in which step it came up, and how to go on."""
        try:
            yield
        except NotFinite as error:
            rate = f" at --learning_rate {self.settings.learning_rate:g}"
            if isinstance(error, BadCredit) or self.step == 0:  # the rate is not to blame
                rate = ""
            raise UserError(f"{error}, in step {self.step}{rate}; "
                            f"{self.last_good_model()}") from error

    @property
    def stopping(self) -> bool:
        return self.stop.requested and self.step < self.settings.steps

    def batch(self, step: int) -> Rollouts:
        s = self.settings
        with self.explained():
            problems = self.task.training_problems(s.seed, step, s.questions)
            rollouts = self.parts.sample(problems, s.answers, derived_seed("train", s.seed, step))
            rollouts = self.policy.score(rollouts)
        return replace(rollouts, forward=self.policy.extra_forward())

    def ask(self, problems: Sequence[Problem], answers: int, generator: torch.Generator,
            greedy: bool = False) -> Rollouts:
        """For an evaluation, which samples at temperature 1, whatever training does."""
        at_one = replace(self.policy, settings=replace(self.settings, temperature=1.0))
        with self.explained():
            return at_one.ask(problems, answers, generator, greedy)

    def advantage(self, rollouts: Rollouts) -> torch.Tensor:
        with self.explained():
            values = advantage_of(self.parts.advantage_method, self.settings, rollouts,
                                  self.policy)
            self.ask_again("advantage", rollouts)
        return values

    def weigh(self, rollouts: Rollouts) -> tuple[torch.Tensor, Json]:
        s = self.settings
        with self.explained():
            found = rescaled_weight(self.parts.weighting, s.mitigation, self.trained_on(rollouts),
                                    self.policy, s.rescale, s.placebo)
            self.ask_again("mitigation", self.trained_on(rollouts))
        return found

    def ask_again(self, axis: str, rollouts: Rollouts) -> None:
        """In the first two steps and at checkpoints, ask a method twice."""
        s, policy = self.settings, self.policy
        is_saved = s.checkpoint_every and self.step % s.checkpoint_every == 0
        if is_saved or self.step <= self.done + 2:
            chosen = self.parts.methods[axis]
            make_another = {"advantage": make_advantage, "mitigation": make_weighting}[axis]
            refuse_other_values(
                chosen, lambda: chosen if policy.model.is_large else make_another(s, policy),
                f"--{axis} {getattr(s, axis)}", rollouts, policy)

    def trained_on(self, rollouts: Rollouts) -> Rollouts:
        return drop_unfinished(rollouts) if self.settings.drop_unfinished else rollouts

    def update(self, rollouts: Rollouts, weight: torch.Tensor, is_measured: bool
               ) -> tuple[Json, dict[str, torch.Tensor]]:
        update_now = update_with_change if is_measured else update
        with self.explained():
            return update_now(self.policy.model, self.parts.optimizer, self.trained_on(rollouts),
                              weight, self.settings, self.parts.reference)

    def read_back(self) -> None:
        """Read the state of a run that is resumed, and remove what it wrote after that."""
        from lab.harness.resume import take_over
        if self.checkpoint:
            self.parts.put_back(read_tensors(self.checkpoint / "trainer" / "state.safetensors"))
        take_over(self.settings, self.folder, self.done)

    def begin_folder(self) -> None:
        """Make the folder of a new run. If the first step fails, it is removed again, so that it is
        not in the way of the next attempt."""
        s, policy, model = self.settings, self.policy, self.policy.model
        size = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in self.parts.parameters.values())
        of_lora = ""
        if s.lora:
            of_lora = f" (LoRA of rank {s.lora} trains {trained / 1e6:.2f} million of them)"
        count = torch.get_num_threads()
        threads = "1 thread" if count == 1 else f"{count} threads"
        say(f"{s.model}: {size / 1e6:.2f} million parameters{of_lora} on {s.device} in {s.dtype}, "
            f"{threads}; {s.questions} problems x {s.answers} answers a step; writing to "
            f"{s.folder}")
        if model.is_large and model.device.type == "cpu":
            from lab.harness.cost import about_cost
            say(about_cost(policy))
        config = {**s.to_json(), "threads": torch.get_num_threads(), **provenance(),
                  "trained_parameters": trained,
                  "reward": policy.task.rewarded, "columns_temperature": 1,
                  "model_config": model.config.to_json(), "made_of": made_of(s)}
        if s.eval_every:
            config["held_out_problems"] = digest_of_problems(self.task, s.eval_tasks)
        make_run(s.folder, config, policy.folder / "tokenizer.json")
        self.cleanup.enter_context(self.folder.opened())

    def close(self, failed: bool) -> None:
        """Give everything back. The folder of a new run whose first step failed is removed, so that
        it is not in the way of the next attempt."""
        is_started = (self.folder.path / "metrics.jsonl").exists()
        if failed and self.is_new and self.folder.path.exists() and not is_started and (
                self.folder.is_here()):
            shutil.rmtree(self.folder.path)
        self.cleanup.close()

    def last_good_model(self) -> str:
        """A clause about the checkpoint from which a run can be begun after an error."""
        checkpoints = self.folder.checkpoints()
        if not checkpoints:
            return "there is no checkpoint before it"
        return (f"the last good checkpoint is {checkpoints[max(checkpoints)]}, from which --model "
                "begins a new run")

    def steps(self) -> Iterator[int]:
        s = self.settings
        if self.done < s.steps < s.warmup_steps:
            say(f"--warmup_steps {s.warmup_steps}: the run ends before, so its learning rate never "
                f"reaches {s.learning_rate:g}")
        for self.step in range(self.done + 1, s.steps + 1):
            if s.warmup_steps or s.decay != "none":
                self.parts.optimizer.learning_rate = rate_of_step(
                    self.step, s.steps, s.learning_rate, s.warmup_steps, s.decay)
            yield self.step

    def record(self, rollouts: Rollouts, weight: torch.Tensor,
               columns: dict[str, torch.Tensor]) -> None:
        """Write the credit file. Answers are scored once more (`score_again`): in the first
        step all of them, and then two in each step."""
        step = rollouts.step
        write_credit(credit_path(self.folder.at(""), step), rollouts, weight, {"step": step},
                     **columns)
        if self.scores_agree:
            self.scores_agree = score_again(
                rollouts, self.policy.task, self.settings.task, self.policy.environment,
                all_rows=step == self.done + 1)

    def log(self, line: Json) -> None:
        """Write a line of metrics.jsonl, and print one."""
        steps, step = self.settings.steps, self.step
        line = with_all_metrics(line, self.parts.advantage_method, self.parts.weighting)
        line["learning_rate"] = self.parts.optimizer.learning_rate
        if self.policy.model.device.type == "cuda":
            line["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.policy.model.device)
        for name, count in self.drawn.items():
            line[name] += count
        if self.drawn:
            sampled = line["tokens"] + self.drawn["extra_tokens"]
            line["rollout_tokens_per_second"] = sampled / line["rollout_seconds"]
        self.folder.append("metrics.jsonl", line)
        self.track(line, "train")
        self.seconds.append(line["seconds"])
        print_step(line, steps, mean(self.seconds) * (steps - step),
                   with_header=step % 20 == 1 or step == self.done + 1,
                   with_format=has_format(self.policy.task))
        self.after_step()

    def log_evaluation(self, line: Json, seconds: float) -> None:
        """Write a line of evaluations.jsonl, and print one."""
        self.folder.append("evaluations.jsonl", line)
        self.track(line, f"held_out/{line['mode']}")
        print_evaluation(line, seconds, has_format(self.policy.task))

    def track(self, line: Json, prefix: str) -> None:
        """Send the numbers of a line to the program that --track names."""
        if self.tracker:
            from lab.harness.track import numbers_of
            self.tracker(numbers_of(line, prefix), line["step"])

    def save(self, step: int) -> None:
        """Write a model folder; in the two newest the trainer's state lies below it. With
        --checkpoint_every 0 the model is written at the end, alone."""
        if step == self.settings.steps and not self.settings.checkpoint_every:
            return
        with self.explained():
            self.policy.refuse_broken_model()
        tensors = self.parts.state()
        with self.explained():
            refuse_undefined("the state that a resumed run would continue from is",
                             *(value for value in tensors.values() if value.is_floating_point()))
        for folder in [*self.folder.checkpoints().values()][:-1]:
            remove(folder / "trainer")
        with whole(self.model_folder(step)) as unfinished:
            self.write_model(unfinished, self.parts.parameters)
            trainer = unfinished / "trainer"
            trainer.mkdir()
            write_tensors(trainer / "state.safetensors", tensors)

    def model_folder(self, step: int) -> Path:
        return self.folder.at("checkpoints") / f"step_{step:06d}"

    def write_model(self, folder: Path, parameters: Mapping[str, torch.Tensor]) -> None:
        """Write the model's folder. With --lora it has the additions as a part of its matrices, and
        once more in a folder for other programs."""
        if self.settings.lora:
            from lab.engine.adapter import write_lora_folder
            write_lora_folder(self.policy.model, folder, self.base)
        else:
            write_model_folder(self.policy.model, folder, parameters)
        for name, content in self.copied_files.items():
            (folder / name).write_bytes(content)

    def save_model(self) -> None:
        """Write the trained model alone, with its matrices rounded to the type of the products. In
        products the run has used no more digits of them; only as inputs the embeddings had more.

        If a stopped run has kept its trainer's state, this is removed, because a later resume would
        go back to it and train past this model.
        """
        dtype = self.policy.model.compute_dtype
        rounded = {}
        for name, parameter in self.parts.parameters.items():
            is_matrix = parameter.dim() > 1
            rounded[name] = parameter.detach().to(dtype) if is_matrix else parameter
        folder = self.model_folder(self.settings.steps)
        if not folder.exists():  # a run that was stopped in its last step has a checkpoint there
            with whole(folder) as unfinished:
                self.write_model(unfinished, rounded)
        for folder in self.folder.checkpoints().values():
            remove(folder / "trainer")

    def end(self) -> None:
        s, path = self.settings, self.folder.path
        if self.stopping:
            say(f"stopped at step {self.step}. Continue with: "
                f"{python_command('train.py', '--resume', path)}")
            return
        with self.explained():
            self.policy.refuse_broken_model()
        if s.steps and not s.checkpoint_every:
            self.save_model()
        if not (s.steps and s.checkpoint_every):  # no checkpoint says that it is finished
            self.folder.change_config({"finished": s.steps})
        say(f"done. Everything is in {path}")
        evaluations = read_lines(path / "evaluations.jsonl")
        sampled = [line for line in evaluations if line["mode"] == "sampled"]
        print_outcome(path, sampled, time.monotonic() - self.start, self.done,
                      has_steps=s.steps > 0)
