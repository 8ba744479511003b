"""The command line of train.py: the flags that were typed, and what --help says."""
from argparse import SUPPRESS
from dataclasses import replace

from engine.errors import UserError
from engine.flags import Flag, Parser, add_flag, describe, fields_as_flags, some_text
from engine.registry import (ADVANTAGES, MITIGATIONS, choice_flags, describe_choices, flags_of,
                             owners_of)
from engine.settings import EVALUATED, OPTIONS, POLICY, PROBLEMS, choose_task, read_files
from engine.tasks import load_task

RESERVED = (  # names that no other flag can have
    "resume", "continue", "restart", "config", "help", "own")
ABOUT_FILES = """\
A model folder's recipe.json sets its own defaults (models/tiny has one), flags override them, and
config.json in the run folder shows what was used. Hyphens work as well as underscores."""


def read_flags(argv: list[str]) -> dict:
    """The flags that were typed, by name."""
    return make_parser(asked_task(argv)).read(argv)


def asked_task(argv: list[str]) -> str:
    """The task of a command line: it has to be known first, since it brings flags of its own."""
    parser = Parser(usage="", add_help=False)
    for name in ("task", "model"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--config", type=some_text)
    given = vars(parser.parse_known_args(argv)[0])
    return choose_task(given, *read_files(given))


def make_parser(task: str) -> Parser:
    refuse_taken_names(task)
    parser = Parser("python train.py [flags]",
                    "Train with GRPO and write down what every token was given.",
                    epilog=f"{describe_choices()}\n\n{ABOUT_FILES}")
    topics = {flag.topic: parser.add_argument_group(flag.topic) for flag in OPTIONS.values()}
    for name, flag in OPTIONS.items():
        add_flag(topics[flag.topic], name, flag, describe_option(name, flag))
    for name, flag in fields_as_flags(load_task(task)).items():
        add_flag(topics[PROBLEMS], name, flag)
    for name, flag in choice_flags().items():
        add_flag(parser, name, flag, SUPPRESS)  # listed below, beside its choice
    add_resuming(parser.add_argument_group("going on"))
    return parser


def describe_option(name: str, flag: Flag) -> str:
    if name in ("mitigation", "advantage"):  # their choices are listed below
        flag = replace(flag, choices=())
    needs = ""
    if flag.only and flag.only not in (POLICY, EVALUATED):
        needs = f"; needs {flag.only[1].split(' (')[0]}"
    return describe(flag) + needs


def add_resuming(group) -> None:
    group.add_argument("--resume", metavar="RUN", type=some_text,
                       help="continue this run folder; only --steps may be given with it")
    group.add_argument("--continue", action="store_true",
                       help="if the run folder exists and has these settings, resume it (a "
                       "finished run is passed over): for loops that can be stopped and started "
                       "again")
    group.add_argument("--restart", action="store_true",
                       help="with one of these two: erase the record of a run that has no "
                       "checkpoint to go on from, and start again at step 1")
    group.add_argument("--config", metavar="FILE", type=some_text,
                       help="take the settings of a run's config.json; flags override them")


def refuse_taken_names(task: str) -> None:
    """Every flag has one meaning, whoever brings it."""
    task_flags = fields_as_flags(load_task(task))
    for name in task_flags:
        if name in OPTIONS or name in RESERVED:
            raise UserError(f"the field {name} of the Task in {task} needs another name: --{name} "
                            "is taken")
    for name in choice_flags():
        on_both_axes = name in flags_of(MITIGATIONS) and name in flags_of(ADVANTAGES)
        if on_both_axes or name in OPTIONS or name in RESERVED or name in task_flags:
            raise UserError(f"the parameter {name} of {owners_of(name)[0]} needs another name: "
                            f"--{name} is taken")
