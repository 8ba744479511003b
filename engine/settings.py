"""Every flag of a run: its default, its range, its help, and where its value comes from.

Defaults < the model folder's recipe.json < --config < what was typed. A flag that would have no
effect beside the others is an error when typed, and back at its default when it comes from a file.

Three settings name something that brings flags of its own: --task (a module with a class Task),
--mitigation and --advantage (choices of engine/registry.py). Those flags are not listed here; the
values of the chosen ones' flags are in `own`.
"""
import importlib
import re
import textwrap
from argparse import SUPPRESS
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

from engine.errors import UserError
from engine.files import PROJECT, find_folder, read_json
from engine.flags import (Flag, Parser, add_flag, check_value, describe, fields_as_flags, option,
                          parameters_as_flags)
from engine.registry import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, flags_of

# beside the settings in config.json
NOT_SETTINGS = ("versions", "git_commit", "model_config", "reward", "ranks")
RESERVED = ("resume", "continue", "config", "help", "own")

MACHINE, PROBLEMS, TRAINING, RECORD = "model and machine", "problems", "training", "record"
WEIGHT, BASELINE, LOSS = "spreading credit over tokens", "from reward to advantage", "loss"

EVALUATED = (lambda s: s.eval_every > 0, "--eval_every above 0")
POLICY = (lambda s: s.loss == "policy", "--loss policy")
DPO = (lambda s: s.loss == "dpo", "--loss dpo")
ANCHORED = (lambda s: s.loss == "policy" and s.kl > 0, "--kl above 0")
REUSED = (lambda s: s.loss == "policy" and s.epochs > 1,
          "--epochs above 1 (in the first pass the ratio is exactly 1) and --loss policy")


