"""Every setting of a run, and where its value comes from.

Defaults < the model folder's recipe.json < --config < what was typed. The task, the weighting and
the advantage bring flags of their own: `method_flags` holds their values. harness/flags.py lists
what can be declared of a flag.
"""
import argparse
import hashlib
import inspect
import re
import typing
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.choices import ADVANTAGES, METHODS, MITIGATIONS, NEVER_RESCALED
from engine.errors import UserError, location_of, read_json
from harness.flags import (MOST_THREADS, Flag, Parser, Requirement, Values, check_value,
                           check_values, flags_of, make_parser, option, print_text,
                           refuse_without_effect, settled)
from harness.record import Json, find_folder
from harness.tasks import load_task, with_module_name

MODES = ("sampled", "greedy")  # the answers of an evaluation
LONGEST_NAME = 80  # characters of a run's folder
LARGE = 200_000_000  # bytes of weights; on a CPU such a model takes minutes for a step
NOT_SETTINGS = (  # entries of a run's config.json that are no settings
    "versions", "git_commit", "model_config", "reward", "ranks", "imported", "trainer",
    "columns_temperature", "made_of", "accepted", "trained_parameters")
# when a setting has an effect
KL: Requirement = (lambda s: s.kl > 0, "--kl above 0")
REUSED: Requirement = (lambda s: s.epochs > 1, "--epochs above 1")
ESTIMATED: Requirement = (
    lambda s: s.temperature == 1 and s.placebo != "advantages",
    "--temperature 1, at which its estimate is right, and advantages that are not shuffled")
RESCALED: Requirement = (lambda s: s.mitigation not in ("none", *NEVER_RESCALED),
                         "a --mitigation whose weights are rescaled")
SHUFFLED: Requirement = (lambda s: s.placebo != "weights" or s.mitigation != "none",
                         "a --mitigation other than none, whose weights can be shuffled")
EVALUATED: Requirement = (lambda s: s.eval_every > 0, "--eval_every above 0")
ON_A_GPU: Requirement = (lambda s: s.device.startswith("cuda"), "--device cuda")

# a setting that says how a run is made, not which run it is
HOW_IT_IS_MADE: Json = {"changeable": True, "in_name": False, "compared": "aside"}

# How many times as high the default learning rate is with --lora, for a small model and for a large
# one. A small step of A and B moves a matrix less than an equal step of all its numbers, and the
# less the wider it is. Rates that are twice and four times as high fail (lab/LOG.md).
LORA_RATE, LORA_RATE_OF_LARGE = 4.0, 25.0

USAGE = "python train.py [flags]"
# headings of the help
MODEL, PROBLEMS, SPREADING = "model and machine", "problems", "spreading credit over tokens"
FROM_REWARD, LOSS, TRAINING = "from reward to advantage", "loss", "training"
RECORD, CONTINUING = "evaluations, record and checkpoints", "continuing a run"
OWN_FLAGS = "flags of the chosen task, weighting and advantage"


