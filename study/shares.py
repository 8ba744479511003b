"""What the arms of an experiment gave to early tokens and to filler, in the sizes that an earlier
experiment looked at and as the gradient that is applied; what their critics knew."""
import numpy as np

from analysis.ratios import early_over_late, pair
from analysis.runs import is_number
from analysis.tables import Table, by_row
from analysis.tally import Tally
from analysis.vocabulary import CLASSES
from study.finished import Study

UNITS = {"A lp": "contribution", "A w lp": "weighted contribution", "A w s": "weighted gradient"}
FILLER, REASONING = CLASSES.index("filler"), CLASSES.index("reasoning")


def ratios_table(study: Study) -> Table:
    """Of each arm the mean over its seeds, and the lowest and highest seed."""
    rows = []
    for arm, runs in study.runs.items():
        tallies = [read_tally(run) for run in runs.values()]
        for label, unit in UNITS.items():
            early = [early_over_late(tally, "ends", unit).value for tally in tallies]
            filler = [pair(tally, "class", unit, FILLER, REASONING)[0].value for tally in tallies]
            rows.append([arm, label, len(tallies), np.mean(early), (min(early), max(early)),
                         np.mean(filler), (min(filler), max(filler))])
    formats = {"arm": "", "size": "", "seeds": "d", "early": ".2f", "early, seeds": ".2f",
               "filler": ".2f", "filler, seeds": ".2f"}
    headings = {"early": "early over late", "early, seeds": "lowest to highest seed",
                "filler": "filler over reasoning", "filler, seeds": "lowest to highest seed"}
    return Table("ratios", "Mean sizes over all steps: early over late, filler over reasoning",
                 by_row(formats, rows), "",
                 ["A lp: advantage times log-prob, which an earlier experiment logged; A w lp: the "
                  "same with the weight; A w s: the gradient that is applied"], headings)


def read_tally(run: dict) -> Tally:
    tally = Tally(run["folder"])
    tally.read()
    return tally


def critics_table(study: Study) -> Table | None:
    """Explained variance of the returns by the critic, where an arm has one: 1 is all of it, 0 what
    a constant explains."""
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
