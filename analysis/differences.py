"""Is one arm better than another? Paired by seed, and by held-out problem."""
import numpy as np

from analysis.arms import Comparison
from analysis.runs import evaluations
from analysis.statistics import Estimate, holm, paired_difference
from analysis.tables import Table, by_row

PRIMARY = "final success, sampled"  # what is decided; the other measures are exploratory
SEEN = 0.05

NOTES = [
    "the verdict goes by Holm's p: among several arms an interval that just excludes 0 is not "
    "enough",
    "paired by seed and, held out, by problem; bootstrap over seeds and over problems, Student's t "
    "for few seeds, never narrower than the chance of single answers allows; with one seed the "
    "interval is about problems alone; could see: a difference of about this size would have been "
    "seen in 80 of 100 such experiments, other arms included (itself an estimate from few seeds)"]
PLACEBO_NOTE = ("a row with a minus: an arm against its own placebo, with a Holm's correction of "
                "its own")


def evaluated(run: dict, mode: str) -> list[int]:
    """At which steps; none if not at the end."""
    steps = sorted({line["step"] for line in evaluations(run, mode)})
    return steps if steps and steps[-1] == run["config"]["steps"] else []


def final_answers(run: dict, at: list[int], mode: str) -> np.ndarray:
    """(problems,) whether each held-out problem is solved at the end."""
    answers = [line["answer"] for line in evaluations(run, mode) if line["step"] == at[-1]]
    return np.array(answers[0], float)


def area(run: dict, at: list[int], mode: str) -> np.ndarray:
    """(problems,) the mean of each one's curve over training, straight between evaluations."""
    curve = [line["answer"] for line in evaluations(run, mode) if line["step"] in at]
    return np.trapezoid(np.array(curve, float), at, axis=0) / (at[-1] - at[0])


def training_mean(run: dict, at: list[int], mode: str) -> np.ndarray:
    """(1,) success over all training batches."""
    return np.array([np.mean([line["success"] for line in run["metrics"]])])


MEASURES = {  # what is computed, from evaluations of which mode, and at how many steps at least
    PRIMARY: (final_answers, "sampled", 1),
    "final success, greedy": (final_answers, "greedy", 1),
    "area under the held-out curve, sampled": (area, "sampled", 2),
    "mean success in training batches": (training_mean, None, 0)}


def difference(comparison: Comparison, one: str, other: str, measure: str,
               tests: int = 1) -> tuple[list[int], Estimate | None]:
    """The seeds that both arms have, and how far arm `one` is ahead, on evaluations both have."""
    values_of, mode, least = MEASURES[measure]
    mine, theirs = comparison.seeds(one), comparison.seeds(other)
    rows, chance = {}, 0.0
    for seed in sorted(set(mine) & set(theirs)):
        pair = mine[seed], theirs[seed]
        at = sorted(set(evaluated(pair[0], mode)) & set(evaluated(pair[1], mode))) if mode else []
        if len(at) >= least and all(run["metrics"] or mode for run in pair):
            rows[seed] = values_of(pair[0], at, mode) - values_of(pair[1], at, mode)
            if mode is None:
                chance += training_chance(pair[0]) + training_chance(pair[1])
    if not rows:
        return [], None
    differences = np.stack(list(rows.values()))
    return list(rows), paired_difference(differences, tests, chance=chance / len(rows) ** 2)


def training_chance(run: dict) -> float:
    """The variance of a run's training success by the chance of single answers, of which only means
    are on record: binomial, with one success and one failure added so that it is never 0."""
    config = run["config"]
    answers = len(run["metrics"]) * config.get("questions", 1) * config.get("answers", 1)
    solved = answers * np.mean([line["success"] for line in run["metrics"]])
    share = (solved + 1) / (answers + 2)
    return share * (1 - share) / (answers + 2)


def verdict(seeds: list[int], estimate: Estimate | None, p: float) -> str:
    """`better` or `worse` only where the interval excludes 0, and still does among all arms (p is
    Holm's)."""
    if estimate is None:
        return "nothing in common"
    if len(seeds) == 1:
        return "one seed: no verdict"
    if not p < SEEN:
        return "no difference seen"
    return "better" if estimate.value > 0 else "worse"


def differences(comparison: Comparison, measure: str) -> Table:
    """Each arm minus the baseline, and each arm minus its own placebo: two questions, each with its
    own correction."""
    against = [(name, comparison.baseline) for name in comparison.others()]
    placebos = [(name, placebo) for name in comparison.arms
                for placebo in comparison.placebos_of(name)]
    rows, verdicts = [], {}
    for family in (against, placebos):
        estimates = {pair: difference(comparison, *pair, measure, len(family)) for pair in family}
        adjusted = adjusted_p(estimates)
        for (name, other), (seeds, estimate) in estimates.items():
            p = adjusted.get((name, other))
            word = verdict(seeds, estimate, np.nan if p is None else p)
            label = name if family is against else f"{name} - {other}"
            rows.append(row_of(label, seeds, estimate, p, word))
            if family is against:
                verdicts.setdefault(word, []).append((name, seeds, estimate))
    finding = in_words(verdicts, comparison.baseline)
    if measure != PRIMARY:
        finding = f"Exploratory, Holm's correction does not reach over the measures. {finding}"
    formats = {"arm": "", "seeds": "d", "difference": "+.1%", "95%": "+.1%", "Holm p": "p",
               "could see": ".1%", "verdict": ""}
    return Table(measure, f"{measure.capitalize()}: each arm minus {comparison.baseline}",
                 by_row(formats, rows), finding, NOTES + [PLACEBO_NOTE] * bool(placebos),
                 {"95%": "95% interval", "Holm p": "p, Holm's correction"})


def adjusted_p(estimates: dict) -> dict:
    """Holm's p of the pairs of which there are several seeds."""
    tested = [pair for pair, (seeds, _) in estimates.items() if len(seeds) > 1]
    if not tested:
        return {}
    return dict(zip(tested, holm([estimates[pair][1].p for pair in tested])))


def row_of(label: str, seeds: list[int], estimate: Estimate | None, p, word: str) -> list:
    if estimate is None:
        return [label, len(seeds), None, None, p, None, word]
    visible = estimate.visible if len(seeds) > 2 else None
    return [label, len(seeds), estimate.value, estimate.interval, p, visible, word]


def in_words(verdicts: dict, baseline: str) -> str:
    """Which arms are better, which worse; and of those without a difference what could be seen."""
    sentences = {"better": f"Better than {baseline}", "worse": f"Worse than {baseline}",
                 "no difference seen": "No difference seen",
                 "one seed: no verdict": "One seed is one seed, and no verdict"}
    findings = []
    for word, sentence in sentences.items():
        names = [name + could_see(seeds, estimate) * (word == "no difference seen")
                 for name, seeds, estimate in verdicts.get(word, ())]
        if names:
            findings.append(f"{sentence}: {', '.join(names)}.")
    return " ".join(findings)


def could_see(seeds: list[int], estimate: Estimate) -> str:
    if len(seeds) == 2:
        return " (with two seeds only a huge one would be seen)"
    return f" (could have seen about {100 * estimate.visible:.0f} points)"