@dataclass
class Settings:
    """The settings of a run. Each field but the last two is a flag."""
    model: str = option(
        "models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model",
        topic=MODEL, label="", compared="setting")
    device: str = option(
        "cpu", "device to compute on: cpu, cuda, cuda:N, or mps, which was never tried",
        topic=MODEL, **HOW_IT_IS_MADE)
    dtype: str = option(
        "float32",
        "type of the numbers to compute with. The parameters stay float32. On CUDA the "
        "default is bfloat16, unless the model folder has a recipe.json",
        choices=("float32", "bfloat16"), topic=MODEL, label="")
    checkpointing: bool = option(
        False, "keep only one activation of each layer for the backward pass, and compute the "
        "others again when they are needed. This takes less memory and makes an update a third "
        "slower",
        topic=MODEL, **HOW_IT_IS_MADE)
    deterministic: bool = option(
        False, "compute the same numbers every time, as a CPU does. A GPU's usual algorithms add "
        "in an order that changes from run to run. A step takes about two fifths longer",
        requires=ON_A_GPU, topic=MODEL, sample_drops=True, **HOW_IT_IS_MADE)
    threads: int = option(
        0, "CPU threads; 0 means one for every 64 hidden units of the model", most=MOST_THREADS,
        topic=MODEL, **HOW_IT_IS_MADE)

    task: str = option(
        "countdown_task", "what the model is trained on: countdown_task, examples.own_reward, or "
        "my_task if your own task is in my_task.py (docs/your_own_task.md)",
        topic=PROBLEMS, label="",
        compared="setting")

    mitigation: str = option(
        "none", "the weighting: how the advantage of an answer is spread over its tokens. The "
        "choices are listed below",
        choices=MITIGATIONS, topic=SPREADING, in_name=False, sample_drops=True)
    rescale: str = option(
        "mean",
        "the number by which all weights of a batch are multiplied. mean: their mean becomes 1. "
        "gradient: the sum of the sizes of the tokens' gradients becomes what it is with weights "
        "of 1. none: the weights stay as they are",
        choices=("mean", "gradient", "none"), requires=RESCALED, topic=SPREADING,
        otherwise=lambda s: "none" if s.mitigation in NEVER_RESCALED else "mean")
    placebo: str = option(
        "none", "train a control instead of the method itself. weights: the weights are shuffled "
        "over the tokens of the batch. advantages: the advantages are shuffled within each group. "
        "none: no control",
        choices=("none", "weights", "advantages"), requires=SHUFFLED,
        topic=SPREADING, idea_takes=False, sample_drops=True)

    advantage: str = option(
        "grpo", "how advantages are computed from rewards. The choices are listed below",
        choices=ADVANTAGES, topic=FROM_REWARD, in_name=False, sample_drops=True)

    loss_norm: str = option(
        "token", "how the loss is averaged. token: over all tokens of the batch, as in DAPO. "
        "sequence: over the tokens of each answer, and then over the answers. constant: its sum is "
        "divided by the number of answers times max_new_tokens, as in Dr. GRPO",
        choices=("token", "sequence", "constant"), topic=LOSS)
    epochs: int = option(
        1, "how many updates are made from each batch, all with the same weights and advantages",
        least=1, topic=LOSS)
    clip_low: float = option(
        0.2, "PPO's lower clipping: the ratio of new to old probability is clipped at 1 minus this",
        most=1, requires=REUSED, topic=LOSS)
    clip_high: float = option(
        0.28, "PPO's upper clipping: the ratio is clipped at 1 plus this",
        requires=REUSED, topic=LOSS)
    clip_kind: str = option(
        "ppo", "how an update on a batch that is used again is bounded. credit/clips.py has the "
        "formulas; in the first pass over a batch all of them are plain GRPO. The metric "
        "clipped_share counts by PPO's bounds, whichever is chosen",
        choices=("ppo", "dual", "gspo", "cispo", "sapo", "gmpo", "dppo"), requires=REUSED,
        topic=LOSS)
    entropy_bonus: float = option(
        0.0, "coefficient of a bonus for entropy. It is added to the advantage of each token, "
        "which has the same gradient on average (credit/entropy_bonus.py)", most=1000,
        requires=ESTIMATED, topic=LOSS)
    kl: float = option(
        0.0, "coefficient of the KL divergence from the initial model. Above 0 a copy of that "
        "model is kept in memory",
        topic=LOSS, sample_drops=True)
    kl_kind: str = option(
        "k3", "estimator of the KL divergence. On average k3 has the gradient of KL(initial || "
        "policy), and k2 has that of KL(policy || initial)",
        choices=("k3", "k2"), requires=KL, topic=LOSS)
    drop_unfinished: bool = option(
        False, "do not train on answers that were cut off at --max_new_tokens", topic=LOSS)

    steps: int = option(
        100, "steps of training. With 0 the model is only evaluated",
        topic=TRAINING, changeable=True, compared="setting")
    questions: int = option(
        8, "problems in each step", least=1, topic=TRAINING, compared="setting")
    answers: int = option(
        8, "answers to each problem", least=2, topic=TRAINING, compared="setting")
    max_new_tokens: int = option(
        512, "the most tokens that an answer may have. A longer one is cut off",
        least=1, topic=TRAINING,
        compared="setting")
    temperature: float = option(
        1.0, "temperature of sampling in training, and of the loss. What is recorded of each token "
        "is always computed at temperature 1, and evaluations sample at 1", least=0.01, most=100,
        topic=TRAINING, compared="setting")
    learning_rate: float = option(
        5e-6, "learning rate of AdamW", above=0, most=10, topic=TRAINING, label="lr")
    lora: int = option(
        0, "LoRA: keep the matrices as they are, and train an addition of this rank to each matrix "
        "of the layers. AdamW and the gradients then take hardly any memory, and an update has a "
        f"third fewer operations. The default learning rate is {LORA_RATE:g} times as high, of a "
        f"large model {LORA_RATE_OF_LARGE:g} times. 0 trains every parameter", topic=TRAINING)
    weight_decay: float = option(0.0, "weight decay of AdamW", topic=TRAINING)
    warmup_steps: int = option(
        0, "the learning rate rises in equal parts over so many steps", topic=TRAINING)
    decay: str = option(
        "none", "how the learning rate falls after that, nearly to 0 in the last step",
        choices=("none", "linear", "cosine"), topic=TRAINING)
    dynamic_sampling: int = option(
        1, "draw at most so many batches of problems for a step, until there are enough groups "
        "whose answers have different rewards. The record is of the groups that were kept, and so "
        "is its success. What is drawn beyond the first batch is counted as extra_answers",
        least=1, most=100, topic=TRAINING)
    micro_batch: int = option(
        8, "how many answers of full length an update computes at a time; a number above that of "
        "all answers means all of them. This changes memory, speed and rounding, and nothing else",
        least=1, topic=TRAINING, **HOW_IT_IS_MADE)
    max_grad_norm: float = option(
        1.0, "gradients with a larger norm are scaled down to this norm; 0 means never",
        topic=TRAINING)
    seed: int = option(
        0, "seed of the training problems and of sampling. Evaluations use the same random numbers "
        "whatever the seed is",
        topic=TRAINING, in_name=False, compared="aside", idea_takes=False)

    eval_every: int = option(
        25, "steps between two evaluations. There is also one at the start and one at the end; 0 "
        "means never", topic=RECORD, compared="aside")
    eval_tasks: int = option(
        500, "number of held-out problems in an evaluation",
        least=1, requires=EVALUATED, topic=RECORD,
        compared="aside")
    change_every: int = option(
        10, "steps between two measurements of each token's change, which is its log-prob after "
        "the step minus its log-prob before. The first and the last step are measured, too; 0 "
        "means never. A measurement needs two more forward passes; on a CPU such a step takes two "
        "fifths longer", topic=RECORD,
        **HOW_IT_IS_MADE)
    track: str = option(
        "none", "show the run's curves while it goes, in one of these programs. tensorboard and "
        "wandb write into the run's folder, trackio into a folder of its own. None sends anything "
        "anywhere: wandb works offline",
        choices=("none", "tensorboard", "trackio", "wandb"), topic=RECORD, **HOW_IT_IS_MADE)
    checkpoint_every: int = option(
        25, "steps between two checkpoints, from which a stopped run resumes. There is also one at "
        "the end. With 0 only the trained model is kept, at the end, with its matrices in --dtype",
        topic=RECORD, **HOW_IT_IS_MADE)
    out: str | None = option(
        None, "folder of the run. By default it is runs/<mitigation>-<advantage>-s<seed>, and "
        "flags that differ from their defaults are named before the seed",
        topic=RECORD, in_name=False, compared="aside",
        idea_takes=False)

    method_flags: Json = field(default_factory=dict)  # of task, weighting and advantage
    defaults: Json = field(default_factory=dict, compare=False)  # those of the model's recipe.json

    @property
    def folder(self) -> Path:
        """The folder of the run. The same command names the same one:
        runs/none-grpo-lr0.001-steps30-s0."""
        if self.out:
            return Path(self.out)
        values, changed = self.to_json(), {}
        for name, flag in all_flags(values).items():
            usual = self.defaults.get(name, flag.default)
            if flag.in_name and flag.has_effect(values) and values[name] != usual:
                label = name if flag.label is None else flag.label
                changed[name] = label + Path(str(values[name])).name
        parts = []
        for axis, choices in METHODS.items():
            chosen = getattr(self, axis)
            parts.append(chosen)
            parts += [changed.pop(name) for name in flags_of(choices[chosen]) if name in changed]
        parts += [*changed.values(), f"s{self.seed}"]
        name = re.sub(r"[^\w.+-]", "_", "-".join(parts))
        if len(name) > LONGEST_NAME:  # with many flags, or a long one: its end becomes a digest
            digest = hashlib.sha256(name.encode()).hexdigest()[:8]
            name = f"{name[:LONGEST_NAME - 20]}-{digest}-s{self.seed}"
        return Path("runs") / name

    def flags_for(self, function: typing.Any) -> Json:
        return {name: self.method_flags[name] for name in flags_of(function)}

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in OPTIONS} | self.method_flags


