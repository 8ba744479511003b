"""Every setting of a run: its default, its range, its help, where its value comes from, and the
folder that the settings name.

Defaults < the model folder's recipe.json < --config < what was typed. Where a flag has no effect
with the other settings, another value than its default is an error if it was typed; from a file, it
is set back.

Three settings name something that brings flags of its own: --task (harness/tasks.py), --mitigation
and --advantage (engine/choices.py). Those flags are not listed here; `method_flags` holds them.
"""
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, Choice, Choices
from engine.errors import UserError
from harness.files import Json, find_folder, is_there, read_json
from harness.flags import (MOST_SEED, MOST_THREADS, Flag, called_by_run, check_file, check_values,
                           fields_as_flags, option, parameters_as_flags)
from harness.own_code import place_of
from harness.tasks import load_task

METHODS = {"mitigation": MITIGATIONS, "advantage": ADVANTAGES}
NOT_SETTINGS = (  # entries of a run's config.json that are no settings
    "versions", "git_commit", "model_config", "reward", "ranks", "made_of", "run_id", "code",
    "imported", "trainer", "columns_temperature",
    "kinds")  # a flag that by_kind once had
NOT_KEYWORDS = (  # nor are words of command lines, here and of the tools
    *NOT_SETTINGS, "help", "resume", "continue", "config", "step", "show", "seeds", "processes",
    "runs")
MOST_STEPS = 10 ** 9
# in a run's name these have a place of their own; and "cuda" stands there, not "devicecuda"
OWN_PLACE = ("task", "model", "mitigation", "placebo", "rescale", "advantage", "seed")
LABELS = {"learning_rate": "lr", "device": "", "dtype": ""}
OWN_SAMPLER = "own"  # --rollouts

TOPICS = {  # of --help: what stands above a setting and those that follow it
    "model": "model and machine", "task": "problems", "mitigation": "spreading credit over tokens",
    "advantage": "from reward to advantage", "loss": "loss", "steps": "training",
    "eval_every": "record"}

Needs = tuple[Callable[["Settings"], bool], str]
# values of `requires`: when a setting has an effect, and how --help says it; what may be set back
# itself stands above the settings that look at it
EVALUATED: Needs = (lambda s: s.eval_every > 0, "--eval_every above 0")
ON_THE_DEVICE: Needs = (lambda s: not s.offload_optimizer, "--offload_optimizer no")
POLICY: Needs = (lambda s: s.loss == "policy", "--loss policy")
DPO: Needs = (lambda s: s.loss == "dpo", "--loss dpo")
ANCHORED: Needs = (lambda s: s.loss == "policy" and s.kl > 0, "--kl above 0")
REUSED: Needs = (
    lambda s: s.loss == "policy" and s.epochs > 1,
    "--epochs above 1 (in the first pass the ratio is exactly 1) and --loss policy")
SAMPLED: Needs = (lambda s: s.pairs is None, "sampled answers: --pairs brings its own")
SERVED: Needs = (lambda s: s.rollouts != OWN_SAMPLER, "--rollouts http://HOST:PORT")
RESCALED: Needs = (
    lambda s: s.loss == "policy" and s.mitigation not in ("none", *NEVER_RESCALED),
    "a --mitigation that is rescaled")
SHUFFLED: Needs = (
    lambda s: s.loss == "policy" and (s.placebo != "weights" or s.mitigation != "none"),
    "--loss policy and, for weights, another --mitigation than none")


