"""An experiment: arms, each trained with several seeds. Runs are planned, made, and used again.

    experiment = Experiment(plan_run)           # plan_run("span", 3): a PlannedRun
    keys = [("none", 0), ("span", 0), ("none", 1), ("span", 1)]
    failed = experiment.make(keys, command, 2)  # train what is missing, two runs at a time
    arms = experiment.arms(keys)                # arms["span"][0] is a finished run
    gains(over_baseline(arms, "none"))          # analysis/gains.py: in pairs with the same seed

`tools.idea` and `python -m lab experiment` are such experiments. Whether a finished run is
used again is decided in `finished_run`, for all of them.
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.runs import Run, read_run
from engine.errors import UserError
from harness.made_of import made_of
from harness.read_record import missing_steps, run_config
from harness.resume import differing
from tools.helpers.planned import PlannedRun, make_runs
from harness.settings import Settings, make_settings, read_flags

WITHOUT_EFFECT = {"out", "checkpoint_every", "track"}  # on the numbers of a run
Key = tuple[str, int]  # arm and seed
Arms = dict[str, dict[int, Run]]  # finished runs, by arm and seed


def settings_of(planned: PlannedRun) -> Settings:
    flags = [*planned.flags, "--steps", str(planned.steps), "--seed", str(planned.seed)]
    return make_settings(read_flags(flags))


def finished_run(planned: PlannedRun) -> Run | None:
    """The run of this plan, if it is finished; one that is not what the plan says is an error."""
    if not planned.is_finished():
        return None
    run = read_run(planned.folder)
    refuse_other_settings(planned, run)
    refuse_changed(planned)
    return run


def refuse_other_settings(planned: PlannedRun, run: Run) -> None:
    """Refuse a run whose settings are not those of the plan: its folder's name says which run it
    should be, its settings which it is."""
    wanted, config = settings_of(planned).to_json(), run["config"]
    passed_over = WITHOUT_EFFECT if wanted["threads"] else {*WITHOUT_EFFECT, "threads"}  # 0: any
    for name in wanted.keys() - passed_over:
        value = config.get(name)
        if value != wanted[name]:
            raise UserError(f"{planned.folder} has --{name} {value}, not {wanted[name]}: remove "
                            "it, and the run is made again")


def refuse_changed(planned: PlannedRun) -> None:
    """Refuse a run that was made of something else, such as a file that the task reads and that has
    changed, or whose record was changed: what would be compared is not the same any more."""
    before = run_config(planned.folder).get("made_of", {})
    wrong = list(missing_steps(planned.folder))
    if changed := differing(before, made_of(settings_of(planned))):
        wrong.append(f"it is an earlier run, and since then {changed[0]} has changed")
    if wrong:
        raise UserError(f"{planned.folder}: {wrong[0]}. Name another folder with --runs, or remove "
                        "this one, and the run is made again")


@dataclass
class Experiment:
    """Planned runs by arm and seed, and those of them that are finished. `known` are runs of a
    published result, which need no folder."""
    plan_run: Callable[[str, int], PlannedRun]
    known: dict[Key, Run] = field(default_factory=dict)
    found: dict[Key, Run] = field(default_factory=dict)  # in their folders, each read once

    def run(self, arm: str, seed: int) -> Run | None:
        """The run if it is finished."""
        key = arm, seed
        if key not in self.known and key not in self.found:
            run = finished_run(self.plan_run(arm, seed))
            if run:
                self.found[key] = run
        return self.known.get(key) or self.found.get(key)

    @property
    def finished(self) -> dict[Key, Run]:
        """All finished runs that are known or that have been asked for."""
        return self.known | self.found

    def arms(self, keys: Iterable[Key]) -> Arms:
        """Those of these runs that are finished."""
        arms: Arms = {}
        for arm, seed in keys:
            run = self.run(arm, seed)
            if run:
                arms.setdefault(arm, {})[seed] = run
        return arms

    def missing(self, keys: Iterable[Key]) -> list[PlannedRun]:
        return [self.plan_run(*key) for key in keys if not self.run(*key)]

    def make(self, keys: Iterable[Key], command: str, processes: int, threads: int = 1,
             **more: Any) -> dict[str, str]:
        """Train what is missing of these runs (`tools.helpers.planned.make_runs`, which also takes
        `more`). Returns the arms that failed, with the reason."""
        planned = [replace(self.plan_run(*key), threads=threads) for key in keys
                   if key not in self.known]
        return make_runs(planned, processes, command, **more)
