"""Write the numbers of research/results into the pages.

    python -m research pages

A page marks what is not written by hand, by comments that a reader of the page does not see:

    <!-- table board board -->                          a table of research/results/board.json
    <!-- table board board; rate = 5e-4; arm; lead -->  some of its rows, some of its columns
    <!-- text first_run transcript; 1 5 9 -->           its lines, or these of them, as printed
    <!-- words dial law -->                             what it shows, in a sentence
    <!-- source board -->                               command, day, version and commit
    <!-- number scoreboard kind operator; decided -->   one cell: row `operator`, column `decided`
    <!-- interval board board span; lead; 95% -->       two: -9.3 (-12.6 to -5.9)

each up to <!-- end -->. A row is named by its texts, as many as tell it from the others, the column
comes last.
"""
import re
import textwrap

from analysis.tables import Table, by_row, escaped
from engine.errors import PROJECT, UserError
from harness.record import replace_text
from harness.screen import say
from harness.parser import make_parser
from research.experiments.published import RESULTS, pages, read_result

MARKED = re.compile(r"<!-- (table|text|words|source|number|interval) ((?:(?!-->).)+?) -->"
                    r"(.*?)<!-- end -->", re.S)


def main(argv: list[str]) -> None:
    make_parser("python -m research pages", __doc__, {}).read(argv)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        filled = fill(text, page.name)
        if filled != text:
            replace_text(page, filled)
            say(f"written: {page.name}")


def fill(text: str, page: str) -> str:
    """The page with everything that is marked made again."""
    def made_again(match: re.Match) -> str:
        kind, words, _ = match.groups()
        try:
            content = MAKERS[kind](words)
        except UserError as error:
            raise UserError(f"{page}: <!-- {kind} {words} -->: {error}") from None
        return f"<!-- {kind} {words} -->{content}<!-- end -->"
    return MARKED.sub(made_again, text)


def make_table(words: str) -> str:
    table, asked = find_table(words)
    rows, wanted = table.cells(), [part for part in asked if " = " not in part]
    for column, _, value in (part.partition(" = ") for part in asked if " = " in part):
        rows = [row for row in rows if row[place_of(column, table)] == value]
    places = [place_of(column, table) for column in wanted or table.columns]
    rules = [":--" if on_left else "--:" for on_left in table.texts()]
    lines = [f"| {' | '.join(escaped(row[place]) for place in places)} |"
             for row in [table.heads(), *rows]]
    lines.insert(1, f"|{'|'.join(rules[place] for place in places)}|")
    return "\n" + "\n".join(lines) + "\n"


def make_text(words: str) -> str:
    table, numbers = find_table(words)
    lines = [row[0] for row in table.rows]
    lines = [lines[int(number) - 1] for number in " ".join(numbers).split()] or lines
    return "\n" + "\n".join(["```", *lines, "```"]) + "\n"


def make_words(words: str) -> str:
    return f"\n{textwrap.fill(find_table(words)[0].finding, 100)}\n"


def make_source(words: str) -> str:
    """The commit is that of the code that made the runs, where it is on record, else that of the
    report. Programs of earlier commits may be gone."""
    result = read_result(RESULTS / f"{words}.json")
    made = [part for part in result.get("made_by") or [] if isinstance(part, dict)] or [result]
    commit = " and ".join(dict.fromkeys((part["git_commit"] or "unknown")[:7] for part in made))
    program = result["measured"]
    is_here = any((PROJECT / f"research/{room}/{program}.py").exists()
                  for room in ("probes", "experiments"))
    gone = "" if is_here else ", a command of that commit, no longer here"
    torch = result["versions"]["torch"]
    return f"\n`{result['command']}`, {result['day']}, torch {torch}, commit {commit}{gone}\n"


def make_number(words: str) -> str:
    table, (*keys, column) = find_table(words)
    place = place_of(column, table)
    rows = [i for i, row in enumerate(table.rows) if set(keys) <= set(map(str, row))]
    if len(rows) != 1:
        raise UserError(f"{len(rows)} rows have {'; '.join(keys)}, one is needed")
    return table.cells()[rows[0]][place]


def make_interval(words: str) -> str:
    row, value, interval = [part.strip() for part in words.rsplit(";", 2)]
    return f"{make_number(f'{row}; {value}')} ({make_number(f'{row}; {interval}')})"


MAKERS = {"table": make_table, "text": make_text, "words": make_words, "source": make_source,
          "number": make_number, "interval": make_interval}


def find_table(words: str) -> tuple[Table, list[str]]:
    """Of `board board measured; lead`: the table board of research/results/board.json, and what is
    asked of it."""
    match = re.fullmatch(r"(\w+) (\w+)[; ]*(.*)", words.strip())
    if match is None:
        raise UserError("a result and a table should be named first")
    result, name, asked = match.groups()
    stored = {table["name"]: table for table in read_result(RESULTS / f"{result}.json")["tables"]}
    if name not in stored:
        raise UserError(f"there is no table {name}, only {', '.join(stored)}")
    return table_of(stored[name]), [part.strip() for part in asked.split(";") if part.strip()]


def table_of(stored: dict) -> Table:
    """The table again, from what Table.to_json wrote."""
    formats = dict(zip(stored["columns"], stored["formats"], strict=True))
    rows = [[tuple(cell) if isinstance(cell, list) else cell for cell in row.values()]
            for row in stored["rows"]]
    headings = dict(zip(stored["columns"], stored["headings"], strict=True))
    return Table(stored["name"], stored["title"], by_row(formats, rows), stored["finding"],
                 stored["notes"], headings)


def place_of(column: str, table: Table) -> int:
    if column not in table.columns:
        raise UserError(f"there is no column {column!r}, only {', '.join(table.columns)}")
    return list(table.columns).index(column)
