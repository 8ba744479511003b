"""The two lists of choices that people add to: --mitigation and --advantage.

A function with a decorator becomes a choice, its keyword-only parameters become flags, and its
docstring the help. Both lists take two forms: a function of the batch, or a class, made once a run,
for a choice that keeps a state or samples more:

    def my_idea(rollouts, *, strength: Positive = 1.0) -> (B, T)

    class my_idea:
        def __init__(self, policy, *, strength: Positive = 1.0)
        def __call__(self, rollouts, policy) -> (B, T)

        def state_dict(self) -> tensors by name     # these two if it has a state
        def load_state_dict(self, tensors)
        metrics: dict                               # if it has numbers for metrics.jsonl
"""
import importlib
from collections import UserDict

from engine.errors import UserError


class Choices(UserDict):
    """Functions and classes by name. In the place of one may stand the name of its module, until it
    is asked for: importing that runs the decorator, which puts it there."""

    def __getitem__(self, name: str):
        if isinstance(self.data[name], str):
            importlib.import_module(self.data[name])
        return self.data[name]

    def __setitem__(self, name: str, choice) -> None:
        """A name belongs to one module. There it may be written anew, as in a notebook's cell."""
        known = self.data.get(name, choice)
        where = {one if isinstance(one, str) else one.__module__ for one in (known, choice)}
        if len(where) > 1:
            raise UserError(f"{name} of {' and '.join(sorted(where))}: one needs another name")
        self.data[name] = choice

    def loaded(self) -> dict:
        return {name: choice for name, choice in self.data.items() if not isinstance(choice, str)}


MITIGATIONS, ADVANTAGES = Choices(), Choices()
LOSSES = Choices()       # but the policy loss: its gradient with an advantage of their own
NEVER_RESCALED = set()   # weightings whose scale is part of what they are
WHOLE_ANSWERS = set()    # advantages that give every token of an answer the same number


def mitigation(function=None, *, rescaled: bool = True):
    """Make it a choice of --mitigation: weights (B, T), not negative."""
    return add_to(MITIGATIONS, function, set() if rescaled else NEVER_RESCALED)


def advantage(function=None, *, whole_answers: bool = False):
    """Make it a choice of --advantage: credit (B, T), with a sign."""
    return add_to(ADVANTAGES, function, WHOLE_ANSWERS if whole_answers else set())


def add_to(choices: Choices, function, marked: set):
    """Without a function, as in @mitigation(rescaled=False), a decorator."""
    if function is None:
        return lambda function: add_to(choices, function, marked)
    choices[function.__name__] = function
    marked.add(function.__name__)
    return function
