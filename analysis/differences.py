"""Is one arm better than another? Paired by seed, and by held-out problem."""
import numpy as np

from analysis.arms import Comparison
from analysis.runs import evaluations
from analysis.statistics import Estimate, holm, paired_difference
from analysis.tables import Table, by_row

PRIMARY = "final success, sampled"  # what is decided; learning speed is exploratory
SPEED = "area under the held-out curve, sampled"
SEEN = 0.05

NOTES = [
    "the verdict goes by Holm's p, over all arms of the table",
    "paired bootstrap over seeds and held-out problems, Student's t for few seeds; with one seed "
    "over problems alone; could see: the size that 80 of 100 such experiments would see, itself "
    "an estimate from few seeds"]
PLACEBO_NOTE = "a row with a minus: an arm against its own placebo; Holm's correction apart"


def evaluated(run: dict) -> list[int]:
    """At which steps, sampled; none if not at the end."""
    steps = [line["step"] for line in evaluations(run, "sampled")]
    return steps if steps and steps[-1] == run["config"]["steps"] else []


def curve_of(run: dict, at: list[int]) -> np.ndarray:
    """(steps, problems) whether each held-out problem was solved."""
    answers = [line["answer"] for line in evaluations(run, "sampled") if line["step"] in at]
    return np.array(answers, float)


def final_answers(run: dict, at: list[int]) -> np.ndarray:
    """(problems,) whether each is solved at the end."""
    return curve_of(run, at)[-1]


def area(run: dict, at: list[int]) -> np.ndarray:
    """(problems,) the mean of each one's curve over training, straight between evaluations."""
    return np.trapezoid(curve_of(run, at), at, axis=0) / (at[-1] - at[0])


MEASURES = {PRIMARY: (final_answers, 1), SPEED: (area, 2)}  # and at how many steps at least


def difference(comparison: Comparison, one: str, other: str, measure: str,
               tests: int = 1) -> tuple[list[int], Estimate | None]:
    """The seeds that both arms have, and how far arm `one` is ahead, on evaluations both have."""
    values_of, least = MEASURES[measure]
    mine, theirs = comparison.seeds(one), comparison.seeds(other)
    rows = {}
    for seed in sorted(set(mine) & set(theirs)):
        at = sorted(set(evaluated(mine[seed])) & set(evaluated(theirs[seed])))
        if len(at) >= least:
            rows[seed] = values_of(mine[seed], at) - values_of(theirs[seed], at)
    return list(rows), paired_difference(np.stack(list(rows.values())), tests) if rows else None


def verdict(seeds: list[int], estimate: Estimate | None, p: float | None) -> str:
    """p is Holm's, of several seeds."""
    if estimate is None:
        return "nothing in common"
    if p is None:
        return "one seed: no verdict"
    if not p < SEEN:
        return "no difference seen"
    return "better" if estimate.value > 0 else "worse"


def differences(comparison: Comparison, measure: str) -> Table:
    """Each arm minus the baseline, and each arm minus its own placebo: two questions, each with its
    own correction."""
    against = rows_of_family(comparison, measure, {
        name: (name, comparison.baseline) for name in comparison.others()})
    placebos = rows_of_family(comparison, measure, {
        f"{name} - {placebo}": (name, placebo) for name in comparison.arms
        for placebo in comparison.placebos_of(name)})
    exploratory = "exploratory: Holm's correction does not reach over the measures"
    notes = NOTES + [PLACEBO_NOTE] * bool(placebos) + [exploratory] * (measure != PRIMARY)
    formats = {"arm": "", "seeds": "d", "difference": "+.1%", "95%": "+.1%", "Holm p": "p",
               "could see": ".1%", "verdict": ""}
    return Table(measure, f"{measure.capitalize()}: each arm minus {comparison.baseline}",
                 by_row(formats, against + placebos), "", notes,
                 {"seeds": "seeds of both arms", "95%": "95% interval",
                  "Holm p": "p, Holm's correction"})


def rows_of_family(comparison: Comparison, measure: str, pairs: dict[str, tuple]) -> list[list]:
    """A row for each pair of arms, by its label; Holm's correction is over all of them."""
    found = {label: difference(comparison, *pair, measure, len(pairs))
             for label, pair in pairs.items()}
    tested = [label for label, (seeds, _) in found.items() if len(seeds) > 1]
    holm_p = dict(zip(tested, holm([found[label][1].p for label in tested])))
    rows = []
    for label, (seeds, estimate) in found.items():
        p = holm_p.get(label)
        numbers = [estimate.value, estimate.interval] if estimate else [None, None]
        visible = estimate.visible if len(seeds) > 2 else None
        rows.append([label, len(seeds), *numbers, p, visible, verdict(seeds, estimate, p)])
    return rows
