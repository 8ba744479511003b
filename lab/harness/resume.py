"""What is checked before a run is resumed: is it the run that is meant, and what has changed since
it stopped? This file is imported if the folder of a run exists."""
from pathlib import Path

import torch

from lab.engine.errors import UserError
from lab.harness.read_record import missing_steps, run_config
from lab.harness.screen import say
from lab.harness.settings import DEFAULTS, LabSettings


def refuse_other(folder: Path, s: LabSettings, may_differ: set[str], way_out: str) -> None:
    """Raise an error unless the run in this folder has these settings."""
    config = run_config(folder)
    for name, value in s.to_json().items():
        before = config.get(name, DEFAULTS.get(name, value))  # earlier versions had fewer
        if name not in may_differ and before != value:
            raise UserError(f"{folder} was made with --{name} {before} instead of {value}: "
                            f"{way_out}")


def say_what_differs(folder: Path, done: int) -> None:
    """Say in which respects a run that was never stopped would give other numbers."""
    if not done:
        return
    torch_before = run_config(folder).get("versions", {}).get("torch")
    if torch_before not in (None, torch.__version__):
        say(f"the {done} steps that are made had torch {torch_before}, and this is "
            f"{torch.__version__}: what follows may differ in the last digits from a run that was "
            "never stopped")
    for sentence in missing_steps(folder, done):
        say(sentence)
