"""A run from its command line to its last step: begun, resumed, recorded, stopped.

    with open_run(argv) as run:      refuses what would be lost or mixed up, locks the folder
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
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from engine.finite import BrokenModel, NotFinite, NotFiniteCredit
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.command_line import read_flags
from harness.credit_file import step_of
from harness.files import is_there
from harness.identity import CHANGEABLE, run_id_of
from harness.load import TrainerState
from harness.outcome import tell_outcome
from harness.progress import print_step, say, sparkline
from harness.provenance import fingerprints, provenance
from harness.resume import (check_what_is_there, how_far, is_finished, keep_changes,
                            refuse_changes, refuse_to_erase, refuse_to_overwrite, what_differs)
from harness.run_folder import RunFolder, open_folder, run_config
from harness.settings import Settings, make_settings
from harness.stopping import StopRequest
from harness.terminal import python_command

NEVER_RIGHT = 5  # steps without one right answer: then people are told


class Run:
    """`done` steps are on record, up to `checkpoint`; a new run has neither folder nor checkpoint
    before it begins."""

    def __init__(self, settings: Settings, folder: RunFolder | None = None,
                 config: dict | None = None, checkpoint: Path | None = None):
        self.settings, self.folder, self.config = settings, folder, config
        self.checkpoint = checkpoint
        self.done = step_of(checkpoint) if checkpoint else 0
        self.step = self.done
        self.is_finished = False
        self.seconds = deque(maxlen=20)  # of the last steps
        self.success = []  # of each step since it was started
        self.start = time.monotonic()
        self.cleanup = ExitStack()

    def begin(self, policy: Policy, state: TrainerState) -> None:
        """Make the folder, or read back the trainer's state; from here on Ctrl-C waits for the end
        of a step."""
        self.policy, self.state = policy, state
        if self.folder is None:
            introduce(self.settings, policy)
            self.folder = self.cleanup.enter_context(create_folder(self.settings, policy))
        else:
            if self.checkpoint:
                state.load(self.checkpoint)
            processes.barrier()  # until all have read what is changed now
            keep_changes(self.folder, self.config, self.settings)
            # -1: the evaluation at step 0 is made again, too
            self.folder.truncate(self.done if self.done else -1)
            processes.barrier()  # until there is nothing left of what is made again
        self.stop = self.cleanup.enter_context(StopRequest())
        if self.settings.eval_every:  # from here on training may not meet what is evaluated
            policy.task.held_out_problems(self.settings.eval_tasks)

    def steps(self) -> Iterator[int]:
        for self.step in range(self.done + 1, self.settings.steps + 1):
            yield self.step

    def is_due(self, every: int, step: int) -> bool:
        """Something happens every so many steps, and at the end; 0 is never."""
        return bool(every) and (step == self.settings.steps or step % every == 0)

    def append(self, name: str, line: dict) -> None:
        self.folder.append(name, line)

    def record(self, step: int, rollouts: Rollouts, weight: torch.Tensor,
               columns: dict[str, torch.Tensor]) -> None:
        """Write what every token was given, each process for its own problems. Rank 0 waits for
        the others before it writes: where its file is, all are."""
        is_first = processes.rank() == 0
        if is_first:
            processes.barrier()
        questions = processes.shard_of(len(rollouts.prompt_ids))
        rows = rollouts.rows_of(questions)
        own = {name: values[rows] for name, values in columns.items()}
        self.folder.write_credit(step, rollouts.of_questions(questions), weight[rows], **own)
        if not is_first:
            processes.barrier()
        every = self.settings.sample_every
        if every and step % every == 0:
            self.keep_samples(step, rollouts)

    def keep_samples(self, step: int, rollouts: Rollouts) -> None:
        """The first answer of the batch, and the best."""
        for row in sorted({0, int(rollouts.reward.argmax())}):
            problem = self.policy.task.show(rollouts.problems[rollouts.group[row]])
            self.append("samples.jsonl", {
                "step": step, "problem": problem, "episode": row,
                "reward": rollouts.reward[row].item(),
                "answer": rollouts.scores["answer"][row].item(), "text": rollouts.responses[row]})

    def log(self, line: dict) -> None:
        """A line of metrics.jsonl, and one for people."""
        steps, step = self.settings.steps, line["step"]
        self.append("metrics.jsonl", line)
        self.seconds.append(line["seconds"])
        self.success.append(line["success"])
        with_header = step % 20 == 1 or step == self.done + 1
        print_step(line, steps, mean(self.seconds) * (steps - step), with_header)
        if len(self.success) == NEVER_RIGHT and not any(self.success):
            say(f"          not one answer of {NEVER_RIGHT} steps was right: the model never found "
                "a right answer, so there is none to learn from")

    def curve(self) -> str:
        """Success of the steps since it was started, small."""
        return f"success {sparkline(self.success)}" if self.success else ""

    def save_if_due(self, step: int) -> None:
        """A checkpoint, when it is due or somebody asked to stop. Then the run ends here."""
        stopped = processes.any_of(self.stop.asked)
        if stopped or self.is_due(self.settings.checkpoint_every, step):
            self.policy.refuse_broken_model()
            self.folder.save_checkpoint(step, self.policy.model, self.state.parameters,
                                        self.policy.folder, self.state.tensors())
        if stopped and step < self.settings.steps:
            command = python_command("train.py", "--resume", self.folder.path)
            say(f"stopped at step {step}. Go on with: {command}")
            processes.barrier()  # torchrun stops all as soon as one has ended
            raise SystemExit(130)

    def end(self) -> None:
        self.policy.refuse_broken_model()
        say(f"done. Everything is in {self.folder.path}")
        tell_outcome(self)


@contextmanager
def open_run(argv: list[str]) -> Iterator[Run]:
    """The run that a command line asks for. What ends it is one sentence where the user can do
    something about it; a first step that failed leaves nothing in the way of the next attempt."""
    given = read_flags(argv)
    may_continue = given.pop("continue", False)
    if "resume" in given:
        run = resumed(Path(given.pop("resume")), given)
    else:
        run = new_or_continued(given, may_continue)
    is_new = run.folder is None
    with run.cleanup:
        try:
            yield run
        except Exception as error:
            if isinstance(error, NotFinite) and run.folder:
                error = UserError(where_to_look(error, run))
            if is_new and run.folder:
                run.folder.remove_unless_begun()
            raise error


def new_or_continued(given: dict, may_continue: bool) -> Run:
    settings = make_settings(given)
    if not is_there(settings.folder):
        return Run(settings)
    difference = what_differs(settings)
    if may_continue and not difference:
        given = {name: value for name, value in given.items() if name in CHANGEABLE}
        return resumed(settings.folder, given)
    refuse_to_overwrite(settings.folder, difference)


def resumed(path: Path, given: dict) -> Run:
    """The run of a folder. `given` are the flags typed now; few may be changed."""
    refuse_changes(given)
    config = run_config(path)
    for name in ("steps", "checkpoint_every"):
        config.setdefault(name, getattr(Settings, name))
    settings = make_settings({"config": path / "config.json", **given})
    processes.start(settings.device)  # who is rank 0, and locks the folder, is known from here on
    with ExitStack() as opened:
        folder = opened.enter_context(open_folder(path))
        run = checked_run(folder, config, settings)
        run.cleanup = opened.pop_all()
    return run


def checked_run(folder: RunFolder, config: dict, settings: Settings) -> Run:
    """From the last checkpoint, or from the start where nothing can be lost."""
    folder.remove_old_states()  # a kill may have come before the run did this
    checkpoints = folder.checkpoints()
    run = Run(settings, folder, config, checkpoints[-1] if checkpoints else None)
    if is_finished(folder, config, settings, run.done):
        say(how_far(folder, config["steps"], run.done))
        run.is_finished = True
        return run
    if not run.checkpoint:
        refuse_to_erase(folder, config)
    check_what_is_there(folder, settings, config, run.checkpoint)
    say(f"going on after step {run.done}" if run.done else
        "no checkpoint yet: starting again at step 1")
    return run


def create_folder(s: Settings, policy: Policy) -> RunFolder:
    """Make the run's folder with its config.json, and open it, in every process."""
    config = {**s.to_json(), "threads": torch.get_num_threads(), "ranks": processes.count(),
              **provenance(), "reward": policy.task.reward,
              "model_config": policy.model.config.to_json()}
    if processes.rank() == 0:
        config["made_of"] = fingerprints(s)
        config["run_id"] = run_id_of(config)
        RunFolder.create(s.folder, config, policy.folder / "tokenizer.json")
    processes.barrier()
    return open_folder(s.folder)


