"""What is said about flags: the text of --help, about all flags or one method (--help NAME); and
what an unknown flag may have meant."""
import inspect
import textwrap

from lab.engine.methods import METHODS, Choices
from lab.engine.errors import UserError
from lab.harness.flags import LARGEST, TYPE_NAMES, Flag, Values, flags_of, help_text

# what the columns of a step's line are, which a run prints (lab/harness/step_lines.py)
ABOUT_STEPS = (
    "A run prints a line for each step. It has the mean reward of the step's answers, their "
    "success (the share that is right), the mean score of their format, their mean length in "
    "tokens, the share that finished before the limit, the mean entropy of the policy in nats, the "
    "norm of the gradient before clipping, the tokens sampled in a second, and an estimate of the "
    "time left.")
ABOUT_DEFAULTS = (
    "The defaults above are those for this model. They come from its folder's recipe.json and from "
    "--config, where there are such files.")


def help_about(topic: str, flags: dict[str, Flag], methods: dict[str, Choices],
               usage: str) -> str:
    """The text of --help, which is that of --help all, or of --help NAME, which is about a method.
    """
    if topic in ("", "all"):
        about = "Train a language model with GRPO, and record each token's advantage and weight."
        return help_text(usage, about, flags, end=about_methods(methods))
    return about_method(topic, methods)


def about_methods(methods: dict[str, Choices]) -> str:
    """The end of the help: each weighting and advantage, its flags, and what it does."""
    lines = []
    for axis, choices in methods.items():
        lines.append(f"choices of --{axis}, each with its own flags (--help NAME says more of "
                     "one):")
        for name in choices:
            flags = "".join(f" --{flag}" for flag in flags_of(choices[name]))
            text = " ".join((inspect.getdoc(choices[name]) or "").split("\n\n")[0].split())
            lines.append(textwrap.fill(f"{name}{flags}: {text}", 99, initial_indent="  ",
                                       subsequent_indent=" " * 6))
    lines += [textwrap.fill(ABOUT_STEPS, 99), textwrap.fill(ABOUT_DEFAULTS, 99)]
    return "\n".join(lines)


def about_method(name: str, methods: dict[str, Choices]) -> str:
    for axis, choices in methods.items():
        if name in choices:
            lines = [f"--{axis} {name}", "", inspect.getdoc(choices[name]) or "", ""]
            for flag, known in flags_of(choices[name]).items():
                lines.append(textwrap.fill(f"--{flag} {about_flag(known)}", 99,
                                           initial_indent="  ", subsequent_indent=" " * 6))
            return "\n".join(lines)
    raise UserError(f"--help {name}: there is no method of this name. --help all lists "
                    "the methods")


def about_flag(flag: Flag) -> str:
    """A method's flag: (a number, above 0; default 2.0): what it means"""
    kind = " or ".join(flag.choices) or TYPE_NAMES[flag.type]
    limits = flag.limits(most=LARGEST) if flag.type in (int, float) else ""
    facts = [f"{kind}, {limits}" if limits else kind, f"default {flag.default}"]
    if flag.requires:
        facts.append(f"needs {flag.requires[1]}")
    meaning = f": {flag.text}" if flag.text else ""
    return f"({'; '.join(facts)}){meaning}"


def about_unknown(name: str, chosen: Values) -> str:
    """A sentence about a flag that belongs to another method; an empty one if it belongs to none.
    """
    for axis, choices in METHODS.items():
        found = [owner for owner in choices if name in flags_of(choices[owner])]
        if found:
            return f"--{name} belongs to {' and '.join(found)}, but --{axis} is {chosen[axis]}"
    return ""
