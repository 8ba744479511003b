"""A flag: its values, when it has an effect, and what the programs do with it; and the parser with
which all programs read their command lines.

    settings, tasks      answers: int = option(8, "answers in a group", least=2)
    weightings           def my_idea(rollouts, *, strength: Positive = 1.0)
    programs             FLAGS = {"answers": Flag(8, "answers in a group", least=2)}

Everything about a flag is said where it is declared, and nowhere else.
"""
import argparse
import dataclasses
import difflib
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace

from engine.choices import Choices, without_decorator
from engine.errors import UserError, location_of

# a test of the values of all flags, and the words that a message says if it is not passed
Requirement = tuple[Callable[[typing.Any], bool], str]
Values = Mapping[str, typing.Any]                       # the value of each flag, by its name
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "yes or no", str: "a text"}
MOST_THREADS = 1024
LARGEST = 10 ** 9  # a number above this is a mistake, so help need not name the limit


@dataclass(frozen=True)
class Flag:
    """A flag. The defaults of these fields suit an ordinary setting: one that tells runs apart."""
    default: typing.Any
    text: str = ""

    # which values are allowed
    least: float = 0         # these three are limits of a number
    above: float = -math.inf
    most: float = LARGEST
    choices: Collection[str] = ()
    kind: type | None = None  # the type of the values, if it is not the type of the default

    # when it has an effect, and which value it has if not; both are functions of all flags' values
    requires: Requirement | None = None                         # None: it always has an effect
    otherwise: Callable[[typing.Any], object] | None = None     # None: the value is the default

    # where the help shows it
    topic: str = ""    # the heading above it
    metavar: str = ""  # the word for its value, if it is not the type

    # what the programs do with it
    changeable: bool = False   # a resumed run may have another value
    in_name: bool = True       # a run's folder is named after it, if it is not at its default
    label: str | None = None   # what is written before the value there, if it is not the flag
    compared: typing.Literal[
        "setting",             # runs that differ in it are not compared
        "arm",                 # runs that differ in it are compared, as different arms
        "aside"] = "arm"       # runs of one arm may differ in it
    idea_takes: bool = True    # python -m tools.idea takes it, and passes it on to its runs
    sample_drops: bool = False  # python -m tools.sample, which does not train, sets it back

    @property
    def type(self) -> type:
        if self.kind:
            return self.kind
        return str if self.default is None else type(self.default)

    def limits(self, most: float = math.inf) -> str:
        """The limits in words; not the upper one if it is no smaller than `most`."""
        limits = []
        if self.above > -math.inf:
            limits.append(f"above {self.above}")
        elif self.least > -math.inf:
            limits.append(f"at least {self.least}")
        if self.most < most:
            limits.append(f"at most {self.most}")
        return " and ".join(limits)

    def help(self) -> str:
        """The flag in the help: what it means (one | another; default one; needs --other above 0)
        """
        facts = []
        if 0 < len(self.choices) < 10:
            facts.append(" | ".join(self.choices))
        if self.default is not None and self.default is not False and self.default != "":
            facts.append(f"default {self.default}")
        if self.requires:
            facts.append(f"needs {self.requires[1]}")
        return f"{self.text} ({'; '.join(facts)})" if facts else self.text

    def has_effect(self, values: Values) -> bool:
        return not self.requires or self.requires[0](SimpleNamespace(**values))

    def value_without_effect(self, values: Values) -> object:
        return self.otherwise(SimpleNamespace(**values)) if self.otherwise else self.default


# Types of the keyword parameters of a weighting or an advantage, whose signature has the defaults.
Range = partial(Flag, None)
NotNegative = typing.Annotated[float, Range()]
Positive = typing.Annotated[float, Range(above=0)]
Share = typing.Annotated[float, Range(most=1)]
Percent = typing.Annotated[float, Range(most=100)]
Count = typing.Annotated[int, Range(least=1)]
CountOrNone = typing.Annotated[int, Range()]
LearningRate = typing.Annotated[float, Range(above=0, most=10)]


def option(default: typing.Any, text: str, **more: typing.Any) -> typing.Any:
    """A field of a dataclass that is a flag; `more` are fields of Flag."""
    return field(default=default, metadata={"flag": Flag(default, text, **more)})


