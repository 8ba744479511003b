"""How results are shown: a table in the terminal, as Markdown and as JSON."""
import math
import textwrap
from dataclasses import dataclass, field


LETTERS = [chr(ord("a") + i) for i in range(26)] + [f"{i}" for i in range(1, 1000)]


@dataclass
class Table:
    """`columns` gives each heading its number format and one value a row: a text, a number, an interval (low, high) or None."""
    name: str
    title: str
    columns: dict[str, tuple]
    finding: str = ""
    notes: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)  # short names of rows, for a narrow terminal

    @property
    def rows(self) -> list[tuple]:
        return list(zip(*(values for _, values in self.columns.values()), strict=True))

    def cells(self) -> list[list[str]]:
        return [[shown(value, spec) for value, (spec, _) in zip(row, self.columns.values())] for row in self.rows]

    def texts(self) -> list[bool]:
        """Which columns hold nothing but text: they stand on the left."""
        return [all(isinstance(value, str) for value in values) for _, values in self.columns.values()]

    def to_text(self, limit: int = 100) -> str:
        """Markdown that also lines up in a terminal. Where it would be too wide, long names become letters, explained below."""
        cells = self.cells()
        text = self.lined_up(cells)
        if len(text.split("\n")[0]) <= limit or not cells:
            return text
        long = [row[0] for row in cells if len(row[0]) > 9]
        names = {row[0]: row[0] for row in cells} | {name: self.keys.get(name, letter) for name, letter in zip(long, LETTERS)}
        legend = [f"({names[name]}) {name}" for name in long]
        return "\n".join([self.lined_up([[names[row[0]], *row[1:]] for row in cells]), *[""] * bool(legend), *legend])

    def lined_up(self, cells: list[list[str]]) -> str:
        rows = [[text.replace("|", "\\|") for text in row] for row in [list(self.columns), *cells]]
        widths = [max(3, *map(len, column)) for column in zip(*rows)]

        def line(row):
            return "| " + " | ".join(text.ljust(w) if left else text.rjust(w) for text, w, left in zip(row, widths, self.texts())) + " |"

        rule = "|" + "|".join("-" * (w + 2) if left else "-" * (w + 1) + ":" for w, left in zip(widths, self.texts())) + "|"
        return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])

    def to_json(self) -> dict:
        return {"name": self.name, "title": self.title, "finding": self.finding, "notes": self.notes, "columns": list(self.columns),
                "rows": [dict(zip(self.columns, map(plain, row))) for row in self.rows]}


def by_row(formats: dict[str, str], rows: list) -> dict[str, tuple]:
    """The columns of a table whose rows are at hand."""
    assert all(len(row) == len(formats) for row in rows), "a row does not fit the headings"
    return {heading: (spec, [row[i] for row in rows]) for i, (heading, spec) in enumerate(formats.items())}


def shown(value, spec: str) -> str:
    """A cell as text. The format `p` is for probabilities, which are never 0."""
    if isinstance(value, tuple):
        return "-" if plain(value[0]) is None else f"{shown(value[0], spec)} to {shown(value[1], spec)}"
    if isinstance(value, str):
        return value
    if plain(value) is None:
        return "-"
    return format(value, spec) if spec != "p" else "<0.001" if value < 0.001 else f"{value:.3f}"


def plain(value):
    """What JSON can hold: an undefined number is null."""
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, str):
        return value
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def show(short: list[str], tables: list[Table], legend: tuple = ()) -> None:
    if short:
        print("\nIn short\n" + "\n".join(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  ") for text in short))
    for text in legend:
        print("\n" + textwrap.fill(text, 100))
    for table in tables:
        print(f"\n## {table.title}\n")
        if table.finding:
            print(textwrap.fill(table.finding, 100) + "\n")
        print(table.to_text())
        if table.notes:
            print("\n" + "\n".join(textwrap.fill(note, 100) for note in table.notes))
