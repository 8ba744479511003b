"""What the notes expected of each weighting beside what several runs have shown, and the notes'
summary table; analysis/notes.py has the sums."""
import numpy as np

from analysis.arms import Comparison
from analysis.compare import IN_TRAINING, difference, final_lines, mean_success
from analysis.notes import FILLER, REASONING, SIZES, UNDEFINED, UNITS, Notes, same_or_other
from analysis.statistics import Estimate, mean_over
from analysis.tables import Row, Table, by_row
from analysis.tally import Tally

BROKEN = 0.0, "equal credit, may destabilise; broken at step 60, norm 0.6 to 0.7"
EXPECTED = {  # weighting: held-out success at the notes' end; what they expected; and saw
    "none": (0.15, "wastes gradient on filler; learns, norm 2 to 3"),
    "outcome_conditional": (0.12, "more credit to the answer, may hurt reasoning; hurts"),
    "inverse_logprob": BROKEN, "inverse_logprob_as_published": BROKEN,
    "attention_credit": (None, "credit by the model's own attention; not run"),
    "entropy_weighted": (None, "forking tokens, may need over 8 billion parameters; not run"),
    "entropy_masking": (None, "forking tokens; the gradient explodes")}


@UNDEFINED
def compared(comparison: Comparison) -> list[Table]:
    """What the notes expected of each weighting, and what was found; their summary table."""
    of_arms = {name: [Notes(run, Tally(run["folder"]), draws=0) for run in arm.values()
                      if run["steps"]] for name, arm in comparison.arms.items()}
    known = {name: all_notes for name, all_notes in of_arms.items() if all_notes}
    return [expected(comparison), summary(known), shares(known)]


def expected(comparison: Comparison) -> Table:
    rows: list[Row] = []
    baseline = comparison.arms[comparison.baseline]
    for name, arm in comparison.arms.items():
        runs, weighting = list(arm.values()), str(comparison.one_of(name)["config"]["mitigation"])
        theirs, words = EXPECTED.get(weighting, (None, ""))
        _, ahead = difference(arm, baseline, IN_TRAINING) if arm is not baseline else ([], None)
        norms = [line["gradient_norm"] for run in runs for line in run["metrics"]]
        ends = [line["success"] for line in final_lines(runs, "sampled")]
        rows.append([name, mean_over([mean_success(run) for run in runs]).value,
                     *([ahead.value, ahead.interval] if ahead else [None, None]),
                     mean_over(ends).value, theirs, seen(ahead, theirs), mean_over(norms).value,
                     words])
    formats = {"arm": "", "speed": ".1%", "minus": "points", "95%": "points", "end": ".1%",
               "theirs": ".0%", "look": "", "norm": ".3f", "words": ""}
    return Table("notes expected", "Expected against found", by_row(formats, rows), "", [
        "Learning speed: mean success of all answers of the training; minus that of the baseline, "
        "with a 95% interval over seeds. It can say how these runs learned; one seed says nothing "
        "of a weighting, and the notes had one: 15% and 12% of 128 problems are z = 0.74. Same: "
        "the interval lies on the notes' side of 0; other: on the far side."],
        {"speed": "learning speed", "minus": f"minus {comparison.baseline}", "95%": "95% interval",
         "end": "held out at the end", "theirs": "notes'", "norm": "norm before clipping",
         "words": "the notes expected; and saw"})


def seen(ahead: Estimate | None, theirs: float | None) -> str:
    """Whether a difference from plain GRPO is what the notes saw."""
    if ahead is None or theirs is None or not np.isfinite(ahead.low):
        return ""
    below, above = ahead.high < 0, ahead.low > 0
    return ("same" if below == (theirs < 0.15) else "other") if below or above else "not seen"


def summary(known: dict[str, list[Notes]]) -> Table:
    rows: list[Row] = []
    for name, all_notes in known.items():
        old, new = (np.mean([notes.mean("class", f"abs {unit}")[:2] for notes in all_notes], 0)
                    for unit in UNITS)
        sizes, is_theirs = SIZES[all_notes[0].published], all_notes[0].is_of_the_notes
        theirs = sizes[FILLER] / sizes[REASONING] if is_theirs else None
        rows.append([name, *old, old[0] / old[1], theirs, same_or_other(old[0] / old[1], theirs, 1),
                     *new, new[0] / new[1]])
    formats = {"arm": "", "filler": ".3f", "reasoning": ".3f", "ratio": ".2f", "theirs": ".2f",
               "look": "", "new filler": ".3f", "new reasoning": ".3f", "new ratio": ".2f"}
    return Table("notes summary", "The notes' summary table: mean abs(A w log p) by class",
                 by_row(formats, rows), "", [
        "Beside it the mean abs(A) w s. It can say which class has the larger terms. It cannot say "
        "that credit moved: a weight is in them, and these runs wrote other texts. Same: on the "
        "same side of 1."],
        {"theirs": "notes' ratio", "new filler": "filler, abs(A) w s", "new reasoning": "reasoning",
         "new ratio": "ratio"})


def shares(known: dict[str, list[Notes]]) -> Table:
    rows = [[name, *(value for measure in ("tokens", *(f"abs {unit}" for unit in UNITS))
                     for value in np.mean([notes.share("class", measure)[:2]
                                           for notes in all_notes], 0))]
            for name, all_notes in known.items()]
    formats = dict.fromkeys(("arm", "tokens", "", "filler", "reasoning", "new filler",
                             "new reasoning"), ".1%") | {"arm": ""}
    return Table("notes shares", "Shares of the classes", by_row(formats, rows), "", [
        "Of the tokens, of the summed contributions and of the gradient; the rest is structure. "
        "It can say how the size is spread, not what the tokens earned."],
        {"tokens": "filler, of the tokens", "": "reasoning", "filler": "filler, of abs(A w log p)",
         "new filler": "filler, of abs(A) w s", "new reasoning": "reasoning"})