OPTIONS = flags_of(Settings)
DEFAULTS = {name: flag.default for name, flag in OPTIONS.items()}
CHANGEABLE = [name for name, flag in OPTIONS.items() if flag.changeable]
# flags that are read with the settings, but are no settings
CONTINUE = {
    "resume": Flag(None, "continue the run in this folder. --steps may be changed, and so may "
                         "flags that say how a run is computed or recorded: "
                         f"{', '.join(name for name in CHANGEABLE if name != 'steps')}",
                   topic=CONTINUING, metavar="RUN", idea_takes=False),
    "continue": Flag(False, "resume the run if its folder exists and has the same settings. A "
                            "finished run is left as it is", topic=CONTINUING, idea_takes=False),
    "accept_changes": Flag(False, "go on although something that the run is made of has changed. "
                           "It is written down, and analyze.py says it", topic=CONTINUING,
                           requires=(lambda s: s.resume is not None, "--resume"),
                           idea_takes=False),
    "config": Flag(None, "take the settings from a run's config.json. Flags that are typed "
                         "override them",
                   topic=CONTINUING, metavar="FILE", idea_takes=False)}
NOT_KEYWORDS = (  # words of command lines, the tools' too, which no method may have as a flag
    *CONTINUE, "help", "step", "show", "seeds", "processes", "runs")


