"""What --help says: what a first day needs; --help all every flag; --help gae a method's own."""
import inspect
import textwrap
from argparse import SUPPRESS
from dataclasses import replace

from engine.choices import Choice
from engine.errors import UserError
from harness.flags import Flag, describe, shortened
from harness.settings import (EVALUATED, METHODS, OPTIONS, POLICY, SAMPLED, Settings,
                              flags_of_one)

FIRST_DAY = (  # what --help lists
    "model", "device", "task", "mitigation", "rescale", "advantage", "loss", "kl", "steps",
    "questions", "answers", "max_new_tokens", "temperature", "learning_rate", "seed", "eval_every",
    "eval_tasks", "checkpoint_every", "out")
ABOUT_HELP = """\n\n
--help METHOD describes one of them and its flags; --help all lists every flag and every method."""
ABOUT_FILES = """\
Defaults are those of this command: a model folder's recipe.json (models/tiny has one) and --config
set their own. Flags override them, and config.json in the run folder shows what was used. Hyphens
work as well as underscores."""


def about_method(name: str) -> str:
    for choices in METHODS.values():
        if name in choices:
            return describe_choice(name, choices[name])
    raise UserError(f"--help {shortened(name)}: there is no method of this name (see --help)")


def text_of_option(is_all: bool, task: object, name: str, flag: Flag) -> str:
    """With the condition under which a setting has an effect."""
    is_told = name in FIRST_DAY if name in OPTIONS else task != Settings.task
    if not (is_all or is_told):
        return SUPPRESS
    if name in METHODS:  # their choices are listed below
        flag = replace(flag, choices=())
    if not flag.requires or flag.requires in (POLICY, EVALUATED, SAMPLED):
        return describe(flag)
    return f"{describe(flag)}; needs {flag.requires[1].partition(' (')[0]}"


def epilog(is_all: bool) -> str:
    methods = "\n\n".join(map(describe_choices if is_all else name_choices, METHODS))
    return f"{methods}{'' if is_all else ABOUT_HELP}\n\n{ABOUT_FILES}"


def describe_choices(axis: str) -> str:
    choices = [describe_choice(name, METHODS[axis][name]) for name in METHODS[axis]]
    return "\n".join([f"choices of --{axis}, each with its own flags:", *choices])


def name_choices(axis: str) -> str:
    return textwrap.fill(f"choices of --{axis}: {', '.join(METHODS[axis])}", 95,
                         subsequent_indent="  ", break_long_words=False)


def describe_choice(name: str, function: Choice) -> str:
    paragraph = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
    lines = textwrap.wrap(paragraph, 84) or ["(no docstring)"]
    for flag_name, flag in flags_of_one(function).items():
        text = f" {flag.text}" if flag.text else ""
        limits = "".join(f", {words} {limit:g}" for words, limit, _ in flag.limits())
        lines.append(f"  --{flag_name}{text} (default {flag.default}{limits})")
    return "\n".join(f"  {name if row == 0 else '':29s} {line}" for row, line in enumerate(lines))
