"""Every setting of a run, and where its value comes from.

Defaults < the model folder's recipe.json < --config < what was typed. The task, the weighting and
the advantage bring flags of their own: `keywords` holds their values.
"""
import inspect
import os
import re
import textwrap
import typing
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.engine.errors import PROJECT, UserError, location_of, read_json, say
from lab.engine.lora import RATE, RATE_OF_LARGE, rate_of_lora
from lab.engine.methods import METHODS, NEVER_RESCALED, axis_of
from lab.engine.model_folder import is_large
from lab.harness.flags import (Flag, check_value, flags_of, help_text, option, settle,
                               unknown_argument, words_of)
from lab.harness.record import Json, find_folder
from lab.harness.tasks import file_of_task, load_task, with_module_name
from run import HERE, Settings

# what a resumed run may change: the book's, and what says how a run is computed or recorded
CHANGEABLE = ("steps", "device", "checkpointing", "deterministic", "threads", "micro_batch",
              "change_every", "track", "checkpoint_every")


@dataclass
class LabSettings(Settings):
    """The settings of a run beyond the book. The second one is the book's, with one more choice."""
    task: str = option("countdown_task", "the problems and the reward: a file of one's own")
    rescale: str = option(
        "mean", "mean: a batch's weights get a mean of 1. gradient: the sum of the sizes of the "
        "tokens' gradients becomes what it is with weights of 1. none: they stay as they are",
        choices=("mean", "gradient", "none"),
        requires=(lambda s: s.mitigation not in ("none", *NEVER_RESCALED),
                  "a --mitigation whose weights are rescaled"))
    device: str = option("cpu", "device to compute on: cpu, cuda or cuda:N")
    dtype: str = option("float32", "type to compute with. The parameters stay float32",
                        choices=("float32", "bfloat16"))
    checkpointing: bool = option(
        False, "keep one activation of each layer, and compute the others again for the backward "
        "pass. This takes less memory, and an update takes a third longer")
    deterministic: bool = option(
        False, "let a GPU add in the same order every time. A step takes about two fifths longer",
        requires=(lambda s: s.device.startswith("cuda"), "--device cuda"))
    placebo: str = option(
        "none", "train a control: shuffle the weights over the tokens of a batch, or the "
        "advantages within each group. _by_kind: only among tokens of one category",
        choices=("none", "weights", "weights_by_kind", "advantages", "advantages_by_kind"),
        requires=(lambda s: not s.placebo.startswith("weights") or s.mitigation != "none",
                  "a --mitigation other than none, whose weights can be shuffled"))
    loss_norm: str = option(
        "token", "what the loss is averaged over. token: all tokens of the batch, as in DAPO. "
        "sequence: the tokens of each answer, then the answers. constant: answers times "
        "max_new_tokens, as in Dr. GRPO", choices=("token", "sequence", "constant"))
    temperature: float = option(
        1.0, "temperature of sampling in training, and of the loss. Records and evaluations are at "
        "temperature 1", least=0.01, most=100)
    parts: int = option(
        1, "updates from each batch, each from this part of its answers; from the second one on "
        "with ratio and clipping", least=1, most=1000,
        requires=(lambda s: s.temperature == 1, "--temperature 1"))
    decay: str = option(
        "none", "linear: the learning rate falls in a straight line, to 0 after the last step",
        choices=("none", "linear"))
    kl_kind: str = option(
        "k3", "estimator of the KL divergence. On average k3 has the gradient of KL(initial || "
        "policy), and k2 has that of KL(policy || initial)", choices=("k3", "k2"),
        requires=(lambda s: s.kl > 0, "--kl above 0"))
    drop_unfinished: bool = option(
        False, "do not train on answers that were cut off at --max_new_tokens")
    lora: int = option(
        0, "LoRA: train an addition of this rank to each matrix of the layers, with far less "
        f"memory and up to {RATE[0]:g} times the learning rate, of a large model up to "
        f"{RATE_OF_LARGE[0]:g} times. 0 trains every parameter")
    dynamic_sampling: int = option(
        1, "draw at most so many batches for a step, until enough groups have different rewards. "
        "Only these groups are on record", least=1, most=100)
    track: str = option("none", "show the run's curves while it goes, in TensorBoard",
                        choices=("none", "tensorboard"))
    typed: dict[str, typing.Any] = field(default_factory=dict)  # the flags that were typed
    unnamed: typing.ClassVar = {*METHODS, "seed", "out", *CHANGEABLE} - {"steps"}

    @property
    def folder(self) -> Path:
        """Named by the flags, so that the same command finds it again, as
        runs/none-grpo-learning_rate0.001-s0."""
        flags = [("" if name in ("model", "task") else name) + Path(str(value)).name
                 for name, value in self.typed.items() if name not in self.unnamed]
        name = "-".join([self.mitigation, self.advantage, *flags, f"s{self.seed}"])
        usual = os.path.relpath(HERE / "runs" / re.sub(r"[^\w.+-]", "_", name))
        return Path(os.path.normpath(self.out or usual))

    def to_json(self) -> Json:
        known = {name: getattr(self, name) for name in OPTIONS if name != "out"}
        return known | self.keywords

    def keywords_of(self, function: typing.Any) -> Json:
        return {name: self.keywords[name] for name in flags_of(function)}


