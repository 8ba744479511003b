"""Every flag: its default, its range, its help, and where its value comes from.

Defaults < the model folder's recipe.json < --config < what was typed. A flag that would have no effect
beside the others is an error when typed, and back at its default when it comes from a file.

The flags of a mitigation are not listed here: they are the keyword-only parameters of its function.
"""
import argparse
import difflib
import inspect
import math
import re
import sys
import textwrap
import typing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from countdown_task import PROMPTS
from credit.critic import CRITICS
from grpo import ADVANTAGES
from mitigations import MITIGATIONS, NEVER_RESCALED, Bounds
from engine.errors import UserError
from engine.files import read_json

NOT_SETTINGS = ("versions", "git_commit", "model_config", "reward", "ranks")  # in config.json beside the settings


def option(topic: str, default, text: str, least=None, above=None, most=None, choices=(), only=None):
    """`only` is a test on the settings and the words for it: without it the flag would do nothing."""
    meta = dict(topic=topic, text=text, bounds=Bounds(least, above, most), choices=choices, only=only)
    return field(default=default, metadata=meta)


WEIGHT, BASELINE = "spreading credit over tokens", "from reward to advantage"  # topics of --help
MADE = (lambda s: s.data is None, "made problems: not with --data")
EVALUATED = (lambda s: s.eval_every > 0, "--eval_every above 0")
POLICY = (lambda s: s.loss == "policy", "--loss policy")
DPO = (lambda s: s.loss == "dpo", "--loss dpo")
REUSED = (lambda s: s.loss == "policy" and s.epochs > 1,
          "--epochs above 1 (in the first pass the ratio is exactly 1) and --loss policy")
ANCHORED = (lambda s: s.loss == "policy" and s.kl > 0, "--kl above 0")
GAE = (lambda s: s.advantage == "gae", "--advantage gae")
VINE = (lambda s: s.advantage == "vine", "--advantage vine")


