"""One mechanism for the flags of all programs: default, range, help, how they are read and checked.

A flag stands in one of three places, and is a `Flag` in all of them:

    programs             FLAGS = {"answers": Flag(8, "answers in a group", least=2)}
    settings, tasks      answers: int = option(8, "answers in a group", least=2)
    weightings           def my_idea(rollouts, *, strength: Positive = 1.0)
"""
import argparse
import dataclasses
import difflib
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

from engine.choices import Choice
from engine.errors import UserError
from harness.files import Json
from harness.own_code import place_of, told_as

Group = argparse._ActionsContainer  # a parser, or a group of one
KINDS = {int: "a whole number", float: "a number", bool: "yes or no", str: "a text"}  # of a flag
MOST_SEED = 2 ** 32 - 1
MOST_THREADS = 1024
Requirement = tuple[Callable[..., bool], str]  # a test of all values, and its words
Limit = tuple[str, float, Callable[[float, float], bool]]    # words, limit, what has to hold
Default = typing.TypeVar("Default")


@dataclass(frozen=True)
class Flag:
    default: object
    text: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Collection[str] = ()
    kind: type | None = None     # where it is not the type of the default
    requires: Requirement | None = None  # of the settings: no effect unless it holds
    is_path: bool = False        # of the settings: what is there counts, not what it is called
    changes_result: bool = True  # of the settings: otherwise it is not in the folder's name

    @property
    def type(self) -> type:
        return self.kind or (str if self.default is None else type(self.default))

    def limits(self) -> list[Limit]:
        every = (("at least", self.least, operator.ge), ("above", self.above, operator.gt),
                 ("at most", self.most, operator.le))
        return [(words, limit, holds) for words, limit, holds in every if limit is not None]


Range = partial(Flag, None)  # of a parameter: the default stands beside it
NotNegative = typing.Annotated[float, Range(least=0, most=1e6)]
Positive = typing.Annotated[float, Range(above=0, most=1e6)]
Share = typing.Annotated[float, Range(least=0, most=1)]
Percent = typing.Annotated[float, Range(least=0, most=100)]
Count = typing.Annotated[int, Range(least=1, most=1_000_000)]
CountOrNone = typing.Annotated[int, Range(least=0, most=1_000_000)]
LearningRate = typing.Annotated[float, Range(above=0, most=10)]


def option(default: Default, text: str, least: float | None = None, above: float | None = None,
           most: float | None = None, choices: Collection[str] = (),
           requires: Requirement | None = None, is_path: bool = False,
           changes_result: bool = True) -> Default:
    flag = Flag(default, text, least, above, most, choices, None, requires, is_path,
                changes_result)
    return dataclasses.field(default=default, metadata={"flag": flag})


@cache  # a comparison of runs asks a hundred thousand times
def fields_as_flags(cls: type) -> dict[str, Flag]:
    with told_as(cls.__name__, cls):
        hints = typing.get_type_hints(cls)
    return {field.name: as_flag(field.metadata["flag"], field.default, hints[field.name],
                                field.name, cls)
            for field in dataclasses.fields(cls) if "flag" in field.metadata}


@cache
def parameters_as_flags(function: Choice) -> dict[str, Flag]:
    """The flags of a weighting or an advantage: its keyword-only parameters."""
    with told_as(function.__name__, function):
        hints = typing.get_type_hints(called_by_run(function), include_extras=True)
    return {name: as_flag(Range(), parameter.default, hints.get(name, type(parameter.default)),
                          name, function)
            for name, parameter in inspect.signature(called_by_run(function)).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY}


def called_by_run(function: Choice) -> Callable[..., object]:
    """Whose parameters count: the function, or the __init__ of a class."""
    return function.__init__ if inspect.isclass(function) else function


def as_flag(declared: Flag, default: object, hint: object, name: str, owner: Choice) -> Flag:
    """The hint is float, or float | None, or Annotated[float, Flag(...)], whose flag counts."""
    several = typing.get_origin(hint) in (typing.Annotated, typing.Union, types.UnionType)
    parts = typing.get_args(hint) if several else (hint,)
    kinds = [part for part in parts if isinstance(part, type) and part in KINDS]
    if not kinds or default is inspect.Parameter.empty:
        raise UserError(f"{name} of {owner.__name__} ({place_of(owner)}) becomes a flag: it needs "
                        "a default and a type that is int, float, bool or str")
    declared = next((part for part in parts if isinstance(part, Flag)), declared)
    flag = dataclasses.replace(declared, default=default, kind=kinds[0])
    try:
        check_value(name, default, dataclasses.replace(flag, choices=()))  # they may still be added
    except UserError as error:
        raise UserError(f"{error}: the default of {owner.__name__} ({place_of(owner)})") from None
    return flag


