"""Print the tables of a stored result, or list all results with their questions.

    python -m lab show                     # the list
    python -m lab show board               # the tables of lab/results/board.json
    python -m lab show board --table rates    # one of its tables
    python -m lab show results/my_plan     # what an experiment or a probe wrote in this folder

Where the program of a result is gone, lab/LOG.md says how to repeat it.
"""
import textwrap
from pathlib import Path

from lab.engine.errors import UserError, read_json
from lab.harness.flags import Flag, print_text, read
from lab.publish.pages import table_of
from lab.publish.results import RESULTS, read_result

FLAGS = {"table": Flag("", "the name of one table. By default all are printed")}


def main(argv: list[str]) -> None:
    args = read(argv, "python -m lab show [NAME] [flags]", __doc__, FLAGS,
                {"[NAME]": "the name of a stored result, or a folder of results"})
    if args.name is None:
        if args.table:
            raise UserError("--table needs the name of a result")
        print_text(all_results())
        return
    print_text(in_text(result_named(args.name), args.table))


def all_results() -> str:
    """A line for each stored result: its name and its question."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        question = read_result(path).get("question", "")
        lines.append(textwrap.fill(question, 100, initial_indent=f"{path.stem:24s} ",
                                   subsequent_indent=25 * " "))
    return "\n".join(lines)


def result_named(name: str) -> dict:
    stored = RESULTS / f"{name}.json"
    if stored.exists():
        return read_result(stored)
    numbers = Path(name) / "numbers.json"
    if not numbers.exists():
        raise UserError(f"there is no stored result {name}, and no {numbers}: python -m lab "
                        "show lists the results")
    return read_json(numbers)


def in_text(result: dict, only: str = "") -> str:
    """The question, where the numbers come from, and the tables."""
    names = [table["name"] for table in result["tables"]]
    if only and only not in names:
        raise UserError(f"--table {only}: the result has {', '.join(names) or 'no tables'}")
    parts = [result.get("question", "")]
    if "day" in result:
        parts.append(source_of(result))
    for stored in result["tables"]:
        if only in ("", stored["name"]):
            table = table_of(stored)
            parts += [f"## {table.title} ({table.name})", *table.finding.splitlines(),
                      table.to_text(), *table.notes]
    return "\n\n".join(part if part.startswith("|") else textwrap.fill(part, 100)
                       for part in parts if part)


def source_of(result: dict) -> str:
    """The commits and versions of the code that made the runs, where they are on record, else those
    of the report, the command as it was typed there, and the day."""
    made = [part for part in result.get("made_by") or [] if isinstance(part, dict)] or [result]
    commits = dict.fromkeys((part["git_commit"] or "unknown")[:7] for part in made)
    versions = dict.fromkeys((part.get("versions") or result["versions"])["torch"] for part in made)
    return (f"Made at commit {' and '.join(commits)} by `{result['command']}`, {result['day']}, "
            f"torch {' and '.join(versions)}")
