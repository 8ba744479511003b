"""Resuming a run: it is checked whether it may be resumed, and its state is read back to the bit.
This file is imported if the folder of a run exists."""
import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.choices import Method
from engine.errors import UserError, read_json
from engine.optimizer import AdamW, load_optimizer_tensors
from harness.made_of import differences, kept, not_known, write_down
from harness.record import (LOGS, Json, RunFolder, checkpoint_folders, is_complete, read_lines,
                            replace_text, run_config)
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
    metrics, evaluations = (read_lines(path / name) for name in LOGS[:2])
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
    """With another number of --steps, --decay gives other learning rates also to the steps that are
    made already."""
    steps = run_config(s.folder)["steps"]
    if s.decay != "none" and done and s.steps != steps:
        say(f"the learning rate now falls until step {s.steps}. The {done} steps that are made had "
            f"the rates of a run of {steps} steps, so a run of {s.steps} steps that was never "
            "stopped would give other numbers")


def say_that_torch_differs(s: Settings, done: int) -> None:
    """Another version may round otherwise. That is no reason to refuse a run."""
    versions = run_config(s.folder).get("versions")
    before = versions.get("torch") if isinstance(versions, dict) else None
    if done and before not in (None, torch.__version__):
        say(f"the {done} steps that are made had torch {before}, and this is {torch.__version__}: "
            "what follows may differ in the last digits from a run that was never stopped")


def accept_changes(folder: RunFolder, s: Settings) -> None:
    """Write down that a finished run is used as it is, although what it was made of, or its record,
    has changed since."""
    found = "; ".join(differences(folder.path, s))
    if found:
        accepted = (kept(folder.path) or {}).get("accepted", [])
        write_down(folder.path, s, [*accepted, {"after_step": s.steps, "changes": found}])
        folder.write_digests()
    say(f"accepted: {found}" if found else "nothing that it is made of has changed")


def refuse_changes(folder: Path, s: Settings, checkpoint: Path | None, done: int,
                   accepts: bool) -> list[Json]:
    """Refuse to go on if something that the run is made of has changed. With --accept_changes the
    changes are returned, after those that were accepted before."""
    before = kept(folder)
    if done and (unknown := not_known(folder)):
        say(unknown)
    found = list(differences(folder, s, checkpoint, done))
    accepted: list[Json] = list((before or {}).get("accepted", []))
    if not found:
        return accepted
    if not accepts:
        others = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"{found[0]}{others}. So what follows would not be what the run that was "
                        "never stopped gives. Put it back, begin a new run, or go on with "
                        "--accept_changes, which is written down")
    say("going on although " + "; ".join(found))
    return [*accepted, {"after_step": done, "changes": "; ".join(found)}]


def has_last_step(s: Settings, path: Path, metrics: list[Json], evaluations: list[Json]) -> bool:
    """Whether a run has all steps, and what is kept at its end.

    A step's checkpoint is written after its record, so if models are kept, a complete record is not
    enough: the last model has to be there. But if the whole folder of checkpoints is missing, a
    user has removed it from a finished run, and the record is enough.
    """
    if max(checkpoint_folders(path), default=-1) >= s.steps:
        return True
    before = run_config(path)
    keeps_models = before["checkpoint_every"] or before.get("save_model")
    if keeps_models and s.steps and (path / "checkpoints").exists():
        return False
    return is_complete(s.to_json(), metrics, evaluations)


def load_state(checkpoint: Path, optimizer: AdamW, parameters: dict[str, torch.nn.Parameter],
               methods: Mapping[str, Method]) -> None:
    """Read back the state of the optimizer, the advantage and the weighting."""
    path = checkpoint / "trainer" / "state.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    for part, method in methods.items():
        names = [name for name in tensors if name.startswith(f"{part}.")]
        state = {name.removeprefix(f"{part}."): tensors.pop(name) for name in names}
        if hasattr(method, "load_state_dict"):
            method.load_state_dict(state)
    load_optimizer_tensors(optimizer, parameters, tensors)


def take_over(s: Settings, folder: RunFolder, done: int) -> None:
    """Write the changed settings to config.json, and remove what was written after `done` steps."""
    config = read_json(folder.path / "config.json")
    values: Json = s.to_json() | {"threads": torch.get_num_threads()}
    config |= {name: values[name] for name in CHANGEABLE if name in config}
    replace_text(folder.path / "config.json", json.dumps(config, indent=2) + "\n")
    folder.forget_after(done or -1)  # a run that starts again evaluates step 0 again, too
