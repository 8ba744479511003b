"""Going on with a run: what it may go on with, and what is read back, to the bit. Loaded where the
folder of a run is there already."""
import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine import processes
from engine.choices import Method
from engine.errors import UserError, read_json
from engine.optimizer import AdamW, load_optimizer_tensors
from harness.record import (LOGS, Json, RunFolder, checkpoint_folders, is_complete, read_lines,
                            replace_text, run_config)
from harness.screen import say
from harness.settings import CHANGEABLE, Settings


def refuse_other(s: Settings, may_continue: bool) -> None:
    """Stop unless the run in the folder of these settings has them, and may be gone on with."""
    config = run_config(s.folder)
    for name, value in s.to_json().items():
        if config.get(name, value) != value and name not in {"out", *CHANGEABLE} - {"steps"}:
            raise UserError(f"{s.folder} exists already, with {name} {config[name]} instead of "
                            f"{value}: name another with --out")
    if not may_continue:
        raise UserError(f"{s.folder} exists already: go on with --resume "
                        f"{shlex.quote(str(s.folder))}, or name another with --out")


def last_state(s: Settings, folder: RunFolder,
               may_begin_again: bool) -> tuple[int, Path | None, bool]:
    """How many steps are done up to the last checkpoint, and whether the run is finished. It
    goes on from there; from the start where none was due yet, or none ever is."""
    path, before = folder.path, run_config(folder.path)
    if not {"steps", "checkpoint_every"} <= before.keys():
        raise UserError(f"{path}/config.json is of no run of train.py: it has no "
                        "checkpoint_every")
    every, steps = before["checkpoint_every"], before["steps"]
    metrics, evaluations = (read_lines(path / name) for name in LOGS[:2])
    *_, (done, checkpoint) = (0, None), *folder.checkpoints().items()
    made = max([done, *(line["step"] for line in metrics)])
    # a checkpoint is written last; somebody may have removed those of a finished run
    is_kept = every or before.get("save_model")
    is_whole = not is_kept or not s.steps or not (path / "checkpoints").exists()
    is_finished = max(checkpoint_folders(path), default=-1) >= s.steps or (
        is_whole and is_complete(s.to_json(), metrics, evaluations))
    if is_finished:
        say(f"{path} has {made} of its {steps} steps, and no more were asked for: --steps N "
            "goes on to N")
    elif not done and made > every and (every or not may_begin_again):
        models = [f", or begin a new run from its model with --model {shlex.quote(str(folder))}"
                  for folder in checkpoint_folders(path).values()]
        raise UserError(f"{path} holds a record of {made} steps, and no checkpoint to go on "
                        f"from. Remove it, or name another folder with --out{''.join(models[-1:])}")
    else:
        say(f"going on after step {done}" if done else
            "no checkpoint to go on from: starting again at step 1")
    return done, checkpoint, is_finished


def load_state(checkpoint: Path, optimizer: AdamW, parameters: dict[str, torch.nn.Parameter],
               methods: Mapping[str, Method]) -> None:
    tensors = load_file(checkpoint / "trainer" / "state.safetensors")
    for part, method in methods.items():
        names = [name for name in tensors if name.startswith(f"{part}.")]
        state = {name.partition(".")[2]: tensors.pop(name) for name in names}
        if hasattr(method, "load_state_dict"):
            method.load_state_dict(state)
    load_optimizer_tensors(optimizer, parameters, tensors)


def take_over(s: Settings, folder: RunFolder, done: int) -> None:
    """config.json gets the settings that are changed; what was written after `done` steps goes."""
    processes.barrier()  # until all have read what is changed now
    if folder.writes:
        config = read_json(folder.path / "config.json")
        values: Json = s.to_json() | {"threads": torch.get_num_threads()}
        config |= {name: values[name] for name in CHANGEABLE if name in config}
        replace_text(folder.path / "config.json", json.dumps(config, indent=2) + "\n")
        folder.forget_after(done or -1)  # the evaluation at step 0 is made again, too
    processes.barrier()
