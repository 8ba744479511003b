"""Runs as arms: which runs can be compared, and which of them are one arm.

Runs that differ in model, data, length of training, sampling or reward are not compared with each
other. An arm is the runs that differ in nothing but their seed.
"""
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lab.analysis.run_folders import (PLAIN_SETTINGS, Run, flags_of_methods, is_done, steps_done,
                                      task_of)
from lab.engine.errors import UserError
from lab.harness.record import Json
from lab.harness.flags import Flag, flags_of
from lab.harness.settings import CHANGEABLE, NOT_SETTINGS, OPTIONS

DEFAULTS = {name: flag.default for name, flag in OPTIONS.items()} | PLAIN_SETTINGS
# runs that differ in one of these are not compared; nor are those that differ in a flag of the task
SETTING = ("reward", "model", "task", "steps", "questions", "answers", "max_new_tokens",
           "temperature")
# runs of one arm may differ in these, and in how they are made
ASIDE = ("seed", "out", "eval_every", "eval_tasks", *CHANGEABLE)


def finished(runs: list[Run]) -> list[Run]:
    """The runs that are finished; a line is printed about each of the others."""
    done = []
    for run in runs:
        if is_done(run):
            done.append(run)
        else:
            print(f"{run['folder']} is left out, because it is not finished: it has made "
                  f"{steps_done(run)} of {run['config']['steps']} steps.", file=sys.stderr)
    if not done:
        raise UserError("none of these runs is finished, so there is nothing to compare")
    return done


def effective_settings(config: Mapping[str, object]) -> Json:
    """A run's settings with defaults filled in, without those that had no effect. The name of the
    reward is recorded beside the settings and counts like one."""
    flags = {**OPTIONS, **task_flags(config), **flags_of_methods(config)}
    defaults = {name: flag.default for name, flag in flags.items()}
    settings = {**defaults, **PLAIN_SETTINGS, **config}
    without_effect = set(NOT_SETTINGS) - {"reward"}
    for name, flag in flags.items():
        if not flag.has_effect(settings):
            without_effect.add(name)
    return {name: settings[name] for name in settings if name not in without_effect}


def task_flags(config: Mapping[str, object]) -> dict[str, Flag]:
    task = task_of(config)
    return flags_of(task) if task else {}


def setting_of(run: Run) -> Json:
    """The settings that have to agree before two runs are compared, and their held-out problems."""
    settings, lines = effective_settings(run["config"]), run["evaluations"]
    names = (*SETTING, *task_flags(run["config"]))
    setting = {name: settings.get(name) for name in names}
    setting["model"] = str(Path(run["config"]["model"]).resolve())
    setting["held-out problems"] = None
    if lines:  # their digest; older runs have none, but an evaluation shows a few of them
        titles = [len(lines[0]["answer"]), *(one["problem"] for one in lines[0].get("shown", ()))]
        setting["held-out problems"] = run["config"].get("held_out_problems", titles)
    return setting


def arm_of(run: Run) -> Json:
    """The settings that tell one arm from another."""
    settings = effective_settings(run["config"])
    aside = (*SETTING, *ASIDE, *task_flags(run["config"]))
    return {name: settings[name] for name in settings if name not in aside}


def alike(runs: list[Run], of: Callable[[Run], Json]) -> list[list[Run]]:
    """The runs in sets: `of` has the same value for all runs of a set. Their order is kept."""
    sets: list[tuple[Json, list[Run]]] = []
    for run in runs:
        mine = of(run)
        for common, members in sets:
            if common == mine:
                members.append(run)
                break
        else:
            sets.append((mine, [run]))
    return [members for _, members in sets]


def comparable(runs: list[Run]) -> tuple[list[list[Run]], list[str]]:
    """The sets of runs that can be compared, evaluated ones first, then by size; and a sentence
    about each run that is in none of them."""
    sets = sorted(alike(runs, setting_of), reverse=True,
                  key=lambda members: (bool(members[0]["evaluations"]), len(members)))
    chosen = [members for members in sets if len(members) > 1] or sets[:1]
    sentences = []
    for members in sets:
        if members not in chosen:
            sentences += [f"{run['folder'].name} is left out, because no other run here has the "
                          "same model, task, number of steps, sampling and held-out problems."
                          for run in members]
    return chosen, sentences


def name_of(mine: Json, settings: list[Json]) -> str:
    """The name of an arm: its weighting, and the settings in which it differs from the others and
    from the defaults."""
    parts = [str(mine.get("mitigation", "none"))]
    for key, value in mine.items():
        differs = any(key in other and other[key] != value for other in settings)
        is_default = key in DEFAULTS and value == DEFAULTS[key]
        if key != "mitigation" and differs and not is_default:
            parts.append(f"{key} {value}")
    return " ".join(parts)


class Comparison:
    """Comparable runs by arm and seed. The first arm is the baseline, with which the others are
    compared."""

    def __init__(self, runs: list[Run], baseline: str | None):
        self.arms: dict[str, dict[int, Run]] = {}
        self.twins: list[str] = []
        sets = alike(runs, arm_of)
        settings = [arm_of(members[0]) for members in sets]
        for mine, members in zip(settings, sets):
            arm = self.arms.setdefault(name_of(mine, settings), {})
            for run in members:
                kept = arm.setdefault(run["config"]["seed"], run)
                if kept is not run:
                    self.twins.append(f"{run['folder'].name} has the settings and the seed of "
                                      f"{kept['folder'].name}, so it is left out.")
        if baseline and baseline not in self.arms:
            raise UserError(f"--baseline {baseline} is none of the arms: {', '.join(self.arms)}")
        self.baseline = baseline or self.usual_baseline()
        self.arms = {self.baseline: self.arms.pop(self.baseline), **self.arms}

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms.values() for run in arm.values()]

    def usual_baseline(self) -> str:
        plain = []
        for name in self.arms:
            config = self.one_of(name)["config"]
            if all(config.get(key, value) == value for key, value in PLAIN_SETTINGS.items()):
                plain.append(name)
        if len(plain) > 1 and "none" not in plain:
            raise UserError(f"which arm is the baseline: {' or '.join(plain)}? Name it with "
                            "--baseline")
        if "none" in plain:
            return "none"
        return plain[0] if plain else next(iter(self.arms))

    def one_of(self, name: str) -> Run:
        return next(iter(self.arms[name].values()))

    def placebos_of(self, name: str) -> list[str]:
        """The arms that differ from this one in --placebo alone."""
        mine, placebos = arm_of(self.one_of(name)), []
        for other in self.arms:
            unshuffled = arm_of(self.one_of(other)) | {"placebo": "none"}
            if other != name and unshuffled == mine:
                placebos.append(other)
        return placebos
