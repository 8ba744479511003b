"""Experiments and probes: what was found with the lab, and the commands that find it again.

On a CPU a probe takes minutes. It answers one question, prints its findings, and writes a folder
with its numbers and picture. An experiment consists of many training runs. It can be stopped at any
moment, and the same command continues it. `python -m lab NAME --help` lists the flags of each
command. lab/LOG.md has what was asked once, and the commit that has its program.
"""
import ast
import textwrap
from importlib import import_module

from engine.errors import PROJECT, UserError
from harness.screen import run_as_program
from lab.probes.common import run_probe

# The commands in the order in which the overview lists them: a heading, and the file of each.
COMMANDS = {
    "Your own method, computed and trained": {
        "experiment": "experiments", "exact": "exact"},
    "Probes, which measure": {name: f"probes.{name}" for name in (
        "planted", "decided")},
    "Questions of the notes that the project began from": {
        "notes": "probes.notes",
        **{name: f"probes.{name}" for name in ("phase1", "rank", "sparsity", "baseline")}},
    "Stored results": {"show": "publish.show", "publish": "publish.publish"}}
# Programs of lab/ with a name of their own, python -m lab.NAME: a heading, and their files.
PROGRAMS = {
    "Any GRPO, anybody's": ("formula.__main__", "trl.codes"),
    "Runs of other trainers": ("trl.import_run",),
    "Speed and memory": ("speed.gpu",)}
RETIRED = {  # a command that is gone, and the commit in which it last stood
    **dict.fromkeys(("board", "real_board", "real_controls", "later", "price", "scoreboard",
                     "large", "law", "change", "group", "failure", "excerpt", "cards",
                     "recompute"), "f19f84f4"),
    **dict.fromkeys(("card", "signal", "dial"), "d04ab972")}
MODULES = {name: f"lab.{file}" for chapter in COMMANDS.values()
           for name, file in chapter.items()}


def main(argv: list[str]) -> None:
    name, *flags = argv or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return
    if name in RETIRED:
        raise UserError(f"{name} last stood in commit {RETIRED[name]}. lab/LOG.md says what it "
                        "found, how to repeat it, and which command is nearest to it today")
    if name not in MODULES:
        raise UserError(f"there is no probe or experiment {name}, only {', '.join(MODULES)}")
    module = import_module(MODULES[name])
    if hasattr(module, "measure"):
        run_probe(name, module.__doc__, module.FLAGS, module.measure, flags)
    else:
        module.main(flags)


def overview() -> str:
    """What each command asks: the first paragraph of its file."""
    parts = [str(__doc__).strip()]
    for heading, chapter in COMMANDS.items():
        lines = [about(f"lab {name}", file) for name, file in chapter.items()]
        parts.append("\n".join([f"{heading}:", *lines]))
    for heading, files in PROGRAMS.items():
        lines = [about(f"lab.{file.removesuffix('.__main__')}", file) for file in files]
        parts.append("\n".join([f"{heading}:", *lines]))
    return "\n\n".join(parts)


def about(command: str, file: str) -> str:
    """A command, and the first paragraph of its file."""
    source = (PROJECT / "lab" / f"{file.replace('.', '/')}.py").read_text("utf-8")
    question = str(ast.get_docstring(ast.parse(source))).split("\n\n")[0]
    return textwrap.fill(" ".join(question.split()), 100,
                         initial_indent=f"    python -m {command:22s}  ",
                         subsequent_indent=" " * 40)


if __name__ == "__main__":
    run_as_program("lab", main, interrupted="stopped at once. The same command continues an "
                   "experiment, and begins a probe again")