@dataclass
class Settings:
    model: str = option("models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model", is_path=True)
    device: str = option("cpu", "cpu, cuda or cuda:N")
    dtype: str = option("float32", "numbers to compute with, on CUDA bfloat16 unless the model has "
        "a recipe; parameters stay float32", choices=("float32", "bfloat16"))
    checkpointing: bool = option(False, "keep one state a layer for the backward pass and compute "
        "the rest again: less memory, a third more time in the update")
    offload_optimizer: bool = option(False, "float32 parameters, gradients and AdamW's state on "
        "the CPU: the device keeps 2 bytes a parameter in bfloat16 instead of 16")
    shard: bool = option(False, "under torchrun: every process keeps a part of the parameters, "
        "gradients and moments, instead of all", requires=ON_THE_DEVICE)
    threads: int = option(0, "CPU threads; 0 is one for every 64 hidden units of the model, at "
        "most what PyTorch finds", least=0, most=MOST_THREADS, changes_result=False)

    task: str = option("countdown_task", "module of the task: countdown_task, tools.largest_last, "
        "or my_task for a file my_task.py of yours in the project's folder (docs/your_own_task.md)")

    mitigation: str = option("none", "how an answer's advantage is spread over its tokens, listed "
        "below", choices=MITIGATIONS, requires=POLICY)
    rescale: str = option(
        "mean", "weights are scaled to mean 1 over the batch's tokens, to the same sum of gradient "
        "sizes, or not", choices=("mean", "gradient", "none"), requires=RESCALED)
    placebo: str = option("none", "shuffle the weights over the batch's tokens, or the advantages "
        "within each group: what the arm owes to anything but its choice of tokens",
        choices=("none", "weights", "advantages"), requires=SHUFFLED)

    advantage: str = option("grpo", "what an answer, or a token, is compared with, listed below",
                            choices=ADVANTAGES, requires=POLICY)

    loss: str = option("policy", "weight * advantage * log_prob, or preference pairs: the best and "
        "the worst answer of a group", choices=("policy", "dpo"))
    loss_norm: str = option("token", "divide by the batch's tokens (DAPO), average per answer "
        "first, or divide by answers times max_new_tokens (Dr. GRPO)",
        choices=("token", "sequence", "constant"), requires=POLICY)
    epochs: int = option(1, "updates from one batch; weights and advantages stay as they are",
                         least=1, most=1000, requires=POLICY)
    clip_low: float = option(0.2, "the ratio new/old counts down to 1 minus this",
                             least=0, most=1, requires=REUSED)
    clip_high: float = option(0.28, "and up to 1 plus this", least=0, most=1000, requires=REUSED)
    kl: float = option(0.0, "coefficient of the divergence from the initial model, of which a copy "
        "is kept", least=0, most=1000, requires=POLICY)
    kl_kind: str = option("k3", "its gradient is that of KL(initial || policy) for k3, of "
        "KL(policy || initial) for k2", choices=("k3", "k2"), requires=ANCHORED)
    drop_unfinished: bool = option(False, "answers cut off by the limit are not trained on",
                                   requires=POLICY)
    dpo_beta: float = option(0.1, "how far preferences may lead from the initial model (smaller: "
        "further)", above=0, most=1000, requires=DPO)

    pairs: str | None = option(None, 'JSON lines {"problem": ..., "chosen": ..., "rejected": ...}: '
        'answers to train on, instead of sampled ones', is_path=True, requires=DPO)

    steps: int = option(100, "batches; 0 evaluates and stops", least=0, most=MOST_STEPS)
    questions: int = option(8, "problems a step", least=1, most=10_000)
    answers: int = option(8, "answers to each problem", least=2, most=1000, requires=SAMPLED)
    max_new_tokens: int = option(512, "an answer is cut off here", least=1, most=1_000_000)
    temperature: float = option(1.0, "of the sampling; training and the columns on record are at "
        "temperature 1 whatever this is", least=0.01, most=100)
    rollouts: str = option(OWN_SAMPLER, "who answers the problems of a step: this program, or with "
        "http://HOST:PORT a server by vLLM (bridges/rollouts_by_a_server.md); evaluations, and "
        "continuations as of vine and oracle, are always sampled here", requires=SAMPLED)
    rollouts_every: int = option(1, "steps between hand-overs of the weights to that server",
        least=1, most=MOST_STEPS, requires=SERVED)
    rollouts_timeout: float = option(
        600.0, "seconds that its answers to a step may take, or its loading of weights", above=0,
        most=1500, requires=SERVED, changes_result=False)
    learning_rate: float = option(5e-6, "of AdamW", above=0, most=10)
    weight_decay: float = option(0.0, "of AdamW", least=0, most=100)
    micro_batch: int = option(8, "full answers held at once in an update; changes rounding alone",
                              least=1, most=1_000_000, changes_result=False)
    max_grad_norm: float = option(1.0, "the gradient is clipped to this norm, 0 for never",
                                  least=0, most=1e9)
    seed: int = option(0, "of problems and sampling; evaluations draw the same numbers "
                      "whatever it is", least=0, most=MOST_SEED)

    eval_every: int = option(25, "steps between evaluations (also at the start and end), 0 for "
                             "never", least=0, most=MOST_STEPS)
    eval_tasks: int = option(500, "held-out problems of an evaluation",
                             least=1, most=100_000, requires=EVALUATED)
    eval_answers: int = option(1, "sampled answers to each of them: success is the share that is "
                               "right", least=1, most=1000, requires=EVALUATED)
    eval_modes: str = option("both", "sampled answers alone, or greedy ones as well",
                             choices=("both", "sampled"), requires=EVALUATED)
    sample_every: int = option(10, "steps between sample answers kept in samples.jsonl, 0 for "
        "never", least=0, most=MOST_STEPS, changes_result=False)
    change_every: int = option(10, "steps between measurements of what became of each token: its "
        "log-prob after the step minus before (also at the first and the last step), 0 for never; "
        "such a step has one more forward pass: a sixth of its time on a CPU", least=0,
        most=MOST_STEPS, changes_result=False)
    checkpoint_every: int = option(25, "steps between checkpoints (also at the end), 0 for never",
                                   least=0, most=MOST_STEPS, changes_result=False)
    out: str | None = option(
        None, "run folder, by default runs/<mitigation>-<advantage>-s<seed>, with the other flags "
        "that are not at their defaults in between", changes_result=False)

    method_flags: Json = field(default_factory=dict)  # of task, weighting and advantage
    defaults: Json = field(default_factory=dict, compare=False)  # those of the model's recipe.json

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{run_name(self)}")

    @property
    def paths(self) -> dict[str, Path]:
        values = self.to_json()
        return {name: find_folder(str(values[name])) for name, flag in flags_beside(values).items()
                if flag.is_path and values[name] is not None}

    def flags_for(self, function: Choice) -> Json:
        return {name: self.method_flags[name] for name in parameters_as_flags(function)}

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in OPTIONS} | self.method_flags