@dataclass
class Settings:
    model: str = option("model and machine", "models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model")
    device: str = option("model and machine", "cpu", "cpu, cuda or cuda:N")
    dtype: str = option("model and machine", "float32", "numbers to compute with; parameters stay float32",
                        choices=("float32", "bfloat16"))
    checkpointing: bool = option("model and machine", False, "keep one state a layer for the backward pass and compute the rest again: "
                                 "less memory, a third more time in the update")
    offload_optimizer: bool = option("model and machine", False, "float32 parameters, gradients and AdamW's state on the CPU: the device "
                                     "keeps 2 bytes a parameter in bfloat16 instead of 16")
    threads: int = option("model and machine", 0, "CPU threads; 0 is one for every 64 hidden units of the model, at most what PyTorch finds", least=0)

    data: str | None = option("problems", None, 'JSON lines {"nums": [3, 5, 7], "target": 22}; without it they are made')
    prompt: str = option("problems", "full", "wording of the prompt", choices=PROMPTS)
    numbers: str = option("problems", "3,4", "how many numbers a made problem has", choices=("3", "4", "3,4"), only=MADE)
    min_number: int = option("problems", 1, "smallest number", least=1, only=MADE)
    max_number: int = option("problems", 99, "largest number", least=1, only=MADE)
    max_target: int = option("problems", 99, "largest target", least=1, only=MADE)
    max_result: int = option("problems", 10_000, "largest intermediate result of the known solution", least=1, only=MADE)

    mitigation: str = option(WEIGHT, "none", "how an answer's advantage is spread over its tokens, listed below",
                             choices=MITIGATIONS)
    rescale: str = option(WEIGHT, "mean", "weights are scaled to mean 1 over the batch's tokens, to the same sum of gradient "
                          "sizes, or not", choices=("mean", "gradient", "none"), only=POLICY)
    placebo: str = option(WEIGHT, "none", "shuffle the weights over the batch's tokens, or the advantages within each group: "
                          "what the arm owes to anything but its choice of tokens",
                          choices=("none", "weights", "advantages"), only=POLICY)

    advantage: str = option(BASELINE, "grpo", "the z-score in the group, reward minus mean (dr_grpo) or minus the others' mean "
                            "(rloo), a critic (gae), Monte Carlo values (vine), each part of the reward on its own span (span)",
                            choices=(*ADVANTAGES, *CRITICS))
    gamma: float = option(BASELINE, 1.0, "discount of later rewards", least=0, most=1, only=GAE)
    gae_lambda: float = option(BASELINE, 1.0, "1 trusts the reward, 0 the critic", least=0, most=1, only=GAE)
    critic_lr: float = option(BASELINE, 1e-2, "learning rate of the critic", above=0, only=GAE)
    values_k: int = option(BASELINE, 9, "fresh continuations behind each value", least=1, only=VINE)
    values_every: str = option(BASELINE, "line", "a value at every new line, or every so many tokens", only=VINE)

    loss: str = option("loss", "policy", "weight * advantage * log_prob, or preference pairs: the best and the worst answer of a group",
                       choices=("policy", "dpo"))
    loss_norm: str = option("loss", "token", "divide by the batch's tokens (DAPO), average per answer first, or divide by answers times "
                            "max_new_tokens (Dr. GRPO)", choices=("token", "sequence", "constant"), only=POLICY)
    epochs: int = option("loss", 1, "updates from one batch; weights and advantages stay as they are", least=1)
    clip_low: float = option("loss", 0.2, "the ratio new/old counts down to 1 minus this", least=0, most=1, only=REUSED)
    clip_high: float = option("loss", 0.28, "and up to 1 plus this", least=0, only=REUSED)
    kl: float = option("loss", 0.0, "coefficient of the divergence from the initial model, of which a copy is kept", least=0, only=POLICY)
    kl_kind: str = option("loss", "k3", "its gradient is that of KL(initial || policy) for k3, of KL(policy || initial) for k2",
                          choices=("k3", "k2"), only=ANCHORED)
    drop_unfinished: bool = option("loss", False, "answers cut off by the limit are not trained on", only=POLICY)
    dpo_beta: float = option("loss", 0.1, "how far preferences may lead from the initial model (smaller: further)", above=0, only=DPO)

    steps: int = option("training", 100, "batches; 0 evaluates and stops", least=0)
    questions: int = option("training", 8, "questions a step", least=1)
    answers: int = option("training", 8, "answers to each question", least=2)
    max_new_tokens: int = option("training", 512, "an answer is cut off here", least=1)
    temperature: float = option("training", 1.0, "of the sampling", above=0)
    learning_rate: float = option("training", 5e-6, "of AdamW", above=0)
    weight_decay: float = option("training", 0.0, "of AdamW", least=0)
    micro_batch: int = option("training", 8, "answers in memory at once during the update; changes no result", least=1)
    max_grad_norm: float = option("training", 1.0, "the gradient is clipped to this norm, 0 for never", least=0)
    seed: int = option("training", 0, "of problems and sampling", least=0)

    eval_every: int = option("record", 25, "steps between evaluations (also at the start and end), 0 for never", least=0)
    eval_tasks: int = option("record", 500, "held-out problems of an evaluation", least=1, only=EVALUATED)
    sample_every: int = option("record", 10, "steps between sample answers kept in samples.jsonl, 0 for never", least=0)
    checkpoint_every: int = option("record", 25, "steps between checkpoints (also at the end), 0 for never", least=0)
    out: str | None = option("record", None, "run folder, by default runs/<mitigation>-<advantage>-s<seed>, with the flags about "
                             "credit and loss that are not at their defaults in between")

    own: dict = field(default_factory=dict)  # the chosen mitigation's flags

    @property
    def folder(self) -> Path:
        """Named by everything about credit and loss, so that arms never meet in one folder."""
        def named(name, value):
            return name + re.sub(r"[^\w.+-]", "_", str(value))[:40]

        def changed(names):
            return [named(name, getattr(self, name)) for name in names if getattr(self, name) != getattr(Settings, name)]

        defaults = {name: p.default for name, p in parameters(MITIGATIONS[self.mitigation]).items()}
        parts = [self.mitigation, *(named(name, value) for name, value in self.own.items() if value != defaults[name])]
        parts += changed(["placebo"] + ["rescale"] * (self.mitigation not in NEVER_RESCALED))
        parts.append(self.advantage)
        parts += changed(name for name in TOPIC if TOPIC[name] in (BASELINE, "loss") and name != "advantage")
        return Path(self.out or f"runs/{'-'.join(parts)}-s{self.seed}")

    def to_json(self) -> dict:
        values = asdict(self)
        own = values.pop("own")
        return values | own


OPTIONS = {f.name: f for f in fields(Settings) if f.metadata}
TOPIC = {name: f.metadata["topic"] for name, f in OPTIONS.items()}


def describe(name: str) -> str:
    """A mitigation's lines in --help."""
    text = " ".join((MITIGATIONS[name].__doc__ or "").split("\n\n")[0].split())
    lines = textwrap.wrap(text or "(no docstring)", 84)
    rows = [f"  {name if i == 0 else '':29s} {line}" for i, line in enumerate(lines)]
    for flag, p in parameters(MITIGATIONS[name]).items():
        limits = [f"{words} {limit:g}" for words, limit in (("at least", p.bounds.least), ("above", p.bounds.above), ("at most", p.bounds.most))
                  if limit is not None]
        rows.append(f"  {'':29s}   --{flag} (default {', '.join([str(p.default), *limits])})")
    return "\n".join(rows)


@dataclass(frozen=True)
class Parameter:
    default: object
    kind: type
    bounds: Bounds


