"""Several runs: the tables of their arms, which differences are real, and how they learned.

Two arms with the same seed are asked the same problems at every step. So the measure that decides
is the mean success of all answers of the training, paired by seed: it counts each of them, and what
a seed's problems bring to both arms cancels. An evaluation at the end stands beside it: what was
learned at last, of one model and other problems.
"""
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, PercentFormatter

from analysis.arms import Comparison
from analysis.plots import Style, legend_below, save, style_of, whole_steps
from analysis.runs import Run, evaluations, share_asked_before
from analysis.statistics import Estimate, Floats, holm, mean_over, paired_difference
from analysis.tables import Row, Table, by_row, shown
from analysis.tally import Tally
from engine.tokens import KINDS, SECTIONS
from harness.record import Json

IN_TRAINING, AT_THE_END = MEASURES = ("success in training", "held-out success at the end")
MOST_REPEATED = 0.1  # share of the problems that were asked before
SEEN = 0.05
WINDOW = 5  # steps whose mean is a point of a curve, but in a short run
NOTES = {
    IN_TRAINING: "the mean over all answers that training sampled, by seed; interval: Student's t "
                 "over the seeds",
    AT_THE_END: "sampled; interval: Student's t, over seeds and held-out problems; with one seed "
                "over problems alone"}
HOLM = ("the verdict goes by Holm's p, over all arms of the table; could see: the difference that "
        "80 of 100 such experiments would see, itself an estimate from few seeds")
PLACEBO_NOTE = "a row with a minus: an arm against its own placebo; Holm's correction apart"


def chapters_of(comparison: Comparison) -> dict[str, list[Table]]:
    """The tables by what they are about; the first chapter decides, the others explore."""
    tables = [arms_table(comparison)]
    if len(comparison.arms) > 1:
        deciding, doubt = deciding_measure(comparison)
        tables += [differences(comparison, measure, measure == deciding, doubt)
                   for measure in sorted(MEASURES, key=lambda name: name != deciding)]
    return {"Which arm is better": tables,
            "Stability and cost": [stability(comparison)],
            "Where the gradient went": [shares_table(comparison)]}


def arms_table(comparison: Comparison) -> Table:
    rows: list[Row] = []
    for name, arm in comparison.arms.items():
        runs = list(arm.values())
        ends, greedy = final_lines(runs, "sampled"), final_lines(runs, "greedy")
        numbers = ([mean_success(run) for run in runs], [line["success"] for line in ends],
                   [line["success"] for line in greedy], [line["format_mean"] for line in ends],
                   [line["finished_mean"] for line in ends], [line["length_mean"] for line in ends])
        rows.append([name, len(runs), *(mean_over(of_runs).value for of_runs in numbers)])
    formats = {"arm": "", "seeds": "d", "training": ".1%", "sampled": ".1%", "greedy": ".1%",
               "format": ".2f", "finished": ".0%", "length": ".0f"}
    return Table("arms", "The arms, means over seeds", by_row(formats, rows), headings={
        "training": "success in training", "sampled": "held-out at the end, sampled",
        "length": "tokens an answer"})


def final_lines(runs: list[Run], mode: str) -> list[Json]:
    return [line for run in runs for line in evaluations(run, mode)
            if line["step"] == run["config"]["steps"]]


def success_by_step(run: Run) -> Floats:
    """(steps,) the share of a batch's answers that are right."""
    return np.array([line["success"] for line in run["metrics"]], float)


def mean_success(run: Run) -> float:
    """Of all answers of the training; every step has as many."""
    return float(success_by_step(run).mean()) if run["metrics"] else np.nan


def in_training(mine: Run, theirs: Run) -> Floats | None:
    """(1,) how far one run is ahead of another with the same problems."""
    same = len(mine["metrics"]) == len(theirs["metrics"]) > 0
    return np.array([mean_success(mine) - mean_success(theirs)]) if same else None


def at_the_end(mine: Run, theirs: Run) -> Floats | None:
    """(problems,) the same after the last step, of each held-out problem."""
    ends = [final_lines([run], "sampled") for run in (mine, theirs)]
    if not all(ends):
        return None
    answers = np.array([lines[0]["answer"] for lines in ends], float)
    return np.asarray(answers[0] - answers[1])


