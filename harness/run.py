"""A run from its first step to its last: begun or gone on with, recorded, stopped.

    with open_run(argv) as run:      a new one, or one that is there already
        run.begin(...)               the folder appears, or the trainer's state is read back
        for step in run.steps():     from the first step, or the one after the checkpoint
            run.record(...)          credit file and sample answers
            run.log(...)             a line of metrics.jsonl, and one for people
            run.save_if_due(step)    a checkpoint; after Ctrl-C also the end
        run.end()
"""
import json
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Protocol

import torch

from engine import processes
from engine.choices import Method
from engine.errors import NotFinite, UserError
from engine.optimizer import AdamW, optimizer_tensors, parameters_by_name
from engine.policy import Policy
from engine.processes import refuse_undefined
from engine.rollouts import Problem, Rollouts
from harness.record import (Json, RunFolder, credit_path, make_run, provenance, read_lines, remove,
                            run_config, whole, write_credit)
from harness.screen import StopRequest, print_step, python_command, say, tell_outcome
from harness.settings import (CHANGEABLE, OWN_SAMPLER, Settings, is_large, make_settings,
                              read_flags)
from qwen2_model import write_tensors

TRAVELS_ALONG = (  # from the model's folder to every checkpoint
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "recipe.json")


@contextmanager
def open_run(argv: list[str]) -> Iterator["Run"]:
    """The run that a command line asks for."""
    given = read_flags(argv)
    may_continue, resume = given.pop("continue", False), given.pop("resume", None)
    if resume:
        for name in sorted(given.keys() - {*CHANGEABLE}):
            others = ", ".join(f"--{flag}" for flag in CHANGEABLE if flag != "steps")
            raise UserError(f"--{name} cannot be changed in a resumed run, only --steps can, and "
                            f"flags that say how the run is made: {others}")
        run_config(Path(resume))
        given |= {"config": Path(resume) / "config.json", "out": resume}
    settings = make_settings(given)
    exists = settings.folder.exists()  # asked before the processes meet: one may make it then
    run = Run(settings)
    with run.cleanup:
        if exists:
            from harness.resume import last_state, refuse_other
            if not resume:
                refuse_other(settings, may_continue)
            run.is_new = False
            run.cleanup.enter_context(run.folder.opened())
            run.done, run.checkpoint, run.is_finished = last_state(
                settings, run.folder, may_begin_again=not resume)
        try:
            yield run
        except NotFinite as error:
            *_, last = "none", *run.folder.checkpoints().values()
            raise UserError(f"{error}, in step {run.step} at --learning_rate "
                            f"{settings.learning_rate:g}. The last good checkpoint, which --model "
                            f"can name: {last}") from error


class Source(Protocol):
    """Who answers the problems: the policy itself, a server, or a file."""
    def sample(self, problems: Sequence[Problem], answers: int, seed: int) -> Rollouts: ...


