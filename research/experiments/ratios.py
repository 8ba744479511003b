"""What the arms of an experiment gave to early tokens and to filler, in the sizes that an earlier
experiment looked at and as the gradient that is applied."""
import numpy as np

from analysis.ratios import early_over_late, pair
from analysis.tables import Table, by_row
from analysis.tally import Tally
from analysis.vocabulary import CLASSES
from research.experiments.finished import Study

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
