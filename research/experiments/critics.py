"""What the critics of an experiment's arms explain of the rewards."""
import numpy as np

from analysis.runs import is_number
from analysis.tables import Table, by_row
from research.experiments.finished import Study


def critics_table(study: Study) -> Table | None:
    """Of each arm that has a critic, in the first and in the last third of training."""
    rows = []
    for arm, runs in study.runs.items():
        curves = [explained(run) for run in runs.values()]
        if not all(curves):
            continue
        third = min(map(len, curves)) // 3
        first, last = ([np.mean(curve[part]) for curve in curves]
                       for part in (slice(third), slice(-third, None)))
        rows.append([arm, len(curves), np.mean(first), (min(first), max(first)), np.mean(last),
                     (min(last), max(last))])
    if not rows:
        return None
    formats = {"arm": "", "seeds": "d", "first": ".3f", "first, seeds": ".3f", "last": ".3f",
               "last, seeds": ".3f"}
    headings = {"first": "in the first third", "first, seeds": "lowest to highest seed",
                "last": "in the last third", "last, seeds": "lowest to highest seed"}
    return Table("critics", "Variance of the rewards that the critic explains",
                 by_row(formats, rows), "", ["1 is all of it, 0 what a constant explains"],
                 headings)


def explained(run: dict) -> list[float]:
    """Of the steps that have it."""
    values = [line.get("explained_variance") for line in run["metrics"]]
    return [value for value in values if is_number(value)]
