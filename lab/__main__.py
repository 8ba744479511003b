"""Whatever is asked beyond a training: commands, each for one question.

Probes measure and take minutes on a CPU; an experiment consists of many training runs. Each can be
stopped at any moment. `python -m lab NAME --help` lists the flags of a command. lab/LOG.md has what
was asked once, and the commit that has its program.
"""
import sys

if not __package__:  # python lab
    sys.exit("start it with: python -m lab")
import ast
import textwrap
from importlib import import_module

try:
    from lab.engine.errors import PROJECT, UserError
    from lab.harness.screen import run_as_program
except KeyboardInterrupt:  # these take seconds
    sys.exit(130)

# The commands in the order in which the overview lists them: a heading, and the file of each.
COMMANDS = {
    "How do I train on my own task?": {"train": "run"},
    "Will it learn?": {"try": "tools.try_task", "warmup": "tools.warmup"},
    "What happened in a run?": {
        name: f"tools.{name}" for name in ("page", "follow", "sample", "pass_at_k", "diagnose")},
    "Is my idea better?": {
        name: f"tools.{name}" for name in ("idea", "experiment", "compare", "speedrun")},
    "Is a method right on average, and how noisy?": {"exact": "exact"},
    "Did I write the loss right?": {"formula": "formula.__main__"},
    "Which tokens have credit?": {"decided": "probes.decided", "score": "tools.score"},
    "Which claims of the notes hold?": {
        name: f"probes.{name}" for name in ("claims", "notes")}}
MODULES = {name: f"lab.{file}" for chapter in COMMANDS.values()
           for name, file in chapter.items()}
JUDGES = ("try", "diagnose", "exact", "formula")  # their status 1 is a verdict, so 2 an error


def main(argv: list[str]) -> None:
    name, *flags = argv or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return
    if name not in MODULES:
        raise UserError(f"there is no command {name}, only {', '.join(MODULES)}. lab/LOG.md says "
                        "what came of others, and in which commit one last stood")
    file = MODULES[name]
    if name == "exact" and any(word.split("=")[0] == "--trainer" for word in flags):
        file = "lab.trl.exact_trl"
    try:
        module = import_module(file)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}. To install what it needs: pip install -r requirements.txt"
                        ) from None
    if status := module.main(flags):  # of a program that judges
        sys.exit(status)


def overview() -> str:
    """What each command asks: the first paragraph of its file."""
    parts = [str(__doc__).strip()]
    for heading, chapter in COMMANDS.items():
        lines = [about(name, file) for name, file in chapter.items()]
        parts.append("\n".join([heading, *lines]))
    return "\n\n".join(parts)


def about(name: str, file: str) -> str:
    """A command, and the first paragraph of its file."""
    source = (PROJECT / "lab" / f"{file.replace('.', '/')}.py").read_text("utf-8")
    question = str(ast.get_docstring(ast.parse(source))).split("\n\n")[0]
    return textwrap.fill(" ".join(question.split()), 100,
                         initial_indent=f"    python -m lab {name:11s} ",
                         subsequent_indent=" " * 30)


if __name__ == "__main__":
    run_as_program(" ".join(["lab", *sys.argv[1:2]]), main, interrupted="stopped at once. The same "
                   "command continues an experiment or an idea, and --resume RUN a run from its "
                   "last checkpoint. All else begins again",
                   status=2 if sys.argv[1:2] and sys.argv[1] in JUDGES else 1)