OPTIONS = flags_of(LabSettings)
DEFAULTS = {name: flag.default for name, flag in OPTIONS.items()}
# flags that are read with the settings, but are no settings
CONTINUE = {
    "resume": Flag(None, "continue the run in this folder, if you like with other values of "
                   f"{', '.join(CHANGEABLE)}"),
    "continue": Flag(False, "resume the run if its folder exists and has the same settings"),
    "config": Flag(None, "take the settings from a run's config.json. Typed flags override them")}
NOT_SETTINGS = (  # entries of a run's config.json that are no settings
    "torch", "versions", "git_commit", "model_config", "reward", "notes", "held_out_problems",
    "columns_temperature", "made_of", "changed", "finished", "trained_parameters")
NOT_KEYWORDS = (  # words of command lines, the tools' too, which no method may have as a flag
    *CONTINUE, "help", "step", "show", "seeds", "processes", "runs")
HINT = "--help all lists the flags"  # the end of a message about an unknown one


def read_flags(argv: list[str]) -> Json:
    """The texts of the flags that were typed, for `make_settings`; --help prints and ends here."""
    words, given = words_of(argv)
    if "help" in given:
        print_help(given)
        raise SystemExit(0)
    if words:
        raise unknown_argument(words[0], {*OPTIONS, *CONTINUE}, HINT)
    return given


def make_settings(given: Json, beside: Collection[str] = ()) -> LabSettings:
    """The settings of a run, from what was given, as texts or as values, and from the files that it
    names. `beside` are further flags of the program that calls, which a misspelt one may have
    meant."""
    typed, usual, flags = from_all(given)
    for name in typed:
        if name not in flags:
            raise unknown_flag(name, {*flags, *beside})
    values = settle(typed, flags, usual)
    typed = {name: values[name] for name in flags if name in typed}
    own = {name: values.pop(name) for name in flags if name not in OPTIONS}
    return LabSettings(**values, keywords=own, typed=typed)


def from_all(given: Json) -> tuple[Json, Json, dict[str, Flag]]:
    """What was given, without --config; the values of recipe.json and then of --config; and which
    flags there are, which follows from the task and the methods."""
    typed = dict(with_module_name(given))
    file = check_value("config", typed.pop("config", None), CONTINUE["config"])
    if str(file).endswith((".yaml", ".yml")):
        raise UserError(f"--config {file}: settings are JSON here. models/qwen2.5-0.5b.json has "
                        "those of GRPO-Zero's config_instrumented.yaml")
    if file is not None and not find_folder(file).exists():
        known = [*PROJECT.glob("lab/recipes/*.json"), *PROJECT.glob("models/*.json")]
        names = ", ".join(sorted(path.relative_to(PROJECT).as_posix() for path in known))
        raise UserError(f"--config {file}: there is no such file. With the project come {names}; "
                        "and every run has a config.json")
    config = {} if file is None else read_json(find_folder(file))
    folder = find_folder(str((config | typed).get("model", LabSettings.model)))
    path = folder / "recipe.json"
    recipe = read_json(path) if path.exists() else {}
    chosen = DEFAULTS | recipe | config | typed
    flags = flags_for(chosen)
    usual = known_values(path, recipe, flags) | known_values(file, config, flags)
    # of a run's config.json the learning rate is that of its --lora
    if check_value("lora", chosen["lora"], OPTIONS["lora"]) and (
            not {"lora", "learning_rate"} <= config.keys()):
        rate = check_value("learning_rate", (DEFAULTS | usual)["learning_rate"],
                           OPTIONS["learning_rate"])
        usual["learning_rate"] = rate_of_lora(rate, is_large(folder))
    return typed, usual, flags


