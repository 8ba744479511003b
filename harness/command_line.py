"""The command line of train.py: the run that it asks for, a new one or one that is there already
(harness/resume.py), the flags that were typed. What --help says is in harness/help.py.
"""
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import BadCredit, NotFinite, UserError
from harness.files import Json, is_there, read_json
from harness.flags import Flag, Parser, add_flag, check_value, fields_as_flags
from harness.run import Run
from harness.settings import (METHODS, OPTIONS, TOPICS, flags_beside, make_settings, read_files,
                              whose_flag)
from harness.tasks import load_task


@contextmanager
def open_run(argv: list[str]) -> Iterator[Run]:
    """The run that a command line asks for; one sentence ends it where the user can act on it."""
    run = asked_for(read_flags(argv))
    with run.cleanup:
        try:
            yield run
        except NotFinite as error:
            raise UserError(where_to_look(error, run)) from error


def asked_for(given: Json) -> Run:
    may_continue = given.pop("continue", False) is True
    if "resume" in given:
        from harness.resume import resumed
        return resumed(Path(str(given.pop("resume"))), given)
    settings = make_settings(given)
    if not is_there(settings.folder):
        return Run(settings)
    from harness.resume import continued
    return continued(settings, given, may_continue)


def where_to_look(error: NotFinite, run: Run) -> str:
    """The error, how far the run came, which flags to look at, and what is left."""
    from harness.log_reading import last_step
    s = run.settings
    of_model = {} if isinstance(error, BadCredit) else {"learning_rate": s.learning_rate}
    chosen = (ADVANTAGES[s.advantage], MITIGATIONS[s.mitigation])
    values = of_model | s.flags_for(chosen[0]) | s.flags_for(chosen[1])
    flags = [f"--{name} {value:g}" for name, value in values.items() if isinstance(value, float)]
    checkpoints = run.folder.checkpoints()
    way_on = (f"the last good checkpoint is {checkpoints[-1]}, --model can begin a new run there"
              if checkpoints else "there is no checkpoint from before")
    way_on += ": is the model sound?" if of_model and not checkpoints else ""
    look_at = f"look at {', '.join(flags)}; " if flags else ""
    return (f"{error}, in step {run.step}. The last step on record is "
            f"{last_step(run.folder.path)}: {look_at}{way_on}")


def read_flags(argv: list[str]) -> Json:
    defaults = defaults_of(argv)
    if "help" in defaults:
        print(help_about(str(defaults.pop("help")), defaults))
        raise SystemExit(0)
    return make_parser(defaults).read(argv, partial(whose_flag, chosen=defaults))


def help_about(topic: str, defaults: Json) -> str:
    from harness.help import about_method, epilog, text_of_option
    if topic not in ("", "all"):
        return about_method(topic)
    text_of = partial(text_of_option, topic == "all", defaults["task"])
    return make_parser(defaults, text_of, epilog(topic == "all")).format_help()


def defaults_of(argv: list[str]) -> Json:
    """What decides which flags there are, and their defaults: the choices and the files named."""
    parser = Parser(usage="", add_help=False)
    for name in ("task", "model", "config", "resume", *METHODS):
        parser.add_argument(f"--{name}")
    parser.add_argument("-h", "--help", nargs="?", const="")
    given = vars(parser.parse_known_args(argv)[0])
    default = {name: OPTIONS[name].default for name in ("task", *METHODS)}
    if "resume" in given:
        path = Path(given["resume"]) / "config.json"
        return default | (read_json(path) if is_there(path) else {}) | given
    recipe, config = read_files(given)
    return default | recipe | config | given


def make_parser(defaults: Json, text_of: Callable[[str, Flag], str] = lambda *_: SUPPRESS,
                epilog: str = "") -> Parser:
    """Of every setting and the flags of the chosen task and methods; `text_of` makes their help."""
    for axis in METHODS:
        check_value(axis, defaults[axis], OPTIONS[axis])
    of_task = fields_as_flags(load_task(defaults["task"]))
    flags = flags_beside(defaults)
    parser = Parser("python train.py [flags]", "Train with GRPO and write down what every token "
                    "was given.", epilog=epilog, add_help=False)
    for setting in OPTIONS:
        if setting in TOPICS:
            group = parser.add_argument_group(TOPICS[setting])
        for name in (setting, *of_task) if setting == "task" else (setting,):
            flag = replace(flags[name], default=defaults.get(name, flags[name].default))
            add_flag(group, name, flag, text_of(name, flag))
    for name in flags.keys() - OPTIONS.keys() - of_task.keys():
        add_flag(parser, name, flags[name], SUPPRESS)  # listed below, beside its choice
    going_on = parser.add_argument_group("going on")
    going_on.add_argument("--resume", metavar="RUN", help="continue this run "
                          "folder; with it only --steps may be given, and flags that say how it is "
                          "made, such as --threads")
    going_on.add_argument("--continue", action="store_true", help="if the run folder exists and "
                          "has these settings, resume it (a finished run is passed over): for "
                          "loops that can be stopped and started again")
    going_on.add_argument("--config", metavar="FILE", help="take the settings of "
                          "a run's config.json; flags override them")
    return parser
