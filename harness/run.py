"""A run from its first step to its last: begun, recorded, stopped.

    with open_run(argv) as run:      command_line.py: a new one, or one that is there already
        run.begin(...)               the folder appears, or the trainer's state is read back
        for step in run.steps():     from the first step, or the one after the checkpoint
            run.record(...)          credit file and sample answers
            run.log(...)             a line of metrics.jsonl, and one for people
            run.save_if_due(step)    a checkpoint; after Ctrl-C also the end
        run.end()
"""
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean

import torch

from engine import processes
from engine.choices import Metrics
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.credit_file import step_of
from harness.identity import Evaluation, code_in_use, fingerprint, provenance, run_id_of
from harness.own_code import number
from harness.progress import print_step, python_command, say, tell_outcome
from harness.run_folder import RunFolder, TrainerState, open_folder
from harness.settings import Settings
from harness.program import StopRequest


class Run:
    """`done` steps are on record, up to `checkpoint`. A new run has no folder before it begins."""

    def __init__(self, settings: Settings, checkpoint: Path | None = None):
        self.settings, self.checkpoint = settings, checkpoint
        self.folder = RunFolder(settings.folder)
        self.step = self.done = step_of(checkpoint) if checkpoint else 0
        self.is_finished = False
        self.seconds: deque[float] = deque(maxlen=20)  # of the last steps
        self.start = time.monotonic()
        self.cleanup = ExitStack()

    def begin(self, policy: Policy, state: TrainerState) -> None:
        """From here on Ctrl-C waits for the end of a step."""
        self.policy, self.state = policy, state
        self.prepare()
        self.stop = self.cleanup.enter_context(StopRequest())
        if self.settings.eval_every:  # CheckedTask keeps them, and refuses to train on one
            policy.task.held_out_problems(self.settings.eval_tasks)

    def prepare(self) -> None:
        """Make the folder of a new run; harness/resume.py has what is done where there is one."""
        s, model = self.settings, self.policy.model
        say(f"{s.model}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters "
            f"on {s.device} in {s.dtype}, {torch.get_num_threads()} threads; {s.questions} "
            f"problems x {s.answers} answers a step; writing to {s.folder}")
        self.state.of_methods()  # what no file can hold is told before the first step
        self.folder = self.cleanup.enter_context(create_folder(s, self.policy))

    def steps(self) -> Iterator[int]:
        for self.step in range(self.done + 1, self.settings.steps + 1):
            yield self.step

    def is_due(self, every: int, step: int) -> bool:
        """Something happens every so many steps, and at the end; 0 is never."""
        return bool(every) and (step == self.settings.steps or step % every == 0)

    def record(self, step: int, rollouts: Rollouts, weight: torch.Tensor,
               columns: dict[str, torch.Tensor]) -> None:
        """Each process writes of its own problems, rank 0 last: where its file is, all are."""
        is_first = processes.rank() == 0
        if is_first:
            processes.barrier()
        problems = processes.shard_of(len(rollouts.prompt_ids))
        rows = rollouts.rows_of(problems)
        own = {name: values[rows] for name, values in columns.items()}
        self.folder.write_credit(step, rollouts.of_problems(problems), weight[rows], **own)
        if not is_first:
            processes.barrier()
        if (every := self.settings.sample_every) and step % every == 0:
            self.keep_samples(step, rollouts)

    def keep_samples(self, step: int, rollouts: Rollouts) -> None:
        for row in sorted({0, int(rollouts.reward.argmax())}):
            problem = self.policy.task.show(rollouts.problems[int(rollouts.group[row])])
            self.folder.append("samples.jsonl", {
                "step": step, "problem": problem, "episode": row,
                "reward": rollouts.reward[row].item(),
                "answer": rollouts.scores["answer"][row].item(), "text": rollouts.answers[row]})

    def log(self, line: Metrics) -> None:
        steps, step = self.settings.steps, self.step
        self.folder.append("metrics.jsonl", line)
        self.seconds.append(number(line, "seconds"))
        print_step(line, steps, mean(self.seconds) * (steps - step),
                   with_header=step % 20 == 1 or step == self.done + 1)

    def save_if_due(self, step: int) -> None:
        """A checkpoint, when it is due or somebody asked to stop. Then the run ends here."""
        stopped = processes.any_of(self.stop.asked)
        if stopped or self.is_due(self.settings.checkpoint_every, step):
            self.policy.refuse_broken_model()
            self.folder.save_checkpoint(step, self.state, self.policy.folder)
        if stopped and step < self.settings.steps:
            say(f"stopped at step {step}. Go on with: "
                f"{python_command('train.py', '--resume', self.folder.path)}")
            processes.barrier()  # torchrun stops all as soon as one has ended
            raise SystemExit(130)

    def end(self) -> None:
        self.policy.refuse_broken_model()
        path = self.folder.path
        say(f"done. Everything is in {path}")
        from harness.log_reading import lines_of_run
        tell_outcome(path, lines_of_run(path, Evaluation), time.monotonic() - self.start, self.done)


@contextmanager
def create_folder(s: Settings, policy: Policy) -> Iterator[RunFolder]:
    """Make the run's folder with its config.json, and open it, in every process. A first step that
    fails leaves nothing in the way of the next attempt."""
    config = {**s.to_json(), "threads": torch.get_num_threads(), "ranks": processes.count(),
              **provenance(), "reward": policy.task.reward, "columns_temperature": 1,
              "model_config": policy.model.config.to_json(), "code": {"1": code_in_use()}}
    if processes.rank() == 0:
        config["made_of"] = {name: fingerprint(path) for name, path in s.paths.items()}
        config["run_id"] = run_id_of(config)
        RunFolder.create(s.folder, config, policy.folder / "tokenizer.json")
    processes.barrier()
    with open_folder(s.folder) as folder:
        try:
            yield folder
        except (Exception, SystemExit):
            folder.remove_unless_begun()
            raise
