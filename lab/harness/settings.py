"""Every setting of a run, and where its value comes from.

Defaults < the model folder's recipe.json < --config < what was typed. The task, the weighting and
the advantage bring flags of their own: `keywords` holds their values.
"""
import inspect
import textwrap
import typing
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.engine.methods import METHODS, NEVER_RESCALED, axis_of
from lab.engine.declared import Requirement
from lab.engine.errors import UserError, location_of, read_json
from lab.harness.flags import (Flag, check_value, flags_of, help_text, option, settle,
                               unknown_argument, value_of, words_of)
from lab.harness.record import Json, find_folder
from lab.harness.tasks import file_of_task, load_task, with_module_name
from run import Settings, say

MODES = ("sampled", "greedy")  # the answers of an evaluation
PLACEBOS = ("none", "weights", "weights_by_kind", "advantages", "advantages_by_kind")
LARGE = 200_000_000  # bytes of weights; on a CPU such a model takes minutes for a step
NOT_SETTINGS = (  # entries of a run's config.json that are no settings
    "versions", "git_commit", "model_config", "reward", "ranks", "notes", "held_out_problems",
    "functions", "columns_temperature", "made_of", "changed", "finished", "trained_parameters")
# settings of earlier runs, and their defaults
GONE = {"warmup_steps": 0, "decay": "none", "noise_parts": 0, "clip_kind": "ppo"}
# when a setting has an effect
KL: Requirement = (lambda s: s.kl > 0, "--kl above 0")
REUSED: Requirement = (lambda s: s.epochs > 1, "--epochs above 1")
ESTIMATED: Requirement = (
    lambda s: s.temperature == 1 and not s.placebo.startswith("advantages"),
    "--temperature 1, at which its estimate is right, and advantages that are not shuffled")
RESCALED: Requirement = (lambda s: s.mitigation not in ("none", *NEVER_RESCALED),
                         "a --mitigation whose weights are rescaled")
SHUFFLED: Requirement = (lambda s: not s.placebo.startswith("weights") or s.mitigation != "none",
                         "a --mitigation other than none, whose weights can be shuffled")
EVALUATED: Requirement = (lambda s: s.eval_every > 0, "--eval_every above 0")
ON_A_GPU: Requirement = (lambda s: s.device.startswith("cuda"), "--device cuda")

# With --lora the default learning rate is so many times that of all parameters, and at most the
# second number: for a small model, and for a large one. A small step of A and B moves a matrix less
# than an equal step of all its numbers, and the less the wider it is. Above the second number a
# task was ruined in which others learn (docs/reference/real_models.md).
LORA_RATE, LORA_RATE_OF_LARGE = (4.0, 1e-3), (25.0, 5e-5)

HINT = "--help all lists the flags"  # the end of a message about an unknown one
# what a resumed run may change: the book's, and what says how a run is computed or recorded
CHANGEABLE = ("steps", "device", "checkpointing", "deterministic", "threads", "micro_batch",
              "change_every", "track", "checkpoint_every")


