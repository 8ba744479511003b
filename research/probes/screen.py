"""What a probe prints: what was found, and as much of a table as a screen holds.

A quick look measures so little that most of its numbers say nothing. It prints what shows that the
probe works, the rows that are clear all the same, and what to type for a real answer.
"""
import shlex
import textwrap
from types import SimpleNamespace

from analysis.tables import WIDTH, Table, by_row, show, show_in_short

NOT_CLEAR = (  # last cells of rows that say nothing, or nothing about a difference
    "", "-", "too few", "none seen", "not seen", "no change seen", "constant", "may be 2",
    "not refuted", "no condition")


def print_findings(findings, summary: list[str], args: SimpleNamespace, command: str) -> None:
    """`summary`: the findings in short. `command` measures in earnest."""
    if args.all:
        intro = [quick_words(findings.takes, command)] if args.quick else []
        show([findings.title, *intro, *findings.intro], findings.tables, summary)
        return
    print(f"{findings.title}\n")
    if args.quick:
        print_quick_look(findings, command)
    else:
        first = [table for table in findings.tables if table.name in findings.short[:1]]
        show_in_short([*findings.intro[:1], *summary], first)


def quick_words(takes: str, command: str) -> str:
    """What a quick look is worth, and how to get more."""
    return ("A quick look: its numbers show that the probe works, and nothing else. A real answer "
            f"takes {takes}: {command}")


def command_of(name: str, typed: dict) -> str:
    """The command that was typed, without --quick and what belongs to it alone."""
    flags = [f" --{flag} {shlex.quote(str(value))}" for flag, value in typed.items()
             if flag not in ("quick", "all", "out")]
    return f"python -m research {name}{''.join(flags)}"


def print_quick_look(findings, command: str) -> None:
    """That the probe works, and the rows that are clear on however little."""
    checks = [table.finding.splitlines()[0] for table in findings.tables
              if table.name in findings.checks]
    clear = [clear_rows(table) for table in findings.tables]
    clear = [table for table in clear if table.rows]
    texts = ["The probe works: it measured, and wrote its page.",
             f"Measured: {findings.intro[0]}", *checks]
    if clear:
        texts.append("Clear even on so little are these rows:")
    elif any(has_intervals(table) for table in findings.tables):
        texts.append("No interval is narrow enough to say anything on so little.")
    show_in_short(texts, clear)
    print()
    print(textwrap.fill(quick_words(findings.takes, command), WIDTH))


def clear_rows(table: Table) -> Table:
    """The rows whose interval excludes 0 and whose verdict, the last cell, is one."""
    formats = {heading: spec for heading, (spec, _) in table.columns.items()}
    rows, about = [], ""
    for row in table.rows:
        about = row[0] or about  # an empty first cell stands for the one above
        if is_clear(row):
            rows.append((about, *row[1:]))
    return Table(table.name, table.title, by_row(formats, rows), headings=table.headings)


def is_clear(row: tuple) -> bool:
    verdict = row[-1]
    if not isinstance(verdict, str) or verdict in NOT_CLEAR:
        return False
    intervals = [cell for cell in row if isinstance(cell, tuple)]
    return any(excludes_0(*interval) for interval in intervals)


def has_intervals(table: Table) -> bool:
    return any(isinstance(cell, tuple) for row in table.rows for cell in row)


def excludes_0(low: float, high: float) -> bool:
    return low * high > 0  # not of an unknown interval, whose ends are no numbers