def difference(mine: dict[int, Run], theirs: dict[int, Run], measure: str,
               tests: int = 1) -> tuple[list[int], Estimate | None]:
    """The seeds that both arms have, and how far the first is ahead. `tests`: of how many arms this
    is one."""
    of_pair = in_training if measure == IN_TRAINING else at_the_end
    found = {seed: of_pair(mine[seed], theirs[seed]) for seed in sorted(set(mine) & set(theirs))}
    known = {seed: value for seed, value in found.items() if value is not None}
    if not known:
        return [], None
    pairs = np.stack(list(known.values()))
    of_all = mean_over(pairs[:, 0], tests) if measure == IN_TRAINING else (
        paired_difference(pairs, tests))
    return list(known), of_all


def deciding_measure(comparison: Comparison) -> tuple[str, str]:
    """Success in training, or where that says little the evaluation, and then why."""
    doubt = doubt_about_training(comparison.runs)
    return (AT_THE_END if doubt else IN_TRAINING), doubt


def doubt_about_training(runs: list[Run]) -> str:
    """Why the answers of training do not tell these runs apart; empty where they do."""
    if any({"imported", "trainer"} & run["config"].keys() for run in runs):
        return "the answers on record were chosen by another program"
    if any(run["config"].get("pairs") for run in runs):
        return "the answers of training were not sampled from the policy"
    repeated = max(map(share_asked_before, runs[:1]), default=0.0)
    if repeated > MOST_REPEATED:
        return (f"{repeated:.0%} of the problems of training were asked before, so an answer may "
                "be remembered")
    return ""


def verdict(estimate: Estimate | None, p: float | None) -> str:
    """p is Holm's, of several seeds. Where nothing is seen, the end of the interval that lies
    further away says how much may be there."""
    if estimate is None:
        return "nothing in common"
    if p is None:
        return "one seed: no verdict"
    if not p < SEEN:
        return f"no difference seen, within {shown(farther_end(estimate), 'size')} points"
    return "better" if estimate.value > 0 else "worse"


def farther_end(estimate: Estimate) -> float:
    return max(map(abs, estimate.interval))


def differences(comparison: Comparison, measure: str, decides: bool = True,
                doubt: str = "") -> Table:
    """Each arm minus the baseline, and each arm minus its own placebo: two questions, each with its
    own correction."""
    against = rows_of_family(comparison, measure, {
        name: (name, comparison.baseline) for name in comparison.arms
        if name != comparison.baseline})
    placebos = rows_of_family(comparison, measure, {
        f"{name} - {placebo}": (name, placebo) for name in comparison.arms
        for placebo in comparison.placebos_of(name)})
    aside = f"this does not decide: {doubt}" if doubt else "beside what decides, not corrected for"
    notes = [NOTES[measure], HOLM, *[PLACEBO_NOTE] * bool(placebos), *[aside] * (not decides)]
    formats = {"arm": "", "seeds": "d", "difference": "points", "95%": "points", "Holm p": "p",
               "could see": "size", "verdict": ""}
    return Table(measure, f"{measure.capitalize()}, in points: each arm minus "
                 f"{comparison.baseline}", by_row(formats, against + placebos), "", notes,
                 {"seeds": "pairs", "95%": "95% interval", "Holm p": "Holm's p"})


def rows_of_family(comparison: Comparison, measure: str,
                   pairs: dict[str, tuple[str, str]]) -> list[Row]:
    """A row for each pair of arms, by its label; Holm's correction is over all of them."""
    arms = comparison.arms
    found = {label: difference(arms[one], arms[other], measure, len(pairs))
             for label, (one, other) in pairs.items()}
    tested = {label: one.p for label, (seeds, one) in found.items() if one and len(seeds) > 1}
    holm_p = dict(zip(tested, holm(list(tested.values()))))
    rows: list[Row] = []
    for label, (seeds, estimate) in found.items():
        p = holm_p.get(label)
        value, interval = (estimate.value, estimate.interval) if estimate else (None, None)
        visible = estimate.visible if estimate and len(seeds) > 2 else None
        rows.append([label, len(seeds), value, interval, p, visible, verdict(estimate, p)])
    return rows


