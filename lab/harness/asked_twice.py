"""A method is asked twice about a batch, and refused if it gives two answers: a resumed run would
not give the numbers of one that was never stopped.

What a function keeps from step to step, and uses in the next one alone, is not noticed so.
"""
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lab.engine.errors import UserError, location_of
from lab.engine.methods import Method, refuse_other_values
from lab.engine.model import Qwen2
from lab.engine.rollouts import Rollouts
from lab.harness.build import Parts, make_advantage, make_weighting


class AskedTwice:
    """The advantage and the weighting of a run, of which each is asked again."""

    def __init__(self, parts: Parts):
        self.parts = parts

    @contextmanager
    def asked(self, axis: str, rollouts: Rollouts) -> Iterator[None]:
        """Ask a function before its values are computed, and an object after that, because only
        then it says whether it samples. Refuse a method that changes the model."""
        policy, before = self.parts.policy, sum_of_parameters(self.parts.policy.model)
        is_function = inspect.isfunction(self.parts.methods[axis])
        if is_function:
            self.ask_again(axis, rollouts)
        yield
        if not is_function:
            self.ask_again(axis, rollouts)
        if sum_of_parameters(policy.model) != before:
            raise UserError(f"--{axis} {getattr(policy.settings, axis)} "
                            f"({location_of(self.parts.methods[axis])}) changes the model, which "
                            "the update alone should do")

    def ask_again(self, axis: str, rollouts: Rollouts) -> None:
        policy, chosen = self.parts.policy, self.parts.methods[axis]
        make = {"advantage": make_advantage, "mitigation": make_weighting}[axis]

        def another() -> Method:
            return chosen if policy.model.is_large else make(policy.settings, policy)

        refuse_other_values(chosen, another, f"--{axis} {getattr(policy.settings, axis)}",
                            rollouts, policy)


def sum_of_parameters(model: Qwen2) -> float:
    return sum(float(p.detach().sum(dtype=torch.float64)) for p in model.parameters())
