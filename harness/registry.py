"""Choices of --mitigation and --advantage (engine/choices.py): made once a run, their flags
collected, described."""
import inspect
import textwrap
from functools import wraps

from engine.choices import ADVANTAGES, LOSSES, MITIGATIONS, Choices
from engine.errors import UserError
from harness.flags import Flag, parameters_as_flags
from harness.own_code import own_code


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
    if s.loss in LOSSES:
        return make(LOSSES[s.loss], {}, policy)
    return make(ADVANTAGES[s.advantage], s.flags_for(ADVANTAGES[s.advantage]), policy)


def make_mitigation(s, policy):
    """The weighting that the settings choose: (rollouts, policy) -> (B, T)."""
    return make(MITIGATIONS[s.mitigation], s.flags_for(MITIGATIONS[s.mitigation]), policy)


def flags_of(choices: Choices | dict) -> dict[str, list[str]]:
    """The flags of a list's choices, and to which choices each belongs."""
    owners = {}
    for name, function in choices.items():
        for flag in parameters_as_flags(function):
            owners.setdefault(flag, []).append(name)
    return owners


def owners_of(flag: str) -> list[str]:
    """The mitigations and advantages that have this flag."""
    return [*flags_of(MITIGATIONS).get(flag, []), *flags_of(ADVANTAGES).get(flag, [])]


def choice_flags(mitigations=MITIGATIONS, advantages=ADVANTAGES) -> dict[str, Flag]:
    """The flags of all mitigations and advantages, or of these. Two that declare the same one share
    it."""
    flags = {}
    for function in (*mitigations.values(), *advantages.values()):
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