def stability(comparison: Comparison) -> Table:
    rows: list[Row] = []
    for name, arm in comparison.arms.items():
        measured = []
        for run in arm.values():
            norm = np.array([line["gradient_norm"] or 0 for line in run["metrics"]])
            seconds = np.array([line["seconds"] for line in run["metrics"]], float)
            if len(norm := norm[norm > 0]):
                measured.append([norm[:10].mean(), norm[-10:].mean(),
                                 norm.max() / np.median(norm), seconds.mean()])
        if measured:
            rows.append([name, len(measured), *np.mean(measured, 0).tolist()])
    formats = {"arm": "", "runs": "d", "first": ".3f", "last": ".3f", "peak": ".1f",
               "seconds": ".1f"}
    return Table("stability", "Gradient norm before clipping, and cost", by_row(formats, rows), "",
                 ["means over runs; first and last: of ten steps"],
                 {"first": "first norm", "last": "last norm", "peak": "largest over median",
                  "seconds": "seconds a step"})


def shares_table(comparison: Comparison) -> Table:
    rows: list[Row] = []
    for name, arm in comparison.arms.items():
        tallies = [Tally(run["folder"]) for run in arm.values() if run["steps"]]
        if tallies:
            shares = [[*one.shares("kind"), *one.shares("section")[1:]] for one in tallies]
            rows.append([name, *np.mean(shares, 0).tolist()])
    formats = {"arm": "", **dict.fromkeys((*KINDS, *SECTIONS[1:]), ".0%")}
    return Table("credit by class", "Share of the gradient abs(A) w s by kind and section",
                 by_row(formats, rows), "",
                 ["means over the runs of an arm; policies that learned other things write other "
                  "texts, so this is not the weighting alone"])


def learning_curves(comparison: Comparison, folder: Path) -> tuple[Path, str]:
    """What is decided comes first."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4))
    for number, (name, arm) in enumerate(comparison.arms.items()):
        style, runs = style_of(number), list(arm.values())
        label = f"{name} ({len(runs)} run{'s' * (len(runs) != 1)})"
        seeds_and_mean(middle, runs, "success", style, label)
        seeds_and_mean(right, runs, "gradient_norm", style)
        held_out_means(left, runs, style)
    left.set(xlabel="step", ylabel="held-out problems solved", title="Held-out success, sampled")
    middle.set(xlabel="step", ylabel="answers that are right", title="Success in training batches")
    for axis in (left, middle):  # a share has no interval outside of 0 to 1
        axis.set_ylim(*np.clip(axis.get_ylim(), -0.01, 1.01))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    right.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log",
              title="Gradient norm")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # it may span less than a decade
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("")
    whole_steps(left, middle, right)
    legend_below(figure, middle, ncols=min(3, len(comparison.arms)))
    caption = f"How each arm learned, smoothed over {WINDOW} steps where there are twice as many"
    if any(len(arm) > 1 for arm in comparison.arms.values()):
        caption += "; means of its runs, each a thin line; held out with 95% intervals over seeds"
    return save(figure, folder, "learning_curves", caption)


def seeds_and_mean(axis: Axes, runs: list[Run], key: Literal["success", "gradient_norm"],
                   style: Style, label: str = "") -> None:
    """Up to the last step that all of them have: runs of another trainer may have fewer."""
    length = min(len(run["metrics"]) for run in runs)
    if not length:
        return
    curves = np.array([[line[key] for line in run["metrics"][:length]] for run in runs], float)
    window = WINDOW if length >= 2 * WINDOW else 1
    curves = np.stack([curves[:, i:i + window].mean(1) for i in range(length - window + 1)], 1)
    steps = np.arange(curves.shape[1]) + (window + 1) / 2
    if len(runs) > 1:
        axis.plot(steps, curves.T, alpha=0.4, lw=0.6, **style)
    axis.plot(steps, curves.mean(0), lw=1.8, label=label, **style)


def held_out_means(axis: Axes, runs: list[Run], style: Style) -> None:
    by_step: dict[int, list[float]] = {}
    for run in runs:
        lines = evaluations(run, "sampled")
        for line in lines:
            by_step.setdefault(line["step"], []).append(line["success"])
        if len(runs) > 1:
            axis.plot([line["step"] for line in lines], [line["success"] for line in lines],
                      alpha=0.4, lw=0.6, **style)
    steps = sorted(by_step)
    found = [mean_over(by_step[step]) for step in steps]
    reach = np.nan_to_num([one.high - one.value for one in found])  # none of a single seed
    axis.errorbar(steps, [one.value for one in found], reach, marker="o", ms=3, lw=1.3, capsize=2,
                  **style)
