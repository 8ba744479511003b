"""What the comparison of runs asks of their settings: defaults, and what had no effect.

All that analysis knows of engine/settings.py stands here.
"""
from types import SimpleNamespace

from engine.settings import NOT_SETTINGS, OPTIONS
from mitigations import NEVER_RESCALED


def default_of(name: str):
    return OPTIONS[name].default


def common_settings() -> list[str]:
    """The flags of every run; those of a mitigation come on top."""
    return list(OPTIONS)


def effective_settings(config: dict) -> dict:
    """A run's settings, defaults filled in, without those that had no effect beside the others."""
    config = {**{name: default_of(name) for name in OPTIONS}, **config}
    left_out = [*idle_settings(config), *NOT_SETTINGS]
    left_out.remove("reward")  # on record beside the settings; another reward is another setting
    settings = {name: value for name, value in config.items() if name not in left_out}
    for name in settings:
        if name in OPTIONS and OPTIONS[name].type is float:  # 1 and 1.0 are the same
            settings[name] = float(settings[name])
    return settings


def idle_settings(config: dict) -> list[str]:
    view = SimpleNamespace(**config)
    conditions = {name: option.metadata["only"] for name, option in OPTIONS.items()}
    idle = [name for name, only in conditions.items() if only and not only[0](view)]
    return idle + ["rescale"] * (config["mitigation"] in NEVER_RESCALED)
