"""The numbers of lab/results in the pages; `python -m lab publish` writes them.

A page marks what is not written by hand, by comments that a reader of the page does not see:

    <!-- table board board -->                          a table of lab/results/board.json
    <!-- table board board; rate = 5e-4; arm; gain -->  some of its rows, some of its columns
    <!-- number scoreboard kind operator; decided -->   one cell: row `operator`, column `decided`
    <!-- interval board board span; gain -->            with its interval: -9.3 (-12.6 to -5.9)

each up to <!-- end -->. A row is named by its texts, as many as tell it from the others, the column
comes last.
"""
import math
import re
from pathlib import Path

from lab.analysis.statistics import Estimate
from lab.analysis.tables import Cell, Table, by_row, escaped, shown
from lab.engine.errors import UserError
from lab.publish.results import Results, pages

KINDS = "table|number|interval"
BEGIN, END = re.compile(rf"<!-- (?:{KINDS}) "), "<!-- end -->"
MARKED = re.compile(rf"<!-- ({KINDS}) ((?:(?!-->).)+?) -->(.*?){END}", re.S)


def filled_pages(results: Results) -> dict[Path, str]:
    """The pages that are not as the results have them, each with the text that it should have."""
    changed = {}
    for page in pages():
        text = page.read_text(encoding="utf-8")
        filled = fill(text, page.name, results)
        if filled != text:
            changed[page] = filled
    return changed


def check_marks(name: str) -> None:
    """End in an error if a page marks what this result does not have."""
    results = Results()
    for page in pages():
        for kind, words, _ in MARKED.findall(page.read_text(encoding="utf-8")):
            if words.split()[0] == name:
                content_of_mark(kind, words, page.name, results)


def fill(text: str, page: str, results: Results) -> str:
    """The page with everything that is marked made again. Where a mark is not closed, what it would
    replace goes on to the end of the next mark, so this is an error."""
    begun, closed = len(BEGIN.findall(text)), text.count(END)
    if not begun == closed == len(MARKED.findall(text)):
        raise UserError(f"{page} has {begun} marks and {closed} times {END}: each mark needs one, "
                        "before the next mark begins")

    def made_again(match: re.Match) -> str:
        kind, words, _ = match.groups()
        return f"<!-- {kind} {words} -->{content_of_mark(kind, words, page, results)}{END}"
    return MARKED.sub(made_again, text)


def content_of_mark(kind: str, words: str, page: str, results: Results) -> str:
    """What a mark stands for; the page is named in an error."""
    try:
        table, asked = find_table(words, results)
        return MAKERS[kind](table, asked)
    except UserError as error:
        raise UserError(f"{page}: <!-- {kind} {words} -->: {error}") from None


def find_table(words: str, results: Results) -> tuple[Table, list[str]]:
    """The table that a mark names, and what is asked of it: of `board board measured; gain` the
    table board of lab/results/board.json."""
    match = re.fullmatch(r"(\w+) (\w+)[; ]*(.*)", words.strip())
    if match is None:
        raise UserError("a result and a table should be named first")
    result, name, asked = match.groups()
    stored = results.table(result, name)
    return table_of(stored), [part.strip() for part in asked.split(";") if part.strip()]


def make_table(table: Table, asked: list[str]) -> str:
    rows, wanted = table.cells(), []
    for part in asked:
        column, is_condition, value = part.partition(" = ")
        number = column_number(column, table)
        if is_condition:
            rows = [row for row in rows if row[number] == value]
        else:
            wanted.append(number)
    wanted = wanted or list(range(len(table.columns)))
    is_text = table.texts()
    rules = [":--" if is_text[number] else "--:" for number in wanted]
    lines = []
    for row in [table.heads(), *rows]:
        cells = [escaped(row[number]) for number in wanted]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, f"|{'|'.join(rules)}|")
    return "\n" + "\n".join(lines) + "\n"


def make_number(table: Table, asked: list[str]) -> str:
    """A cell without its interval."""
    value, spec = find_cell(table, asked)
    return shown(value.value if isinstance(value, Estimate) else value, spec)


def make_interval(table: Table, asked: list[str]) -> str:
    """A cell with its interval."""
    return shown(*find_cell(table, asked))


MAKERS = {"table": make_table, "number": make_number, "interval": make_interval}


def find_cell(table: Table, asked: list[str]) -> tuple[Cell, str]:
    """The value that a mark names, and its format."""
    *keys, column = asked
    place = column_number(column, table)
    rows = [row for row in table.rows if set(keys) <= set(map(str, row))]
    if len(rows) != 1:
        raise UserError(f"{len(rows)} rows have {'; '.join(keys)}, one is needed")
    spec, _ = table.columns[column]
    return rows[0][place], spec


def table_of(stored: dict) -> Table:
    """The table again, from what Table.to_json wrote."""
    formats = dict(zip(stored["columns"], stored["formats"], strict=True))
    rows = [list(map(cell_of_json, row.values())) for row in stored["rows"]]
    headings = dict(zip(stored["columns"], stored["headings"], strict=True))
    return Table(stored["name"], stored["title"], by_row(formats, rows), stored["finding"],
                 stored["notes"], headings)


def cell_of_json(cell: str | float | list | dict | None) -> Cell:
    """A cell again, from what Table.to_json wrote."""
    if isinstance(cell, dict):
        known = {name: number for name, number in cell.items() if number is not None}
        return Estimate(**{"value": math.nan, **known})
    if isinstance(cell, list):
        low, high = cell
        return low, high
    return cell


def column_number(column: str, table: Table) -> int:
    if column not in table.columns:
        raise UserError(f"there is no column {column!r}, only {', '.join(table.columns)}")
    return list(table.columns).index(column)
