"""The tables that a probe made with several seeds, as one: medians, ranges, counts of verdicts."""
from collections import Counter

import numpy as np

from analysis.runs import is_number
from analysis.tables import Table


def over_seeds(tables: list[Table]) -> Table:
    """The rows that all seeds have: numbers as their median, intervals from lowest to highest, and
    of a verdict how many seeds came to it."""
    first, count = tables[0], key_length(tables)
    by_seed = [dict(zip(keys_of(table, count), table.rows)) for table in tables]
    kept = [key for key in by_seed[0] if all(key in rows for rows in by_seed)]
    columns = {}
    for place, (column, (spec, _)) in enumerate(first.columns.items()):
        if place < count:
            cells = [by_seed[0][key][place] for key in kept]
        else:
            cells = [together([rows[key][:place + 1] for rows in by_seed], spec) for key in kept]
        columns[column] = (spec, cells)
    headings = {column: "lowest to highest" for column, (_, values) in first.columns.items()
                if any(isinstance(value, tuple) for value in values)}
    finding = f"Medians of {len(tables)} seeds, with the range from the lowest to the highest."
    return Table(first.name, first.title, columns, finding, first.notes, first.headings | headings)


def key_length(tables: list[Table]) -> int:
    """How many cells on the left tell the rows of each table apart."""
    width = len(tables[0].columns)
    for count in range(1, width):
        if all(len(set(keys_of(table, count))) == len(table.rows) for table in tables):
            return count
    return width


def keys_of(table: Table, count: int) -> list[tuple]:
    """An empty first cell stands for the one above."""
    keys, above = [], ""
    for row in table.rows:
        above = row[0] or above
        keys.append((above, *row[1:count]))
    return keys


def together(rows: list[tuple], spec: str):
    """The last cell of what is given of the same row in all seeds. A count stays a whole number.
    An interval is about the number before it."""
    cells = [row[-1] for row in rows]
    if any(isinstance(cell, tuple) for cell in cells):
        return range_of([row[-2] for row in rows if is_number(row[-2])])
    if any(isinstance(cell, str) for cell in cells):
        return most_common([str(cell) for cell in cells if cell is not None])
    known = [cell for cell in cells if is_number(cell)]
    if not known:
        return None
    middle = float(np.median(known))
    return round(middle) if spec.endswith("d") else middle


def range_of(values: list) -> tuple:
    return (min(values), max(values)) if values else (None, None)


def most_common(texts: list[str]) -> str:
    """With its count, unless all say the same."""
    text, count = Counter(texts).most_common(1)[0]
    return text if count == len(texts) else f"{text} ({count} of {len(texts)})"