@dataclass
class LabSettings(Settings):
    """The settings of a run beyond the book. The first one is the book's, with one more choice."""
    rescale: str = option(
        "mean", "the number by which all weights of a batch are multiplied. mean: their mean "
        "becomes 1. gradient: the sum of the sizes of the tokens' gradients becomes what it is "
        "with weights of 1. none: the weights stay as they are",
        choices=("mean", "gradient", "none"))
    device: str = option(
        "cpu", "device to compute on: cpu, cuda or cuda:N")
    dtype: str = option(
        "float32", "type of the numbers to compute with. The parameters stay float32",
        choices=("float32", "bfloat16"))
    checkpointing: bool = option(
        False, "keep only one activation of each layer for the backward pass, and compute the "
        "others again when they are needed. This takes less memory and makes an update a third "
        "slower")
    deterministic: bool = option(
        False, "compute the same numbers every time, as a CPU does. A GPU's usual algorithms add "
        "in an order that changes from run to run. A step takes about two fifths longer")
    placebo: str = option(
        "none", "train a control instead of the method itself. weights: the weights are shuffled "
        "over the tokens of the batch. advantages: the advantages are shuffled within each group. "
        "With _by_kind only tokens of one category exchange theirs. none: no control",
        choices=PLACEBOS)
    loss_norm: str = option(
        "token", "how the loss is averaged. token: over all tokens of the batch, as in DAPO. "
        "sequence: over the tokens of each answer, and then over the answers. constant: its sum is "
        "divided by the number of answers times max_new_tokens, as in Dr. GRPO",
        choices=("token", "sequence", "constant"))
    temperature: float = option(
        1.0, "temperature of sampling in training, and of the loss. What is recorded of each token "
        "is always computed at temperature 1, and evaluations sample at 1", least=0.01, most=100)
    entropy_bonus: float = option(
        0.0, "coefficient of a bonus for entropy. It is added to the advantage of each token, "
        "which has the same gradient on average (lab/engine/entropy_bonus.py)", most=1000)
    kl_kind: str = option(
        "k3", "estimator of the KL divergence. On average k3 has the gradient of KL(initial || "
        "policy), and k2 has that of KL(policy || initial)", choices=("k3", "k2"))
    drop_unfinished: bool = option(
        False, "do not train on answers that were cut off at --max_new_tokens")
    lora: int = option(
        0, "LoRA: keep the matrices as they are, and train an addition of this rank to each matrix "
        "of the layers. AdamW and the gradients then take hardly any memory, and an update has a "
        f"third fewer operations. The default learning rate is {LORA_RATE[0]:g} times as high "
        f"and at most {LORA_RATE[1]:g}, of a large model {LORA_RATE_OF_LARGE[0]:g} times and at "
        f"most {LORA_RATE_OF_LARGE[1]:g}. 0 trains every parameter")
    dynamic_sampling: int = option(
        1, "draw at most so many batches of problems for a step, until there are enough groups "
        "whose answers have different rewards. The record is of the groups that were kept, and so "
        "is its success. What is drawn beyond the first batch is counted as extra_answers",
        least=1, most=100)
    track: str = option(
        "none", "show the run's curves while it goes, in TensorBoard", choices=(
            "none", "tensorboard"))
    typed: Json = field(default_factory=dict, compare=False)     # the values that were given
    unnamed: typing.ClassVar = {*METHODS, "seed", "out", *CHANGEABLE} - {"steps"}
    defaults: Json = field(default_factory=dict, compare=False)  # those of the model's recipe.json

    def keywords_of(self, function: typing.Any) -> Json:
        return {name: self.keywords[name] for name in flags_of(function)}


# when a flag has an effect, and which value it has if not
REQUIRED: dict[str, Requirement] = {
    "deterministic": ON_A_GPU, "rescale": RESCALED, "placebo": SHUFFLED, "clip_low": REUSED,
    "clip_high": REUSED, "entropy_bonus": ESTIMATED, "kl_kind": KL,
    "eval_tasks": EVALUATED}
OTHERWISE: dict[str, typing.Callable[[typing.Any], object]] = {
    "rescale": lambda s: "none" if s.mitigation in NEVER_RESCALED else "mean"}
OPTIONS = {name: replace(flag, requires=REQUIRED.get(name), otherwise=OTHERWISE.get(name))
           for name, flag in flags_of(LabSettings).items()}
OPTIONS |= {name: replace(OPTIONS[name], choices=METHODS.get(name, ()))
            for name in ("task", "mitigation", "advantage")}  # more than those of the book
DEFAULTS = {name: flag.default for name, flag in OPTIONS.items()}
# flags that are read with the settings, but are no settings
CONTINUE = {
    "resume": Flag(None, "continue the run in this folder. --steps may be changed, and so may "
                         "flags that say how a run is computed or recorded: "
                         f"{', '.join(name for name in CHANGEABLE if name != 'steps')}"),
    "continue": Flag(False, "resume the run if its folder exists and has the same settings. A "
                            "finished run is left as it is"),
    "config": Flag(None, "take the settings from a run's config.json. Flags that are typed "
                         "override them")}
