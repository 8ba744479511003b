"""A flag: its default, its help, and which values it may have. Of a keyword of a method, its type
has the limits:

    def my_idea(rollouts, *, strength: Positive = 1.0)          # limits from the list below
    def my_idea(rollouts, *, parts: Annotated[int, Range(least=2)] = 4)

Command lines are read by lab/harness/flags.py.
"""
import math
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

# a test of the values of all flags, and the words that a message says if it is not passed
Requirement = tuple[Callable[[typing.Any], bool], str]


@dataclass(frozen=True)
class Flag:
    """The default and the help, as in the book, and limits."""
    default: typing.Any
    text: str = ""
    least: float = 0          # these three are limits of a number
    above: float = -math.inf
    most: float = 10 ** 9     # a larger number is a mistake
    choices: Collection[str] = ()
    kind: type | None = None  # the type of the values, if it is not the type of the default
    requires: Requirement | None = None  # when it has an effect; otherwise it has its default

    @property
    def type(self) -> type:
        return self.kind or (str if self.default is None else type(self.default))

    def help(self) -> str:
        """The flag in the help: what it means (one | another; default one; needs --other above 0)
        """
        facts = [" | ".join(self.choices)] if 0 < len(self.choices) < 10 else []
        if self.default is not None and self.default is not False and self.default != "":
            facts.append(f"default {self.default}")
        if self.requires:
            facts.append(f"needs {self.requires[1]}")
        return f"{self.text} ({'; '.join(facts)})" if facts else self.text


Range = partial(Flag, None)  # the limits of a keyword parameter, whose signature has the default
Count = typing.Annotated[int, Range(least=1)]
CountOrNone = typing.Annotated[int, Range()]
NotNegative = typing.Annotated[float, Range(least=0)]
Positive = typing.Annotated[float, Range(above=0)]
Share = typing.Annotated[float, Range(least=0, most=1)]
LearningRate = typing.Annotated[float, Range(above=0, most=10)]
