"""Every setting of a run, with its range and its help; and how all programs read their flags.

    settings, tasks      answers: int = option(8, "answers in a group", least=2)
    weightings           def my_idea(rollouts, *, strength: Positive = 1.0)
    programs             FLAGS = {"answers": Flag(8, "answers in a group", least=2)}

Defaults < the model folder's recipe.json < --config < what was typed. The task, the weighting and
the advantage bring flags of their own: `method_flags` holds their values.
"""
import argparse
import dataclasses
import difflib
import inspect
import math
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED
from engine.errors import UserError, read_json
from harness.own_code import place_of
from harness.record import Json, find_folder
from harness.tasks import load_task

Requirement = tuple[Callable[[typing.Any], bool], str]  # a test of all values, and its words
KINDS = {int: "a whole number", float: "a number", bool: "yes or no", str: "a text"}


@dataclass(frozen=True)
class Flag:
    default: typing.Any
    text: str = ""
    least: float = 0  # these three of a number
    above: float = -math.inf
    most: float = 10 ** 9
    choices: Collection[str] = ()
    kind: type | None = None             # where it is not the type of the default
    requires: Requirement | None = None  # otherwise it has no effect

    @property
    def type(self) -> type:
        return self.kind or (str if self.default is None else type(self.default))

    def limits(self) -> str:
        low = f"above {self.above}" if self.above > -math.inf else f"at least {self.least}"
        return f"{low}, at most {self.most}"

    def help(self) -> str:
        choices = f": {' | '.join(self.choices)}" if 0 < len(self.choices) < 10 else ""
        default = "" if self.default in (None, False) else f" (default {self.default})"
        needed = f"; needs {self.requires[1]}" if self.requires else ""
        return f"{self.text}{choices}{default}{needed}"


Range = partial(Flag, None)  # of a parameter: the default stands beside it
NotNegative = typing.Annotated[float, Range()]
Positive = typing.Annotated[float, Range(above=0)]
Share = typing.Annotated[float, Range(most=1)]
Percent = typing.Annotated[float, Range(most=100)]
Count = typing.Annotated[int, Range(least=1)]
CountOrNone = typing.Annotated[int, Range()]
LearningRate = typing.Annotated[float, Range(above=0, most=10)]


def option(default: typing.Any, text: str, **more: typing.Any) -> typing.Any:
    return field(default=default, metadata={"flag": Flag(default, text, **more)})


@cache  # a comparison of runs asks a hundred thousand times
def flags_of(owner: typing.Any) -> dict[str, Flag]:
    """The fields of a dataclass; the keyword-only parameters of a method, which may be a class."""
    if dataclasses.is_dataclass(owner):
        flags = {one.name: one.metadata["flag"] for one in dataclasses.fields(owner)
                 if "flag" in one.metadata}
        hints = typing.get_type_hints(owner)
    else:
        function = owner.__init__ if inspect.isclass(owner) else owner
        flags = {name: Flag(one.default, least=-math.inf) for name, one in
                 inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY}
        hints = typing.get_type_hints(function, include_extras=True)
    return {name: as_flag(owner, name, flag, hints.get(name)) for name, flag in flags.items()}


def as_flag(owner: typing.Any, name: str, flag: Flag, hint: object) -> Flag:
    """The hint is float, or float | None, or Annotated[float, Flag(...)], whose flag counts."""
    parts = typing.get_args(hint) or (hint,)
    kind = next((part for part in parts if isinstance(part, type) and part in KINDS), None)
    if (kind or type(flag.default)) not in KINDS or flag.default is inspect.Parameter.empty:
        raise UserError(f"{name} of {owner.__name__} ({place_of(owner)}) becomes a flag: it needs "
                        "a default and a type that is int, float, bool or str")
    declared = next((part for part in parts if isinstance(part, Flag)), flag)
    return replace(declared, default=flag.default, kind=kind)


def check_values(values: Mapping[str, object], flags: Mapping[str, Flag]) -> None:
    for name, flag in flags.items():
        check_value(name, values[name], flag)


