"""Runs as arms: the runs that differ in nothing but their seed, named as analyze.py names them."""
from collections import defaultdict
from collections.abc import Sequence

import analyze
from lab.analysis.gains import Arm
from lab.analysis.run_folders import PLAIN_SETTINGS, Run
from lab.engine.errors import UserError


def arms_of(runs: Sequence[Run], baseline: str | None = None) -> dict[str, dict[int, Run]]:
    """The runs by arm and seed. The first arm is the one that the others are compared with: the one
    that is named, or plain GRPO."""
    arms: dict[str, dict[int, Run]] = defaultdict(dict)
    for run, name in zip(runs, analyze.names_of([analyze.Run(run["folder"]) for run in runs])):
        other = arms[name].setdefault(run["config"]["seed"], run)
        if other is not run:
            raise UserError(f"{other['folder']} and {run['folder']} are one arm with one seed: "
                            "name one")
    if baseline and baseline not in arms:
        raise UserError(f"--baseline {baseline} is none of the arms: {', '.join(arms)}")
    plain = [name for name, arm in arms.items() if is_plain(arm)]
    first = baseline or (plain or list(arms))[0]
    return {first: arms.pop(first), **arms}


def is_plain(arm: Arm) -> bool:
    config = next(iter(arm.values()))["config"]
    return all(config.get(name, value) == value for name, value in PLAIN_SETTINGS.items())
