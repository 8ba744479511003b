"""Tables of the earlier experiment for several runs: what it expected of each weighting beside what
these runs have shown, and its summary table. notes_sums.py has the sums."""
from collections.abc import Iterable, Mapping

import numpy as np

from lab.analysis.comparison import Arm, Gain, final_lines, gains, mean_success, over_baseline
from lab.analysis.statistics import Floats, mean_over
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row
from lab.probes.notes_sums import FILLER, PUBLISHED_SIZES, REASONING, UNDEFINED, UNITS, Notes

BROKEN = 0.0, ("expected: equal credit, perhaps instability; seen: broken at step 60, norm 0.6 to "
               "0.7")
THEIR_PLAIN_SUCCESS = 0.15  # held out, of plain GRPO at the end of the earlier experiment
EXPECTED = {  # weighting: held-out success at their end; what they expected; and saw
    "none": (THEIR_PLAIN_SUCCESS, "expected: gradient wasted on filler; seen: it learns, norm 2 to "
                                  "3"),
    "outcome_conditional": (0.12, "expected: more credit for the answer, perhaps worse reasoning; "
                                  "seen: it hurts"),
    "inverse_logprob": BROKEN, "inverse_logprob_as_published": BROKEN,
    "attention_credit": (None, "expected: credit by the model's own attention; not run"),
    "entropy_weighted": (None, "expected: credit for forking tokens, perhaps only above 8 billion "
                               "parameters; not run"),
    "entropy_masking": (None, "expected: credit for forking tokens; seen: the gradient explodes")}
Sums = dict[str, list[Notes]]  # of each run of an arm, by the arm's name


@UNDEFINED
def notes_tables_of_arms(arms: Mapping[str, Arm]) -> list[Table]:
    """Three tables: what the notes expected of each weighting and what was found, their summary
    table, and the shares of the classes."""
    known: Sums = {}
    for name, arm in arms.items():
        sums = [Notes(run) for run in arm.values() if run.steps]
        if sums:
            known[name] = sums
    return [expected_and_found(arms), size_by_class(known), shares_by_class(known)]


def expected_and_found(arms: Mapping[str, Arm]) -> Table:
    rows: list[Row] = []
    baseline = next(iter(arms))
    found = gains(over_baseline(arms, baseline))
    for name, arm in arms.items():
        weighting = str(next(iter(arm.values())).config["mitigation"])
        theirs, words = EXPECTED.get(weighting, (None, ""))
        gain = found.get(name)
        success, norms, peaks = [], [], []
        for run in arm.values():
            success.append(mean_success(run))
            of_run = [line["gradient_norm"] for line in run.metrics]
            norms += of_run
            if positive := [norm for norm in of_run if norm]:
                peaks.append(float(max(positive) / np.median(positive)))
        ends = [line["success"] for line in final_lines(list(arm.values()), "sampled")]
        rows.append([
            name,
            mean_over(success).value,
            gain.estimate if gain else None,
            mean_over(ends).value,
            theirs,
            as_they_saw(gain, theirs),
            mean_over(norms).value,
            mean_over(peaks).value,
            words])
    formats = {"arm": "", "speed": ".1%", "gain": "points", "end": ".1%", "theirs": ".0%",
               "look": "", "norm": ".3f", "peak": ".1f", "words": ""}
    return Table("notes expected", "What the notes expected, and what these runs show",
                 by_row(formats, rows), "", [
        "Learning speed is the mean success of all answers in training. The gain is its difference "
        "from the baseline's, with a 95% interval over seeds.",
        "This table can show how these runs learned. One seed shows nothing about a weighting, and "
        "the earlier experiment had one: its 15% and 12% of 128 problems differ by z = 0.74. Ours "
        "is the same if the whole interval lies on the side of 0 that the notes saw, and other if "
        "it lies on the other side."],
        {"look": "ours is",
         "speed": "learning speed",
         "gain": f"gain over {baseline}{WITH_INTERVAL}",
         "end": "held-out success at the end", "theirs": "published",
         "norm": "gradient norm before clipping",
         "peak": "largest norm / median norm", "words": "the notes"})


def as_they_saw(gain: Gain | None, theirs: float | None) -> str:
    """Whether the gain over plain GRPO has the sign that the notes saw."""
    if gain is None or theirs is None or not np.isfinite(gain.estimate.low):
        return ""
    is_below, is_above = gain.estimate.high < 0, gain.estimate.low > 0
    if not is_below and not is_above:
        return "not seen"
    return "same" if is_below == (theirs < THEIR_PLAIN_SUCCESS) else "other"


def size_by_class(known: Sums) -> Table:
    rows: list[Row] = []
    for name, sums in known.items():
        old, new = (mean_of_runs(one.mean("class", f"abs {unit}") for one in sums)
                    for unit in UNITS)
        theirs = None
        if sums[0].is_of_the_notes:
            sizes = PUBLISHED_SIZES[sums[0].published]
            theirs = sizes[FILLER] / sizes[REASONING]
        ratio = old[0] / old[1]
        rows.append([name, *old, ratio, theirs, *new, new[0] / new[1]])
    formats = {"arm": "", "filler": ".3f", "reasoning": ".3f", "ratio": ".2f", "theirs": ".2f",
               "new filler": ".3f", "new reasoning": ".3f", "new ratio": ".2f"}
    return Table("notes summary", "The notes' summary table: mean abs(A w log p) by class",
                 by_row(formats, rows), "", [
        "A ratio is that of filler to reasoning. The last three columns are the same for abs(A) w "
        "s, the size of the gradient.",
        "This table can show which class has the larger terms. It cannot show that credit moved, "
        "because the terms contain the weight, and because these runs wrote other texts."],
        {"theirs": "published ratio", "new filler": "filler, abs(A) w s",
         "new reasoning": "reasoning, abs(A) w s", "new ratio": "ratio, abs(A) w s"})


def shares_by_class(known: Sums) -> Table:
    rows: list[Row] = []
    for name, sums in known.items():
        row: Row = [name]
        for measure in ("tokens", *(f"abs {unit}" for unit in UNITS)):
            row += mean_of_runs(one.share("class", measure) for one in sums).tolist()
        rows.append(row)
    formats = {"arm": "", "tokens": ".1%", "": ".1%", "filler": ".1%", "reasoning": ".1%",
               "new filler": ".1%", "new reasoning": ".1%"}
    return Table("notes shares", "Shares of the classes", by_row(formats, rows), "", [
        "These are shares of the tokens, of the summed contributions and of the gradient. What is "
        "missing to 100% is structure. This table can show how the sizes are spread over the "
        "classes. It cannot show what the tokens decide."],
        {"tokens": "filler, of the tokens", "": "reasoning, of the tokens",
         "filler": "filler, of abs(A w log p)", "reasoning": "reasoning, of abs(A w log p)",
         "new filler": "filler, of abs(A) w s", "new reasoning": "reasoning, of abs(A) w s"})


def mean_of_runs(by_class: Iterable[Floats]) -> Floats:
    """(2,) filler and reasoning, the mean over runs."""
    return np.asarray(np.mean([values[:2] for values in by_class], 0))
