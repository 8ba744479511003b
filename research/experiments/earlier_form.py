"""The summary table of an earlier experiment, with its columns: one seed, 128 problems, the mean of
abs(A log p) by the classes of its regex. Beside them the same seeds on all problems."""
import numpy as np

from analysis.tables import Table, by_row
from analysis.tally import Tally, early_over_late
from harness.progress import show_status
from research.experiments.finished import END, Study, evaluated, success_by_seed

ITEMS = 128  # it evaluated so many, once


def summary_table(study: Study) -> Table:
    rows = []
    for arm, runs in study.runs.items():
        success, *sizes = study.experiment.published.get(arm, (None, None, None))
        few = [np.mean(evaluated(run, END)["answer"][:ITEMS]) for run in runs.values()]
        all_items = success_by_seed(runs, END)
        found = np.mean([sizes_of(run) for run in runs.values()], axis=0)
        rows.append([arm, success, few[0], (min(few), max(few)), np.mean(all_items),
                     (min(all_items), max(all_items)), *sizes, ratio(*sizes), *found[:2],
                     ratio(*found[:2]), found[2]])
    formats = {"arm": "", "success*": ".0%", "once": ".1%", "seeds": ".1%", "end": ".1%",
               "ends": ".1%", "filler*": ".3f", "reasoning*": ".3f", "ratio*": ".2f",
               "filler": ".3f", "reasoning": ".3f", "ratio": ".2f", "early": ".2f"}
    return Table("appendix", "Appendix B of an earlier experiment, repeated", by_row(formats, rows),
                 "",
                 [f"once: the first seed on {ITEMS} held-out problems, as it was measured then; "
                  "sizes are means of abs(A log p), filler and reasoning the classes of its regex; "
                  "* published, of Qwen2.5-0.5B"],
                 {"once": f"success, {ITEMS} problems", "seeds": f"{ITEMS} problems, range",
                  "end": "all problems, mean", "ends": "all problems, range",
                  "ratio*": "filler / reasoning*", "ratio": "filler / reasoning",
                  "early": "gradient, early / late"})


def sizes_of(run: dict) -> list[float]:
    """Filler, reasoning; and the first fifth over the last in the gradient abs(A) w s."""
    tally = Tally(run["folder"])
    tally.read(show_status)
    filler, reasoning, _ = tally.mean("class", "abs contribution")
    return [filler, reasoning, early_over_late(tally, "gradient").value]


def ratio(filler: float | None, reasoning: float | None) -> float | None:
    return filler / reasoning if filler else None
