"""Resuming a run: it is checked whether it may be resumed, and its state is read back to the bit.
This file is imported if the folder of a run exists."""
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engine.choices import Method
from engine.errors import PROJECT, UserError, read_json
from engine.model_folder import opened
from engine.optimizer import AdamW, load_optimizer_tensors
from engine.rollouts import Problem, Task
from harness.made_of import digest_of_part, made_of, named_files, shown
from harness.read_record import credit_steps, is_complete, missing_steps, run_config
from harness.record import (LOGS, Json, RunFolder, checkpoint_folders, credit_path, digest_of,
                            digest_of_problems, find_folder, read_lines, remove, replace_text)
from harness.screen import say
from harness.settings import CHANGEABLE, Settings


def refuse_other(s: Settings, may_continue: bool) -> None:
    """Raise an error unless the run in this folder has these settings, and may be continued."""
    config = run_config(s.folder)
    may_differ = {"out", *CHANGEABLE} - {"steps"}
    for name, value in s.to_json().items():
        if name not in may_differ and config.get(name, value) != value:
            raise UserError(f"{s.folder} exists already, and was made with {name} {config[name]} "
                            f"instead of {value}: name another folder with --out")
    if not may_continue:
        raise UserError(f"{s.folder} exists already: continue it with --resume "
                        f"{shlex.quote(str(s.folder))}, or name another folder with --out")


def last_state(s: Settings, folder: RunFolder,
               may_begin_again: bool) -> tuple[int, Path | None, bool]:
    """The number of steps up to the last checkpoint, that checkpoint, and whether the run is
    finished. A run without a checkpoint starts again, if none was due yet or none ever is."""
    path, before = folder.path, run_config(folder.path)
    if not {"steps", "checkpoint_every"} <= before.keys():
        raise UserError(f"{path}/config.json was not written by train.py: it has no "
                        "checkpoint_every")
    checkpoints = folder.checkpoints()
    done = max(checkpoints, default=0)
    metrics, evaluations = (read_lines(path / name) for name in LOGS)
    made = max([done, *(line["step"] for line in metrics)])
    is_finished = has_last_step(s, path, metrics, evaluations)
    every, steps = before["checkpoint_every"], before["steps"]
    if is_finished:
        say(f"{path} has {made} of its {steps} steps, and no more were asked for. To continue it, "
            "give a larger --steps")
    elif not done and made > every and (every or not may_begin_again):
        ways_out = "Remove it, or name another folder with --out"
        models = list(checkpoint_folders(path).values())
        if models:
            ways_out += ", or begin a new run from its model with --model "
            ways_out += shlex.quote(str(models[-1]))
        raise UserError(f"{path} recorded {made} steps, but has no checkpoint to continue from. "
                        f"{ways_out}")
    elif done:
        say(f"continuing after step {done}")
    else:
        say("there is no checkpoint to continue from: starting again at step 1")
    return done, checkpoints.get(done), is_finished


def say_that_the_schedule_differs(s: Settings, done: int) -> None:
    """Say it if --steps has changed and --decay is set: then the steps that are made already had
    other learning rates than they would have now."""
    steps = run_config(s.folder)["steps"]
    if s.decay != "none" and done and s.steps != steps:
        say(f"the learning rate now falls until step {s.steps}. The {done} steps that are made had "
            f"the rates of a run of {steps} steps, so a run of {s.steps} steps that was never "
            "stopped would give other numbers")


def say_that_torch_differs(s: Settings, done: int) -> None:
    """Say it if torch has another version now, which may round otherwise. The run goes on."""
    versions = run_config(s.folder).get("versions")
    before = versions.get("torch") if isinstance(versions, dict) else None
    if done and before not in (None, torch.__version__):
        say(f"the {done} steps that are made had torch {before}, and this is {torch.__version__}: "
            "what follows may differ in the last digits from a run that was never stopped")


def changes(before: dict[str, str], s: Settings, done: int) -> Iterator[str]:
    """What has changed since a run, which has made `done` steps, wrote down what it is made of."""
    needs_first_model = not done or s.kl > 0 or s.lora > 0
    folder = shown(find_folder(s.model))
    for name, digest in before.items():
        path = PROJECT / name
        if shown(path.parent) == folder and not needs_first_model:
            continue
        if not path.is_file():
            yield f"{name} is gone"
        elif digest_of_part(path, s) != digest:
            yield f"{name} has changed"
    for path in named_files(s):  # what a relative path leads to depends on the present folder
        if shown(path) not in before and digest_of(path) not in before.values():
            yield f"{shown(path)} is another file than the run was made with"