OPTIONS = fields_as_flags(Settings)
# in a run's config.json a method may be one that is gone since, or another trainer's
ON_FILE = OPTIONS | {name: replace(OPTIONS[name], choices=()) for name in METHODS}


def choice_flags(*lists: Choices) -> dict[str, Flag]:
    return {name: flag for choices in lists or METHODS.values() for method in choices
            for name, flag in flags_of_one(choices[method]).items()}


def flags_of_one(method: Choice) -> dict[str, Flag]:
    """Of one among many: a mistake in its flags is told when it is chosen, and is in nobody else's
    way."""
    with suppress(UserError, NameError, TypeError):  # the latter two are of its annotations
        return parameters_as_flags(method)
    return {}


def make_settings(given: Json) -> Settings:
    """Defaults, then the model's recipe, then --config, then `given`."""
    recipe, config = read_files(given)
    given = {name: value for name, value in given.items() if name != "config"}
    values = {name: flag.default for name, flag in OPTIONS.items()} | recipe | config | given
    check_values(values, OPTIONS)
    if not METHODS.keys() <= config.keys():  # a run's, which names the flags of all if it is old
        refuse_flags_of_others(config, values)
    drop_what_has_no_effect(values, OPTIONS, given)
    refuse_flags_of_others(given, values)
    flags = flags_beside(values)
    values = {name: values.get(name, flag.default) for name, flag in flags.items()}
    check_values(values, flags)
    drop_what_has_no_effect(values, flags, given)
    chosen = {name: float(value) if type(value) is int and flags[name].type is float else value
              for name, value in values.items() if name not in OPTIONS}
    settings = Settings(method_flags=chosen, defaults=recipe)
    vars(settings).update({name: values[name] for name in OPTIONS})  # of their types: checked
    return settings