@dataclass
class Settings:
    model: str = option("models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model", topic=MACHINE)
    device: str = option("cpu", "cpu, cuda or cuda:N", topic=MACHINE)
    dtype: str = option("float32", "numbers to compute with; parameters stay float32",
                        choices=("float32", "bfloat16"), topic=MACHINE)
    checkpointing: bool = option(
        False, "keep one state a layer for the backward pass and compute the rest again: less "
        "memory, a third more time in the update", topic=MACHINE)
    offload_optimizer: bool = option(
        False, "float32 parameters, gradients and AdamW's state on the CPU: the device keeps 2 "
        "bytes a parameter in bfloat16 instead of 16", topic=MACHINE)
    threads: int = option(
        0, "CPU threads; 0 is one for every 64 hidden units of the model, at most what PyTorch "
        "finds", least=0, topic=MACHINE)

    task: str = option(
        "countdown_task", "module with the class Task: countdown_task, tools.descending, or "
        "my_task for a file my_task.py of yours in the project's folder", topic=PROBLEMS)

    mitigation: str = option(
        "none", "how an answer's advantage is spread over its tokens, listed below",
        choices=MITIGATIONS, topic=WEIGHT)
    rescale: str = option(
        "mean", "weights are scaled to mean 1 over the batch's tokens, to the same sum of gradient "
        "sizes, or not", choices=("mean", "gradient", "none"), only=POLICY, topic=WEIGHT)
    placebo: str = option(
        "none", "shuffle the weights over the batch's tokens, or the advantages within each group: "
        "what the arm owes to anything but its choice of tokens",
        choices=("none", "weights", "advantages"), only=POLICY, topic=WEIGHT)

    advantage: str = option(
        "grpo", "what an answer, or a token, is compared with, listed below",
        choices=ADVANTAGES, topic=BASELINE)

    loss: str = option(
        "policy", "weight * advantage * log_prob, or preference pairs: the best and the worst "
        "answer of a group", choices=("policy", "dpo"), topic=LOSS)
    loss_norm: str = option(
        "token", "divide by the batch's tokens (DAPO), average per answer first, or divide by "
        "answers times max_new_tokens (Dr. GRPO)",
        choices=("token", "sequence", "constant"), only=POLICY, topic=LOSS)
    epochs: int = option(1, "updates from one batch; weights and advantages stay as they are",
                         least=1, topic=LOSS)
    clip_low: float = option(0.2, "the ratio new/old counts down to 1 minus this",
                             least=0, most=1, only=REUSED, topic=LOSS)
    clip_high: float = option(0.28, "and up to 1 plus this", least=0, only=REUSED, topic=LOSS)
    kl: float = option(
        0.0, "coefficient of the divergence from the initial model, of which a copy is kept",
        least=0, only=POLICY, topic=LOSS)
    kl_kind: str = option(
        "k3", "its gradient is that of KL(initial || policy) for k3, of KL(policy || initial) for "
        "k2", choices=("k3", "k2"), only=ANCHORED, topic=LOSS)
    drop_unfinished: bool = option(False, "answers cut off by the limit are not trained on",
                                   only=POLICY, topic=LOSS)
    dpo_beta: float = option(
        0.1, "how far preferences may lead from the initial model (smaller: further)",
        above=0, only=DPO, topic=LOSS)

    steps: int = option(100, "batches; 0 evaluates and stops", least=0, topic=TRAINING)
    questions: int = option(8, "questions a step", least=1, topic=TRAINING)
    answers: int = option(8, "answers to each question", least=2, topic=TRAINING)
    max_new_tokens: int = option(512, "an answer is cut off here", least=1, topic=TRAINING)
    temperature: float = option(
        1.0, "of the sampling; training and the columns on record are at temperature 1 whatever "
        "this is", above=0, topic=TRAINING)
    learning_rate: float = option(5e-6, "of AdamW", above=0, topic=TRAINING)
    weight_decay: float = option(0.0, "of AdamW", least=0, topic=TRAINING)
    micro_batch: int = option(8, "answers in memory at once during the update; changes no result",
                              least=1, topic=TRAINING)
    max_grad_norm: float = option(1.0, "the gradient is clipped to this norm, 0 for never",
                                  least=0, topic=TRAINING)
    seed: int = option(0, "of problems and sampling", least=0, topic=TRAINING)

    eval_every: int = option(25, "steps between evaluations (also at the start and end), 0 for "
                             "never", least=0, topic=RECORD)
    eval_tasks: int = option(500, "held-out problems of an evaluation",
                             least=1, only=EVALUATED, topic=RECORD)
    sample_every: int = option(10, "steps between sample answers kept in samples.jsonl, 0 for "
                               "never", least=0, topic=RECORD)
    checkpoint_every: int = option(25, "steps between checkpoints (also at the end), 0 for never",
                                   least=0, topic=RECORD)
    out: str | None = option(
        None, "run folder, by default runs/<mitigation>-<advantage>-s<seed>, with the flags about "
        "credit and loss that are not at their defaults in between", topic=RECORD)

    own: dict = field(default_factory=dict)  # flags of the chosen task, mitigation and advantage

    @property
    def folder(self) -> Path:
        """Named by everything about credit and loss, so that arms never meet in one folder."""
        if self.out:
            return Path(self.out)
        parts = [] if self.task == Settings.task else [self.task.rpartition(".")[2]]
        parts += [self.mitigation, *self.changed_own(MITIGATIONS[self.mitigation])]
        parts += self.changed(["placebo"])
        if self.mitigation not in NEVER_RESCALED:
            parts += self.changed(["rescale"])
        parts += [self.advantage, *self.changed_own(ADVANTAGES[self.advantage])]
        parts += self.changed(name for name, flag in OPTIONS.items() if flag.topic == LOSS)
        return Path(f"runs/{'-'.join(parts)}-s{self.seed}")

    def changed(self, names) -> list[str]:
        return [name_part(name, getattr(self, name)) for name in names
                if getattr(self, name) != OPTIONS[name].default]

    def changed_own(self, function) -> list[str]:
        flags = parameters_as_flags(function)
        return [name_part(name, self.own[name]) for name, flag in flags.items()
                if self.own[name] != flag.default]

    def flags_for(self, function) -> dict:
        """The values of the flags that a mitigation or an advantage brings."""
        return {name: self.own[name] for name in parameters_as_flags(function)}

    def to_json(self) -> dict:
        values = asdict(self)
        own = values.pop("own")
        return values | own


def name_part(name: str, value) -> str:
    return name + re.sub(r"[^\w.+-]", "_", str(value))[:40]


OPTIONS = fields_as_flags(Settings)


def load_task(name: str) -> type:
    """The class Task of a module of the project's folder."""
    parts = str(name).split(".")
    path = PROJECT.joinpath(*parts).with_suffix(".py")
    if not all(part.isidentifier() for part in parts) or not path.is_file():
        raise UserError(f"--task {name}: there is no module {path.name} in the project's folder; "
                        "countdown_task and tools.descending ship with it")
    task = getattr(importlib.import_module(name), "Task", None)
    if task is None:
        raise UserError(f"--task {name}: {path.name} has no class Task")
    return task


def make_task(settings: Settings):
    task = load_task(settings.task)
    return task(**{name: settings.own[name] for name in fields_as_flags(task)})


def read_flags(argv: list[str]) -> dict:
    """The flags that were typed, by name."""
    return make_parser(asked_task(argv)).read(argv)


