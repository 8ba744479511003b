"""How all programs of the lab read their command lines, and where their flags come from.

    settings, tasks      answers: int = option(8, "answers in a group", least=2)
    weightings           def my_idea(rollouts, *, strength: Positive = 1.0)
    programs             FLAGS = {"answers": Flag(8, "answers in a group", least=2)}

`words_of` splits a command line into the texts of its flags, for which no flag has to be known, and
`settle` makes values of the texts. So which flags there are may follow from what was typed, as
those of a weighting do.
"""
import argparse
import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import run
from countdown_task import Task
from lab.engine.declared import Flag as Flag, Range, Requirement
from lab.engine.errors import UserError, did_you_mean_name, location_of, say
from lab.harness.flags_elsewhere import did_you_mean_flag

# the least values of the book's flags; of the others 0
LEAST = run.LEAST | dict.fromkeys(("min_number", "max_number", "max_target", "max_result"), 1)
MOST = {"threads": 1024, "learning_rate": 10, "clip_low": 1}  # of the others 1e12
MOST_THREADS = MOST["threads"]
KINDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "yes or no"}
YES_OR_NO = {"yes": True, "true": True, "no": False, "false": False}
REUSED: Requirement = (lambda s: s.epochs > 1, "--epochs above 1")
# What the lab says of the book's flags beyond the book; of those of a weighting, after its name.
# What a run of the book can have is refused nowhere, because the lab's tools read such a run.
MORE: dict[str, dict[str, typing.Any]] = {
    "clip_low": {"requires": REUSED}, "clip_high": {"requires": REUSED},
    "outcome_conditional.think_discount": {"least": 0},
    "inverse_logprob.epsilon": {"least": 0}, "equal_gradient.epsilon": {"least": 0},
    "entropy_masking.mask_percentile": {"least": 0, "most": 100},
    "by_kind.word_weight": {"least": 0}, "by_kind.number_weight": {"least": 0},
    "mitigation": {"choices": ()}, "advantage": {"choices": ()}}
OF_BOOK = {name: replace(Flag(default, text, LEAST.get(name, 0), most=MOST.get(name, 1e12),
                              choices=run.CHOICES.get(name, ())), **MORE.get(name, {}))
           for owner in (run.Settings, Task)
           for name, (default, text) in run.flags_of(owner).items() if name != "resume"}


def option(default: typing.Any, text: str, **limits: typing.Any) -> typing.Any:
    """A field of a dataclass that is a flag, with what a `Flag` says of it."""
    return dataclasses.field(default=default, metadata={"text": text, **limits})


def field_of(flag: Flag) -> typing.Any:
    """The field of a dataclass that `flags_of` makes this flag of again."""
    metadata = {one.name: getattr(flag, one.name) for one in dataclasses.fields(flag)}
    return dataclasses.field(default=metadata.pop("default"), metadata=metadata)


@cache  # a comparison of runs calls it a hundred thousand times
def flags_of(owner: typing.Any) -> dict[str, Flag]:
    """The options of a dataclass; the keyword-only parameters of a method, which may be a class.
    A parameter's hint is a type, or Annotated[type, limits] with its limits as a Flag."""
    flags: dict[str, Flag] = {}
    if dataclasses.is_dataclass(owner):
        of_book = OF_BOOK if issubclass(typing.cast(type, owner), (run.Settings, Task)) else {}
        for field in dataclasses.fields(owner):
            if field.metadata:
                flags[field.name] = Flag(field.default, **field.metadata)
            elif field.name in of_book:
                flags[field.name] = of_book[field.name]
        return flags
    function = owner.__init__ if inspect.isclass(owner) else owner
    hints = typing.get_type_hints(function, include_extras=True)
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is not one.KEYWORD_ONLY:
            continue
        hint = hints.get(name, type(one.default))
        kind = getattr(hint, "__origin__", hint)
        limits = getattr(hint, "__metadata__", [Range(least=-1e12, most=1e12)])[0]
        if kind not in KINDS or not isinstance(limits, Flag) or one.default is one.empty:
            raise UserError(f"{name} of {owner.__name__} ({location_of(owner)}) becomes a flag, so "
                            "it needs a default, and a type that is int, float, bool or str")
        text = limits.text or f"of {owner.__name__}"
        more = MORE.get(f"{owner.__name__}.{name}", {})
        flags[name] = replace(limits, default=one.default, text=text, kind=kind, **more)
    return flags


def words_of(argv: Sequence[str]) -> tuple[list[str], dict[str, typing.Any]]:
    """A command line: the words that belong to no flag, and the texts of the flags. The text is the
    next word, or what follows the sign in --steps=30; of a flag without a text it is True. A word
    with a blank before its sign is a text."""
    words, texts, name = list[str](), dict[str, typing.Any](), ""
    for word in argv:
        flag = re.fullmatch("--([^ =]+)(?:=(.*))?", "--help" if word == "-h" else word, re.DOTALL)
        if flag:
            name = flag[1].replace("-", "_")
            texts[name] = True if flag[2] is None else flag[2]
        elif texts.get(name) is True:
            texts[name] = word
        else:
            words.append(word)
    return words, texts


