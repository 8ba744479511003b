"""Which runs can be compared, and which of them are one arm.

Runs that differ in model, data, length of training, sampling or reward are compared apart. An arm
is runs that differ in nothing but their seed.
"""
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from analysis.runs import PLAIN, Run, is_done, steps_done, task_of
from engine.errors import UserError
from harness.record import Json
from harness.flags import Flag, flags_of
from harness.settings import METHODS, NOT_SETTINGS, OPTIONS

# runs that differ in one of these are not compared; nor are those that differ in a flag of the task
SETTING = ("reward", *(name for name, flag in OPTIONS.items() if flag.compared == "setting"))
ASIDE = tuple(name for name, flag in OPTIONS.items() if flag.compared == "aside")


def finished(runs: list[Run]) -> list[Run]:
    """Those that can be compared at all; the others are passed over, with a line."""
    for run in runs:
        if not is_done(run):
            print(f"passed over: {run['folder']} is not finished, step {steps_done(run)} of "
                  f"{run['config']['steps']}", file=sys.stderr)
    if not (done := [run for run in runs if is_done(run)]):
        raise UserError("none of these runs is finished, so there is nothing to compare")
    return done


def effective_settings(config: Mapping[str, object]) -> Json:
    """A run's settings, defaults filled in, without those that had no effect beside the others.
    The reward is on record beside the settings, and TRL's loss; another one is another setting."""
    flags = {**OPTIONS, **task_flags(config)}  # and those of the choices it made
    for axis, choices in METHODS.items():
        name = str(config.get(axis, OPTIONS[axis].default))
        flags |= flags_of(choices[name]) if name in choices else {}
    settings = {name: flag.default for name, flag in flags.items()} | dict(config)
    idle = {name for name, flag in flags.items() if not flag.has_effect(settings)}
    idle |= set(NOT_SETTINGS) - {"reward", "trainer"}
    return {name: value for name, value in settings.items() if name not in idle}


def task_flags(config: Mapping[str, object]) -> dict[str, Flag]:
    task = task_of(config)
    return flags_of(task) if task else {}


def setting_of(run: Run) -> Json:
    """What has to agree before two runs are compared."""
    settings, lines = effective_settings(run["config"]), run["evaluations"]
    return {name: settings.get(name) for name in (*SETTING, *task_flags(run["config"]))} | {
        "model": str(Path(run["config"]["model"]).resolve()),
        "held-out problems": len(lines[0]["answer"]) if lines else None}


def arm_of(run: Run) -> Json:
    settings = effective_settings(run["config"])
    aside = (*SETTING, *ASIDE, *task_flags(run["config"]))
    return {name: value for name, value in settings.items() if name not in aside}


def alike(runs: list[Run], of: Callable[[Run], Json]) -> list[list[Run]]:
    """The runs in parts that agree in `of`, in the order in which they came."""
    found = [(of(run), run) for run in runs]
    different = [mine for n, (mine, _) in enumerate(found) if mine not in [a for a, _ in found[:n]]]
    return [[run for mine, run in found if mine == common] for common in different]


def comparable(runs: list[Run]) -> tuple[list[list[Run]], list[str]]:
    """The sets of runs that can be compared, evaluated ones first, then by size; and a sentence
    about each run that is in none of them."""
    sets = sorted(alike(runs, setting_of), reverse=True,
                  key=lambda part: (bool(part[0]["evaluations"]), len(part)))
    chosen = [part for part in sets if len(part) > 1] or sets[:1]
    alone = [run for part in sets if part not in chosen for run in part]
    return chosen, [f"{run['folder'].name} is left out: no other run here has its model, task, "
                    "length, sampling and held-out problems." for run in alone]


def name_of(mine: Json, settings: list[Json]) -> str:
    """The weighting, and which settings tell this arm apart; a default that all runs have is not
    said."""
    parts = [str(mine.get("mitigation", "none"))]  # --loss dpo has none
    for key, value in mine.items():
        differs = any(key in other and other[key] != value for other in settings)
        is_default = key in OPTIONS and value == OPTIONS[key].default
        if key != "mitigation" and differs and not is_default:
            parts.append(f"{key} {value}")
    return " ".join(parts)


class Comparison:
    """Comparable runs, arm by arm and seed by seed; the baseline, which the others are compared
    with, comes first."""

    def __init__(self, runs: list[Run], baseline: str | None):
        self.arms: dict[str, dict[int, Run]] = {}
        self.twins: list[str] = []
        parts = alike(runs, arm_of)
        settings = [arm_of(part[0]) for part in parts]
        for mine, part in zip(settings, parts):
            arm = self.arms.setdefault(name_of(mine, settings), {})
            for run in part:
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
        plain = [name for name in self.arms
                 if PLAIN.items() <= {**PLAIN, **self.one_of(name)["config"]}.items()]
        if len(plain) > 1 and "none" not in plain:
            raise UserError(f"which arm is the baseline: {' or '.join(plain)}? Say so with "
                            "--baseline and the name of an arm")
        return "none" if "none" in plain else (plain or list(self.arms))[0]

    def one_of(self, name: str) -> Run:
        return next(iter(self.arms[name].values()))

    def placebos_of(self, name: str) -> list[str]:
        """The arms that are this one with something shuffled."""
        mine, unshuffled = arm_of(self.one_of(name)), {"placebo": "none"}
        return [other for other in self.arms
                if other != name and mine == arm_of(self.one_of(other)) | unshuffled]