def parameters(function) -> dict[str, Parameter]:
    """The keyword-only parameters, which are the flags."""
    signed = function.__init__ if inspect.isclass(function) else function
    hints, found = typing.get_type_hints(signed, include_extras=True), {}
    for place, (name, p) in enumerate(inspect.signature(signed).parameters.items()):
        if p.kind is p.POSITIONAL_OR_KEYWORD and place >= (2 if inspect.isclass(function) else 1):
            raise UserError(f"the parameter {name} of {function.__name__} in mitigations.py comes after tokens (a class: after lab): "
                            "write a * before it to make it a flag")
        if p.kind is p.KEYWORD_ONLY:
            hint = hints.get(name, type(p.default))
            bounds = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bounds)]
            found[name] = Parameter(p.default, getattr(hint, "__origin__", hint), bounds[0] if bounds else Bounds())
            if found[name].kind not in (int, float, bool, str) or p.default is p.empty:
                raise UserError(f"the parameter {name} of {function.__name__} in mitigations.py needs a default, and a "
                                "type that is int, float, bool or str: it becomes a flag")
    return found


def owners(flag: str) -> list[str]:
    """The mitigations that a flag belongs to."""
    return [name for name, function in MITIGATIONS.items() if flag in parameters(function)]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true")


def flag_kind(kind) -> dict:
    """How argparse reads a flag of this type. A yes-or-no flag alone means yes."""
    if kind is bool:
        return dict(type=yes_or_no, nargs="?", const=True, metavar="yes|no")
    return {int: dict(type=int, metavar="N"), float: dict(type=float, metavar="X")}.get(kind, dict(type=str, metavar="TEXT"))


def make_parser() -> Parser:
    parser = Parser(usage="python train.py [flags]", epilog=describe_mitigations(), allow_abbrev=False,
                    description="Train with GRPO and write down what every token was given.",
                    argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    topics = {topic: parser.add_argument_group(topic) for topic in dict.fromkeys(TOPIC.values())}
    for name, f in OPTIONS.items():
        meta = f.metadata
        choices = ": " + " | ".join(meta["choices"]) if meta["choices"] and name != "mitigation" else ""
        default = "" if f.default is None or f.default is False else f" (default {f.default})"
        only = f"; needs {meta['only'][1].split(' (')[0]}" if meta["only"] and meta["only"] not in (POLICY, MADE, EVALUATED) else ""
        topics[meta["topic"]].add_argument(f"--{name}", help=meta["text"] + choices + default + only, **flag_kind(f.type))
    for name, found in mitigation_flags().items():
        kinds = {parameters(MITIGATIONS[owner])[name].kind for owner in found}
        if len(kinds) > 1:
            raise UserError(f"the parameter {name} of {' and '.join(found)} in mitigations.py should have the same type: it is one flag")
        if name in OPTIONS or name in ("resume", "continue", "config", "help", "own"):
            raise UserError(f"the parameter {name} of {found[0]} in mitigations.py needs another name: --{name} is taken")
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **flag_kind(parameters(MITIGATIONS[found[0]])[name].kind))
    again = parser.add_argument_group("going on")
    again.add_argument("--resume", metavar="RUN", help="continue this run folder; only --steps may be given with it")
    again.add_argument("--continue", action="store_true", default=argparse.SUPPRESS,
                       help="if the run folder exists and has these settings, resume it (a finished run is passed over): for loops that "
                            "can be stopped and started again")
    again.add_argument("--config", metavar="FILE", help="take the settings of a run's config.json; flags override them")
    return parser


def mitigation_flags() -> dict[str, list[str]]:
    """Which mitigations each of their flags belongs to."""
    return {name: owners(name) for function in MITIGATIONS.values() for name in parameters(function)}


def describe_mitigations() -> str:
    recipe = ("A model folder's recipe.json sets its own defaults (models/tiny has one), flags override them, and config.json\n"
              "in the run folder shows what was used. Hyphens work as well as underscores.")
    return "\n".join(["choices of --mitigation, each with its own flags:", *(describe(name) for name in MITIGATIONS), "", recipe])