def read_files(given: Json) -> tuple[Json, Json]:
    """The values of the model folder's recipe.json and of --config, empty where there is none."""
    config = read_values(Path(str(given["config"]))) if "config" in given else {}
    model = str(given.get("model", config.get("model", Settings.model)))
    recipe_path = find_folder(model) / "recipe.json"
    recipe = read_values(recipe_path) if is_there(recipe_path) else {}
    chosen = {"task": Settings.task} | recipe | config | given
    if "config" in given and chosen.get("mitigation") == "by_kind":
        refuse_other_kinds(Path(str(given["config"])))
    if not recipe and str(chosen.get("device")).startswith("cuda"):
        recipe = {"dtype": "bfloat16"}  # a large model: in float32 a GPU is several times slower
    return without_other_choices(recipe, chosen), without_other_choices(config, chosen)


def refuse_other_kinds(path: Path) -> None:
    if (kinds := read_json(path).get("kinds", "token")) != "token":
        raise UserError(f"{path}: --kinds {kinds} of by_kind is gone, so this run can be analysed, "
                        "and neither gone on with nor repeated")


def read_values(path: Path) -> Json:
    values = {name: value for name, value in read_json(path).items() if name not in NOT_SETTINGS}
    flags = ON_FILE | fields_as_flags(load_task(values.get("task", Settings.task)))
    for name in values.keys() - flags.keys():
        if name not in choice_flags():  # imports all methods
            raise UserError(f"{path} has the unknown setting {name}")
    check_file(path, values, flags)
    return values


def without_other_choices(values: Json, chosen: Json) -> Json:
    """A file's values, without the flags of another task, weighting or advantage than chosen."""
    left_out, task = set(), values.get("task", Settings.task)
    if task != chosen["task"]:
        left_out |= {"task", *fields_as_flags(load_task(task))}
    for axis, choices in METHODS.items():
        if axis in values and values[axis] != chosen[axis]:
            left_out |= choice_flags(choices).keys() - OPTIONS.keys()
            if values[axis] in tuple(NEVER_RESCALED):
                left_out.add("rescale")
    return {name: value for name, value in values.items() if name not in left_out}


def flags_beside(values: Json) -> dict[str, Flag]:
    """All settings and the flags of the chosen task and methods; a name has one meaning."""
    flags = dict(OPTIONS)
    for owner, flags_of in ((load_task(values["task"]), fields_as_flags),
                            (MITIGATIONS[str(values["mitigation"])], parameters_as_flags),
                            (ADVANTAGES[str(values["advantage"])], parameters_as_flags)):
        for name in flags_of(owner).keys() & {*flags, *NOT_KEYWORDS}:
            raise UserError(f"the keyword {name} of {owner.__name__} ({place_of(owner)}) means "
                            "something else to this program: give it another name, "
                            f"{owner.__name__}_{name} say")
        flags |= flags_of(owner)
    return flags


def refuse_flags_of_others(given: Json, values: Json) -> None:
    for name in sorted(given.keys() - flags_beside(values).keys()):
        said = f"--{name} is no flag of --task {values['task']}"
        raise UserError(whose_flag(name, values) or said)


