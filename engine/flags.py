"""One mechanism for every flag of every program: its default, its range, its help, how it is read
and checked.

A flag stands in one of three places, and is a `Flag` in all of them:

    probes, benchmarks   FLAGS = {"answers": Flag(8, "answers in a group", least=2)}
    settings, tasks      answers: int = option(8, "answers in a group", least=2)
    weightings           def my_idea(tokens, *, strength: Positive = 1.0)
"""
import argparse
import dataclasses
import difflib
import inspect
import math
import sys
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

from engine.errors import UserError


@dataclass(frozen=True)
class Flag:
    default: object
    text: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Iterable[str] = ()
    kind: type | None = None     # the type of the default, where nothing else is said
    quick: object = None         # its value with --quick, where that differs
    topic: str = ""              # of the settings: under which heading of --help it stands
    only: tuple | None = None    # a test on the settings, and words for it: else it does nothing

    @property
    def type(self) -> type:
        return self.kind or (str if self.default is None else type(self.default))

    def limits(self) -> str:
        """", at least 0, at most 1" for the help text."""
        named = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return "".join(f", {words} {limit:g}" for words, limit in named if limit is not None)


@dataclass(frozen=True)
class Range:
    """The range of a parameter that is a flag, written as its type: `Annotated[float,
    Range(least=0)]`."""
    least: float | None = None
    above: float | None = None
    most: float | None = None


NotNegative = typing.Annotated[float, Range(least=0, most=1e6)]
Positive = typing.Annotated[float, Range(above=0, most=1e6)]
Share = typing.Annotated[float, Range(least=0, most=1)]
Percent = typing.Annotated[float, Range(least=0, most=100)]
Count = typing.Annotated[int, Range(least=1)]
CountOrNone = typing.Annotated[int, Range(least=0)]


def option(default, text: str, **more):
    """A dataclass field that is a flag."""
    return dataclasses.field(default=default, metadata={"flag": Flag(default, text, **more)})


def fields_as_flags(cls) -> dict[str, Flag]:
    """The flags of a dataclass whose fields are options."""
    flags = {}
    for f in dataclasses.fields(cls):
        if "flag" in f.metadata:
            flag = f.metadata["flag"]
            flags[f.name] = dataclasses.replace(flag, kind=flag.kind or plain_type(f.type))
    return flags


def plain_type(hint) -> type:
    """str of `str | None`, float of `Annotated[float, ...]`."""
    kinds = [kind for kind in typing.get_args(hint) if kind in (int, float, bool, str)]
    return kinds[0] if kinds else hint


def parameters_as_flags(function) -> dict[str, Flag]:
    """The flags of a weighting or an advantage: the keyword-only parameters of the function, or
    of a class's __init__."""
    is_class = inspect.isclass(function)
    signed = function.__init__ if is_class else function
    hints = typing.get_type_hints(signed, include_extras=True)
    flags, given = {}, 2 if is_class else 1  # (self, lab) or (tokens)
    for place, (name, parameter) in enumerate(inspect.signature(signed).parameters.items()):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and place >= given:
            raise UserError(f"the parameter {name} of {function.__name__} comes after tokens (a "
                            "class: after lab): write a * before it to make it a flag")
        if parameter.kind is parameter.KEYWORD_ONLY:
            hint = hints.get(name, type(parameter.default))
            flags[name] = parameter_as_flag(function, name, parameter, hint)
    return flags