def asked_task(argv: list[str]) -> str:
    """Which task's flags the rest of the command line may have: the one of --task or of
    --config."""
    parser = Parser(usage="", add_help=False)
    parser.add_argument("--task")
    parser.add_argument("--config")
    given = vars(parser.parse_known_args(argv)[0])
    if "task" in given:
        return given["task"]
    config = read_json(Path(given["config"])) if "config" in given else {}
    return config.get("task", Settings.task)


def make_parser(task: str) -> Parser:
    description = "Train with GRPO and write down what every token was given."
    parser = Parser("python train.py [flags]", description, epilog=describe_choices())
    topics = {flag.topic: parser.add_argument_group(flag.topic) for flag in OPTIONS.values()}
    for name, flag in OPTIONS.items():
        help_text = describe(flag)
        if name in ("mitigation", "advantage"):
            help_text = f"{flag.text} (default {flag.default})"
        if flag.only and flag.only not in (POLICY, EVALUATED):
            help_text += f"; needs {flag.only[1].split(' (')[0]}"
        add_flag(topics[flag.topic], name, flag, help_text)
    for name, flag in fields_as_flags(load_task(task)).items():
        add_flag(topics[PROBLEMS], name, flag)
    for name, flag in choice_flags().items():
        refuse_taken_name(name, task)
        add_flag(parser, name, flag, SUPPRESS)  # listed below, beside its choice
    add_resuming(parser.add_argument_group("going on"))
    return parser


def add_resuming(group) -> None:
    group.add_argument("--resume", metavar="RUN",
                       help="continue this run folder; only --steps may be given with it")
    group.add_argument("--continue", action="store_true",
                       help="if the run folder exists and has these settings, resume it (a "
                       "finished run is passed over): for loops that can be stopped and started "
                       "again")
    group.add_argument("--config", metavar="FILE",
                       help="take the settings of a run's config.json; flags override them")


def choice_flags() -> dict[str, Flag]:
    """The flags of all mitigations and advantages. Two that declare the same one share it."""
    flags = {}
    for registry in (MITIGATIONS, ADVANTAGES):
        for function in registry.values():
            for name, flag in parameters_as_flags(function).items():
                if flags.setdefault(name, flag).type is not flag.type:
                    owners = " and ".join(owners_of(name))
                    raise UserError(f"the parameter {name} of {owners} should have the same type: "
                                    "it is one flag")
    return flags


def owners_of(flag: str) -> list[str]:
    return [*flags_of(MITIGATIONS).get(flag, []), *flags_of(ADVANTAGES).get(flag, [])]


def refuse_taken_name(name: str, task: str) -> None:
    taken = [*OPTIONS, *RESERVED, *fields_as_flags(load_task(task))]
    if name in flags_of(MITIGATIONS):
        taken += flags_of(ADVANTAGES)
    if name in taken:
        raise UserError(f"the parameter {name} of {owners_of(name)[0]} needs another name: "
                        f"--{name} is taken")


def describe_choices() -> str:
    lines = ["choices of --mitigation, each with its own flags:"]
    lines += [describe_choice(name, function) for name, function in MITIGATIONS.items()]
    lines += ["", "choices of --advantage:"]
    lines += [describe_choice(name, function) for name, function in ADVANTAGES.items()]
    lines += ["", "A model folder's recipe.json sets its own defaults (models/tiny has one), flags "
              "override them, and config.json\nin the run folder shows what was used. Hyphens work "
              "as well as underscores."]
    return "\n".join(lines)


def describe_choice(name: str, function) -> str:
    """A mitigation's or an advantage's lines in --help."""
    text = " ".join((function.__doc__ or "(no docstring)").split("\n\n")[0].split())
    wrapped = textwrap.wrap(text, 84)
    rows = [f"  {name:29s} {wrapped[0]}", *(f"  {'':29s} {line}" for line in wrapped[1:])]
    for flag, meta in parameters_as_flags(function).items():
        text = f" {meta.text}" if meta.text else ""
        rows.append(f"  {'':29s}   --{flag}{text} (default {meta.default}{meta.limits()})")
    return "\n".join(rows)


