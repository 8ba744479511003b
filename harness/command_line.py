"""The command line of train.py: the run that it asks for, a new one or one that is there already
(harness/resume.py), the flags that were typed, and what --help says.

--help lists what a first day needs, --help all every flag, --help gae a method with its own.
"""
import inspect
import textwrap
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import BrokenModel, NotFinite, NotFiniteCredit, UserError
from harness.files import is_file, is_there, read_json
from harness.flags import (Flag, Parser, add_flag, describe, fields_as_flags,
                           parameters_as_flags, shortened, some_text)
from harness.run import Run
from harness.settings import (EVALUATED, OPTIONS, POLICY, PROBLEMS, Settings, choice_flags,
                              flags_of, make_settings, read_files)
from harness.tasks import load_task

METHODS = {"mitigation": MITIGATIONS, "advantage": ADVANTAGES}
RESERVED = (  # names that no other flag can have
    "resume", "continue", "config", "help", "method_flags")
FIRST_DAY = (  # what --help lists
    "model", "device", "task", "mitigation", "rescale", "advantage", "loss", "kl", "steps",
    "questions", "answers", "max_new_tokens", "temperature", "learning_rate", "seed", "eval_every",
    "eval_tasks", "checkpoint_every", "out")
ABOUT_HELP = """\
--help METHOD describes one of them and its flags; --help all lists every flag and every method."""
ABOUT_FILES = """\
Defaults are those of this command: a model folder's recipe.json (models/tiny has one) and --config
set their own. Flags override them, and config.json in the run folder shows what was used. Hyphens
work as well as underscores."""


@contextmanager
def open_run(argv: list[str]) -> Iterator[Run]:
    """The run that a command line asks for. What ends it is one sentence where the user can do
    something about it; a first step that failed leaves nothing in the way of the next attempt."""
    given = read_flags(argv)
    may_continue = given.pop("continue", False)
    if "resume" in given:
        from harness.resume import resumed
        run = resumed(Path(given.pop("resume")), given)
    else:
        run = new_or_continued(given, may_continue)
    is_new = run.folder is None
    with run.cleanup:
        try:
            yield run
        except Exception as error:
            if isinstance(error, NotFinite) and run.folder:
                error = UserError(where_to_look(error, run))
            if is_new and run.folder:
                run.folder.remove_unless_begun()
            raise error


def new_or_continued(given: dict, may_continue: bool) -> Run:
    settings = make_settings(given)
    if not is_there(settings.folder):
        return Run(settings)
    from harness.resume import continued
    return continued(settings, given, may_continue)


def where_to_look(error: NotFinite, run: Run) -> str:
    """The error, how far the run came, which flags to look at, and what is left."""
    s, steps = run.settings, run.folder.last_step()
    if steps == 0 and isinstance(error, BrokenModel):
        return f"{error}, in the first step. Is {run.policy.folder} a sound model?"
    method_flags = s.flags_for(ADVANTAGES[s.advantage]) | s.flags_for(MITIGATIONS[s.mitigation])
    is_own = isinstance(error, NotFiniteCredit)  # of finite numbers: no rate is too large
    values = method_flags if is_own else {"learning_rate": s.learning_rate, **method_flags}
    flags = ", ".join(["its line and what it divides by"] * is_own + [
        f"--{name} {value:g}" for name, value in values.items() if isinstance(value, float)])
    checkpoints = run.folder.checkpoints()
    way_on = (f"the last good checkpoint is {checkpoints[-1]}, --model can begin a new run there"
              if checkpoints else "there is no checkpoint from before")
    return (f"{error}, in step {run.step}. The last step on record is {steps}. Look at {flags}; "
            f"{way_on}")


def read_flags(argv: list[str]) -> dict:
    """The flags that were typed, by name."""
    defaults = defaults_of(argv)
    topic = defaults.pop("help", None)  # what stands behind --help, empty if nothing does
    if topic is not None:
        print(help_about(topic, defaults))
        raise SystemExit(0)
    given, unknown = make_parser(defaults).parse(argv)
    if unknown:  # flags of the chosen methods, say, whose files are imported now
        for axis, choices in METHODS.items():
            choices.get((defaults | given).get(axis))
        given, unknown = make_parser(defaults).parse(argv)
    if unknown:  # a flag of another method, or a mistake: with all of them imported it is told
        from harness.hints import about_unknown
        choice_flags()
        given = make_parser(defaults).read(argv, about_unknown)
    return given