def check_value(name: str, value: typing.Any, flag: Flag) -> None:
    """Refuse a value of another type, one out of range, and one that is no choice."""
    if value is None and flag.default is None:
        return
    if not has_type(value, flag):
        untyped = flag.type is int and not (flag.kind or flag.text)  # a parameter: strength=1
        way_out = f", as its default {flag.default} is: write {flag.default}.0 there" * untyped
        raise UserError(f"--{name} {value!r:.80} should be {KINDS[flag.type]}{way_out}")
    if flag.choices and value not in flag.choices:
        nearest = difflib.get_close_matches(str(value), flag.choices, len(flag.choices), cutoff=0)
        raise UserError(f"--{name} {value:.80} is not one of: {', '.join(nearest)}")
    if flag.type in (int, float) and not flag.above < value >= flag.least <= value <= flag.most:
        raise UserError(f"--{name} {value} should be {flag.limits()}")


def has_type(value: typing.Any, flag: Flag) -> bool:
    """A whole number will do for a float."""
    if flag.type is str:
        return isinstance(value, str) and (value.strip() != "" or flag.default == "")
    is_kind = type(value) is flag.type or (type(value) is int and flag.type is float)
    return is_kind and -math.inf < value < math.inf


def value_of(text: str, flag: Flag) -> object:
    """What was typed, in the flag's type; as it is where that cannot be: check_value says so."""
    if flag.type is bool:
        return {"yes": True, "true": True, "no": False, "false": False}.get(text.lower(), text)
    try:
        return flag.type(text)
    except ValueError:
        return text


def with_defaults(given: Json, flags: Mapping[str, Flag]) -> SimpleNamespace:
    values = {name: flag.default for name, flag in flags.items()} | given
    check_values(values, flags)
    return SimpleNamespace(**values)


class Parser(argparse.ArgumentParser):
    """Say what is wrong in one sentence, and never guess what a shortened flag means."""
    flags: Mapping[str, Flag] = {}

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message} (--help lists the flags)")

    def read(self, argv: list[str], about_unknown: Callable[[str], str] = lambda _: "") -> Json:
        """What was typed, --max-new-tokens too; `about_unknown` may say more of what is no flag."""
        typed = [re.sub("(?<=^--)[^= ]*", lambda name: name[0].replace("-", "_"), argument)
                 for argument in argv]
        found, unknown = self.parse_known_intermixed_args(typed)  # RUN --flag 1 PROBLEM, too
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, 1, cutoff=0.75)
            question = f", did you mean {near[0]}?" if near else ""
            said = about_unknown(name.removeprefix("--"))
            self.error(said or f"unknown argument {unknown[0]}{question}")
        return self.values(found)

    def values(self, found: argparse.Namespace) -> Json:
        given = dict(vars(found))
        for name in given.keys() & self.flags.keys():
            given[name] = value_of(given[name], self.flags[name])
            check_value(name, given[name], self.flags[name])
        return given


