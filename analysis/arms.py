"""Which runs can be compared, and which of them are one arm.

Runs that differ in model, data, length of training, sampling or reward are not comparable: that is
said, and they are not averaged. An arm is runs that differ in nothing but their seed.
"""
import json
from pathlib import Path

from analysis.runs import is_done
from analysis.settings import advantage_flags, effective_settings, task_flags
from engine.errors import UserError
from harness.settings import OPTIONS

SETTING = ("model", "task", "reward", "steps", "questions", "answers", "max_new_tokens",
           "temperature")  # and the flags of the task
ASIDE = (  # what may differ within an arm
    "seed", "out", "own", "eval_tasks", "device", "threads", "checkpointing", "offload_optimizer",
    "shard", "micro_batch", "rollouts_timeout", "eval_every", "sample_every", "checkpoint_every")
PLAIN = {"mitigation": "none", "advantage": "grpo", "loss": "policy", "placebo": "none"}


def setting_of(run: dict) -> dict:
    """What has to agree before two runs are compared."""
    settings = effective_settings(run["config"])
    names = [*SETTING, *task_flags(run["config"])]
    setting = {name: settings.get(name) for name in names}
    setting["model"] = str(Path(settings["model"]).resolve())
    lines = run["evaluations"]
    setting["held-out problems"] = len(lines[0]["answer"]) if lines else None
    return setting


def arm_of(run: dict) -> dict:
    """What the runs of an arm have in common, beside the setting."""
    settings = effective_settings(run["config"])
    aside = (*SETTING, *ASIDE, *task_flags(run["config"]))
    return {name: value for name, value in settings.items() if name not in aside}


def alike(runs: list[dict], of) -> list[list[dict]]:
    """The runs in parts that agree in `of`, in the order in which they came."""
    parts = {}
    for run in runs:
        parts.setdefault(json.dumps(of(run), sort_keys=True), []).append(run)
    return list(parts.values())


def what_differs(parts: list[list[dict]]) -> str:
    """Why these parts are not compared with each other."""
    settings = [setting_of(part[0]) for part in parts]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    names = [name for name in names if len({json.dumps(s.get(name)) for s in settings}) > 1]
    sets = []
    for i, (setting, part) in enumerate(zip(settings, parts), 1):
        differences = ", ".join(f"{name} {setting[name]}" for name in names if name in setting)
        folders = ", ".join(run["folder"].name for run in part)
        sets.append(f"set {i}: {differences} ({folders})")
    return ("Not comparable, so each set is compared by itself and nothing is averaged over them. "
            f"{'; '.join(sets)}.")


def usual_values(arms: list[list[dict]]) -> dict:
    """Of each common setting (a learning rate, say) that differs between arms, what most runs have.
    An arm's name tells it only where it is something else."""
    settings = [(arm_of(arm[0]), len(arm)) for arm in arms]
    usual = {}
    for key in OPTIONS:
        values = [json.dumps(mine[key]) for mine, count in settings if key in mine
                  for _ in range(count)]
        if key != "mitigation" and len(set(values)) > 1:
            default = json.dumps(OPTIONS[key].default)
            most = max(values, key=lambda value: (values.count(value), value == default))
            usual[key] = json.loads(most)
    return usual


def name_of(mine: dict, settings: list[dict], usual: dict) -> str:
    """The mitigation, and what else tells this arm apart from those with the other settings."""
    own = [key for key in mine if key not in OPTIONS and tells_apart(key, mine, settings)]
    unusual = [key for key, value in usual.items() if key in mine and mine[key] != value]
    return " ".join([mine["mitigation"], *(f"{key} {mine[key]}" for key in own + unusual)])


def tells_apart(flag: str, mine: dict, settings: list[dict]) -> bool:
    """Whether arms that have this flag, too, have another value of it."""
    axes = ["mitigation", "advantage"] if flag in advantage_flags() else ["mitigation"]
    rivals = [other for other in settings if all(other[axis] == mine[axis] for axis in axes)]
    return any(rival.get(flag) != mine[flag] for rival in rivals)


class Comparison:
    """Comparable runs, arm by arm; the baseline is the arm that all others are compared with."""

    def __init__(self, runs: list[dict], baseline: str | None):
        arms = alike(runs, arm_of)
        self.usual = usual_values(arms)
        settings = [arm_of(arm[0]) for arm in arms]
        self.arms = {}
        for mine, arm in zip(settings, arms):  # settings that read alike, 1 and "1", are one arm
            self.arms.setdefault(name_of(mine, settings, self.usual), []).extend(arm)
        for arm in self.arms.values():
            refuse_twins(arm)
        named = self.arm_named(baseline) if baseline else None
        self.baseline_was_named = named is not None
        self.baseline = named or self.usual_baseline(baseline)
        self.arms = {self.baseline: self.arms[self.baseline], **self.arms}  # it comes first

    def arm_named(self, wanted: str) -> str | None:
        """The arm of this name, or with a run of this name or folder."""
        for name, arm in self.arms.items():
            folders = [run["folder"] for run in arm]
            paths = [folder.resolve() for folder in folders]
            if wanted in (name, *(f.name for f in folders)) or Path(wanted).resolve() in paths:
                return name
        return None

    def usual_baseline(self, wanted: str | None) -> str:
        """Plain GRPO with the settings that most runs have, otherwise the first arm."""
        plain = [name for name, arm in self.arms.items()
                 if PLAIN.items() <= (PLAIN | arm[0]["config"]).items()]
        if "none" in plain:
            return "none"
        if len(plain) > 1 and not wanted:
            raise UserError(f"which arm is the baseline: {' or '.join(plain)}? Say so with "
                            "--baseline and the name of a run or an arm")
        return (plain or list(self.arms))[0]

    def seeds(self, name: str) -> dict[int, dict]:
        """The finished runs of an arm."""
        return {run["config"]["seed"]: run for run in self.arms[name] if is_done(run)}

    def shown(self, name: str) -> list[dict]:
        """The runs that curves and means are made of: finished ones, or what there is."""
        return list(self.seeds(name).values()) or self.arms[name]

    def others(self) -> list[str]:
        return [name for name in self.arms if name != self.baseline]

    def placebos_of(self, name: str) -> list[str]:
        """The arms that are this one with something shuffled."""
        mine, unshuffled = arm_of(self.arms[name][0]), {"placebo": "none"}
        return [other for other, arm in self.arms.items()
                if other != name and mine == arm_of(arm[0]) | unshuffled]


def refuse_twins(arm: list[dict]) -> None:
    by_seed = {}
    for run in arm:
        twin = by_seed.setdefault(run["config"]["seed"], run)
        if twin is not run:
            raise UserError(f"{twin['folder']} and {run['folder']} are the same arm and seed: "
                            "one of them is enough")


def refuse_unknown_baseline(comparisons: list[Comparison], wanted: str | None) -> None:
    if wanted and not any(comparison.baseline_was_named for comparison in comparisons):
        names = ", ".join(name for comparison in comparisons for name in comparison.arms)
        raise UserError(f"--baseline {wanted} is neither one of these runs nor one of the arms: "
                        f"{names}")