def help_about(topic: str, defaults: dict) -> str:
    if topic in ("", "all"):
        return make_parser(defaults, OPTIONS if topic else FIRST_DAY).format_help()
    for choices in METHODS.values():
        if topic in choices:
            return describe_choice(topic, choices[topic])
    raise UserError(f"--help {shortened(topic)}: there is no method of this name (--help lists "
                    "them)")


def defaults_of(argv: list[str]) -> dict:
    """What the files that were named set: the task, on which depends what other flags there are,
    and what --help shows in place of the defaults of the settings."""
    parser = Parser(usage="", add_help=False)
    for name in ("task", "model", "config", "resume"):
        parser.add_argument(f"--{name}", type=some_text)
    parser.add_argument("-h", "--help", nargs="?", const="")
    given = vars(parser.parse_known_args(argv)[0])
    if "resume" in given:
        path = Path(given["resume"]) / "config.json"
        return {"task": Settings.task} | (read_json(path) if is_file(path) else {}) | given
    recipe, config = read_files(given)
    return {"task": Settings.task} | recipe | config | given


def make_parser(defaults: dict, listed=()) -> Parser:
    """It reads every setting and the flags of the methods that are imported; its help lists these
    settings."""
    task, is_all = defaults["task"], listed is OPTIONS
    epilog = describe_choices() if is_all else f"{choices_by_name()}\n{ABOUT_HELP}"
    imported = [choices.loaded() for choices in METHODS.values()]
    refuse_taken_names(task, imported)
    parser = Parser("python train.py [flags]", "Train with GRPO and write down what every token "
                    "was given.", epilog=f"{epilog}\n\n{ABOUT_FILES}", add_help=False)
    topics = {flag.topic: parser.add_argument_group(flag.topic) for flag in OPTIONS.values()}
    for name, flag in OPTIONS.items():
        flag = replace(flag, default=defaults.get(name, flag.default))
        add_flag(topics[flag.topic], name, flag,
                 describe_option(name, flag) if name in listed else SUPPRESS)
    of_task = None if is_all or task != Settings.task else SUPPRESS  # None: described in full
    for name, flag in fields_as_flags(load_task(task)).items():
        flag = replace(flag, default=defaults.get(name, flag.default))
        add_flag(topics[PROBLEMS], name, flag, of_task)
    for name, flag in choice_flags(*imported).items():
        add_flag(parser, name, flag, SUPPRESS)  # listed below, beside its choice
    add_resuming(parser.add_argument_group("going on"))
    return parser


def describe_choices() -> str:
    """The choices of both lists with their flags, for --help."""
    weightings, advantages = ("\n".join(describe_choice(*choice) for choice in registry.items())
                              for registry in (MITIGATIONS, ADVANTAGES))
    return (f"choices of --mitigation, each with its own flags:\n{weightings}\n\n"
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


def choices_by_name() -> str:
    """The choices of both lists, without a word about them."""
    return "".join(textwrap.fill(f"choices of --{axis}: {', '.join(registry)}", 95,
                                 subsequent_indent="  ", break_long_words=False) + "\n\n"
                   for axis, registry in METHODS.items())


def describe_option(name: str, flag: Flag) -> str:
    """The help of a setting, with the condition under which it has an effect."""
    if name in ("mitigation", "advantage"):  # their choices are listed below
        flag = replace(flag, choices=())
    needs = ""
    if flag.requires and flag.requires not in (POLICY, EVALUATED):
        needs = f"; needs {flag.requires[1].split(' (')[0]}"
    return describe(flag) + needs


def add_resuming(group) -> None:
    group.add_argument("--resume", metavar="RUN", type=some_text,
                       help="continue this run folder; with it only --steps may be given, and "
                       "flags that say how it is made, such as --threads")
    group.add_argument("--continue", action="store_true",
                       help="if the run folder exists and has these settings, resume it (a "
                       "finished run is passed over): for loops that can be stopped and started "
                       "again")
    group.add_argument("--config", metavar="FILE", type=some_text,
                       help="take the settings of a run's config.json, or of a YAML file of "
                       "GRPO-Zero; flags override them")


def refuse_taken_names(task: str, methods: list[dict]) -> None:
    """Every flag has one meaning, whoever brings it."""
    taken = {*OPTIONS, *RESERVED}
    fields = {name: f"field {name} of the Task in {task}"
              for name in fields_as_flags(load_task(task))}
    parameters = [{name: f"parameter {name} of {owners[0]}"
                   for name, owners in flags_of(choices).items()} for choices in methods]
    for names in (fields, *parameters):
        for name in names:
            if name in taken:
                raise UserError(f"the {names[name]} needs another name: --{name} is taken")
        taken |= set(names)
