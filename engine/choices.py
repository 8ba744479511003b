"""The choices that people add to, --mitigation and --advantage; and the check of what they return.

A function with a decorator becomes a choice, its keyword-only parameters become flags, and its
docstring the help. Both lists take two forms: a function of the batch, or a class, made once a run,
for a choice that keeps a state or samples more:

    def my_idea(rollouts: Rollouts, *, strength: Positive = 1.0) -> Tensor   # (B, T)

    class my_idea:
        def __init__(self, policy: Policy, *, strength: Positive = 1.0)
        def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor     # (B, T)

        def state_dict(self) -> tensors by name     # these two if it has a state
        def load_state_dict(self, tensors)
        metrics: dict                               # if it has numbers for metrics.jsonl
"""
import importlib
from collections import UserDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from reprlib import repr as brief
from typing import Any, Protocol, TypeVar, overload

from torch import Tensor

from engine.errors import BadCredit, UserError, place_of
from engine.rollouts import Rollouts

LARGEST_CREDIT = 1e12  # the squares of its gradient, in float32, are still finite

Choice = Callable[..., Tensor] | type  # a function or a class below a decorator
Metrics = dict[str, Any]  # numbers for a line of metrics.jsonl, by name
Same = TypeVar("Same", bound=Choice)


class Method(Protocol):
    """What a choice is made into for a run, its flags given. The policy is None where none is
    loaded, as in a preview."""
    def __call__(self, rollouts: Rollouts, policy: object, /) -> Tensor: ...


class Choices(UserDict[str, str | Choice]):
    """Functions and classes by name, or until one is asked for the name of its module: importing
    that runs the decorator, which puts it there."""

    def __init__(self, choices: Mapping[str, str | Choice] = {}):
        self.clashes: list[tuple[str, str | Choice, str | Choice]] = []  # a name and its two owners
        super().__init__(choices)

    def __getitem__(self, name: str) -> Choice:
        choice = self.data[name]
        if not isinstance(choice, str):
            return choice
        importlib.import_module(choice)
        return self[name]

    def __setitem__(self, name: str, choice: str | Choice) -> None:
        """A name is taken once: a second `def none` would take plain GRPO's place in silence. It is
        refused when the flags are read, as other mistakes are. But a notebook's cell may be run
        again."""
        known, module = self.data.get(name), module_of(choice)
        if known not in (None, module) and not module_of(known) == module == "__main__":
            self.clashes.append((name, known, choice))
        else:
            self.data[name] = choice


def module_of(choice: str | Choice) -> str:
    return choice if isinstance(choice, str) else choice.__module__


MITIGATIONS, ADVANTAGES = Choices(), Choices()
LOSSES = Choices()       # but the policy loss: its gradient with an advantage of their own
NEVER_RESCALED: set[str] = set()  # weightings whose scale is part of what they are
WHOLE_ANSWERS: set[str] = set()   # advantages that give every token of an answer the same number


@overload
def mitigation(function: Same) -> Same: ...
@overload
def mitigation(*, rescaled: bool) -> Callable[[Same], Same]: ...
def mitigation(function: Choice | None = None, *, rescaled: bool = True) -> object:
    """Make it a choice of --mitigation: weights (B, T), not negative."""
    return add_to(MITIGATIONS, function, NEVER_RESCALED, not rescaled)


@overload
def advantage(function: Same) -> Same: ...
@overload
def advantage(*, whole_answers: bool) -> Callable[[Same], Same]: ...
def advantage(function: Choice | None = None, *, whole_answers: bool = False) -> object:
    """Make it a choice of --advantage: credit (B, T), with a sign."""
    return add_to(ADVANTAGES, function, WHOLE_ANSWERS, whole_answers)


def add_to(choices: Choices, function: Choice | None, marked: set[str], is_marked: bool) -> object:
    """Without a function, as in @mitigation(rescaled=False), a decorator."""
    if function is None:
        return lambda function: add_to(choices, function, marked, is_marked)
    choices[function.__name__] = function
    (marked.add if is_marked else marked.discard)(function.__name__)  # a cell may be run again
    return function


def checked_credit(chosen: Method, whose: str, rollouts: Rollouts, policy: object = None,
                   is_weight: bool = False) -> Tensor:
    """Credit (B, T) in float32, without gradient, finite, and 0 beyond the mask.

    `whose` is "the weighting my_idea", say. It gets a copy of the batch, so what it changes in
    place has no effect elsewhere. It may return a single row or column: (B, 1) is a number for
    each answer, while (B,) would spread over T.
    """
    shared, mask = (rollouts.generator, rollouts.forward), rollouts.mask
    values = chosen(deepcopy(rollouts, {id(part): part for part in shared}), policy)
    if not fits_frame(values, mask):
        about = " ".join(brief(values).split())[:200]
        if isinstance(values, Tensor):
            about = f"a tensor {tuple(values.shape)} of {values.dtype} on {values.device}"
        raise UserError(f"{whose} ({place_of(chosen)}) should return a tensor (B, T) = "
                        f"{tuple(mask.shape)} of real numbers on {mask.device}, got {about}")
    frame = values.detach().float().expand(mask.shape).masked_fill(~mask, 0.0)
    too_large = f"{whose} is not finite, or beyond {LARGEST_CREDIT:g},"
    refuse_tokens(~(frame.abs() <= LARGEST_CREDIT), too_large, mask, place_of(chosen), BadCredit)
    if is_weight:
        refuse_tokens(frame < 0, f"{whose} is negative", mask, f"{place_of(chosen)}; credit with a "
                      "sign is an advantage: see docs/weightings.md")
    return frame


def fits_frame(values: Tensor, mask: Tensor) -> bool:
    if not isinstance(values, Tensor) or values.dim() != 2 or values.is_complex():
        return False
    (B, T), (rows, columns) = mask.shape, values.shape
    return rows in (1, B) and columns in (1, T) and values.device == mask.device


def refuse_tokens(wrong: Tensor, what: str, mask: Tensor, place: str,
                  kind: type[UserError] = UserError) -> None:
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        raise kind(f"{what} at {int(wrong.sum())} of {int(mask.sum())} tokens, first at answer "
                   f"{row}, token {t} ({place})")


def metrics_of(chosen: object) -> Metrics:
    """The numbers for metrics.jsonl that a choice has, as plain numbers."""
    return {name: value.item() if hasattr(value, "item") else value  # of torch or numpy
            for name, value in getattr(chosen, "metrics", {}).items()}
