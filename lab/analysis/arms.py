"""Runs as arms: the runs that differ in nothing but their seed, named by the settings in which the
arms differ."""
import json
from collections import defaultdict
from collections.abc import Sequence

from lab.analysis.gains import Arm
from lab.analysis.run_folders import PLAIN_SETTINGS, Run
from lab.engine.errors import UserError

# settings in which runs of one arm may differ
NOT_OF_ARM = {"seed", "out", "threads", "versions", "checkpoint_every", "change_every",
              "eval_every", "micro_batch", "model_config", "columns_temperature",
              "trained_parameters", "made_of", "git_commit", "changed", "finished",
              "held_out_problems"}


def names_of(runs: Sequence[Run]) -> list[str]:
    """A name for the arm of each run: the settings in which the arms differ."""
    known = [{name: value for name, value in run.config.items() if name not in NOT_OF_ARM}
             for run in runs]
    differing = [name for name in sorted(set().union(*known))
                 if len({json.dumps(config[name]) for config in known if name in config}) > 1]
    return [" ".join(f"{name} {config[name]}" for name in differing if name in config) or "all runs"
            for config in known]


def arms_of(runs: Sequence[Run], baseline: str | None = None) -> dict[str, dict[int, Run]]:
    """The runs by arm and seed. The first arm is the one that the others are compared with: the one
    that is named, or plain GRPO."""
    arms: dict[str, dict[int, Run]] = defaultdict(dict)
    for run, name in zip(runs, names_of(runs)):
        other = arms[name].setdefault(run.config["seed"], run)
        if other is not run:
            raise UserError(f"{other.folder} and {run.folder} are one arm with one seed: "
                            "name one")
    if baseline and baseline not in arms:
        raise UserError(f"--baseline {baseline} is none of the arms: {', '.join(arms)}")
    plain = [name for name, arm in arms.items() if is_plain(arm)]
    first = baseline or (plain or list(arms))[0]
    return {first: arms.pop(first), **arms}


def is_plain(arm: Arm) -> bool:
    config = next(iter(arm.values())).config
    return all(config.get(name, value) == value for name, value in PLAIN_SETTINGS.items())