def whose_flag(name: str, chosen: Json) -> str:
    """A sentence about a parameter of the chosen method that is no keyword, or about the flag of a
    method that is not chosen; empty for any other name."""
    for axis, choices in METHODS.items():
        mine = choices[str(chosen[axis])]
        parameter = signature(called_by_run(mine)).parameters.get(name)
        if parameter and parameter.default is not parameter.empty:
            return (f"{name} of {mine.__name__} ({place_of(mine)}) becomes a flag as a keyword: "
                    f"write a * before it, as in (rollouts, *, {name})")
        owners = [owner for owner in choices if name in flags_of_one(choices[owner])]
        if owners:
            return f"--{name} belongs to {' and '.join(owners)}, --{axis} is {chosen[axis]}"
    return ""


def has_effect(flag: Flag, values: Json) -> bool:
    return not flag.requires or flag.requires[0](SimpleNamespace(**values))


def drop_what_has_no_effect(values: Json, flags: dict[str, Flag], given: Json) -> None:
    """Set flags without effect to the value they then have: the default, or the one that is left.
    To have typed another one is an error."""
    for name, flag in flags.items():
        if not has_effect(flag, values):
            value = flag.default
            if name == "answers":
                value = 2  # of a pair
            elif name == "rescale" and values["mitigation"] in NEVER_RESCALED:
                value = "none"
            if given.get(name, value) != value:
                needed = flag.requires[1] if flag.requires else ""
                raise UserError(f"--{name} has no effect without {needed}")
            values[name] = value


def run_name(s: Settings) -> str:
    """Every flag that is not at the default that holds for the model, so that the same command
    names the same folder: none-grpo-lr1e-3-steps30-s0. Task, model, mitigation, advantage, each
    with its own flags; then all others; the seed."""
    changed = partial(changed_flags, s.to_json(), s.defaults)
    folders = [find_folder(name) for name in (s.model, Settings.model)]
    names = list(OPTIONS)
    of_loss = {name: OPTIONS[name] for name in names[names.index("loss"):names.index("steps")]}
    parts = [
        "" if s.task == Settings.task else s.task.rpartition(".")[2],
        "" if len(set(map(os.path.realpath, folders))) == 1 else path_part(folders[0]),
        s.mitigation, *changed(parameters_as_flags(MITIGATIONS[s.mitigation])),
        *changed({name: OPTIONS[name] for name in ("placebo", "rescale")}),
        s.advantage, *changed(parameters_as_flags(ADVANTAGES[s.advantage])),
        *changed(of_loss), *changed(fields_as_flags(load_task(s.task))),
        *changed({name: OPTIONS[name] for name in names if name not in {*OWN_PLACE, *of_loss}}),
        f"s{s.seed}"]
    return re.sub(r"[^\w.+-]", "_", "-".join(filter(None, parts)))


def changed_flags(values: Json, defaults: Json, flags: dict[str, Flag]) -> list[str]:
    """A part, "think_discount0.25", for each flag that makes a difference to results here."""
    parts = []
    for name, flag in flags.items():
        value = values[name]
        is_default = value == defaults.get(name, flag.default)
        if flag.changes_result and has_effect(flag, values) and not is_default:
            label = "" if flag.is_path else LABELS.get(name, name)
            is_address = name == "rollouts"  # whatever that of the server is
            written = path_part(str(value)) if flag.is_path else short(value)
            parts.append(label if is_address else label + written)
    return parts


def path_part(name: str | Path) -> str:
    """The name of a file or folder; of a checkpoint that of its run as well. Two of one name lead
    to one run folder: whoever comes second is told what differs (harness/resume.py)."""
    path = Path(os.path.abspath(find_folder(str(name))))
    return f"{path.parents[1].name}-{path.name}" if path.name.startswith("step_") else path.name


def short(value: object) -> str:
    """The shorter way to write a number with all its digits: 1e-3 of 0.001, 2 of 2.0, 0.5."""
    if not isinstance(value, float):
        return str(value)
    scientific = f"{Decimal(repr(value)).normalize():e}".replace("+", "")
    return min(repr(value).removesuffix(".0"), scientific, key=len)
