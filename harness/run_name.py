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
from pathlib import Path
from types import SimpleNamespace

from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED
from harness.files import find_folder
from harness.flags import Flag, parameters_as_flags

BY_PLACE = (  # these have a place of their own in the name
    "task", "model", "mitigation", "placebo", "rescale", "advantage", "seed")
LABELS = {"learning_rate": "lr", "device": "", "dtype": ""}  # "cuda" instead of "devicecuda"


def run_name(s, options: dict[str, Flag], of_task: dict[str, Flag]) -> str:
    """Task, model, mitigation, advantage, each with its own flags; then all others; the seed."""
    usual, model = find_folder(options["model"].default), find_folder(s.model)
    rescale = () if s.mitigation in ("none", *NEVER_RESCALED) else ("rescale",)
    of_loss = {name: flag for name, flag in options.items() if flag.topic == "loss"}
    of_rest = {name: flag for name, flag in options.items() if name not in {*BY_PLACE, *of_loss}}
    parts = [
        "" if s.task == options["task"].default else s.task.rpartition(".")[2],
        "" if os.path.realpath(model) == os.path.realpath(usual) else path_part(model),
        s.mitigation, *changed(s, parameters_as_flags(MITIGATIONS[s.mitigation])),
        *changed(s, {name: options[name] for name in ("placebo", *rescale)}),
        s.advantage, *changed(s, parameters_as_flags(ADVANTAGES[s.advantage])),
        *changed(s, of_loss), *changed(s, of_task, short), *changed(s, of_rest, short),
        f"s{s.seed}"]
    return re.sub(r"[^\w.+-]", "_", "-".join(filter(None, parts)))


def changed(s, flags: dict[str, Flag], write=str) -> list[str]:
    """A part, "think_discount0.25", for each of these flags that is not at its default, has an
    effect here, and can change a result."""
    values, parts = s.to_json(), []
    for name, flag in flags.items():
        value = values[name]
        has_effect = not flag.requires or flag.requires[0](SimpleNamespace(**values))
        is_default = value == s.defaults.get(name, flag.default)
        if not flag.changes_result or not has_effect or is_default:
            continue
        if flag.is_path and value:
            parts.append(path_part(value))
        elif name == "rollouts":  # whatever the address of the server is
            parts.append(name)
        else:
            parts.append(LABELS.get(name, name) + write(value))
    return parts


def path_part(path: str | Path) -> str:
    """The name of a file or folder; of a checkpoint that of its run as well."""
    path = Path(os.path.abspath(find_folder(path)))
    return f"{path.parents[1].name}-{path.name}" if path.name.startswith("step_") else path.name


def short(value) -> str:
    """The shorter way to write a number with all its digits: 1e-3 of 0.001, 2 of 2.0, 0.5."""
    if not isinstance(value, float):
        return str(value)
    scientific = f"{Decimal(repr(value)).normalize():e}".replace("+", "")
    return min(repr(value).removesuffix(".0"), scientific, key=len)
