"""The name of a run's folder: every flag that is not at the default that holds for its model.

    python train.py                                     runs/none-grpo-s0
    python train.py --learning_rate 1e-3 --steps 30     runs/none-grpo-lr1e-3-steps30-s0

The same command always names the same folder, so that --continue finds it. What changes no result,
say --threads, is not in the name. Files of one name in two places name one folder: whoever comes
second is told what differs (harness/resume.py).
"""
import os
import re
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from engine.choices import ADVANTAGES, MITIGATIONS
from harness.files import Json, find_folder
from harness.flags import Flag, parameters_as_flags

OWN_PLACE = ("task", "model", "mitigation", "placebo", "rescale", "advantage", "seed")
LABELS = {"learning_rate": "lr", "device": "", "dtype": ""}  # "cuda" instead of "devicecuda"


def run_name(values: Json, defaults: Json, options: dict[str, Flag],
             of_task: dict[str, Flag]) -> str:
    """Task, model, mitigation, advantage, each with its own flags; then all others; the seed."""
    task, mitigation, advantage = (
        str(values[name]) for name in ("task", "mitigation", "advantage"))
    folders = [find_folder(str(name)) for name in (values["model"], options["model"].default)]
    changed = partial(changed_flags, values, defaults)
    of_loss = {name: flag for name, flag in options.items() if flag.topic == "loss"}
    parts = [
        "" if task == options["task"].default else task.rpartition(".")[2],
        "" if len(set(map(os.path.realpath, folders))) == 1 else path_part(folders[0]),
        mitigation, *changed(parameters_as_flags(MITIGATIONS[mitigation])),
        *changed({name: options[name] for name in ("placebo", "rescale")}),
        advantage, *changed(parameters_as_flags(ADVANTAGES[advantage])), *changed(of_loss),
        *changed(of_task), *changed({name: options[name] for name in options
                                     if name not in {*OWN_PLACE, *of_loss}}), f"s{values['seed']}"]
    return re.sub(r"[^\w.+-]", "_", "-".join(filter(None, parts)))


def changed_flags(values: Json, defaults: Json, flags: dict[str, Flag]) -> list[str]:
    """A part, "think_discount0.25", for each flag that makes a difference to results here."""
    parts = []
    for name, flag in flags.items():
        value = values[name]
        has_effect = not flag.requires or flag.requires[0](SimpleNamespace(**values))
        if not flag.changes_result or not has_effect or value == defaults.get(name, flag.default):
            continue
        if name == "rollouts":  # whatever the address of the server is
            value = ""
        label = "" if flag.is_path else LABELS.get(name, name)
        parts.append(label + (path_part(str(value)) if flag.is_path else short(value)))
    return parts


def path_part(name: str | Path) -> str:
    """The name of a file or folder; of a checkpoint that of its run as well."""
    path = Path(os.path.abspath(find_folder(str(name))))
    return f"{path.parents[1].name}-{path.name}" if path.name.startswith("step_") else path.name


def short(value: object) -> str:
    """The shorter way to write a number with all its digits: 1e-3 of 0.001, 2 of 2.0, 0.5."""
    if not isinstance(value, float):
        return str(value)
    scientific = f"{Decimal(repr(value)).normalize():e}".replace("+", "")
    return min(repr(value).removesuffix(".0"), scientific, key=len)