@cache  # a comparison of runs calls it a hundred thousand times
def flags_of(owner: typing.Any) -> dict[str, Flag]:
    """The options of a dataclass; the keyword-only parameters of a method, which may be a class."""
    if dataclasses.is_dataclass(owner):
        flags = {one.name: one.metadata["flag"] for one in dataclasses.fields(owner)
                 if "flag" in one.metadata}
        hints = typing.get_type_hints(owner)
    else:
        function = owner.__init__ if inspect.isclass(owner) else owner
        flags = {}
        for name, one in inspect.signature(function).parameters.items():
            if one.kind is one.KEYWORD_ONLY:
                flags[name] = Flag(one.default, least=-math.inf)
            elif one.default is not one.empty:  # it would keep this value, whatever is typed
                raise UserError(f"{name} of {owner.__name__} ({location_of(owner)}) is no flag, "
                                "because only arguments after a * become flags: write "
                                f"`(..., *, {name})`")
        hints = typing.get_type_hints(function, include_extras=True)
    return {name: as_flag(owner, name, flag, hints.get(name)) for name, flag in flags.items()}


def as_flag(owner: typing.Any, name: str, flag: Flag, hint: object) -> Flag:
    """The flag with the type of its hint: float, float | None, or Annotated[float, Flag(...)],
    where the annotated flag has the limits."""
    parts = typing.get_args(hint) or (hint,)
    kind = next((part for part in parts if isinstance(part, type) and part in TYPE_NAMES), None)
    if (kind or type(flag.default)) not in TYPE_NAMES or flag.default is inspect.Parameter.empty:
        raise UserError(f"{name} of {owner.__name__} ({location_of(owner)}) becomes a flag, so it "
                        "needs a default, and a type that is int, float, bool or str")
    declared = next((part for part in parts if isinstance(part, Flag)), flag)
    return replace(declared, default=flag.default, kind=kind)


def check_values(values: Values, flags: Mapping[str, Flag]) -> None:
    for name, flag in flags.items():
        check_value(name, values[name], flag)


def check_value(name: str, value: typing.Any, flag: Flag) -> None:
    """Refuse a value of another type, one out of range, and one that is none of the choices."""
    if wrong := fault_of_value(value, flag):
        raise UserError(f"--{name} {wrong}")


def fault_of_value(value: typing.Any, flag: Flag) -> str:
    """A clause about what is wrong with a value, to stand after the flag's name; an empty text if
    nothing is."""
    if value is None and flag.default is None:
        return ""
    if not has_type(value, flag):
        way_out = ""
        if flag.type is int and not (flag.kind or flag.text):  # a parameter without type: power=1
            way_out = f", because its default is {flag.default}: write {flag.default}.0 there"
        if flag.type is bool and value in ("yes", "no"):  # in a file: typed words are read as bool
            way_out = ", which in a file is true or false"
        wanted = f"be {TYPE_NAMES[flag.type]}{way_out}"
        if flag.type is str and isinstance(value, str):
            wanted = "not be empty"
        return f"{value!r:.80} should {wanted}"
    if flag.choices and value not in flag.choices:
        hint = without_decorator(value) if isinstance(flag.choices, Choices) else ""
        near = difflib.get_close_matches(value, flag.choices, 1)
        if near and not hint:
            hint = f"Did you mean {near[0]}?"
        return f"{value:.80} is not one of: {', '.join(flag.choices)}. {hint}"
    is_number = flag.type in (int, float)
    if is_number and not (flag.above < value and flag.least <= value <= flag.most):
        most = LARGEST if value <= LARGEST else math.inf
        return f"{value} should be {flag.limits(most)}"
    return ""


def has_type(value: typing.Any, flag: Flag) -> bool:
    """Whether a value is of the flag's type, where a whole number will do for a float."""
    if flag.type is str:
        return isinstance(value, str) and (value.strip() != "" or flag.default == "")
    is_kind = type(value) is flag.type or (type(value) is int and flag.type is float)
    return is_kind and -math.inf < value < math.inf


def settled(values: Values, flags: Mapping[str, Flag]) -> dict[str, typing.Any]:
    """The values with which a run is made. They are the given ones, except that a flag without an
    effect is set to its `value_without_effect`.

    Whether one flag has an effect may depend on another, which may have none itself. So all flags
    are tested again, always from the given values, until nothing changes. The result does not
    depend on their order.
    """
    current = dict(values)
    for _ in range(1 + len(flags)):  # no chain of flags that depend on each other is longer
        without_effect = {}
        for name, flag in flags.items():
            if not flag.has_effect({**current, name: values[name]}):
                without_effect[name] = flag.value_without_effect(current)
        before, current = current, {**values, **without_effect}
        if current == before:
            break
    return current


