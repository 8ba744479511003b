"""What analysis asks of the settings of runs: defaults, and what had no effect.

The lists of engine/choices.py are filled by whoever imports mitigations.py, as analyze.py does.
"""
from collections.abc import Mapping
from types import SimpleNamespace

from engine.choices import NEVER_RESCALED
from engine.errors import UserError
from harness.flags import Flag, fields_as_flags, parameters_as_flags
from harness.files import Json
from harness.settings import METHODS, NOT_SETTINGS, OPTIONS, Settings, choice_flags
from harness.tasks import load_task

PLAIN = {"mitigation": "none", "advantage": "grpo", "loss": "policy", "placebo": "none"}


def effective_settings(config: Mapping[str, object]) -> Json:
    """A run's settings, defaults filled in, without those that had no effect beside the others.
    The reward is on record beside the settings, and TRL's loss; another one is another setting."""
    flags = {**OPTIONS, **task_flags(config)}  # and those of the choices it made
    for axis, choices in METHODS.items():
        name = str(config.get(axis, OPTIONS[axis].default))
        flags |= parameters_as_flags(choices[name]) if name in choices else {}
    settings = {**{name: flag.default for name, flag in flags.items()}, **config}
    chosen = SimpleNamespace(**settings)
    idle = {name for name, flag in flags.items() if flag.requires and not flag.requires[0](chosen)}
    idle |= choice_flags().keys() - flags.keys()  # older runs list those of every advantage
    idle |= set(NOT_SETTINGS) - {"reward", "trainer"}
    if config["mitigation"] in NEVER_RESCALED:
        idle.add("rescale")
    return {name: value for name, value in settings.items() if name not in idle}


def task_flags(config: Mapping[str, object]) -> dict[str, Flag]:
    """The flags of a run's task; none if its module is not there any more."""
    task = task_of(config)
    return fields_as_flags(task) if task else {}


def task_of(config: Mapping[str, object]) -> type | None:
    try:
        return load_task(config.get("task", Settings.task))
    except (UserError, OSError):  # a name that no file can have
        return None