def known_values(path: object, values: Json, flags: dict[str, Flag]) -> Json:
    """The values of a file that are settings of this run. Those of another task, weighting or
    advantage are left out, and a setting of no run is an error."""
    known = flags_for(DEFAULTS | values)
    for name, value in values.items():
        if name not in known and name not in NOT_SETTINGS:
            raise UserError(f"{path} has the unknown setting {name}")
    return {name: values[name] for name, flag in known.items()
            if name in values and flags.get(name) == flag}


def flags_for(values: Json) -> dict[str, Flag]:
    """The settings, and the flags of the task, the weighting and the advantage that these values
    name. A name has one meaning."""
    for choices in METHODS.values():
        for clash, *both in choices.clashes:
            locations = [one if isinstance(one, str) else location_of(one) for one in both]
            raise UserError(f"there are two {clash}, {' and '.join(locations)}: one needs another "
                            "name")
    flags = dict(OPTIONS)
    for axis in ("task", *METHODS):
        owner = owner_of(axis, values[axis])
        for name in flags_of(owner).keys() & {*flags, *NOT_SETTINGS, *NOT_KEYWORDS}:
            raise UserError(f"the keyword {name} of {owner.__name__} ({location_of(owner)}) means "
                            "something else to this program: give it another name, "
                            f"for example {owner.__name__}_{name}")
        flags |= flags_of(owner)
    if values["mitigation"] in NEVER_RESCALED:
        flags["rescale"] = replace(flags["rescale"], default="none")
    return flags


def owner_of(axis: str, name: str) -> typing.Any:
    """The task, the weighting or the advantage of this name."""
    check_value(axis, name, OPTIONS[axis])
    if axis not in METHODS:
        return load_task(name)
    if name not in METHODS[axis]:  # `axis_of` says if it is in neither
        raise UserError(f"{name} is a value of --{axis_of(name)}, and not of --{axis}")
    return METHODS[axis][name]


def unknown_flag(name: str, flags: set[str]) -> UserError:
    """The error of a flag that the run does not have: it may be another method's, or misspelt."""
    for axis, choices in METHODS.items():
        if found := [owner for owner in choices if name in flags_of(choices[owner])]:
            return UserError(f"--{name} is a flag of --{axis} {' and '.join(found)} ({HINT})")
    return unknown_argument(f"--{name}", flags | CONTINUE.keys() - {name}, HINT)


def print_help(given: Json) -> None:
    """Print what --help asks for: a method, a task, a flag, or all flags, with their values for
    this model."""
    topic = str(given.pop("help"))
    for axis in ("task", *METHODS):
        if topic in METHODS.get(axis, ()) or axis == "task" and file_of_task(topic).is_file():
            owner = owner_of(axis, topic)
            return say(help_text(f"python -m lab train --{axis} {topic} [flags]",
                                 inspect.getdoc(owner), flags_of(owner)))
    if topic in OPTIONS:
        return say(f"--{topic}: {OPTIONS[topic].help()}")
    if topic not in ("True", "all"):
        raise UserError(f"--help {topic}: there is no method and no flag of this name. --help all "
                        "lists them")
    _, usual, flags = from_all(given)
    flags = {name: replace(flag, default=usual.get(name, flag.default))
             for name, flag in flags.items()}
    choices = [textwrap.fill(f"--{axis} is one of {', '.join(METHODS[axis])}", 99)
               for axis in METHODS]
    say(help_text("python -m lab train [flags]", "Train a language model with GRPO. --help "
                  "NAME says more of a method.", flags | CONTINUE, end="\n".join(choices)))
