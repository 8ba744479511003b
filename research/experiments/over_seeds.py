"""The tables that a probe made with several seeds, as one: medians, ranges, counts of verdicts."""
from collections import Counter

import numpy as np

from harness.log_reading import is_number
from analysis.tables import Table


def over_seeds(tables: list[Table]) -> Table:
    """The rows that all seeds have, by their first cell: numbers as their median, intervals from
    lowest to highest, and of a verdict how many seeds came to it."""
    first, by_seed = tables[0], [{row[0]: row for row in table.rows} for table in tables]
    kept = [name for name in by_seed[0] if all(name in rows for rows in by_seed)]
    columns = {}
    for place, (column, (spec, _)) in enumerate(first.columns.items()):
        cells = [together([rows[name][:place + 1] for rows in by_seed], spec) for name in kept]
        columns[column] = (spec, cells)
    headings = {column: "lowest to highest" for column, (_, values) in first.columns.items()
                if any(isinstance(value, tuple) for value in values)}
    finding = f"Medians of {len(tables)} seeds, with the range from the lowest to the highest."
    return Table(first.name, first.title, columns, finding, first.notes, first.headings | headings)


def together(rows: list[tuple], spec: str):
    """The last cell of what is given of the same row in all seeds. A count stays a whole number.
    An interval is about the number before it."""
    cells = [row[-1] for row in rows]
    if any(isinstance(cell, tuple) for cell in cells):
        values = [row[-2] for row in rows if is_number(row[-2])]
        return (min(values), max(values)) if values else (None, None)
    if any(isinstance(cell, str) for cell in cells):
        return most_common([str(cell) for cell in cells if cell is not None])
    known = [cell for cell in cells if is_number(cell)]
    if not known:
        return None
    middle = float(np.median(known))
    return round(middle) if spec.endswith("d") else middle


def most_common(texts: list[str]) -> str:
    """With its count, unless all say the same."""
    text, count = Counter(texts).most_common(1)[0]
    return text if count == len(texts) else f"{text} ({count} of {len(texts)})"