def parameter_as_flag(function, name: str, parameter, hint) -> Flag:
    kind = getattr(hint, "__origin__", hint)
    if kind not in (int, float, bool, str) or parameter.default is parameter.empty:
        raise UserError(f"the parameter {name} of {function.__name__} needs a default, and a type "
                        "that is int, float, bool or str: it becomes a flag")
    extras = getattr(hint, "__metadata__", ())
    whole = [extra for extra in extras if isinstance(extra, Flag)]
    if whole:
        return dataclasses.replace(whole[0], default=parameter.default, kind=kind)
    ranges = [extra for extra in extras if isinstance(extra, Range)]
    limits = dataclasses.asdict(ranges[0]) if ranges else {}
    return Flag(parameter.default, kind=kind, **limits)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and never guesses what a shortened flag means."""

    def __init__(self, usage: str, description: str | None = None, **more):
        more = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False,
                "argument_default": argparse.SUPPRESS, **more}
        super().__init__(usage=usage, description=description, **more)

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")

    def read(self, argv: list[str], known: Iterable[str] = ()) -> dict:
        """The flags that were typed. --max-new-tokens is --max_new_tokens."""
        given, unknown = self.parse_known_args([underscores(argument) for argument in argv])
        if unknown:
            names = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], [*names, *known], 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"unknown argument {unknown[0]}{hint}")
        return vars(given)


def underscores(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def add_flag(parser, name: str, flag: Flag, help: str | None = None) -> None:
    """Add it to a parser or a group of one. A yes-or-no flag alone means yes."""
    kinds = {int: dict(type=int, metavar="N"), float: dict(type=float, metavar="X"),
             str: dict(type=str, metavar="TEXT"),
             bool: dict(type=yes_or_no, nargs="?", const=True, metavar="yes|no")}
    help = describe(flag) if help is None else help
    parser.add_argument(f"--{name}", help=help, **kinds[flag.type])


def describe(flag: Flag) -> str:
    """A flag's line in --help."""
    text = flag.text
    if flag.choices:
        text += ": " + " | ".join(flag.choices)
    if flag.default is not None and flag.default is not False:
        quick = "" if flag.quick is None else f", quick {flag.quick}"
        text += f" (default {flag.default}{quick})"
    return text.replace("%", "%%")  # argparse takes a single one for a placeholder


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true")


def add_flags(parser: Parser, flags: dict[str, Flag]) -> Parser:
    for name, flag in flags.items():
        add_flag(parser, name, flag)
    return parser


def with_defaults(given: dict, flags: dict[str, Flag], quick: bool = False) -> SimpleNamespace:
    """What was typed, checked, and the default of all else; with `quick` the quick value."""
    values = {name: flag.default for name, flag in flags.items()}
    if quick:
        values |= {name: flag.quick for name, flag in flags.items() if flag.quick is not None}
    values |= given
    for name, flag in flags.items():
        check_value(name, values[name], flag)
    return SimpleNamespace(**values)


def check_value(name: str, value, flag: Flag) -> None:
    if not has_type(value, flag):
        wanted = {int: "a number", float: "a number", bool: "a yes or no"}.get(flag.type, "a text")
        raise UserError(f"--{name} {value!r} should be {wanted}")
    if value is None:
        return
    if flag.choices and value not in flag.choices:
        near = ", ".join(nearest(value, flag.choices))
        raise UserError(f"--{name} {value} is not one of: {near}")
    if flag.least is not None and value < flag.least:
        raise UserError(f"--{name} {value} should be at least {flag.least}")
    if flag.above is not None and value <= flag.above:
        raise UserError(f"--{name} {value} should be above {flag.above}")
    if flag.most is not None and value > flag.most:
        raise UserError(f"--{name} {value} should be at most {flag.most}")


def nearest(value: str, choices: Iterable[str]) -> list[str]:
    """The choices, those that are spelled alike first."""
    def distance(choice):
        return -difflib.SequenceMatcher(None, choice, value).ratio()

    return sorted(choices, key=distance)


def has_type(value, flag: Flag) -> bool:
    if value is None:
        return flag.default is None
    if flag.type in (int, float):
        return type(value) in (int, flag.type) and math.isfinite(value)
    if flag.type is bool:
        return type(value) is bool
    return isinstance(value, str) and (value != "" or flag.default == "")


def run_as_program(name: str, main) -> None:
    """Run main(argv); print an error that the user can fix as one line."""
    sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output went away, which is no error
        sys.stderr.close()
    except OSError as error:  # of printing; files have their own
        sys.exit(f"{name}: {error}")
