"""Resuming a run: how far it is, and what has changed since. This file is imported if the folder of
a run exists."""
import shlex
from pathlib import Path

import torch

from lab.engine.errors import UserError
from lab.harness.made_of import made_of
from lab.harness.read_record import missing_steps, run_config, steps_finished
from lab.harness.record import LOGS, Json, checkpoint_folders, read_lines
from lab.harness.screen import say
from lab.harness.settings import CHANGEABLE, LabSettings, written_by
from run import checkpoints

SHOWN = 5  # names of changed files


def refuse_other(s: LabSettings, may_continue: bool) -> None:
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


def last_state(s: LabSettings, may_begin_again: bool) -> tuple[int, Path | None, bool]:
    """The number of steps up to the last checkpoint, that checkpoint, and whether the run is
    finished. A run without a checkpoint starts again, if none was due yet or none ever is, but not
    if a user has removed the folder of its checkpoints: what is on record would be lost."""
    path, before = s.folder, run_config(s.folder)
    if missing := s.to_json().keys() - before.keys():
        raise UserError(f"{path}/config.json lacks the setting {min(missing)}, so this version of "
                        f"the program cannot go on{written_by(before)}")
    found = checkpoints(path)
    done = max(found, default=0)
    made = max([done, *(line["step"] for line in read_lines(path / LOGS[0]))])
    is_finished = steps_finished(path) >= s.steps
    every, steps = before["checkpoint_every"], before["steps"]
    is_removed = not (path / "checkpoints").exists()
    if is_finished:
        say(f"{path} has {made} of its {steps} steps, and no more were asked for. To continue it, "
            "give a larger --steps")
        for sentence in missing_steps(path, made):
            say(sentence)
    elif not done and made and (is_removed or made > every and (every or not may_begin_again)):
        ways_out = "Remove it, or name another folder with --out"
        models = list(checkpoint_folders(path).values())
        if models:
            ways_out += ", or begin a new run from its model with --model "
            ways_out += shlex.quote(str(models[-1]))
        raise UserError(f"{path} recorded {made} steps, but has no checkpoint to continue from. "
                        f"{ways_out}")
    return done, found.get(done), is_finished


def changed_config(s: LabSettings, done: int) -> Json:
    """The config.json of a resumed run, of which `done` steps are made. Says what is not as it was
    when they were made."""
    before, now = run_config(s.folder), made_of(s)
    changed = differing(before.get("made_of", {}), now)
    say_what_differs(s, before, changed, done)
    values = s.to_json() | {"threads": torch.get_num_threads(), "made_of": now}
    values = {name: values[name] for name in (*CHANGEABLE, "made_of")}
    if changed and done:
        values["changed"] = [*before.get("changed", []), {"after_step": done, "files": changed}]
    return before | values


def differing(before: Json, now: Json) -> list[str]:
    """The names of the files that have another digest, have gone, or are new."""
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def say_what_differs(s: LabSettings, before: Json, changed: list[str], done: int) -> None:
    """Say in which respects a run that was never stopped would give other numbers."""
    if not done:
        return
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        say(f"changed since the {done} steps were made: {', '.join(changed[:SHOWN])}{more}. So "
            "what follows may not be what a run that was never stopped gives")
    if s.decay != "none" and s.steps != before["steps"]:
        say(f"the learning rate now falls until step {s.steps}. The {done} steps that are made had "
            f"the rates of a run of {before['steps']} steps, so a run of {s.steps} steps that was "
            "never stopped would give other numbers")
    torch_before = before.get("versions", {}).get("torch")
    if torch_before not in (None, torch.__version__):
        say(f"the {done} steps that are made had torch {torch_before}, and this is "
            f"{torch.__version__}: what follows may differ in the last digits from a run that was "
            "never stopped")
    for sentence in missing_steps(s.folder, done):
        say(sentence)
