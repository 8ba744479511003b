"""How results are shown: a table in the terminal, as Markdown and as JSON."""
import math
import textwrap
from dataclasses import dataclass, field

LETTERS = [chr(ord("a") + i) for i in range(26)] + [f"{i}" for i in range(1, 1000)]
WIDTH = 100  # of a terminal


@dataclass
class Table:
    """`columns` gives each heading its number format and one value a row: a text, a number, an
    interval (low, high) or None."""
    name: str
    title: str
    columns: dict[str, tuple]
    finding: str = ""
    notes: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)  # short names of rows, where room is short

    @property
    def rows(self) -> list[tuple]:
        return list(zip(*(values for _, values in self.columns.values()), strict=True))

    def cells(self) -> list[list[str]]:
        formats = [spec for spec, _ in self.columns.values()]
        return [list(map(shown, row, formats)) for row in self.rows]

    def texts(self) -> list[bool]:
        """Which columns hold nothing but text: they stand on the left."""
        return [is_text(values) for _, values in self.columns.values()]

    def to_text(self, limit: int = WIDTH) -> str:
        """Markdown that also lines up in a terminal. Where it would be too wide, long names become
        letters, explained below."""
        cells = self.cells()
        text = self.lined_up(cells)
        if len(text.split("\n")[0]) <= limit or not cells:
            return text
        long = [row[0] for row in cells if len(row[0]) > 9]
        letters = {name: self.keys.get(name, letter) for name, letter in zip(long, LETTERS)}
        short = [[letters.get(row[0], row[0]), *row[1:]] for row in cells]
        legend = [f"({letters[name]}) {name}" for name in long]
        return "\n".join([self.lined_up(short), *[""] * bool(legend), *legend])

    def lined_up(self, cells: list[list[str]]) -> str:
        rows = [list(map(escaped, row)) for row in [list(self.columns), *cells]]
        widths, left = [max(3, *map(len, column)) for column in zip(*rows)], self.texts()
        rule = [rule_of(width, on_left) for width, on_left in zip(widths, left)]
        lines = [line_of(row, widths, left) for row in rows]
        return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])

    def to_json(self) -> dict:
        rows = [dict(zip(self.columns, map(plain, row))) for row in self.rows]
        return {"name": self.name, "title": self.title, "finding": self.finding,
                "notes": self.notes, "columns": list(self.columns), "rows": rows}


def is_text(values) -> bool:
    return all(isinstance(value, str) for value in values)


def escaped(text: str) -> str:
    return text.replace("|", "\\|")  # which would end a cell


def line_of(row: list[str], widths: list[int], left: list[bool]) -> str:
    cells = [text.ljust(width) if on_left else text.rjust(width)
             for text, width, on_left in zip(row, widths, left)]
    return f"| {' | '.join(cells)} |"


def rule_of(width: int, on_left: bool) -> str:
    return "-" * (width + 2) if on_left else "-" * (width + 1) + ":"


def by_row(formats: dict[str, str], rows: list) -> dict[str, tuple]:
    """The columns of a table whose rows are at hand."""
    assert all(len(row) == len(formats) for row in rows), "a row does not fit the headings"
    columns = {}
    for i, (heading, spec) in enumerate(formats.items()):
        columns[heading] = (spec, [row[i] for row in rows])
    return columns


def shown(value, spec: str) -> str:
    """A cell as text. The format `p` is for probabilities, which are never 0."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        low, high = value
        return "-" if plain(low) is None else f"{shown(low, spec)} to {shown(high, spec)}"
    if plain(value) is None:
        return "-"
    if spec != "p":
        return format(value, spec)
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def plain(value):
    """What JSON can hold: an undefined number is null."""
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, str):
        return value
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def show(short: list[str], tables: list[Table], legend: tuple = ()) -> None:
    """Print the findings in short, the legend, and every table."""
    if short:
        print("\nIn short")
    for text in short:
        print(textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  "))
    for text in legend:
        print("\n" + textwrap.fill(text, WIDTH))
    for table in tables:
        print(f"\n## {table.title}\n")
        if table.finding:
            print(textwrap.fill(table.finding, WIDTH) + "\n")
        print(table.to_text())
        if table.notes:
            print("\n" + "\n".join(textwrap.fill(note, WIDTH) for note in table.notes))
