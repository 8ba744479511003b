"""What a method declares of a keyword that becomes a flag: its type, which values are allowed, and
when it has an effect.

    def my_idea(rollouts, *, strength: Positive = 1.0)          # limits from the list below
    def my_idea(rollouts, *, parts: Annotated[int, Range(least=2)] = 4)

Command lines are read by lab/harness/flags.py.
"""
import math
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

# a test of the values of all flags, and the words that a message says if it is not passed
Requirement = tuple[Callable[[typing.Any], bool], str]
Values = Mapping[str, typing.Any]                       # the value of each flag, by its name


@dataclass(frozen=True)
class Flag:
    """A flag. The defaults of these fields suit an ordinary setting: one that tells runs
    apart."""
    default: typing.Any
    text: str = ""

    # which values are allowed
    least: float = 0         # these three are limits of a number
    above: float = -math.inf
    most: float = 10 ** 9    # a larger number is a mistake
    choices: Collection[str] = ()
    kind: type | None = None  # the type of the values, if it is not the type of the default

    # when it has an effect, and which value it has if not; both are functions of all flags' values
    requires: Requirement | None = None                         # None: it always has an effect
    otherwise: Callable[[typing.Any], object] | None = None     # None: the value is the default

    @property
    def type(self) -> type:
        if self.kind:
            return self.kind
        return str if self.default is None else type(self.default)

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


Range = partial(Flag, None)  # the limits of a keyword parameter, whose signature has the default
Count = typing.Annotated[int, Range(least=1)]
CountOrNone = typing.Annotated[int, Range()]
NotNegative = typing.Annotated[float, Range(least=0)]
Positive = typing.Annotated[float, Range(above=0)]
Share = typing.Annotated[float, Range(least=0, most=1)]
LearningRate = typing.Annotated[float, Range(above=0, most=10)]