def make_parser(usage: str, description: str | None, flags: Mapping[str, Flag],
                topics: Mapping[str, str] | None = None, epilog: str = "",
                add_help: bool = True) -> Parser:
    """`topics` has what stands above a flag and those that follow it."""
    parser = Parser(usage=usage, description=description, epilog=epilog, add_help=add_help,
                    allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    group: typing.Any = parser
    parser.flags = flags
    for name, flag in flags.items():
        if topics and name in topics:
            group = parser.add_argument_group(topics[name])
        alone = {"nargs": "?", "const": "yes"} if flag.type is bool else {}
        text = flag.help().replace("%", "%%")  # argparse fills in %(default)s
        group.add_argument(f"--{name}", help=text, metavar=flag.type.__name__.upper(), **alone)
    return parser


METHODS = {"mitigation": MITIGATIONS, "advantage": ADVANTAGES}
MODES = {"both": ("sampled", "greedy"), "sampled": ("sampled",)}  # of an evaluation
NOT_SETTINGS = (  # entries of a run's config.json that are no settings
    "versions", "git_commit", "model_config", "reward", "ranks", "imported", "trainer",
    "columns_temperature")
CHANGEABLE = (  # in a resumed run: how many steps it has and how it is made, not which run it is
    "steps", "threads", "device", "micro_batch", "checkpointing", "offload_optimizer", "shard",
    "rollouts", "rollouts_timeout", "sample_every", "change_every", "checkpoint_every",
    "save_model")
NOT_IN_NAME = {*CHANGEABLE, "mitigation", "advantage", "seed"} - {"steps"}
LABELS = {"learning_rate": "lr", "task": "", "model": "", "data": "", "dtype": ""}  # of its parts
MOST_THREADS = 1024
OWN_SAMPLER = "own"  # --rollouts
TOPICS = {"model": "model and machine", "task": "problems",
          "mitigation": "spreading credit over tokens", "advantage": "from reward to advantage",
          "loss": "loss", "steps": "training", "eval_every": "record"}
LARGE = 200_000_000  # bytes of weights; on a CPU such a model takes minutes for a step
# What a large model gets on a CPU, if its folder has no recipe.json. By --prompt: two numbers,
# which it learns within minutes. For other prompts and tasks: sizes that a laptop can live with.
LAPTOP: Json = {
    "questions": 4, "answers": 8, "max_new_tokens": 128, "micro_batch": 4, "eval_every": 50,
    "eval_tasks": 64, "eval_modes": "sampled", "checkpoint_every": 50}
TWO_NUMBERS: Json = {
    "numbers": "2", "min_number": 2, "max_number": 30, "max_target": 900, "examples": 4,
    "reward_form": "right", "questions": 8, "answers": 8, "micro_batch": 64, "steps": 48,
    "eval_every": 24, "eval_tasks": 250, "eval_modes": "sampled", "checkpoint_every": 0,
    "save_model": True}
LAPTOP_BY_PROMPT: Json = {
    "expression": {**TWO_NUMBERS, "max_new_tokens": 12},
    "brief": {**TWO_NUMBERS, "max_new_tokens": 64, "questions": 4, "micro_batch": 32}}
LONGER: Json = {"expression": 32, "brief": 192}  # tokens of an answer with more numbers than two
# In bfloat16 most of a small update is rounded away, so in float32 the same rate moves a model
# several times as far (docs/how_a_run_fails.md).
LAPTOP_RATE: Json = {"bfloat16": 2e-6, "float32": 5e-7}
NOT_KEYWORDS = ("help", "resume", "continue", "config",  # words of command lines, the tools' too
                "step", "show", "seeds", "processes", "runs")
OTHER_NAMES = {  # that other trainers use
    "lr": "--learning_rate", "batch_size": "--questions times --answers", "n": "--answers",
    "group_size": "--answers", "num_generations": "--answers", "max_steps": "--steps",
    "num_steps": "--steps", "max_tokens": "--max_new_tokens", "beta": "--kl", "output_dir": "--out",
    "max_completion_length": "--max_new_tokens", "gradient_checkpointing": "--checkpointing",
    "wandb": "metrics.jsonl in the run's folder, a line a step",
    "strength": "a keyword of your function: after the * in (rollouts, *, strength)"}

# when a setting has an effect; what may be set back itself stands above those that look at it
POLICY: Requirement = (lambda s: s.loss == "policy", "--loss policy")
DPO: Requirement = (lambda s: s.loss == "dpo", "--loss dpo")
KL: Requirement = (lambda s: s.loss == "policy" and s.kl > 0, "--kl above 0")
REUSED: Requirement = (lambda s: s.loss == "policy" and s.epochs > 1, "--epochs above 1")
RESCALED: Requirement = (
    lambda s: s.loss == "policy" and s.mitigation not in ("none", *NEVER_RESCALED),
    "a --mitigation that is rescaled")
SHUFFLED: Requirement = (
    lambda s: s.loss == "policy" and (s.placebo != "weights" or s.mitigation != "none"),
    "--loss policy and, for weights, another --mitigation than none")
SAMPLED: Requirement = (lambda s: s.pairs is None, "sampled answers: --pairs brings its own")
SERVED: Requirement = (lambda s: s.rollouts != OWN_SAMPLER, "--rollouts http://HOST:PORT")
NO_CHECKPOINTS: Requirement = (
    lambda s: s.checkpoint_every == 0, "--checkpoint_every 0: the last checkpoint has the model")
EVALUATED: Requirement = (lambda s: s.eval_every > 0, "--eval_every above 0")
ON_THE_DEVICE: Requirement = (lambda s: not s.offload_optimizer, "--offload_optimizer no")


@dataclass
class Settings:
    model: str = option("models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model")
    device: str = option("cpu", "cpu, cuda or cuda:N")
    dtype: str = option("float32", "to compute in; parameters stay float32. On CUDA bfloat16, "
                        "unless the model has a recipe", choices=("float32", "bfloat16"))
    checkpointing: bool = option(False, "one state a layer is kept for the backward pass: less "
                                 "memory, a third more time in the update")
    offload_optimizer: bool = option(False, "parameters in float32, gradients and AdamW's state on "
                                     "the CPU: in bfloat16 2 bytes a parameter on the device")
    shard: bool = option(False, "under torchrun: every process keeps a part of parameters, "
                         "gradients and moments", requires=ON_THE_DEVICE)
    threads: int = option(0, "of the CPU; 0 is one for every 64 hidden units", most=MOST_THREADS)
    task: str = option("countdown_task", "countdown_task, examples.largest_last, or my_task for a "
                       "file my_task.py of yours (docs/your_own_task.md)")
    mitigation: str = option("none", "how an answer's advantage is spread over its tokens, listed "
                             "below", choices=MITIGATIONS, requires=POLICY)
    rescale: str = option("mean", "weights to mean 1 over the batch's tokens, to the same sum of "
                          "gradient sizes, or not", choices=("mean", "gradient", "none"),
                          requires=RESCALED)
    placebo: str = option("none", "shuffle weights over the batch's tokens, or advantages within "
                          "each group", choices=("none", "weights", "advantages"),
                          requires=SHUFFLED)
    advantage: str = option("grpo", "what an answer, or a token, is compared with, listed below",
                            choices=ADVANTAGES, requires=POLICY)
    loss: str = option("policy", "weight * advantage * log_prob, or preference pairs: the best and "
                       "the worst answer of a group", choices=("policy", "dpo"))
    loss_norm: str = option("token", "divide by the batch's tokens (DAPO), average per answer "
                            "first, or divide by answers times max_new_tokens (Dr. GRPO)",
                            choices=("token", "sequence", "constant"), requires=POLICY)
    epochs: int = option(1, "updates from one batch; weights and advantages stay as they are",
                         least=1, requires=POLICY)
    clip_low: float = option(0.2, "the ratio new/old, 1 in the first epoch, counts down to 1 minus "
                             "this", most=1, requires=REUSED)
    clip_high: float = option(0.28, "and up to 1 plus this", requires=REUSED)
    kl: float = option(0.0, "coefficient of the divergence from the initial model, of which a copy "
                       "is kept", requires=POLICY)
    kl_kind: str = option("k3", "its gradient is that of KL(initial || policy) for k3, of "
                          "KL(policy || initial) for k2", choices=("k3", "k2"), requires=KL)
    drop_unfinished: bool = option(False, "answers cut off by the limit are not trained on",
                                   requires=POLICY)
    dpo_beta: float = option(0.1, "the smaller, the further preferences may lead from the initial "
                             "model", above=0, requires=DPO)
    pairs: str | None = option(None, 'JSON lines {"problem": ..., "chosen": ..., "rejected": ...}: '
                               "to train on, instead of sampled answers", requires=DPO)
    steps: int = option(100, "batches; 0 evaluates and stops")
    questions: int = option(8, "problems a step", least=1)
    answers: int = option(8, "answers to each problem", least=2, requires=SAMPLED)
    max_new_tokens: int = option(512, "an answer is cut off here", least=1)
    temperature: float = option(1.0, "of the sampling; training and the columns on record are at "
                                "temperature 1 whatever this is", least=0.01, most=100)
    rollouts: str = option(OWN_SAMPLER, "who answers the problems of a step: this program, or a "
                           "server by vLLM, http://HOST:PORT (bridges/rollouts_by_a_server.md)",
                           requires=SAMPLED)
    rollouts_every: int = option(1, "steps between hand-overs of the weights to it", least=1,
                                 requires=SERVED)
    rollouts_timeout: float = option(600.0, "seconds that its answers to a step may take, or its "
                                     "loading of weights", above=0, most=1500, requires=SERVED)
    learning_rate: float = option(5e-6, "of AdamW", above=0, most=10)
    weight_decay: float = option(0.0, "of AdamW")
    micro_batch: int = option(8, "full answers held at once in an update; changes rounding alone",
                              least=1)
    max_grad_norm: float = option(1.0, "the gradient is clipped to this norm, 0 for never")
    seed: int = option(0, "of problems and sampling; evaluations draw the same numbers anyway")
    eval_every: int = option(25, "steps between evaluations, also at the start and end; 0 is never")
    eval_tasks: int = option(500, "held-out problems of an evaluation", least=1, requires=EVALUATED)
    eval_answers: int = option(1, "sampled answers to each of them: success is the share that is "
                               "right", least=1, requires=EVALUATED)
    eval_modes: str = option("both", "sampled answers alone, or greedy ones as well",
                             choices=MODES, requires=EVALUATED)
    sample_every: int = option(10, "steps between answers kept in samples.jsonl, 0 for never")
    change_every: int = option(10, "steps between measurements of what became of each token, also "
                               "at the first and the last; 0 is never. Such a step has one more "
                               "forward pass: a sixth of its time on a CPU")
    checkpoint_every: int = option(25, "steps between checkpoints, also at the end; 0 is never")
    save_model: bool = option(False, "leave the trained model at the end: its matrices in the type "
                              "that the run computes in, without what a resumed run needs",
                              requires=NO_CHECKPOINTS)
    out: str | None = option(None, "run folder, by default runs/<mitigation>-<advantage>-s<seed>, "
                             "with the flags that are not at their defaults in between")
    method_flags: Json = field(default_factory=dict)  # of task, weighting and advantage
    defaults: Json = field(default_factory=dict, compare=False)  # those of the model's recipe.json

    @property
    def folder(self) -> Path:
        """The same command names the same folder: runs/none-grpo-lr0.001-steps30-s0."""
        values = self.to_json()
        changed = {name: LABELS.get(name, name) + Path(str(values[name])).name
                   for name, flag in all_flags(values).items()
                   if name not in NOT_IN_NAME and has_effect(flag, values)
                   and values[name] != self.defaults.get(name, flag.default)}
        parts = []
        for axis, choices in METHODS.items():
            name = getattr(self, axis)
            parts += [name, *(changed.pop(flag) for flag in flags_of(choices[name])
                              if flag in changed)]
        parts += [*changed.values(), f"s{self.seed}"]
        return Path(self.out or "runs/" + re.sub(r"[^\w.+-]", "_", "-".join(parts)))

    def flags_for(self, function: typing.Any) -> Json:
        return {name: self.method_flags[name] for name in flags_of(function)}

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in OPTIONS} | self.method_flags


