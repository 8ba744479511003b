"""What is checked before a run is resumed: is it the run that is meant, and what has changed since
it stopped? This file is imported if the folder of a run exists."""
from pathlib import Path

import torch

from lab.engine.errors import UserError
from lab.harness.made_of import made_of
from lab.harness.read_record import missing_steps, run_config
from lab.harness.record import Json
from lab.harness.screen import say
from lab.harness.settings import CHANGEABLE, DEFAULTS, LabSettings

SHOWN = 5  # names of changed files


def refuse_other(folder: Path, s: LabSettings, may_differ: set[str], way_out: str) -> None:
    """Raise an error unless the run in this folder has these settings."""
    config = run_config(folder)
    for name, value in s.to_json().items():
        before = config.get(name, DEFAULTS.get(name, value))  # earlier versions had fewer
        if name not in may_differ and before != value:
            raise UserError(f"{folder} was made with --{name} {before} instead of {value}: "
                            f"{way_out}")


def changed_config(s: LabSettings, done: int) -> Json:
    """The config.json of a resumed run, of which `done` steps are made. Prints what has changed
    since they were made."""
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
    torch_before = before.get("versions", {}).get("torch")
    if torch_before not in (None, torch.__version__):
        say(f"the {done} steps that are made had torch {torch_before}, and this is "
            f"{torch.__version__}: what follows may differ in the last digits from a run that was "
            "never stopped")
    for sentence in missing_steps(s.folder, done):
        say(sentence)