def refuse_without_effect(typed: Values, final: Values, flags: Mapping[str, Flag]) -> None:
    """Refuse a flag that was typed and has no effect, unless its value is the final one anyway."""
    for name, flag in flags.items():
        value = typed.get(name, final[name])
        if value != final[name] and flag.requires and not flag.has_effect({**final, name: value}):
            raise UserError(f"--{name} has no effect without {flag.requires[1]}")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and never guesses what a shortened flag means."""
    flags: Mapping[str, Flag] = {}
    hint = "--help lists the flags"
    also_known: Collection[str] = ()  # flags that the program has read before
    not_taken: Collection[str] = ()   # flags that the program refuses

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message} ({self.hint})")

    def parse_known_args(self, args: typing.Any = None, namespace: typing.Any = None
                         ) -> typing.Any:
        """Parse as argparse does, but refuse --flag=--, because argparse would give the flag an
        empty list for a value."""
        for argument in args or []:
            if re.fullmatch("--[^=]+=--", argument):
                self.error(f"{argument}: -- is no value of a flag")
        return super().parse_known_args(args, namespace)

    def print_help(self, file: typing.Any = None) -> None:
        print_text(self.format_help())

    def read(self, argv: list[str], about_unknown: Callable[[str], str] = lambda _: ""
             ) -> dict[str, typing.Any]:
        """The values that were typed; --max-new-tokens is --max_new_tokens. `about_unknown` may
        say more about a name that is no flag."""
        typed = [re.sub("(?<=^--)[^= ]*", lambda name: name[0].replace("-", "_"), argument)
                 for argument in argv]
        found, unknown = self.parse_known_intermixed_args(typed)  # RUN --flag 1 PROBLEM, too
        if unknown:
            name = unknown[0].partition("=")[0]
            refused = {f"--{flag}" for flag in self.not_taken}
            takes = [*self._option_string_actions, *(f"--{flag}" for flag in self.also_known)]
            takes = [flag for flag in takes if flag not in refused]
            near = difflib.get_close_matches(name, takes, 1, cutoff=0.75)
            question = f", did you mean {near[0]}?" if near else ""
            said = about_unknown(name.removeprefix("--"))
            self.error(said or f"unknown argument {unknown[0]:.200}{question}")
        return self.values(found)

    def values(self, found: argparse.Namespace) -> dict[str, typing.Any]:
        given = dict(vars(found))
        for name in given.keys() & self.flags.keys():
            given[name] = value_of(given[name], self.flags[name])
            check_value(name, given[name], self.flags[name])
        return given


def print_text(text: str) -> None:
    """Print a text that may be read in part, as in `--help | head`: that is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest goes nowhere


def make_parser(usage: str, description: str | None, flags: Mapping[str, Flag], epilog: str = "",
                add_help: bool = True) -> Parser:
    parser = Parser(usage=usage, description=description, epilog=epilog, add_help=add_help,
                    allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.flags = flags
    groups: dict[str, typing.Any] = {"": parser}  # by topic
    for name, flag in flags.items():
        if flag.topic not in groups:
            groups[flag.topic] = parser.add_argument_group(flag.topic)
        more = {}
        if flag.type is bool:  # alone it means yes
            more = {"nargs": "?", "const": "yes"}
        text = flag.help().replace("%", "%%")  # argparse fills in %(default)s
        metavar = flag.metavar or flag.type.__name__.upper()
        groups[flag.topic].add_argument(f"--{name}", help=text, metavar=metavar, **more)
    return parser


def value_of(text: str, flag: Flag) -> object:
    """The text as a value of the flag's type; or the text itself, which `check_value` refuses."""
    if flag.type is bool:
        return {"yes": True, "true": True, "no": False, "false": False}.get(text.lower(), text)
    try:
        return flag.type(text)
    except ValueError:
        return text


def with_defaults(given: dict[str, typing.Any], flags: Mapping[str, Flag]) -> SimpleNamespace:
    """The values of all flags, checked. One that was typed and has no effect is refused."""
    values = {name: flag.default for name, flag in flags.items()} | given
    check_values(values, flags)
    refuse_without_effect(given, settled(values, flags), flags)
    return SimpleNamespace(**values)
