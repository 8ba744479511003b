"""The name of a run's folder: every flag that is not at the default that holds for its model.

    python train.py                                     runs/none-grpo-s0
    python train.py --learning_rate 1e-3 --steps 30     runs/none-grpo-lr1e-3-steps30-s0

Runs that differ never meet in one folder, and the same command always names the same one, so that
--continue finds it. What changes no result, say --threads, is not in the name.
"""
import hashlib
import os
import re
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED
from harness.files import PROJECT, find_folder
from harness.flags import Flag, fields_as_flags, parameters_as_flags
from harness.tasks import load_task

LONGEST = 100  # bytes; the end of a longer name becomes a hash
BY_PLACE = (  # these have a place of their own in the name
    "task", "model", "mitigation", "placebo", "rescale", "advantage", "seed")
LABELS = {"learning_rate": "lr", "device": "", "dtype": ""}  # "cuda" instead of "devicecuda"


def run_name(settings, options: dict[str, Flag]) -> str:
    """Task, model, weighting, advantage, each with its own flags; then all others; the seed."""
    s = settings
    is_usual = os.path.realpath(find_folder(s.model)) == os.path.realpath(
        find_folder(options["model"].default))
    rescale = () if s.mitigation in ("none", *NEVER_RESCALED) else ("rescale",)
    of_loss = {name: flag for name, flag in options.items() if flag.topic == "loss"}
    of_rest = {name: flag for name, flag in options.items() if name not in {*BY_PLACE, *of_loss}}
    parts = [
        "" if s.task == options["task"].default else s.task.rpartition(".")[2],
        "" if is_usual else model_name(find_folder(s.model)),
        s.mitigation, *changed(s, parameters_as_flags(MITIGATIONS[s.mitigation]), write=str),
        *changed(s, {name: options[name] for name in ("placebo", *rescale)}),
        s.advantage, *changed(s, parameters_as_flags(ADVANTAGES[s.advantage]), write=str),
        *changed(s, of_loss, write=str), *changed(s, fields_as_flags(load_task(s.task))),
        *changed(s, of_rest)]
    return shortened("-".join(filter(None, parts)), f"-s{s.seed}")


def changed(settings, flags: dict[str, Flag], write=None) -> list[str]:
    """A part, "think_discount0.25", for each of these flags that is not at its default, has an
    effect here, and can change a result."""
    values, parts = settings.to_json(), []
    for name, flag in flags.items():
        value = values[name]
        has_effect = not flag.requires or flag.requires[0](SimpleNamespace(**values))
        is_default = value == settings.defaults.get(name, flag.default)
        if not flag.changes_result or not has_effect or is_default:
            continue
        if flag.is_path and value:
            parts.append(path_part(value, usual="."))
        elif name == "rollouts":  # whatever the address of the server is
            parts.append(name)
        else:
            parts.append(LABELS.get(name, name) + legal((write or short)(value)))
    return parts


def path_part(path: str | Path, usual: str) -> str:
    """The name of a file or folder, with a hash of the whole path unless it lies in the `usual`
    folder of the project: elsewhere there may be another of that name."""
    path = Path(os.path.abspath(find_folder(path)))
    place = path.relative_to(PROJECT) if PROJECT in path.parents else path
    name, home = place.name, str(place.parent)
    if name.startswith("step_"):  # a checkpoint is named by its run as well
        name = f"{place.parent.parent.name}-{name}"
        home, usual = str(place.parent.parent.parent), "runs"
    return legal(name) if home == usual else f"{legal(name)}.{digest(str(place), 6)}"


def legal(text: str) -> str:
    """The text if a folder's name can have it; otherwise what it can have, and a hash."""
    kept = re.sub(r"[^\w.+-]", "_", text)
    return kept if kept == text else f"{kept}.{digest(text, 6)}"


def digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:length]


def short(value) -> str:
    """The shorter way to write a number with all its digits: 1e-3 of 0.001, 2 of 2.0, 0.5."""
    if not isinstance(value, float):
        return str(value)
    plain = repr(value).removesuffix(".0")
    scientific = f"{Decimal(repr(value)).normalize():e}".replace("+", "")
    return min(plain, scientific, key=len)


def model_name(folder: Path) -> str:
    return path_part(folder, usual="models")


def shortened(name: str, ending: str) -> str:
    """Name and ending, if they have at most LONGEST bytes. A longer name is cut behind a part and
    gets a hash of the whole."""
    if len((name + ending).encode()) <= LONGEST:
        return name + ending
    hashed = digest(name, 8)
    room = LONGEST - len(f"-{hashed}{ending}")
    beginning = name.encode()[:room].decode(errors="ignore")
    kept = beginning.rpartition("-")[0] or beginning
    return f"{kept}-{hashed}{ending}"