def introduce(s: Settings, policy: Policy) -> None:
    """Print what is about to be trained, and where."""
    millions = sum(p.numel() for p in policy.model.parameters()) / 1e6
    say(f"{s.model}: {millions:.2f} million parameters on {s.device}, "
        f"{torch.get_num_threads()} threads; {s.questions} problems x {s.answers} answers a step; "
        f"writing to {s.folder}")


def where_to_look(error: NotFinite, run: Run) -> str:
    """The error, how far the run came, which flags to look at, and what is left."""
    s, steps = run.settings, run.folder.last_step()
    if steps == 0 and isinstance(error, BrokenModel):
        return f"{error}, in the first step. Is {run.policy.folder} a sound model?"
    own = s.flags_for(ADVANTAGES[s.advantage]) | s.flags_for(MITIGATIONS[s.mitigation])
    is_own = isinstance(error, NotFiniteCredit)  # of finite numbers: no rate is too large
    values = own if is_own else {"learning_rate": s.learning_rate, **own}
    flags = ", ".join(["its line and what it divides by"] * is_own + [
        f"--{name} {value:g}" for name, value in values.items() if isinstance(value, float)])
    checkpoints = run.folder.checkpoints()
    way_on = (f"the last good checkpoint is {checkpoints[-1]}, --model can begin a new run there"
              if checkpoints else "there is no checkpoint from before")
    return (f"{error}, in step {run.step}. The last step on record is {steps}. Look at {flags}; "
            f"{way_on}")
