"""A flag: its values, when it has an effect, and what the programs do with it; and how all programs
read their command lines.

    settings, tasks      answers: int = option(8, "answers in a group", least=2)
    weightings           def my_idea(rollouts, *, strength: Positive = 1.0)
    programs             FLAGS = {"answers": Flag(8, "answers in a group", least=2)}

Everything about a flag is said where it is declared, and nowhere else. A command line is read once,
in two steps: `words_of` splits it into the texts of its flags, for which no flag has to be known,
and `settle` makes values of the texts. So which flags there are may follow from what was typed, as
those of a weighting do.
"""
import dataclasses
import difflib
import inspect
import math
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace

from lab.engine.methods import Choices, axis_of, without_decorator
from lab.engine.errors import UserError, location_of

# a test of the values of all flags, and the words that a message says if it is not passed
Requirement = tuple[Callable[[typing.Any], bool], str]
Values = Mapping[str, typing.Any]                       # the value of each flag, by its name
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "yes or no", str: "a text"}
MOST_THREADS = 1024
LARGEST = 10 ** 9  # a number above this is a mistake, so help need not name the limit


@dataclass(frozen=True)
class Flag:
    """A flag. The defaults of these fields suit an ordinary setting: one that tells runs
    apart."""
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


@cache  # a comparison of runs calls it a hundred thousand times
def flags_of(owner: typing.Any) -> dict[str, Flag]:
    """The options of a dataclass; the keyword-only parameters of a method, which may be a class."""
    if dataclasses.is_dataclass(owner):
        flags = {one.name: flag_of(one) for one in dataclasses.fields(owner) if one.metadata}
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


def flag_of(one: dataclasses.Field[typing.Any]) -> Flag:
    """The flag of a field that countdown_task.option declares; its limits may be any of Flag's."""
    limits = dict(one.metadata)
    return Flag(one.default, limits.pop("help"), **limits)


def as_flag(owner: typing.Any, name: str, flag: Flag, hint: object) -> Flag:
    """The flag with the type of its hint: float, float | None, or Annotated[float, Flag(...)],
    where the annotated flag has the limits."""
    parts = typing.get_args(hint) or (hint,)
    kind = next((part for part in parts if isinstance(part, type) and part in TYPE_NAMES), None)
    if (kind or type(flag.default)) not in TYPE_NAMES or flag.default is inspect.Parameter.empty:
        raise UserError(f"{name} of {owner.__name__} ({location_of(owner)}) becomes a flag, so it "
                        "needs a default, and a type that is int, float, bool or str")
    declared = next((part for part in parts if isinstance(part, Flag)), flag)
    for limits in parts:
        if isinstance(limits, dict):  # as the book writes them
            declared = Range(**limits)
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
        is_method = isinstance(flag.choices, Choices)
        if is_method and (axis := axis_of(value)):
            return f"{value} is a{'n' * (axis == 'advantage')} --{axis}"
        hint = without_decorator(value) if is_method else ""
        near = difflib.get_close_matches(value.lower(), flag.choices, 1)
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
        check_value(name, value, flag)
        is_whole = type(value) is int and flag.type is float
        values[name] = float(value) if is_whole else value
    for name, flag in flags.items():
        if flag.requires and not flag.has_effect(values):
            wanted, values[name] = values[name], flag.value_without_effect(values)
            if name in given and wanted != values[name]:
                raise UserError(f"--{name} has no effect without {flag.requires[1]}")
    return values


def value_of(name: str, given: object, flag: Flag) -> object:
    """A typed text as a value of the flag's type, or the text itself, which `check_value` refuses.
    What is no text, as in a file, stays as it is. True is a flag that was typed without a text."""
    if given is True and flag.type is not bool:
        raise UserError(f"--{name} needs a value")
    if not isinstance(given, str):
        return given
    if flag.type is bool:
        return {"yes": True, "true": True, "no": False, "false": False}.get(given.lower(), given)
    try:
        return flag.type(given)
    except ValueError:
        return given


def words_of(argv: Sequence[str]) -> tuple[list[str], dict[str, typing.Any]]:
    """Split a command line into the words that belong to no flag and the texts of the flags by
    name. The text is the next word, or what follows the sign in --steps=30. A flag that has no text
    gets True. --max-new-tokens is the flag max_new_tokens."""
    words: list[str] = []
    texts: dict[str, typing.Any] = {}
    rest = list(argv)
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
    return word == "-h" or re.match("--[^ =]+(=|$)", word) is not None


def unknown_argument(word: str, flags: Collection[str], hint: str = "--help lists the flags"
                     ) -> UserError:
    """The error of a word that is no flag of the program, with the nearest one."""
    near = difflib.get_close_matches(word, [f"--{name}" for name in flags], 1, cutoff=0.75)
    question = f", did you mean {near[0]}?" if near else ""
    return UserError(f"unknown argument {word:.200}{question} ({hint})")


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
        print_text(help_text(usage, about, flags, places))
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


def print_text(text: str) -> None:
    """Print a text that may be read in part, as in `--help | head`: that is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest goes nowhere


INDENT = 24  # of the explanations in a help text


def help_text(usage: str, about: str | None, flags: Mapping[str, Flag],
              places: Mapping[str, str] = {}, end: str = "") -> str:
    """The text of --help: the words and the flags of a program, each below the heading of its
    topic."""
    topics: dict[str, list[tuple[str, str]]] = {"words": list(places.items()), "flags": []}
    for name, flag in flags.items():
        kind = flag.metavar or flag.type.__name__.upper()
        head = f"--{name} [{kind}]" if flag.type is bool else f"--{name} {kind}"
        topics.setdefault(flag.topic or "flags", []).append((head, flag.help()))
    lines = [f"usage: {usage}"]
    if about:
        lines += ["", about.strip()]
    for topic, entries in topics.items():
        if entries:
            lines += ["", f"{topic}:"]
        for head, text in entries:
            lines += explained(f"  {head}", text)
    return "\n".join([*lines, "", end] if end else lines)


def explained(head: str, text: str) -> list[str]:
    """The lines of a flag in a help text. A long head has a line of its own."""
    width = shutil.get_terminal_size().columns - 2
    lines = textwrap.wrap(text, width, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)
    if len(head) > INDENT - 2 or not lines:
        return [head, *lines]
    return [head.ljust(INDENT) + lines[0].lstrip(), *lines[1:]]
