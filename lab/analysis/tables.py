"""A table of results, for the terminal and as JSON."""
import math
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from lab.analysis.statistics import Estimate, Interval

WIDTH = 100        # of a terminal
WITH_INTERVAL = " (95% interval)"  # ends the heading of a column of estimates
LONGEST_WORD = 30  # in a table; a longer one is cut where there is no room
Cell = str | float | Interval | Estimate | None
Row = list[Cell]
Columns = Mapping[str, tuple[str, Collection[Cell]]]


@dataclass
class Table:
    """`columns` gives each heading its number format and one value a row. `headings` has the full
    words of short ones, to be shown."""
    name: str
    title: str
    columns: Columns
    notes: list[str] = field(default_factory=list)
    headings: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        return list(zip(*(values for _, values in self.columns.values()), strict=True))

    def heads(self) -> list[str]:
        return [self.headings.get(column, column) for column in self.columns]

    def formats(self) -> list[str]:
        return [spec for spec, _ in self.columns.values()]

    def cells(self) -> list[list[str]]:
        return [list(map(shown, row, self.formats())) for row in self.rows]

    def texts(self) -> list[bool]:
        """Whether each column holds nothing but text. Such columns are aligned to the left."""
        return [all(isinstance(value, str) for value in values)
                for _, values in self.columns.values()]

    def to_text(self) -> str:
        """The table as Markdown that also lines up in a terminal. If it would be wider than
        WIDTH, headings and texts are wrapped."""
        rows = [list(map(escaped, row)) for row in [self.heads(), *self.cells()]]
        left = self.texts()
        widths = narrowed(rows, left, WIDTH - 3 * len(left) - 1)
        rules = []
        for width, on_left in zip(widths, left):
            end = "-" if on_left else ":"
            rules.append("-" * (width + 1) + end)
        head, *body = [wrapped_row(row, widths, left) for row in rows]
        return "\n".join([head, f"|{'|'.join(rules)}|", *body])

    def to_json(self) -> dict[str, object]:
        rows = [dict(zip(self.columns, map(in_json, row))) for row in self.rows]
        return {
            "name": self.name,
            "title": self.title,
            "notes": self.notes,
            "columns": list(self.columns),
            "headings": self.heads(),
            "formats": self.formats(),
            "rows": rows}


def escaped(text: str) -> str:
    return text.replace("|", "\\|")  # which would end a cell


def narrowed(rows: list[list[str]], left: list[bool], room: int) -> list[int]:
    """The width of each column.

    It begins with the width of the longest text. While the columns need more than the room, one of
    them is made narrower by a letter: the widest of those whose heading is wider than their cells,
    and after these the widest column. Words of headings stay whole, numbers stay on one line, and
    texts are wrapped. If no column can be made narrower, the table is wider than the room.
    """
    widths, of_cells, least = [], [], []
    for (heading, *cells), on_left in zip(zip(*rows), left):
        of_cells.append(max(map(len, cells), default=0))
        widths.append(max(3, len(heading), of_cells[-1]))
        wrapped = min(longest_word(cells), LONGEST_WORD) if on_left else of_cells[-1]
        least.append(max(3, longest_word([heading]), wrapped))
    while sum(widths) > room:
        wide = [i for i, width in enumerate(widths) if width > least[i]]
        if not wide:
            break
        with_wide_heading = [i for i in wide if widths[i] > of_cells[i]]
        widest = max(with_wide_heading or wide, key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


def longest_word(texts: list[str]) -> int:
    return max(map(len, " ".join(texts).split()), default=0)


def wrapped_row(row: list[str], widths: list[int], left: list[bool]) -> str:
    """A row of a table, over as many lines as its longest text needs."""
    wrapped, formats = [], []
    for text, width, on_left in zip(row, widths, left):
        wrapped.append(textwrap.wrap(text, width) or [""])
        formats.append(f"<{width}" if on_left else f">{width}")
    lines = []
    for parts in zip_longest(*wrapped, fillvalue=""):
        lines.append(f"| {' | '.join(map(format, parts, formats))} |")
    return "\n".join(lines)


def by_row(formats: dict[str, str], rows: Iterable[Collection[Cell]]) -> Columns:
    values: dict[str, Row] = {name: [] for name in formats}
    for row in rows:
        for column, cell in zip(values.values(), row, strict=True):
            column.append(cell)
    return {name: (spec, values[name]) for name, spec in formats.items()}


def shown(value: Cell, spec: str) -> str:
    """A cell as text. The format `p` is for p-values, which are never 0; `points` for a difference
    of shares with its sign, and `size` without. An estimate is shown with its 95% interval: +2.8
    (+1.8 to +3.8)."""
    if isinstance(value, str):
        return value
    if isinstance(value, Estimate):
        interval = shown(value.interval, spec)
        number = shown(value.value, spec)
        return number if interval == "-" else f"{number} ({interval})"
    if isinstance(value, tuple):
        ends = [shown(end, spec) for end in value]
        return "-" if "-" in ends else " to ".join(ends)
    if value is None or not math.isfinite(value):
        return "-"
    if spec in ("points", "size"):
        return format(100 * value, "+.1f" if spec == "points" else ".1f")
    if spec != "p":
        return format(value, spec)
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def in_json(value: object) -> object:
    """The value as JSON can hold it: an undefined number is null."""
    if isinstance(value, Estimate):
        return {"value": in_json(value.value), "low": in_json(value.low),
                "high": in_json(value.high)}
    if isinstance(value, tuple):
        return [in_json(end) for end in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(texts: list[str], tables: Iterable[Table]) -> None:
    for text in texts:
        print(textwrap.fill(text, WIDTH) + "\n")
    for table in tables:
        sentences = [f"{note.removesuffix('.')}." for note in table.notes]
        notes = "\n".join(textwrap.fill(sentence, WIDTH) for sentence in sentences)
        parts = [f"## {table.title}", table.to_text(), notes]
        print("\n\n".join(filter(None, parts)) + "\n")