class Run:
    """`done` steps are on record, up to `checkpoint`. A new run has no folder before it begins."""

    def __init__(self, settings: Settings):
        processes.start(settings.device)  # who is rank 0, and writes, is known from here on
        self.settings, self.folder = settings, RunFolder(settings.folder)
        self.checkpoint: Path | None = None
        self.step = self.done = 0
        self.is_finished, self.is_new = False, True
        self.seconds: deque[float] = deque(maxlen=20)  # of the last steps
        self.start, self.cleanup = time.monotonic(), ExitStack()

    def begin(self, policy: Policy, optimizer: AdamW, methods: Mapping[str, Method]) -> None:
        """A checkpoint keeps the state of all three. From now on Ctrl-C waits for a step's end."""
        self.policy, self.optimizer, self.methods = policy, optimizer, methods
        if self.is_new:
            self.begin_folder()
        else:
            from harness.resume import load_state, take_over
            if self.checkpoint:
                load_state(self.checkpoint, optimizer, self.parameters, methods)
            take_over(self.settings, self.folder, self.done)
        if policy.model.is_large:
            from harness.memory import keep_memory, should_keep_memory
            if should_keep_memory(policy.model):
                keep_memory()
        self.stop = self.cleanup.enter_context(StopRequest())
        if self.settings.eval_every:  # the task keeps them, and refuses to train on one
            policy.task.held_out_problems(self.settings.eval_tasks)

    def begin_folder(self) -> None:
        """A first step that fails leaves nothing in the way of the next attempt."""
        s, policy, model = self.settings, self.policy, self.policy.model
        say(f"{s.model}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters "
            f"on {s.device} in {s.dtype}, {torch.get_num_threads()} threads; {s.questions} "
            f"problems x {s.answers} answers a step; writing to {s.folder}")
        if s.device == "cpu" and is_large(policy.folder):
            from harness.forecast import forecast
            for sentence in forecast(s, policy):
                say(f"  {sentence}")
        config = {**s.to_json(), "threads": torch.get_num_threads(), "ranks": processes.count(),
                  **provenance(), "reward": policy.task.reward, "columns_temperature": 1,
                  "model_config": model.config.to_json()}
        if self.folder.writes:
            make_run(s.folder, config, policy.folder / "tokenizer.json")
        processes.barrier()
        self.cleanup.enter_context(self.folder.opened())
        self.cleanup.push(self.remove_unless_started)

    def remove_unless_started(self, error: object, *_: object) -> None:
        is_ours = self.folder.writes and self.folder.is_here()
        if error and is_ours and not (self.folder.path / "metrics.jsonl").exists():
            shutil.rmtree(self.folder.path)

    def steps(self) -> Iterator[int]:
        for self.step in range(self.done + 1, self.settings.steps + 1):
            yield self.step

    def is_due(self, every: int, step: int) -> bool:
        """Something happens every so many steps, and at the end; 0 is never."""
        return bool(every) and (step == self.settings.steps or step % every == 0)

    def record(self, step: int, rollouts: Rollouts, weight: torch.Tensor,
               columns: dict[str, torch.Tensor]) -> None:
        """Each process writes of its own problems, rank 0 last: where its file is, all are."""
        if self.folder.writes:
            processes.barrier()
        problems = processes.shard_of(len(rollouts.prompt_ids))
        rows = rollouts.rows_of(problems)
        own = {name: values[rows] for name, values in columns.items()}
        write_credit(credit_path(self.folder.at(""), step, processes.rank()),
                     rollouts.of_problems(problems), weight[rows], {}, **own)
        if not self.folder.writes:
            processes.barrier()
        if (every := self.settings.sample_every) and step % every == 0:
            for row in sorted({0, int(rollouts.reward.argmax())}):
                problem = self.policy.task.show(rollouts.problems[int(rollouts.group[row])])
                self.folder.append("samples.jsonl", {
                    "step": step, "problem": problem, "episode": row,
                    "reward": rollouts.reward[row].item(),
                    "answer": rollouts.scores["answer"][row].item(), "text": rollouts.answers[row]})

    def log(self, line: Json) -> None:
        steps, step = self.settings.steps, self.step
        self.folder.append("metrics.jsonl", line)
        self.seconds.append(line["seconds"])
        print_step(line, steps, mean(self.seconds) * (steps - step),
                   with_header=step % 20 == 1 or step == self.done + 1)
        if self.policy.model.is_large:
            from harness.memory import return_memory
            return_memory()

    def save_if_due(self, step: int) -> None:
        """A checkpoint, when it is due or somebody asked to stop. Then the run ends here."""
        stopped = processes.any_of(self.stop.asked)
        if stopped or self.is_due(self.settings.checkpoint_every, step):
            self.policy.refuse_broken_model()
            self.save_checkpoint(step)
        if stopped and step < self.settings.steps:
            say(f"stopped at step {step}. Go on with: "
                f"{python_command('train.py', '--resume', self.folder.path)}")
            processes.barrier()  # torchrun stops all as soon as one has ended
            raise SystemExit(130)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return parameters_by_name(self.policy.model, self.optimizer)

    def save_checkpoint(self, step: int) -> None:
        """A model folder, with the trainer's state below it in the two newest."""
        tensors = optimizer_tensors(self.optimizer, self.parameters)
        for part, method in self.methods.items():
            state: dict[str, torch.Tensor] = getattr(method, "state_dict", dict)()
            tensors |= {f"{part}.{name}": value for name, value in state.items()}
        refuse_undefined("what a resumed run would go on from is",
                         *(value for value in tensors.values() if value.is_floating_point()))
        if not self.folder.writes:
            for cut in (self.parameters, tensors):  # --shard: the rows that this process keeps
                write_tensors(None, cut)
            return
        for folder in [*self.folder.checkpoints().values()][:-1]:
            remove(folder / "trainer")
        with whole(self.model_folder(step)) as unfinished:
            self.write_model(unfinished, self.parameters)
            trainer = unfinished / "trainer"
            trainer.mkdir()
            write_tensors(trainer / "state.safetensors", tensors)
            (trainer / "state.json").write_text(json.dumps({"step": step}) + "\n")

    def model_folder(self, step: int) -> Path:
        return self.folder.at("checkpoints") / f"step_{step:06d}"

    def write_model(self, folder: Path, parameters: Mapping[str, torch.Tensor]) -> None:
        self.policy.model.save_pretrained(folder, parameters)
        source = self.policy.folder
        for name in TRAVELS_ALONG:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)

    def save_model(self) -> None:
        """The trained model alone, its matrices rounded to the type that products are made in. The
        run saw no more digits of them, but for those of the embeddings as inputs. What a stopped
        run kept to go on from goes: a later resume would go back to it, and past this model."""
        dtype = self.policy.model.compute_dtype
        rounded = {name: parameter.detach().to(dtype) if parameter.dim() > 1 else parameter
                   for name, parameter in self.parameters.items()}
        if not self.folder.writes:
            write_tensors(None, rounded)  # --shard: its part
            return
        if not self.model_folder(self.settings.steps).exists():  # stopped in the last step: it has
            with whole(self.model_folder(self.settings.steps)) as unfinished:
                self.write_model(unfinished, rounded)
        for folder in self.folder.checkpoints().values():
            remove(folder / "trainer")

    def end(self) -> None:
        self.policy.refuse_broken_model()
        if self.settings.save_model:
            self.save_model()
        path = self.folder.path
        say(f"done. Everything is in {path}")
        tell_outcome(path, read_lines(path / "evaluations.jsonl"), time.monotonic() - self.start,
                     self.done)


def answers_from(run: Run, policy: Policy, optimizer: AdamW) -> Source:
    s = run.settings
    if s.pairs:
        from bridges.pairs import GivenPairs
        return GivenPairs(s.pairs, policy, run)
    if s.rollouts != OWN_SAMPLER:
        from bridges.remote_rollouts import connect
        return connect(policy, optimizer, run)
    return policy
