"""The two lists of choices that people add to: --mitigation and --advantage.

A function with a decorator becomes a choice, its keyword-only parameters become flags, its
docstring the help. Both axes have the same form: a function of the batch, or, for one that keeps
a state or samples more, a class that is made once a run:

    def my_idea(tokens, *, strength: Positive = 1.0) -> (B, T)

    class my_idea:
        def __init__(self, lab, *, strength: Positive = 1.0)
        def __call__(self, tokens, lab) -> (B, T)
        def state_dict(self) -> tensors by name        # the two go together,
        def load_state_dict(self, tensors)             # for one that has a state
        metrics: dict                                  # for one that has something to tell
"""
import inspect

from engine.errors import UserError
from engine.flags import parameters_as_flags

MITIGATIONS, ADVANTAGES = {}, {}
NEVER_RESCALED = set()   # mitigations whose scale is part of what they are
WHOLE_ANSWERS = set()    # advantages that give every token of an answer the same number


def mitigation(function=None, *, rescaled: bool = True):
    """Make it a choice of --mitigation: weights (B, T), not negative."""
    if function is None:
        return lambda function: mitigation(function, rescaled=rescaled)
    MITIGATIONS[function.__name__] = function
    if not rescaled:
        NEVER_RESCALED.add(function.__name__)
    return function


def advantage(function=None, *, whole_answers: bool = False):
    """Make it a choice of --advantage: credit (B, T), with a sign."""
    if function is None:
        return lambda function: advantage(function, whole_answers=whole_answers)
    ADVANTAGES[function.__name__] = function
    if whole_answers:
        WHOLE_ANSWERS.add(function.__name__)
    return function


def flags_of(registry: dict) -> dict[str, list[str]]:
    """Which choices each of their flags belongs to."""
    owners = {}
    for name, function in registry.items():
        for flag in parameters_as_flags(function):
            owners.setdefault(flag, []).append(name)
    return owners


def make(function, flags: dict, lab):
    """The choice with its flags set, in the one form (tokens, lab) -> (B, T)."""
    if not inspect.isclass(function):
        return lambda tokens, lab: function(tokens, **flags)
    if hasattr(function, "state_dict") != hasattr(function, "load_state_dict"):
        raise UserError(f"{function.__name__} needs both state_dict and load_state_dict, or a "
                        "resumed run would forget its state")
    return function(lab, **flags)