def make_settings(given: Json) -> Settings:
    """The settings of a run, from what was typed and from the files that this names."""
    recipe, config = from_files(given)
    typed = {name: value for name, value in given.items() if name != "config"}
    values = DEFAULTS | recipe | config | typed
    check_values(values, OPTIONS)
    # the methods that the run will use: where --mitigation has no effect, for example, it is none
    final = settled(values, OPTIONS)
    refuse_without_effect(typed, final, OPTIONS)
    flags = all_flags(final)  # with those of these methods
    for name in sorted(typed.keys() - flags.keys()):
        from harness.help import about_unknown
        raise UserError(about_unknown(name, final) or f"--{name} is no flag of {final['task']}")
    values = {name: values.get(name, flag.default) for name, flag in flags.items()}
    check_values(values, flags)
    final = settled(values, flags)
    refuse_without_effect(typed, final, flags)
    for name, flag in flags.items():
        if flag.type is float and type(final[name]) is int:
            final[name] = float(final[name])
    own = {name: final.pop(name) for name in flags if name not in OPTIONS}
    return Settings(**final, method_flags=own, defaults=recipe)


def settings_of_run(run: Path, **changed: object) -> Settings:
    """The settings that a run's folder has on record, but for these."""
    return make_settings({"config": run / "config.json", **changed})


def from_files(given: Json) -> tuple[Json, Json]:
    """The settings of the model folder's recipe.json and those of --config. Flags of a task, a
    weighting or an advantage that the run does not have are left out."""
    config = read_json(Path(given["config"])) if "config" in given else {}
    folder = find_folder(str((config | given).get("model", Settings.model)))
    path = folder / "recipe.json"
    recipe = read_json(path) if path.exists() else {}
    chosen = DEFAULTS | recipe | config | given
    on_gpu = str(chosen["device"]).startswith("cuda")
    if not recipe and is_large(folder):
        from harness.large_model import recipe_of_large
        recipe = recipe_of_large(config | given, chosen["task"] == Settings.task, on_gpu)
    elif not recipe and on_gpu:
        recipe = {"dtype": "bfloat16"}  # in float32 a GPU is several times slower
    if str(chosen["lora"]) != "0":
        rate = recipe.get("learning_rate", Settings.learning_rate)
        factor = LORA_RATE_OF_LARGE if is_large(folder) else LORA_RATE
        recipe = {**recipe, "learning_rate": float(f"{factor * rate:g}")}
    return known_values(path, recipe, chosen), known_values(given.get("config"), config, chosen)


def is_large(folder: Path) -> bool:
    """Whether a model is large, by its files of weights: nothing else of the folder is read yet."""
    from engine.model_folder import base_of
    files = base_of(folder).glob("*.safetensors")
    return sum(file.stat().st_size for file in files) > LARGE


def known_values(path: object, values: Json, chosen: Json) -> Json:
    """The values of a file that are settings of this run; an error if one is a setting of no run.
    """
    flags, owners_here = all_flags(chosen), owners(chosen)
    # A method that the file names may not exist here: it was removed, or is another trainer's. Then
    # it is not known which flags it had.
    missing = {axis for axis in METHODS if values.get(axis, chosen[axis]) not in METHODS[axis]}
    owners_in_file = owners(DEFAULTS | {name: values[name] for name in values.keys() - missing})
    flags_of_file: set[str] = set()
    flags_of_others: set[str] = set()  # of a task or method of the file that this run does not have
    for owner in owners_in_file:
        flags_of_file |= flags_of(owner).keys()
        if not any(is_or_extends(one, owner) for one in owners_here):
            flags_of_others |= flags_of(owner).keys()
    unknown = values.keys() - {*flags, *flags_of_file, *NOT_SETTINGS}
    if unknown and not missing:
        raise UserError(f"{path} has the unknown setting {min(unknown)}{written_by(values)}")
    kept = flags.keys() - flags_of_others
    return {name: value for name, value in values.items() if name in kept}