OPTIONS = flags_of(Settings)
DEFAULTS = {name: flag.default for name, flag in OPTIONS.items()}


def make_settings(given: Json) -> Settings:
    recipe, config = from_files(given)
    typed = {name: value for name, value in given.items() if name != "config"}
    values = DEFAULTS | recipe | config | typed
    check_values(values, OPTIONS)
    apply_implied(values, OPTIONS, typed)  # it may be the method that has no effect
    flags = all_flags(values)
    for name in sorted(typed.keys() - flags.keys()):
        raise UserError(about_unknown(name, values) or f"--{name} is no flag of {values['task']}")
    values = {name: values.get(name, flag.default) for name, flag in flags.items()}
    check_values(values, flags)
    apply_implied(values, flags, typed)
    values = {name: float(value) if type(value) is int and flags[name].type is float else value
              for name, value in values.items()}
    own = {name: values.pop(name) for name in flags if name not in OPTIONS}
    return Settings(**values, method_flags=own, defaults=recipe)


def from_files(given: Json) -> tuple[Json, Json]:
    """The settings of the model folder's recipe.json and of --config, without the flags of another
    task, weighting or advantage than those that are chosen."""
    config = read_json(Path(given["config"])) if "config" in given else {}
    path = find_folder(str((config | given).get("model", Settings.model))) / "recipe.json"
    recipe = read_json(path) if path.exists() else {}
    chosen = DEFAULTS | recipe | config | given
    if not recipe and str(chosen["device"]).startswith("cuda"):
        recipe = {"dtype": "bfloat16"}  # a large model: in float32 a GPU is several times slower
    elif not recipe and is_large(path.parent):
        recipe = laptop_recipe(config | given)
    return known_values(path, recipe, chosen), known_values(given.get("config"), config, chosen)


