"""What analysis asks of the settings of runs: whether they can be, defaults, what had no effect.

All that analysis knows of the flags of a run stands here. The lists of harness/registry.py are
filled by whoever imports mitigations.py, as analyze.py does.
"""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from engine.errors import UserError
from harness.flags import (Flag, check_value, fields_as_flags, parameters_as_flags,
                           shortened)
from harness.registry import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, choice_flags, flags_of
from harness.settings import NOT_SETTINGS, OPTIONS
from harness.tasks import load_task

NEEDED = ("mitigation", "steps", "seed", "model")  # every run's config.json says what they are


def check_settings(path: Path, config: dict) -> None:
    """Refuse values that no run has. Settings that are not known, of an older version say, stay,
    but have to be printable: they become names of arms."""
    for key in NEEDED:
        if key not in config:
            raise UserError(f"{path} says nothing of {key}")
    flags = {**OPTIONS, **choice_flags(), **task_flags(config), "reward": Flag(None)}
    for name in ("mitigation", "advantage"):  # it may have been deleted since
        flags[name] = replace(flags[name], choices=())
    for name, value in config.items():
        if not all(text.isprintable() for text in (name, value) if isinstance(text, str)):
            raise UserError(f"{path}: {name!r} has characters that cannot be shown: "
                            f"{shortened(repr(value))}")
        try:
            if name in flags:
                check_value(name, value, flags[name])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def effective_settings(config: dict) -> dict:
    """A run's settings, defaults filled in, without those that had no effect beside the others."""
    defaults = {name: flag.default for name, flag in flags_beside(config).items()}
    config = defaults | config  # a run older than a flag had its default
    left_out = [*idle_settings(config), *NOT_SETTINGS]
    left_out.remove("reward")  # on record beside the settings; another reward is another setting
    settings = {name: value for name, value in config.items() if name not in left_out}
    flags = {**OPTIONS, **choice_flags()}
    for name in settings:
        if name in flags and flags[name].type is float:  # 1 and 1.0 are the same
            settings[name] = float(settings[name])
    return settings


def flags_beside(config: dict) -> dict[str, Flag]:
    """The flags of every run, of this one's task, and of the choices it made."""
    flags = {**OPTIONS, **task_flags(config)}
    for registry, axis in ((MITIGATIONS, "mitigation"), (ADVANTAGES, "advantage")):
        chosen = registry.get(config.get(axis, OPTIONS[axis].default))
        flags |= parameters_as_flags(chosen) if chosen else {}
    return flags


def idle_settings(config: dict) -> list[str]:
    view = SimpleNamespace(**config)
    flags = flags_beside(config)
    idle = [name for name, flag in flags.items() if flag.only and not flag.only[0](view)]
    if config["mitigation"] in NEVER_RESCALED:
        idle.append("rescale")
    owners = advantage_flags()  # older runs list the flags of every advantage
    return idle + [name for name in owners if config["advantage"] not in owners[name]]


def advantage_flags() -> dict[str, list[str]]:
    """Which advantages each of their flags belongs to."""
    return flags_of(ADVANTAGES)


def task_flags(config: dict) -> dict[str, Flag]:
    """The flags of a run's task; none if its module is not there any more."""
    try:
        return fields_as_flags(load_task(config.get("task", OPTIONS["task"].default)))
    except (UserError, OSError):  # a name that no file can have
        return {}
