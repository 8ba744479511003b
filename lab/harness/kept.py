"""A method is asked twice about a batch, and refused if it gives two answers.

A function may keep something from call to call, in its globals, its closure and its attributes. A
resumed run begins with these as they are when the files are imported. So a function is also asked
without what it has kept: if that matters, it gives other numbers after a resume.
"""
import inspect
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from lab.engine.errors import UserError, location_of
from lab.engine.methods import Method, refuse_other_values
from lab.engine.model import Qwen2
from lab.engine.rollouts import Rollouts
from lab.harness.build import Parts, make_advantage, make_weighting

Place = tuple[MutableMapping[str, Any], str]  # where a value stands, and its name there


class AskedTwice:
    """The advantage and the weighting of a run, of which each is asked again."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.kept = {axis: Kept(inspect.unwrap(method)) for axis, method in parts.methods.items()
                     if inspect.isfunction(method)}

    @contextmanager
    def asked(self, axis: str, rollouts: Rollouts) -> Iterator[None]:
        """Ask a function before its values are computed, and an object after that, because only
        then it says whether it samples. Refuse a method that changes the model."""
        policy, before = self.parts.policy, sum_of_parameters(self.parts.policy.model)
        if axis in self.kept:
            self.ask_again(axis, rollouts)
        yield
        if axis not in self.kept:
            self.ask_again(axis, rollouts)
        if sum_of_parameters(policy.model) != before:
            raise UserError(f"--{axis} {getattr(policy.settings, axis)} "
                            f"({location_of(self.parts.methods[axis])}) changes the model, which "
                            "the update alone should do")

    def ask_again(self, axis: str, rollouts: Rollouts) -> None:
        """Ask the method again, and of a function also what it is in a run that is resumed now."""
        policy, chosen = self.parts.policy, self.parts.methods[axis]
        make = {"advantage": make_advantage, "mitigation": make_weighting}[axis]

        def another() -> Method:
            return chosen if policy.model.is_large else make(policy.settings, policy)

        def forgetting() -> Method:
            return self.kept[axis].forgetting(chosen)

        for make_another in (another, forgetting) if axis in self.kept else (another,):
            refuse_other_values(chosen, make_another, f"--{axis} {getattr(policy.settings, axis)}",
                                rollouts, policy)


def sum_of_parameters(model: Qwen2) -> float:
    return sum(float(p.detach().sum(dtype=torch.float64)) for p in model.parameters())


class Cells(dict[str, CellType]):
    """The closure of a function, with the value of a variable by its name."""
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        super().__getitem__(name).cell_contents = value


class Kept:
    """Copies of what a function, and those of its module that it calls, can keep: made at once, so
    make it before the function is called."""

    def __init__(self, function: FunctionType):
        self.first: list[tuple[Place, Any]] = []
        for place in places_of(function, set()):
            try:
                self.first.append((place, deepcopy(place[0][place[1]])))
            except (TypeError, ValueError, RuntimeError):  # a module, an open file, a live tensor
                continue

    @contextmanager
    def as_at_first(self) -> Iterator[None]:
        """Put copies of the first values in place, and afterwards what was there."""
        now = [(place, place[0][place[1]]) for place, _ in self.first]
        for (where, name), value in self.first:
            where[name] = deepcopy(value)
        try:
            yield
        finally:
            for (where, name), value in now:
                where[name] = value

    def forgetting(self, method: Method) -> Method:
        """The method of this function, as it is in a run that is resumed now."""
        @wraps(method)
        def call(*given: Any) -> Any:
            with self.as_at_first():
                return method(*given)
        return call


def places_of(function: FunctionType, seen: set[int]) -> Iterator[Place]:
    """Where the values stand that a function reads: attributes, defaults, closure, globals."""
    if id(function) in seen:
        return
    seen.add(id(function))
    cells = Cells(zip(function.__code__.co_freevars, function.__closure__ or ()))
    parts: list[tuple[MutableMapping[str, Any], set[str]]] = [
        (function.__dict__, {*function.__dict__} - {"__wrapped__"}),
        (function.__kwdefaults__ or {}, {*(function.__kwdefaults__ or {})}),
        (cells, {name for name, cell in cells.items() if is_filled(cell)}),
        (function.__globals__, names_in(function.__code__) & function.__globals__.keys())]
    for where, names in parts:
        for name in sorted(names):
            if not isinstance(where[name], FunctionType):
                yield where, name
            elif where[name].__globals__ is function.__globals__:
                yield from places_of(where[name], seen)


def names_in(code: CodeType) -> set[str]:
    """The names of globals in a function, also in the functions inside it."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names}.union(*map(names_in, inner))


def is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
