"""The two lists of choices that people add to: --mitigation and --advantage.

A function with a decorator becomes a choice, its keyword-only parameters become flags, and its
docstring the help. Both lists take two forms: a function of the batch, or a class, made once a run,
for a choice that keeps a state or samples more:

    def my_idea(tokens, *, strength: Positive = 1.0) -> (B, T)

    class my_idea:
        def __init__(self, policy, *, strength: Positive = 1.0)
        def __call__(self, tokens, policy) -> (B, T)

        def state_dict(self) -> tensors by name     # these two if it has a state
        def load_state_dict(self, tensors)
        metrics: dict                               # if it has numbers for metrics.jsonl
"""
import inspect
import textwrap
from functools import wraps

from engine.errors import UserError
from harness.flags import Flag, parameters_as_flags
from harness.own_code import own_code

MITIGATIONS, ADVANTAGES = {}, {}
NEVER_RESCALED = set()   # mitigations whose scale is part of what they are
WHOLE_ANSWERS = set()    # advantages that give every token of an answer the same number


def mitigation(function=None, *, rescaled: bool = True):
    """Make it a choice of --mitigation: weights (B, T), not negative."""
    return add_to(MITIGATIONS, function, None if rescaled else NEVER_RESCALED)


def advantage(function=None, *, whole_answers: bool = False):
    """Make it a choice of --advantage: credit (B, T), with a sign."""
    return add_to(ADVANTAGES, function, WHOLE_ANSWERS if whole_answers else None)


def add_to(registry: dict, function, marked: set | None):
    """Without a function, as in @mitigation(rescaled=False), a decorator."""
    if function is None:
        return lambda function: add_to(registry, function, marked)
    registry[function.__name__] = function
    if marked is not None:
        marked.add(function.__name__)
    return function


def make(function, values: dict, policy):
    """Bring a choice with the values of its flags into the one form (tokens, policy) -> (B, T)."""
    if not inspect.isclass(function):
        return wraps(function)(lambda tokens, policy: function(tokens, **values))
    if hasattr(function, "state_dict") != hasattr(function, "load_state_dict"):
        raise UserError(f"{function.__name__} needs both state_dict and load_state_dict, or a "
                        "resumed run would forget its state")
    with own_code(function.__name__, function):
        return function(policy, **values)


def make_advantage(s, policy):
    """The advantage that the settings choose: (rollouts, policy) -> (B, T)."""
    return make(ADVANTAGES[s.advantage], s.flags_for(ADVANTAGES[s.advantage]), policy)


def make_mitigation(s, policy):
    """The weighting that the settings choose: (rollouts, policy) -> (B, T)."""
    return make(MITIGATIONS[s.mitigation], s.flags_for(MITIGATIONS[s.mitigation]), policy)


def flags_of(registry: dict) -> dict[str, list[str]]:
    """The flags of a list's choices, and to which choices each belongs."""
    owners = {}
    for name, function in registry.items():
        for flag in parameters_as_flags(function):
            owners.setdefault(flag, []).append(name)
    return owners


def owners_of(flag: str) -> list[str]:
    """The mitigations and advantages that have this flag."""
    return [*flags_of(MITIGATIONS).get(flag, []), *flags_of(ADVANTAGES).get(flag, [])]


def choice_flags() -> dict[str, Flag]:
    """The flags of all mitigations and advantages. Two that declare the same one share it."""
    flags = {}
    for function in (*MITIGATIONS.values(), *ADVANTAGES.values()):
        for name, flag in parameters_as_flags(function).items():
            if flags.setdefault(name, flag).type is not flag.type:
                raise UserError(f"the parameter {name} of {' and '.join(owners_of(name))} should "
                                "have the same type: it is one flag")
    return flags


def describe_choices() -> str:
    """The choices of both lists with their flags, for --help."""
    mitigations, advantages = ("\n".join(describe_choice(*choice) for choice in registry.items())
                               for registry in (MITIGATIONS, ADVANTAGES))
    return (f"choices of --mitigation, each with its own flags:\n{mitigations}\n\n"
            f"choices of --advantage:\n{advantages}")


def describe_choice(name: str, function) -> str:
    """The first paragraph of its docstring, and a line for each of its flags."""
    paragraph = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
    lines = textwrap.wrap(paragraph, 84) or ["(no docstring)"]
    for flag_name, flag in parameters_as_flags(function).items():
        text = f" {flag.text}" if flag.text else ""
        limits = "".join(f", {words} {limit:g}" for words, limit, _ in flag.limits())
        lines.append(f"  --{flag_name}{text} (default {flag.default}{limits})")
    return "\n".join(f"  {name if row == 0 else '':29s} {line}" for row, line in enumerate(lines))