class Parser(argparse.ArgumentParser):
    """Say what is wrong in one line, and never guess what a shortened flag means."""

    def __init__(self, usage: str, description: str | None = None, epilog: str = "",
                 add_help: bool = True):
        super().__init__(usage=usage, description=description, epilog=epilog, add_help=add_help,
                         allow_abbrev=False, argument_default=argparse.SUPPRESS,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{shortened(message, 300)} (--help lists the flags)")

    def read(self, argv: list[str], about_unknown: Callable[[str], str] = lambda name: "") -> Json:
        """What was typed, --max-new-tokens too; `about_unknown` may say more of what is no flag."""
        typed = [re.sub("(?<=^--)[^=]*", lambda name: name[0].replace("-", "_"), argument)
                 for argument in argv]
        given, unknown = self.parse_known_intermixed_args(typed)  # RUN --flag 1 PROBLEM, too
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, 1, cutoff=0.75)
            question = f", did you mean {near[0]}?" if near else ""
            said = f"unknown argument {shortened(' '.join(unknown[0].split()))}{question}"
            self.error(about_unknown(name.removeprefix("--")) or said)
        return vars(given)


def add_flag(parser: Group, name: str, flag: Flag, help: str | None = None) -> None:
    """A yes-or-no flag alone means yes."""
    add = partial(parser.add_argument, f"--{name}", help=describe(flag) if help is None else help)
    if flag.type is bool:
        add(metavar="yes|no", type=yes_or_no, nargs="?", const=True)
    else:
        add(metavar={int: "N", float: "X", str: "TEXT"}[flag.type], type=flag.type)


def add_flags(parser: Parser, flags: dict[str, Flag]) -> Parser:
    for name, flag in flags.items():
        add_flag(parser, name, flag)
    return parser


def describe(flag: Flag) -> str:
    choices = ": " + " | ".join(flag.choices) if flag.choices else ""
    is_told = flag.default is not None and flag.default is not False
    default = f" (default {flag.default})" if is_told else ""
    return (flag.text + choices + default).replace("%", "%%")  # argparse fills in %(default)s


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false"):
        raise argparse.ArgumentTypeError(f"{shortened(repr(text))} is neither yes nor no")
    return text.lower() in ("yes", "true")


def with_defaults(given: Json, flags: dict[str, Flag]) -> SimpleNamespace:
    values = {name: flag.default for name, flag in flags.items()} | given
    check_values(values, flags)
    return SimpleNamespace(**values)


def check_values(values: Json, flags: dict[str, Flag]) -> None:
    for name, flag in flags.items():
        check_value(name, values[name], flag)


def check_file(path: Path, values: Json, flags: dict[str, Flag]) -> None:
    for name in values.keys() & flags.keys():
        try:
            check_value(name, values[name], flags[name])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def check_value(name: str, value: object, flag: Flag) -> None:
    """Refuse a value of another type, one out of range, and one that is no choice."""
    said = f"--{name} {shortened(repr(value) if isinstance(value, str) else str(value))}"
    if not has_type(value, flag):
        raise UserError(f"{said} should be {KINDS[flag.type]}")
    if flag.choices and value is not None and value not in flag.choices:
        nearest = difflib.get_close_matches(str(value), flag.choices, len(flag.choices), cutoff=0)
        raise UserError(f"--{name} {shortened(str(value))} is not one of: {', '.join(nearest)}")
    if isinstance(value, (int, float)):
        for words, limit, holds in flag.limits():
            if not holds(value, limit):
                raise UserError(f"{said} should be {words} {limit}")


def has_type(value: object, flag: Flag) -> bool:
    """A whole number will do for a float."""
    if value is None:
        return flag.default is None
    if type(value) is int:
        return flag.type in (int, float)
    if flag.type is str:
        return isinstance(value, str) and (value.strip() != "" or flag.default == "")
    return type(value) is flag.type and isinstance(value, float | bool) and math.isfinite(value)


def shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[:most] + "..."