NOT_KEYWORDS = (  # words of command lines, the tools' too, which no method may have as a flag
    *CONTINUE, "help", "step", "show", "seeds", "processes", "runs")


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
    names. Which flags there are follows from the task and the methods. `beside` are further flags
    of the program that calls, which a misspelt one may have meant."""
    typed, recipe, config, here = from_all(given)
    flags = all_flags(here)
    for name in typed:
        if name not in flags:
            raise unknown_flag(name, {*flags, *beside}, here, DEFAULTS | recipe | config | typed)
    values = settle(typed, flags, recipe | config)
    typed = {name: values[name] for name in flags if name in typed}
    own = {name: values.pop(name) for name in flags if name not in OPTIONS}
    return LabSettings(**values, keywords=own, defaults=recipe, typed=typed)


def settings_of_run(run: Path, **changed: object) -> LabSettings:
    """The settings that a run's folder has on record, but for these."""
    return make_settings({"config": run / "config.json", **changed})


def from_all(given: Json) -> tuple[Json, Json, Json, Json]:
    """What was given, without --config; the settings of the model folder's recipe.json; those of
    --config; and the task, the weighting and the advantage that follow from these three."""
    typed = {}
    for name, value in given.items():  # a flag of a method stays a text until it is known
        flag = OPTIONS.get(name) or CONTINUE.get(name)
        typed[name] = value_of(name, value, flag) if flag else value
    typed, file = with_module_name(typed), typed.pop("config", None)
    config = {} if file is None else read_json(find_folder(str(file)))
    if (config | typed).get("advantage") == "dpo":
        raise UserError("the advantage dpo is that of examples/dpo.py, and python examples/dpo.py "
                        "--resume RUN goes on with a run of it")
    folder = find_folder(str((config | typed).get("model", LabSettings.model)))
    path = folder / "recipe.json"
    recipe = recipe_in(path)
    chosen = DEFAULTS | recipe | config | typed
    if chosen["lora"]:
        is_recipe = "lora" not in config  # of a run's config.json the rate is that of its --lora
        rate = (recipe | (config if is_recipe else {})).get("learning_rate",
                                                            LabSettings.learning_rate)
        check_value("learning_rate", rate, OPTIONS["learning_rate"])
        factor, most = LORA_RATE_OF_LARGE if is_large(folder) else LORA_RATE
        with_lora = {"learning_rate": min(float(f"{factor * rate:g}"), most)}
        recipe, config = recipe | with_lora, config | (with_lora if is_recipe else {})
    here = owners(chosen)
    return typed, known_values(path, recipe, here), known_values(file, config, here), here


def recipe_in(file: Path) -> Json:
    """The settings that suit a model. They may name neither a model nor a run's folder."""
    recipe = read_json(file) if file.exists() else {}
    if wrong := recipe.keys() & {"model", "out"}:
        raise UserError(f"{file} sets {min(wrong)}, which the recipe of a model may not")
    return recipe


def is_large(folder: Path) -> bool:
    """Whether a model is large, by its files of weights: nothing else of the folder is read yet."""
    files = folder.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) > LARGE


def known_values(path: object, values: Json, here: Json) -> Json:
    """The values of a file that are settings of this run; an error if one is a setting of no run.
    Flags of a task, a weighting or an advantage that the run does not have are left out."""
    flags, may_have_more = all_flags(here), False
    values = {name: value for name, value in values.items()
              if name not in GONE or value != GONE[name]}
    of_others: set[str] = set()
    for axis, owner in here.items():
        name = values.get(axis, DEFAULTS[axis])
        if axis in METHODS and isinstance(name, str) and name not in METHODS[axis]:
            may_have_more = True  # a method that was removed: it is not known which flags it had
        elif not is_or_extends(owner, other := owner_of(axis, name)):
            of_others |= flags_of(other).keys()
    unknown = values.keys() - {*flags, *of_others, *NOT_SETTINGS}
    if unknown and not may_have_more:
        raise UserError(f"{path} has the unknown setting {min(unknown)}")
    kept = flags.keys() - of_others
    return {name: value for name, value in values.items() if name in kept}


def is_or_extends(owner: typing.Any, other: typing.Any) -> bool:
    """Whether one is the other, or a task whose class extends that of the other."""
    both_classes = inspect.isclass(owner) and inspect.isclass(other)
    return owner is other or (both_classes and issubclass(owner, other))