def converted(given: typing.Any, kind: typing.Any) -> typing.Any:
    """The value of this type that a text stands for; what stands for none, as it is."""
    if isinstance(given, str) and kind is bool:
        return YES_OR_NO.get(given.lower(), given)
    if isinstance(given, str) or kind is float and type(given) is int:
        with suppress(ValueError, OverflowError):
            return kind(given)
    return given


def check_value(name: str, given: typing.Any, flag: Flag) -> typing.Any:
    """The value of a flag, from its text or from a file, if it is of the flag's type, within its
    limits, and one of its choices. True also stands for a flag that was typed without a text."""
    kind: typing.Any = flag.type
    if given is None and flag.default in (None, ""):  # "" where earlier versions had None
        return flag.default
    is_empty = isinstance(given, str) and not given.strip() and flag.default != ""
    if is_empty or given is True and kind is not bool:
        raise UserError(f"--{name} needs a value")
    value = converted(given, kind)
    if type(value) is not kind or kind is float and not math.isfinite(value):
        raise UserError(f"--{name} {given!r:.80}: should be {KINDS[kind]}")
    if flag.choices and value not in flag.choices:
        raise UserError(f"--{name} {value!r:.80}: choose from {', '.join(flag.choices)}"
                        f"{did_you_mean_name(value, flag.choices)}")
    if kind in (int, float) and not (flag.above < value and flag.least <= value <= flag.most):
        least = f"at least {flag.least}" if flag.above == -math.inf else f"above {flag.above}"
        raise UserError(f"--{name} {value!r:.80}: should be {least} and at most {flag.most:g}")
    return value


def settle(given: Mapping[str, typing.Any], flags: Mapping[str, Flag],
           usual: Mapping[str, typing.Any] = {}) -> dict[str, typing.Any]:
    """The value of each flag: the given one, else the usual one, else the default. Each is checked.
    A flag without an effect has its default, and is refused if another value was given. This is
    decided in the order of the flags, so a requirement may read the flags before its own."""
    values = {name: check_value(name, given.get(name, usual.get(name, flag.default)), flag)
              for name, flag in flags.items()}
    for name, flag in flags.items():
        if flag.requires and not flag.requires[0](SimpleNamespace(**values)):
            if name in given and values[name] != flag.default:
                raise UserError(f"--{name} has no effect without {flag.requires[1]}")
            values[name] = flag.default
    return values


def unknown_argument(word: str, flags: Collection[str], hint: str = "--help lists the flags"
                     ) -> UserError:
    """The error of a word that is no flag of the program, with the nearest one."""
    near = did_you_mean_flag(word.strip("-"), flags)
    return UserError(f"unknown argument {word:.200}{near} ({hint})")


def read(argv: Sequence[str], usage: str, about: str | None, flags: Mapping[str, Flag],
         places: Mapping[str, str] = {}, others: dict[str, typing.Any] | None = None
         ) -> SimpleNamespace:
    """The values of a program's flags, and of the words beside them.

    `places` says what these words are, each with its help: RUN is one word, [RUN] one or none,
    RUN ... at least one, and [RUN ...] any number. Their values are found by the name `run`.
    The texts of flags that the program does not have are put into `others`, if it passes them on to
    another one; else they are an error. `typed` has the values of the flags that were typed.
    """
    words, texts = words_of(argv)
    if "help" in texts:
        say(help_text(usage, about, flags, places))
        raise SystemExit(0)
    found, words = in_places(words, places)
    rest = {name: texts.pop(name) for name in [*texts] if name not in flags}
    if others is None:
        words += [f"--{name}" for name in rest]
    else:
        others |= rest
    for word in words:
        raise unknown_argument(word, [*flags, "help"])
    values = settle(texts, flags)
    return SimpleNamespace(**values, **found, typed={name: values[name] for name in texts})


def in_places(words: list[str], places: Mapping[str, str]
              ) -> tuple[dict[str, typing.Any], list[str]]:
    """The words by the name of their place, and the words that are left over."""
    names = {place: re.sub("[^A-Z]", "", place) for place in places}
    required = [name for place, name in names.items() if not place.startswith("[")]
    if len(words) < len(required):
        raise UserError(f"the following arguments are required: {', '.join(required)} (--help "
                        "lists the flags)")
    found: dict[str, typing.Any] = {}
    for place, name in names.items():
        if "..." in place:
            found[name.lower()], words = words, []
        else:
            found[name.lower()], words = words[0] if words else None, words[1:]
    return found, words


def help_text(usage: str, about: str | None, flags: Mapping[str, Flag],
              places: Mapping[str, str] = {}, end: str = "") -> str:
    """The text of --help: the words and the flags of a program."""
    parser = argparse.ArgumentParser(usage=usage, description=about, epilog=end, add_help=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for place, text in places.items():
        parser.add_argument(place, help=text)
    for name, flag in flags.items():
        kind = "[yes|no]" if flag.type is bool else flag.type.__name__
        parser.add_argument(f"--{name}", metavar=kind, help=flag.help().replace("%", "%%"))
    return parser.format_help().rstrip()
