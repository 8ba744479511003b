"""The parser with which all programs read their command lines."""
import argparse
import difflib
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace

from engine.errors import UserError
from harness.flags import Flag, check_value, check_values
from harness.record import Json


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
        """As argparse does; but --flag=-- is refused, because argparse would give the flag an empty
        list for a value."""
        for argument in args or []:
            if re.fullmatch("--[^=]+=--", argument):
                self.error(f"{argument}: -- is no value of a flag")
        return super().parse_known_args(args, namespace)

    def print_help(self, file: typing.Any = None) -> None:
        print_text(self.format_help())

    def read(self, argv: list[str], about_unknown: Callable[[str], str] = lambda _: "") -> Json:
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

    def values(self, found: argparse.Namespace) -> Json:
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


def values_of(text: str, name: str, flag: Flag) -> list[typing.Any]:
    """The values of a text that holds several, separated by commas, each checked as a value of
    --`name`."""
    values = []
    for part in text.split(","):
        value = value_of(part, flag)
        check_value(name, value, flag)
        values.append(value)
    return values


def with_defaults(given: Json, flags: Mapping[str, Flag]) -> SimpleNamespace:
    """The values of all flags, checked. One that was typed and has no effect is refused."""
    values = {name: flag.default for name, flag in flags.items()} | given
    check_values(values, flags)
    for name in given.keys() & flags.keys():
        needed = flags[name].requires
        if needed and given[name] != flags[name].default and not flags[name].has_effect(values):
            raise UserError(f"--{name} has no effect without {needed[1]}")
    return SimpleNamespace(**values)