def read_flags(argv: list[str]) -> dict:
    """The flags that were given. --max-new-tokens is --max_new_tokens."""
    given, unknown = make_parser().parse_known_args([underscores(argument) for argument in argv])
    if unknown:
        known = [f"--{name}" for name in (*OPTIONS, *mitigation_flags(), "resume", "continue", "config")]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
        raise UserError(f"unknown argument {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
    return vars(given)


def underscores(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def run_as_program(name: str, main) -> None:
    """With what was typed. What the user can put right is one line; a reader of the output that goes away is no error."""
    sys.stdout.reconfigure(errors="replace")  # an answer may hold characters that the terminal cannot show
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:  # of printing; files have their own
        sys.exit(f"{name}: {error}")


def make_settings(given: dict) -> Settings:
    """Defaults, then the model's recipe, then --config, then flags."""
    config = {}
    if path := given.pop("config", None):
        config = {k: v for k, v in read_json(Path(path)).items() if k not in NOT_SETTINGS}
    folder = Path(str(given.get("model", config.get("model", Settings.model))))
    recipe = read_json(folder / "recipe.json") if (folder / "recipe.json").is_file() else {}
    for source, values in ((folder / "recipe.json", recipe), (path, config)):
        unknown = set(values) - set(OPTIONS) - set(mitigation_flags())
        if unknown:
            raise UserError(f"{source} has the unknown setting {sorted(unknown)[0]}")
    if given.get("mitigation", config.get("mitigation")) != config.get("mitigation"):  # what belonged to the one before stays with it
        own = [*mitigation_flags(), *(["rescale"] if config.get("mitigation") in NEVER_RESCALED else [])]
        config = {name: value for name, value in config.items() if name not in own}
    values = {**recipe, **config, **given}
    if type(values.get("values_every")) is int:
        values["values_every"] = str(values["values_every"])
    settings = Settings(**{name: value for name, value in values.items() if name in OPTIONS})
    check(settings)
    settings.own = own_flags(settings.mitigation, values, given)
    drop_what_has_no_effect(settings, given)
    return settings


def own_flags(mitigation: str, values: dict, given: dict) -> dict:
    """The mitigation's own flags, and an error for one that is another's."""
    mine = parameters(MITIGATIONS[mitigation])
    for name in given:
        if name not in OPTIONS and name not in mine:
            raise UserError(f"--{name} belongs to {' and '.join(owners(name))}, --mitigation is {mitigation}")
    own = {name: values.get(name, p.default) for name, p in mine.items()}
    for name, p in mine.items():
        check_value(name, own[name], p.kind, p.bounds, default=p.default)
    return {name: p.kind(own[name]) for name, p in mine.items()}


def drop_what_has_no_effect(settings: Settings, given: dict) -> None:
    if settings.loss == "dpo" and (settings.mitigation, settings.advantage) != ("none", "grpo"):
        wrong = "mitigation" if settings.mitigation != "none" else "advantage"
        raise UserError(f"--loss dpo has no tokens to weight and no advantage: it cannot be combined with --{wrong} {getattr(settings, wrong)}")
    for name, f in OPTIONS.items():
        if f.metadata["only"] and not f.metadata["only"][0](settings):
            if name in given:
                raise UserError(f"--{name} has no effect without {f.metadata['only'][1]}")
            setattr(settings, name, f.default)
    if settings.mitigation in NEVER_RESCALED:
        if given.get("rescale", "none") != "none":
            raise UserError(f"--rescale {given['rescale']}: {settings.mitigation} is never rescaled, its scale is part of the mistake")
        settings.rescale = "none"
    if settings.mitigation == "none":
        for name, value in (("placebo", "weights"), ("rescale", "gradient"), ("rescale", "none")):
            if given.get(name) == value:
                raise UserError(f"--{name} {value} has no effect on --mitigation none: all its weights are 1")
        settings.rescale = "mean"
        settings.placebo = "none" if settings.placebo == "weights" else settings.placebo


def check(settings: Settings) -> None:
    for name, f in OPTIONS.items():
        check_value(name, getattr(settings, name), f.type, f.metadata["bounds"], f.metadata["choices"], f.default)
    if settings.min_number > settings.max_number:
        raise UserError(f"--min_number {settings.min_number} is above --max_number {settings.max_number}")
    every = settings.values_every
    if every != "line" and not (every.isdecimal() and int(every) > 0):
        raise UserError(f"--values_every {every} should be line or a number of tokens, at least 1")


def check_value(name: str, value, kind, bounds: Bounds, choices=(), default=0) -> None:
    number = kind in (int, float)
    right = type(value) in (int, kind) and math.isfinite(value) if number else \
        type(value) is bool if kind is bool else isinstance(value, str) and (value or default == "") or value is None and default is None
    if not right:
        raise UserError(f"--{name} {value!r} should be a {'number' if number else 'yes or no' if kind is bool else 'text'}")
    if choices and value not in choices:
        near = sorted(choices, key=lambda c: -difflib.SequenceMatcher(None, c, value).ratio())
        raise UserError(f"--{name} {value} is not one of: {', '.join(near)}")
    for limit, wrong, words in ((bounds.least, lambda v, b: v < b, "at least"), (bounds.above, lambda v, b: v <= b, "above"),
                                (bounds.most, lambda v, b: v > b, "at most")):
        if limit is not None and wrong(value, limit):
            raise UserError(f"--{name} {value} should be {words} {limit}")