def changed_since(s: Settings, done: int) -> list[str]:
    """Sentences about what the record lacks, and about what has changed since the run was made. Of
    the run `done` steps are kept."""
    config = run_config(s.folder)
    found = list(missing_steps(s.folder, done))
    if config.get("made_of"):
        found += changes(config["made_of"], s, done)
    elif done:
        say(f"{s.folder} is of an earlier version, which did not write down what a run is made of: "
            "so it is not known whether that has changed")
    return found


def accept_changes(s: Settings) -> None:
    """Write down that a finished run is used as it is, although something has changed since."""
    found = changed_since(s, s.steps)
    if found:
        write_accepted(s, found, s.steps)
    say(f"accepted: {'; '.join(found)}" if found else "nothing that it is made of has changed")


def write_accepted(s: Settings, found: list[str], done: int) -> None:
    """Put into config.json what the run is made of now, and what was accepted."""
    config = run_config(s.folder)
    accepted = [*config.get("accepted", []), {"after_step": done, "changes": "; ".join(found)}]
    config |= {"made_of": made_of(s), "accepted": accepted}
    replace_text(s.folder / "config.json", json.dumps(config, indent=2) + "\n")


def refuse_changes(found: list[str], accepts: bool) -> None:
    """Refuse to go on if something has changed that the run is made of."""
    if found and not accepts:
        others = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"{found[0]}{others}. So what follows would not be what the run that was "
                        "never stopped gives. Put it back, begin a new run, or go on with "
                        "--accept_changes, which is written down")
    if found:
        say("going on although " + "; ".join(found))


def refuse_other_problems(checkpoint: Path, s: Settings, task: Task[Problem], done: int,
                          accepts: bool) -> None:
    """Refuse to go on if the task does not return the problems of the last step again, or those
    that are held out: it draws them without the seed that it is given, or reads them from a file
    that has changed."""
    state = read_json(checkpoint / "trainer" / "state.json")
    if kept := state.get("problems"):
        problems = task.training_problems(s.seed, done, s.questions)
        if digest_of_problems(problems, task) != kept:
            refuse_changes([f"--task {s.task} returns other problems for step {done} than when the "
                            "step was made: training_problems should depend on nothing but its "
                            "seed and step"], accepts)
    if kept := state.get("held_out"):
        if digest_of_problems(task.held_out_problems(s.eval_tasks), task) != kept:
            refuse_changes([f"--task {s.task} returns other problems to evaluate than before: "
                            "held_out_problems should depend on nothing but its count"], accepts)


def has_last_step(s: Settings, path: Path, metrics: list[Json], evaluations: list[Json]) -> bool:
    """Whether a run has all steps, and what is kept at its end.

    The last model is written after its record, so a complete record is not enough: the model has
    to be there. But if the whole folder of checkpoints is missing, a user has removed it from a
    finished run, and the record is enough.
    """
    if max(checkpoint_folders(path), default=-1) >= s.steps:
        return True
    if s.steps and (path / "checkpoints").exists():
        return False
    return is_complete(s.to_json(), metrics, evaluations)


def load_state(checkpoint: Path, optimizer: AdamW, parameters: dict[str, torch.nn.Parameter],
               methods: Mapping[str, Method]) -> None:
    """Read back the state of the optimizer, the advantage and the weighting."""
    with opened(checkpoint / "trainer" / "state.safetensors") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    for part, method in methods.items():
        names = [name for name in tensors if name.startswith(f"{part}.")]
        state = {name.removeprefix(f"{part}."): tensors.pop(name) for name in names}
        if hasattr(method, "load_state_dict"):
            method.load_state_dict(state)
    load_optimizer_tensors(optimizer, parameters, tensors)


def take_over(s: Settings, folder: RunFolder, done: int, accepted: list[str]) -> None:
    """Write the changed settings to config.json, and remove what was written after `done` steps."""
    if accepted:
        write_accepted(s, accepted, done)
    config = read_json(folder.path / "config.json")
    values: Json = s.to_json() | {"threads": torch.get_num_threads()}
    config |= {name: values[name] for name in CHANGEABLE if name in config}
    replace_text(folder.path / "config.json", json.dumps(config, indent=2) + "\n")
    forget_after(folder.path, done or -1)  # a run that starts again evaluates step 0 again, too


def forget_after(run: Path, step: int) -> None:
    """Remove what a stopped run wrote after its last checkpoint: it will be made again."""
    for name in LOGS:
        kept = [line for line in read_lines(run / name) if line["step"] <= step]
        if (run / name).exists():
            replace_text(run / name, "".join(json.dumps(line) + "\n" for line in kept))
    for known in credit_steps(run):
        if known > step:
            remove(credit_path(run, known))
    for known, folder in checkpoint_folders(run).items():
        if known > step:  # one that has lost its trainer's state
            remove(folder)
    for folder in (run, run / "credit", run / "checkpoints"):
        for path in folder.glob(".*.tmp"):
            remove(path)