def written_by(config: Json) -> str:
    """A clause about the commit that a run was made with; an empty text if it is not on record."""
    commit = config.get("git_commit")
    return f": commit {str(commit)[:8]} wrote it, and has it" if commit else ""


def is_or_extends(owner: typing.Any, other: typing.Any) -> bool:
    """Whether one is the other, or a task whose class extends that of the other."""
    both_classes = inspect.isclass(owner) and inspect.isclass(other)
    return owner is other or (both_classes and issubclass(owner, other))


def owners(values: Values) -> list[typing.Any]:
    """The task, the weighting and the advantage, which bring flags of their own."""
    for choices in METHODS.values():
        for clash, *both in choices.clashes:
            locations = [one if isinstance(one, str) else location_of(one) for one in both]
            raise UserError(f"there are two {clash}, {' and '.join(locations)}: one needs another "
                            "name")
    for name in ("task", *METHODS):
        check_value(name, values[name], OPTIONS[name])
    return [load_task(values["task"]), *(METHODS[axis][values[axis]] for axis in METHODS)]


def all_flags(values: Values) -> dict[str, Flag]:
    """The settings, and the flags of the chosen task and methods; a name has one meaning."""
    flags = dict(OPTIONS)
    for owner in owners(values):
        for name in flags_of(owner).keys() & {*flags, *NOT_SETTINGS, *NOT_KEYWORDS}:
            raise UserError(f"the keyword {name} of {owner.__name__} ({location_of(owner)}) means "
                            "something else to this program: give it another name, "
                            f"for example {owner.__name__}_{name}")
        flags |= flags_of(owner)
    return flags


def read_flags(argv: list[str], also_known: Collection[str] = (),
               not_taken: Collection[str] = ()) -> Json:
    """The flags that were typed, with `resume`, `config` and `continue`. Which flags there are
    follows from the task and the methods, which are typed or in a file.

    A misspelt flag is answered with the nearest one. Another program than train.py may have read
    flags of its own before, which are `also_known`, and may refuse some of train.py, `not_taken`.
    """
    given = read_what_decides(argv)
    topic = given.pop("help", None)
    if "resume" in given:
        run = Path(given.pop("resume"))
        from harness.read_record import run_config
        run_config(run)  # refuses a folder that is none of a run
        given["config"] = run / "config.json"
    recipe, config = from_files(given)
    defaults = DEFAULTS | recipe | config | given
    flags = {}
    for name, flag in all_flags(defaults).items():
        flags[name] = replace(flag, default=defaults.get(name, flag.default),
                              topic=flag.topic or OWN_FLAGS)
    if topic is not None:
        from harness.help import help_about
        print_text(help_about(topic, flags | CONTINUE, METHODS, USAGE))
        raise SystemExit(0)
    parser = make_parser(USAGE, None, flags | CONTINUE, add_help=False)
    parser.also_known, parser.not_taken = also_known, not_taken
    parser.hint = "--help all lists the flags" + "".join(map(own_flags_of, owners(defaults)[1:]))

    def said_of_unknown(name: str) -> str:
        from harness.help import about_unknown
        return about_unknown(name, defaults)

    typed = parser.read(argv, said_of_unknown)
    usual = {name: flag.default for name, flag in CONTINUE.items()}
    refuse_without_effect(typed, usual | {"resume": typed.get("resume")}, CONTINUE)
    return with_module_name(typed)


def own_flags_of(method: typing.Any) -> str:
    """The end of a hint about a method's flags: "; those of my_idea are --strength"."""
    own = " ".join(f"--{name}" for name in flags_of(method))
    return f"; those of {method.__name__} are {own}" if own else ""


def read_what_decides(argv: list[str]) -> Json:
    """The flags that decide which other flags there are, and what defaults they have; and --help.
    They are not checked here."""
    first = Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    first.add_argument("-h", "--help", nargs="?", const="")
    of_a_recipe = ("dtype", "prompt", "numbers", "data", "lora")  # which recipe a large model gets
    for name in ("model", "device", "task", "config", "resume", *of_a_recipe, *METHODS):
        first.add_argument(f"--{name}")
    found, _ = first.parse_known_args(argv)
    return with_module_name(vars(found))
