"""A flag: its values, when it has an effect, and what the programs do with it; and how all programs
read their command lines.

    settings, tasks      answers: int = option(8, "answers in a group", least=2)
    weightings           def my_idea(rollouts, *, strength: Positive = 1.0)
    programs             FLAGS = {"answers": Flag(8, "answers in a group", least=2)}

Everything about a flag is said where it is declared, and nowhere else. run.py checks its values.
A command line is read once, in two steps: `words_of` splits it into the texts of its flags, for
which no flag has to be known, and `settle` makes values of the texts. So which flags there are may
follow from what was typed, as those of a weighting do.
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
from lab.engine.declared import Flag as Flag, Range, Values
from lab.engine.errors import UserError, did_you_mean_name, location_of
from run import Unknown

MOST_THREADS = 1024
KINDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "yes or no"}


def words_of(argv: Sequence[str]) -> tuple[list[str], dict[str, typing.Any]]:
    """A command line: the words that belong to no flag, and the texts of the flags. The text is the
    next word, or what follows the sign in --steps=30; of a flag without a text it is True."""
    words, texts, rest = [], dict[str, typing.Any](), list(argv)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            words.append(word)
            continue
        name, sign, text = word.partition("=")
        if not sign and rest and not is_flag(rest[0]):
            sign, text = "=", rest.pop(0)
        if text == "--":
            raise UserError(f"{word}: -- is no value of a flag")
        name = "help" if name == "-h" else name.removeprefix("--").replace("-", "_")
        texts[name] = text if sign else True
    return words, texts


def is_flag(word: str) -> bool:
    """Whether a word is --steps, --steps=30 or -h. What has a blank in its name is a value."""
    return re.match("-h$|--[^ =]+(=|$)", word) is not None


def option(default: typing.Any, text: str, **limits: typing.Any) -> typing.Any:
    """A field of a dataclass that is a flag, with what a `Flag` says of it."""
    return dataclasses.field(default=default, metadata={"text": text, **limits})


# limits of the book's flags beyond its own, which are "at least"; of a weighting's after its name
LIMITS: dict[str, dict[str, typing.Any]] = {
    "learning_rate": {"above": 0, "most": 10}, "clip_low": {"most": 1},
    "threads": {"most": MOST_THREADS},
    "outcome_conditional.think_discount": {"least": 0, "most": 1},
    "inverse_logprob.epsilon": {"above": 0}, "equal_gradient.epsilon": {"above": 0},
    "entropy_weighted.entropy_temp": {"above": 0},
    "entropy_masking.mask_percentile": {"least": 0, "most": 100},
    "by_kind.word_weight": {"least": 0}, "by_kind.number_weight": {"least": 0}}
OF_BOOK = {name: replace(Flag(default, text, run.LEAST.get(name, 0),
                              choices=run.CHOICES.get(name, ())), **LIMITS.get(name, {}))
           for owner in (run.Settings, Task)
           for name, (default, text) in run.flags_of(owner).items()}


@cache  # a comparison of runs calls it a hundred thousand times
def flags_of(owner: typing.Any) -> dict[str, Flag]:
    """The options of a dataclass; the keyword-only parameters of a method, which may be a class."""
    flags: dict[str, Flag] = {}
    if dataclasses.is_dataclass(owner):
        is_of_book = {run.Settings, Task} & {*inspect.getmro(typing.cast(type, owner))}
        for field in dataclasses.fields(owner):
            if field.metadata:
                flags[field.name] = Flag(field.default, **field.metadata)
            elif field.name in OF_BOOK and is_of_book:
                flags[field.name] = OF_BOOK[field.name]
        return flags
    function = owner.__init__ if inspect.isclass(owner) else owner
    hints = typing.get_type_hints(function, include_extras=True)
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is one.KEYWORD_ONLY:
            hint = hints.get(name, type(one.default))
            flags[name] = flag_of(owner, name, one.default, hint)
        elif one.default is not one.empty:  # it would keep this value, whatever is typed
            raise UserError(f"{name} of {owner.__name__} ({location_of(owner)}) is no flag, "
                            "because only arguments after a * become flags: write "
                            f"`(..., *, {name})`")
    return flags


def flag_of(owner: typing.Any, name: str, default: object, hint: typing.Any) -> Flag:
    """The flag of a parameter, whose hint is a type, or Annotated[type, limits] with its limits as
    a Flag."""
    kind, limits = hint, Range(least=-math.inf)
    if hasattr(hint, "__metadata__"):
        kind, limits, *_ = typing.get_args(hint)
    is_known = kind in (int, float, bool, str) and isinstance(limits, Flag)
    if not is_known or default is inspect.Parameter.empty:
        raise UserError(f"{name} of {owner.__name__} ({location_of(owner)}) becomes a flag, so it "
                        "needs a default, and a type that is int, float, bool or str")
    if (own := f"{owner.__name__}.{name}") in LIMITS and owner.__module__ == "mitigations":
        limits = replace(limits, **LIMITS[own])
    return replace(limits, default=default, kind=kind)


def checked_value(name: str, given: typing.Any, kind: typing.Any, least: float = -math.inf,
                  choices: Collection[str] = ()) -> typing.Any:
    """The value of a flag, typed or from a file, if it is of this type and allowed."""
    value: typing.Any = given
    if isinstance(given, str) and kind is bool:
        value = {"yes": True, "true": True, "no": False, "false": False}.get(given.lower(), given)
    elif isinstance(given, str) or kind is float and type(given) is int:
        with suppress(ValueError, OverflowError):
            value = kind(given)
    if type(value) is not kind or kind is float and not math.isfinite(value):
        raise UserError(f"--{name} {given!r:.80}: should be {KINDS[kind]}")
    if choices and value not in choices:
        raise Unknown(f"--{name} {value!r:.80}: choose from {', '.join(choices)}"
                      f"{did_you_mean_name(value, choices)}")
    if kind in (int, float) and not least <= value <= 1e12:
        limit = f"least {least}" if value < least else "most 1e12"
        raise UserError(f"--{name} {value!r:.80}: should be at {limit}")
    return value


def check_value(name: str, value: typing.Any, flag: Flag) -> typing.Any:
    """The value, if it is of the flag's type, within its limits, and one of its choices; a whole
    number becomes one with a point where that is the type."""
    if value is None and flag.default in (None, ""):  # "" where earlier versions had None
        return flag.default
    if isinstance(value, str) and not value.strip() and flag.default != "":
        raise UserError(f"--{name} {value!r}: should not be empty")
    least = flag.least if flag.above == -math.inf and not flag.choices else -math.inf
    value = checked_value(name, value, flag.type, least, flag.choices)
    if flag.type in (int, float) and not flag.above < value <= flag.most:
        raise UserError(f"--{name} {value!r:.80}: should be " + (
            f"at most {flag.most}" if value > flag.most else f"above {flag.above}"))
    return value


def settle(given: Values, flags: Mapping[str, Flag], usual: Values = {}) -> dict[str, typing.Any]:
    """The value of each flag: the given one, which may still be a text; else the usual one; else
    the default. Each is checked.

    A flag without an effect gets its `value_without_effect`, and is refused if another value was
    given. This is decided in the order of the flags. So a requirement may read the flags that stand
    before its own, and those that always have an effect.
    """
    values: dict[str, typing.Any] = {}
    for name, flag in flags.items():
        value = usual.get(name, flag.default)
        if name in given:
            value = value_of(name, given[name], flag)
        values[name] = check_value(name, value, flag)
    for name, flag in flags.items():
        if flag.requires and not flag.has_effect(values):
            wanted, values[name] = values[name], flag.value_without_effect(values)
            if name in given and wanted != values[name]:
                raise UserError(f"--{name} has no effect without {flag.requires[1]}")
    return values


def value_of(name: str, given: object, flag: Flag) -> object:
    """A typed text as a value of the flag's type. What is no text, as in a file, stays as it is.
    True is a flag that was typed without a text."""
    if given is True and flag.type is not bool:
        raise UserError(f"--{name} needs a value")
    return checked_value(name, given, flag.type) if isinstance(given, str) else given


def unknown_argument(word: str, flags: Collection[str], hint: str = "--help lists the flags"
                     ) -> UserError:
    """The error of a word that is no flag of the program, with the nearest one."""
    near = did_you_mean_name(word.strip("-"), flags)
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
        run.say(help_text(usage, about, flags, places))
        raise SystemExit(0)
    found, words = in_places(words, places)
    known = {name: text for name, text in texts.items() if name in flags}
    rest = {name: text for name, text in texts.items() if name not in flags}
    if others is not None:
        others |= rest
    elif rest:
        words += [f"--{name}" for name in rest]
    for word in words:
        raise unknown_argument(word, [*flags, "help"])
    values = settle(known, flags)
    return SimpleNamespace(**values, **found, typed={name: values[name] for name in known})


def in_places(words: list[str], places: Mapping[str, str]
              ) -> tuple[dict[str, typing.Any], list[str]]:
    """The words by the name of their place, and the words that are left over."""
    found: dict[str, typing.Any] = {}
    missing = []
    for place in places:
        name = re.sub("[^A-Z]", "", place).lower()
        if not words and not place.startswith("["):
            missing.append(name.upper())
        if "..." in place:
            found[name], words = words, []
        else:
            found[name], words = words[0] if words else None, words[1:]
    if missing:
        raise UserError(f"the following arguments are required: {', '.join(missing)} (--help lists "
                        "the flags)")
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
