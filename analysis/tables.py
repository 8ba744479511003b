"""How results are shown: a table in the terminal and as JSON."""
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from analysis.statistics import Estimate, Interval

WIDTH = 100        # of a terminal
WITH_INTERVAL = " (95% interval)"  # ends the heading of a column of estimates
LONGEST_WORD = 30  # in a table; a longer one is cut where there is no room
NOTHING = ("Too few groups to say: it takes six with different rewards, and gradients of known "
           "size.")
UNDEFINED = re.compile(r"(?<!['\w])(nan|inf)(?!['\w])")  # as a number, not as a quoted token
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
    finding: str = ""
    notes: list[str] = field(default_factory=list)
    headings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if UNDEFINED.search(self.finding):
            self.finding = NOTHING

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        return list(zip(*(values for _, values in self.columns.values()), strict=True))

    def heads(self) -> list[str]:
        return [self.headings.get(column, column) for column in self.columns]

    def cells(self) -> list[list[str]]:
        formats = [spec for spec, _ in self.columns.values()]
        return [list(map(shown, row, formats)) for row in self.rows]

    def texts(self) -> list[bool]:
        """Which columns hold nothing but text: they stand on the left."""
        return [all(isinstance(value, str) for value in values)
                for _, values in self.columns.values()]

    def to_text(self, limit: int = WIDTH) -> str:
        """Markdown that also lines up in a terminal. Where it would be too wide, headings and
        texts go over several lines."""
        rows = [list(map(escaped, row)) for row in [self.heads(), *self.cells()]]
        left = self.texts()
        widths = narrowed(rows, left, limit - 3 * len(left) - 1)
        rule = ["-" * (width + 1) + ("-" if on_left else ":")
                for width, on_left in zip(widths, left)]
        head, *body = [wrapped_row(row, widths, left) for row in rows]
        return "\n".join([head, f"|{'|'.join(rule)}|", *body])

    def to_json(self) -> dict[str, object]:
        rows = [dict(zip(self.columns, map(in_json, row))) for row in self.rows]
        return {"name": self.name, "title": self.title, "finding": self.finding,
                "notes": self.notes, "columns": list(self.columns), "headings": self.heads(),
                "formats": [spec for spec, _ in self.columns.values()], "rows": rows}


def escaped(text: str) -> str:
    return text.replace("|", "\\|")  # which would end a cell


def narrowed(rows: list[list[str]], left: list[bool], room: int) -> list[int]:
    """The width of each column: of its longest text. Where there is no room for that they are made
    narrower, one letter at a time, until all fit or none can: first headings are wrapped, their
    words whole, then texts; numbers stay on one line."""
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
        widths[max(wide, key=lambda i: (widths[i] > of_cells[i], widths[i]))] -= 1
    return widths


def longest_word(texts: list[str]) -> int:
    return max(map(len, " ".join(texts).split()), default=0)


def wrapped_row(row: list[str], widths: list[int], left: list[bool]) -> str:
    """A row of a table, over as many lines as its longest text needs."""
    wrapped = [textwrap.wrap(text, width) or [""] for text, width in zip(row, widths)]
    formats = [f"{'<' if on_left else '>'}{width}" for width, on_left in zip(widths, left)]
    return "\n".join(f"| {' | '.join(map(format, line, formats))} |"
                     for line in zip_longest(*wrapped, fillvalue=""))


def by_row(formats: dict[str, str], rows: Iterable[Collection[Cell]]) -> Columns:
    columns: dict[str, tuple[str, Row]] = {name: (spec, []) for name, spec in formats.items()}
    for row in rows:
        for (_, values), value in zip(columns.values(), row, strict=True):
            values.append(value)
    return columns


def shown(value: Cell, spec: str) -> str:
    """A cell as text. The format `p` is for probabilities, which are never 0; `points` for
    differences of shares, `size` for how large one is. An estimate is shown with its 95% interval:
    +2.8 (+1.8 to +3.8)."""
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
    """What JSON can hold: an undefined number is null."""
    if isinstance(value, Estimate):
        return {"value": in_json(value.value), "low": in_json(value.low),
                "high": in_json(value.high)}
    if isinstance(value, tuple):
        return [in_json(end) for end in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(texts: list[str], tables: list[Table]) -> None:
    for text in texts:
        print(textwrap.fill(text, WIDTH) + "\n")
    for table in tables:
        sentences = [f"{note.removesuffix('.')}." for note in table.notes]
        notes = "\n".join(textwrap.fill(sentence, WIDTH) for sentence in sentences)
        parts = [f"## {table.title}", textwrap.fill(table.finding, WIDTH), table.to_text(), notes]
        print("\n\n".join(filter(None, parts)) + "\n")


def show_in_short(texts: list[str], tables: list[Table]) -> None:
    """Print texts as a list, and tables without findings and notes."""
    for text in dict.fromkeys(texts):
        print(textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ",
                            break_on_hyphens=False))
    for table in tables:
        print(f"\n{table.title}\n{table.to_text()}")