def make_settings(given: dict) -> Settings:
    """Defaults, then the model's recipe, then --config, then `given`."""
    assert MITIGATIONS and ADVANTAGES, "import mitigations first: it fills the lists of choices"
    given = dict(given)
    config_path = given.pop("config", None)
    config = read_json(Path(config_path)) if config_path else {}
    config = {name: value for name, value in config.items() if name not in NOT_SETTINGS}
    recipe_path = find_folder(str(given.get("model", config.get("model", Settings.model))))
    recipe_path = recipe_path / "recipe.json"
    recipe = read_json(recipe_path) if recipe_path.is_file() else {}
    task = given.get("task", config.get("task", recipe.get("task", Settings.task)))
    recipe = without_other_task(recipe, task, recipe_path)
    config = without_other_task(config, task, config_path)
    config = without_other_mitigation(config, given)
    values = {**recipe, **config, **given}
    settings = Settings(**{name: value for name, value in values.items() if name in OPTIONS})
    for name, flag in OPTIONS.items():
        check_value(name, getattr(settings, name), flag)
    settings.own = own_values(settings, values, given)
    refuse_pairs_with_weights(settings)
    drop_what_has_no_effect(settings, given)
    return settings


def without_other_task(values: dict, task: str, source) -> dict:
    """A file's values without the flags of its own task, if that is not the one asked for."""
    its_task = values.get("task", Settings.task)
    its_flags = fields_as_flags(load_task(its_task))
    for name in values:
        if name not in OPTIONS and name not in its_flags and name not in choice_flags():
            raise UserError(f"{source} has the unknown setting {name}")
    if its_task == task:
        return values
    return {name: value for name, value in values.items()
            if name in OPTIONS or name not in its_flags}


def without_other_mitigation(config: dict, given: dict) -> dict:
    """When another mitigation is typed, what belonged to the one of --config stays with it."""
    before = config.get("mitigation")
    if given.get("mitigation", before) == before:
        return config
    forget = set(flags_of(MITIGATIONS))
    if before in NEVER_RESCALED:
        forget.add("rescale")
    return {name: value for name, value in config.items() if name not in forget}


def own_values(settings: Settings, values: dict, given: dict) -> dict:
    """The flags of the chosen task, mitigation and advantage; an error for one that is
    another's."""
    mitigation_flags = parameters_as_flags(MITIGATIONS[settings.mitigation])
    advantage_flags = parameters_as_flags(ADVANTAGES[settings.advantage])
    flags = {**fields_as_flags(load_task(settings.task)), **mitigation_flags, **advantage_flags}
    for name in given:
        if name not in OPTIONS and name not in flags:
            axis = "mitigation" if name in flags_of(MITIGATIONS) else "advantage"
            raise UserError(f"--{name} belongs to {' and '.join(owners_of(name))}, --{axis} is "
                            f"{getattr(settings, axis)}")
    own = {name: values.get(name, flag.default) for name, flag in flags.items()}
    for name, flag in flags.items():
        if flag.type is str and type(own[name]) is int:  # --values_every 16 in a file
            own[name] = str(own[name])
        check_value(name, own[name], flag)
        if flag.type is float:
            own[name] = float(own[name])
    return own


def refuse_pairs_with_weights(settings: Settings) -> None:
    for axis in ("mitigation", "advantage"):
        chosen = getattr(settings, axis)
        if settings.loss == "dpo" and chosen != OPTIONS[axis].default:
            raise UserError("--loss dpo has no tokens to weight and no advantage: it cannot be "
                            f"combined with --{axis} {chosen}")


def drop_what_has_no_effect(settings: Settings, given: dict) -> None:
    for name, flag in OPTIONS.items():
        if flag.only and not flag.only[0](settings):
            refuse_if_typed(name, flag, given)
            setattr(settings, name, flag.default)
    task = load_task(settings.task)
    for name, flag in fields_as_flags(task).items():
        if flag.only and not flag.only[0](SimpleNamespace(**settings.own)):
            refuse_if_typed(name, flag, given)
            settings.own[name] = flag.default
    drop_rescaling(settings, given)


def refuse_if_typed(name: str, flag: Flag, given: dict) -> None:
    if name in given:
        raise UserError(f"--{name} has no effect without {flag.only[1]}")


def drop_rescaling(settings: Settings, given: dict) -> None:
    """Some weights are never rescaled, and weights that are all 1 cannot be."""
    if settings.mitigation in NEVER_RESCALED:
        if given.get("rescale", "none") != "none":
            raise UserError(f"--rescale {given['rescale']}: {settings.mitigation} is never "
                            "rescaled, its scale is part of the mistake")
        settings.rescale = "none"
    if settings.mitigation == "none":
        for name, value in (("placebo", "weights"), ("rescale", "gradient"), ("rescale", "none")):
            if given.get(name) == value:
                raise UserError(f"--{name} {value} has no effect on --mitigation none: all its "
                                "weights are 1")
        settings.rescale = "mean"
        settings.placebo = "none" if settings.placebo == "weights" else settings.placebo