def laptop_recipe(given: Json) -> Json:
    """Of a large model on a CPU. Unless something else is asked for, it learns Countdown of two
    numbers, answered with an expression alone: what it can learn within minutes."""
    from qwen2_model import is_fast_in_bfloat16  # an analysis reads settings without a model
    dtype = "bfloat16" if is_fast_in_bfloat16() else "float32"
    if given.get("task", Settings.task) != Settings.task:
        return {"dtype": dtype, **LAPTOP}
    prompt = given.get("prompt", "expression")
    recipe = {"dtype": dtype, "prompt": "expression", **LAPTOP_BY_PROMPT.get(prompt, LAPTOP)}
    if prompt in LAPTOP_BY_PROMPT:
        computed_in = given.get("dtype", dtype)
        recipe["learning_rate"] = LAPTOP_RATE.get(computed_in, Settings.learning_rate)
        if "data" in given or given.get("numbers", "2") != "2":
            recipe["max_new_tokens"] = LONGER[prompt]
    return recipe


def is_large(folder: Path) -> bool:
    """By its weights, as nothing else of a model folder is read yet."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) > LARGE


def known_values(path: object, values: Json, chosen: Json) -> Json:
    # a method of the file may be gone since, or another trainer's: then its flags are not known
    gone = {axis for axis in METHODS if values.get(axis, chosen[axis]) not in METHODS[axis]}
    theirs = owners(DEFAULTS | {name: values[name] for name in values.keys() - gone})
    flags, mine = all_flags(chosen), owners(chosen)
    others = {name for owner in theirs if owner not in mine for name in flags_of(owner)}
    for name in sorted(values.keys() - {*flags, *others, *NOT_SETTINGS}) if not gone else ():
        raise UserError(f"{path} has the unknown setting {name}")
    return {name: value for name, value in values.items() if name in flags.keys() - others}


def owners(values: Json) -> list[typing.Any]:
    """What brings flags of its own: the task, the weighting and the advantage."""
    for choices in METHODS.values():
        for clash, *both in choices.clashes:
            places = " and ".join(one if isinstance(one, str) else place_of(one) for one in both)
            raise UserError(f"there are two {clash}, {places}: one needs another name")
    for name in ("task", *METHODS):
        check_value(name, values[name], OPTIONS[name])
    return [load_task(values["task"]), *(METHODS[axis][values[axis]] for axis in METHODS)]


def all_flags(values: Json) -> dict[str, Flag]:
    """Settings and the flags of the chosen task and methods; a name has one meaning."""
    flags = dict(OPTIONS)
    for owner in owners(values):
        for name in flags_of(owner).keys() & {*flags, *NOT_SETTINGS, *NOT_KEYWORDS}:
            raise UserError(f"the keyword {name} of {owner.__name__} ({place_of(owner)}) means "
                            "something else to this program: give it another name, "
                            f"{owner.__name__}_{name} say")
        flags |= flags_of(owner)
    return flags


def has_effect(flag: Flag, values: Json) -> bool:
    return not flag.requires or flag.requires[0](SimpleNamespace(**values))


def apply_implied(values: Json, flags: dict[str, Flag], typed: Json) -> None:
    """A flag without effect gets the value that then holds; to have typed another is an error."""
    implied: Json = {"answers": 2}  # of a pair
    if values["mitigation"] in NEVER_RESCALED:
        implied["rescale"] = "none"
    for name, flag in flags.items():
        if flag.requires and not has_effect(flag, values):
            value = implied.get(name, flag.default)
            if typed.get(name, value) != value:
                raise UserError(f"--{name} has no effect without {flag.requires[1]}")
            values[name] = value


def about_unknown(name: str, chosen: Json) -> str:
    """About a flag of a method that is not chosen, and one that other trainers have."""
    for axis, choices in METHODS.items():
        found = [owner for owner in choices if name in flags_of(choices[owner])]
        if found:
            return f"--{name} belongs to {' and '.join(found)}, --{axis} is {chosen[axis]}"
    other = OTHER_NAMES.get(name)
    return f"unknown argument --{name}: here it is {other}" if other else ""


def read_flags(argv: list[str]) -> Json:
    """What was typed, `resume`, `config` and `continue` among it. Which flags there are follows
    from the task and the methods, typed or in a file."""
    first = Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    first.add_argument("-h", "--help", nargs="?", const="")
    of_a_recipe = ("dtype", "prompt", "numbers", "data")  # which recipe a large model gets
    for name in ("model", "device", "task", "config", "resume", *of_a_recipe, *METHODS):
        first.add_argument(f"--{name}")
    given = vars(first.parse_known_args(argv)[0])
    topic = given.pop("help", None)
    if "resume" in given:
        given["config"] = Path(given.pop("resume")) / "config.json"
    recipe, config = from_files(given)
    defaults = DEFAULTS | recipe | config | given
    flags = {name: replace(flag, default=defaults.get(name, flag.default))
             for name, flag in all_flags(defaults).items()}
    own = [name for name in flags if name not in OPTIONS]
    parser = make_parser(
        "python train.py [flags]", "Train with GRPO and write down what every token was given.",
        flags, TOPICS | {name: "of the task, weighting and advantage" for name in own[:1]},
        epilog="" if topic is None else about_methods(), add_help=False)
    group = parser.add_argument_group("going on")
    group.add_argument("--resume", metavar="RUN", help="continue this run folder; with it only "
                       "--steps may be given, and flags that say how it is made, as --threads")
    group.add_argument("--continue", action="store_true", help="if the run folder exists and has "
                       "these settings, resume it (a finished run is passed over)")
    group.add_argument("--config", metavar="FILE", help="take the settings of a run's config.json; "
                       "flags override them")
    if topic is not None:
        print(about_method(topic) if topic else parser.format_help())
        raise SystemExit(0)
    return parser.read(argv, partial(about_unknown, chosen=defaults))


def about_methods() -> str:
    lines = []
    for axis, choices in METHODS.items():
        lines.append(f"choices of --{axis}, each with its own flags (--help NAME tells all of it):")
        for name in choices:
            flags = "".join(f" --{flag}" for flag in flags_of(choices[name]))
            text = " ".join((inspect.getdoc(choices[name]) or "").split("\n\n")[0].split())
            lines.append(textwrap.fill(f"{name}{flags}: {text}", 99, initial_indent="  ",
                                       subsequent_indent=" " * 6))
    lines.append("Defaults are those of this command: recipe.json and --config set their own.")
    return "\n".join(lines)


def about_method(name: str) -> str:
    for axis, choices in METHODS.items():
        if name in choices:
            lines = [f"--{axis} {name}", "", inspect.getdoc(choices[name]) or "", ""]
            lines += [f"  --{flag} {known.help()} {known.limits() * (known.type in (int, float))}"
                      for flag, known in flags_of(choices[name]).items()]
            return "\n".join(lines)
    raise UserError(f"--help {name}: there is no method of this name (--help lists them)")
