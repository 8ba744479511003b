"""Every command line of the pages, of docstrings and of messages is one that its program takes.
`python train.py` has the flags of the book alone, and `python -m lab train` has all."""
import importlib
import re
import shlex

import pytest

import mitigations

from conftest import ROOT, project_files
from examples import dpo
from lab.__main__ import MODULES
from lab.engine.methods import METHODS
from lab.formula.__main__ import parser
from lab.harness.flags import check_value, flags_of, words_of
from lab.harness.settings import CONTINUE, make_settings
from lab.trl import exact_trl
from run import CHANGEABLE, read_settings
from small import put_in

FILES = [path for pattern in ("**/*.md", "**/*.py", ".github/workflows/*.yml")
         for path in project_files(pattern) if "tests" not in path.relative_to(ROOT).parts]
# a command ends at a comma, a comment, a pipe, the end of the code, or two blanks
COMMAND = re.compile(r"python (?=train\.py\b|examples/\w+\.py\b|-m lab(?: [a-z]|\.formula ))"
                     r"(?:[^`\s\"|>#,]|,(?! )| \"[^\"\n]+\"| (?! ))+")
STANDS_FOR = {  # a reader's own file, folder or number
    "my_task": "examples.own_reward", "divide": "examples.own_reward", "N": "1", "K": "1",
    "$seed": "0", "FOLDER": "models/tiny", "models/warm": "models/tiny",
    "models/Qwen2.5-Coder-0.5B-Instruct": "models/tiny"}


def commands_of(text):
    """The commands of a file that have a flag. One may go on in the next line: after a backslash,
    between two words of a text, or in the next string of a message."""
    text = re.sub(r"\s*\\+\n\s*", " ", text)
    text = re.sub(r"`python [^`]*`", lambda found: " ".join(found[0].split()), text)
    text = re.sub(r" \"\n\s*f?\"(?=--|\w+ --|[A-Z]{4})", " ", text)
    found = [command[0].strip(" .)'") for command in COMMAND.finditer(text)]
    return [command for command in found if " --" in command and "{" not in command]


FOUND = sorted({(str(path.relative_to(ROOT)), command) for path in FILES
                for command in commands_of(path.read_text(encoding="utf-8"))})


def test_commands_are_found():
    assert len(FOUND) > 90


@pytest.mark.parametrize("page, command", FOUND)
def test_every_command_line_is_taken_by_its_program(page, command, with_my_idea):
    take(command.removeprefix("python "))


@pytest.fixture
def with_my_idea(monkeypatch):
    """README's weighting is a choice."""
    def my_idea(rollouts, *, strength: float = 1.0):
        return rollouts

    put_in(monkeypatch, my_idea, "my_idea")
    monkeypatch.setitem(mitigations.MITIGATIONS, "my_idea", my_idea)


def take(command):
    """End with an error unless the program has these flags, and they may have these values. Words
    without a flag may be the rest of a sentence."""
    words = shlex.split(re.sub(r"[\[\]]|\.\.\.", "", command))
    program, rest = (words[2], words[3:]) if words[1] == "lab" else (words[0], words[1:])
    if words[1] == "lab.formula":
        parser().parse_args(words[2:])
        return
    rest = [STANDS_FOR.get(word, word) for word in rest]
    places, flags = words_of(rest)
    flags = {name: value for name, value in flags.items() if value != "NAME"}
    if program in ("train.py", "examples/dpo.py"):
        take_by_book(read_settings if program == "train.py" else dpo.settings_of, flags)
    elif program == "train":
        take_by_run(flags)
    elif program.startswith("examples/"):
        example = importlib.import_module(program.removesuffix(".py").replace("/", "."))
        take_by_run(own_checked(flags, example.FLAGS))
    else:
        take_by_tool(program, places, flags)


def take_by_book(settings_of, flags):
    if "help" in flags:
        assert flags == {"help": True}, "--help NAME is one of the lab"
    elif "resume" in flags:
        assert flags.keys() <= {"resume", *CHANGEABLE}
    else:
        settings_of([word for name, value in flags.items()
                     for word in (f"--{name}", value) if word is not True])


def take_by_run(flags):
    """By the lab's reader of settings; those of a run that is continued or repeated are not there.
    """
    if "help" not in flags:
        is_there = (ROOT / str(flags.get("config"))).is_file()
        left_out = {*CONTINUE} - ({"config"} if is_there else set())
        make_settings({name: value for name, value in flags.items() if name not in left_out})


def own_checked(flags, own):
    """The flags that the program does not have, after its own are checked."""
    for name in flags.keys() & own.keys():
        check_value(name, flags[name], own[name])
    return {name: value for name, value in flags.items() if name not in own}


def take_by_tool(name, places, flags):
    if "trainer" in flags:
        assert own_checked(flags, exact_trl.FLAGS).keys() <= exact_trl.JUDGED | {"help"}
        return
    others = own_checked(flags, vars(importlib.import_module(MODULES[name])).get("FLAGS", {}))
    methods = [(axis, place) for axis, choices in METHODS.items() for place in places
               if place in choices]
    if name in ("idea", "try"):
        take_by_run(others | dict(methods if name == "idea" else []))
        return
    of_methods = {flag for axis, method in methods for flag in flags_of(METHODS[axis][method])}
    assert others.keys() <= of_methods | {"help"}