def owner_of(axis: str, name: str) -> typing.Any:
    """The task, the weighting or the advantage of this name."""
    check_value(axis, name, replace(OPTIONS[axis], choices=()))
    if axis not in METHODS:
        return load_task(name)
    if name not in METHODS[axis]:
        other = axis_of(name)  # or says that there is none
        raise UserError(f"--{axis} {name} is a{'n' * (other == 'advantage')} --{other}")
    return METHODS[axis][name]


def owners(values: Json) -> Json:
    """The task, the weighting and the advantage, which bring flags of their own, by their axis."""
    for choices in METHODS.values():
        for clash, *both in choices.clashes:
            locations = [one if isinstance(one, str) else location_of(one) for one in both]
            raise UserError(f"there are two {clash}, {' and '.join(locations)}: one needs another "
                            "name")
    return {axis: owner_of(axis, values[axis]) for axis in ("task", *METHODS)}


def all_flags(here: Json) -> dict[str, Flag]:
    """The settings, and the flags of the task and the methods in `here`; a name has one meaning."""
    flags = dict(OPTIONS)
    for owner in here.values():
        for name in flags_of(owner).keys() & {*flags, *NOT_SETTINGS, *NOT_KEYWORDS}:
            raise UserError(f"the keyword {name} of {owner.__name__} ({location_of(owner)}) means "
                            "something else to this program: give it another name, "
                            f"for example {owner.__name__}_{name}")
        flags |= flags_of(owner)
    return flags


def unknown_flag(name: str, flags: set[str], here: Json, chosen: Json) -> UserError:
    """The error of a flag that the run does not have: it may be another method's, or misspelt."""
    hint = HINT + "".join(own_flags_of(here[axis]) for axis in METHODS)
    for axis, choices in METHODS.items():
        if found := [owner for owner in choices if name in flags_of(choices[owner])]:
            return UserError(f"--{name} belongs to {' and '.join(found)}, but --{axis} is "
                             f"{chosen[axis]} ({hint})")
    return unknown_argument(f"--{name}", flags | CONTINUE.keys() - {name}, hint)


def own_flags_of(method: typing.Any) -> str:
    """The end of a hint about a method's flags: "; those of my_idea are --strength"."""
    own = " ".join(f"--{name}" for name in flags_of(method))
    return f"; those of {method.__name__} are {own}" if own else ""


def print_help(given: Json) -> None:
    """Print what --help asks for: one method, or all flags, with the defaults for this model."""
    topic = given.pop("help")
    for axis, choices in METHODS.items():
        if topic in choices:
            method = choices[topic]
            return say(help_text(f"python train.py --{axis} {topic} [flags]",
                                 inspect.getdoc(method), flags_of(method)))
    if file_of_task(str(topic)).is_file():
        task = load_task(str(topic))
        return say(help_text(f"python train.py --task {topic} [flags]", inspect.getdoc(task),
                             flags_of(task)))
    if topic in OPTIONS:
        return say(f"--{topic}: {OPTIONS[topic].help()}")
    if topic not in (True, "all"):
        raise UserError(f"--help {topic}: there is no method and no flag of this name. --help all "
                        "lists them")
    if "resume" in given:
        run = value_of("resume", given.pop("resume"), CONTINUE["resume"])
        given["config"] = Path(str(run)) / "config.json"
    _, recipe, config, here = from_all(given)
    flags = {}
    for name, flag in all_flags(here).items():
        flags[name] = replace(flag, default=(recipe | config).get(name, flag.default))
    about = "Train a language model with GRPO, and record each token's advantage and weight."
    say(help_text("python train.py [flags]", about, flags | CONTINUE, end=about_methods()))


def about_methods() -> str:
    """The end of the help: each weighting and advantage, its flags, and what it does."""
    lines = []
    for axis, choices in METHODS.items():
        lines.append(f"choices of --{axis}, each with its own flags (--help NAME says more of "
                     "one):")
        for name in choices:
            flags = "".join(f" --{flag}" for flag in flags_of(choices[name]))
            text = " ".join((inspect.getdoc(choices[name]) or "").split("\n\n")[0].split())
            lines.append(textwrap.fill(f"{name}{flags}: {text}", 99, initial_indent="  ",
                                       subsequent_indent=" " * 6))
    return "\n".join(lines)
