"""Several runs: the tables of their arms, which gains are real, and how the arms learned.

The primary metric is success in training: the mean over all answers that training sampled, paired
by seed (lab/analysis/gains.py). Where those answers do not tell the runs apart, it is the
evaluation at the end, and the table says why.
"""
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, PercentFormatter

from lab.analysis.arms import Comparison
from lab.analysis.gains import (AT_THE_END, IN_TRAINING, final_lines, gain_table, gains,
                                mean_success, over_baseline)
from lab.analysis.plots import Style, legend_below, save, style_of, whole_steps
from lab.analysis.run_folders import Run, evaluations, share_seen_before
from lab.analysis.statistics import mean_over
from lab.analysis.tables import Row, Table, by_row, without_format
from lab.analysis.tally import Tally
from lab.engine.tokens import KINDS, SECTIONS
from lab.harness.record import Json

MOST_REPEATED = 0.1  # share of the training problems that had come before
WINDOW = 5  # steps whose mean is a point of a curve, but in a short run
PAIRED_BY_SEED = ("for pairs of runs with the same seed. The interval is Student's t over the "
                  "pairs")
MEASURE_NOTES = {
    IN_TRAINING: "The gain is the difference in mean success over all answers that training "
                 f"sampled, {PAIRED_BY_SEED}",
    AT_THE_END: "The gain is the difference in success of sampled answers to the held-out "
                "problems. The interval is Student's t over the pairs, with these problems. If "
                "there is one pair, it is over the problems"}
VERDICT_NOTE = (
    "The verdict is better or worse if p is below 0.05, after Holm's correction for the number of "
    "arms in the table. This is one look: an arm counts as ahead if it is better again on new "
    "seeds, and as behind if it is worse once. Where no difference is seen, the interval says how "
    "large a gain or a loss may still be. The detectable gain is the true gain that 80 of 100 such "
    "experiments would find. It is only an estimate, because there are few seeds")
GREEDY_NOTE = (
    "A sampled answer draws each token from the model's distribution, and a greedy one takes the "
    "likeliest token at every place. An arm that loses more with sampled answers than with greedy "
    "ones has become less sure, which is not the same as less able")
PLACEBO_NOTE = ("A row with a minus compares an arm with its own placebo. For these rows p is "
                "corrected separately")
SECONDARY_NOTE = ("The primary metric is that of the table above. The p-values here are not "
                  "corrected for testing two metrics")


def chapters_of(comparison: Comparison) -> dict[str, list[Table]]:
    """The tables by what they are about. The first chapter has the primary metric, the others
    explore."""
    tables = [arms_overview(comparison)]
    if len(comparison.arms) > 1:
        primary, doubt = primary_metric(comparison)
        secondary = AT_THE_END if primary == IN_TRAINING else IN_TRAINING
        tables.append(differences(comparison, primary))
        tables.append(differences(comparison, secondary, False, doubt))
    return {"Which arm is better": tables,
            "Stability and cost": [stability(comparison)],
            "Where the gradient went": [shares_of_arms(comparison)]}


def arms_overview(comparison: Comparison) -> Table:
    """The table of the arms: what each has learned, as means over its seeds."""
    rows: list[Row] = []
    for name, arm in comparison.arms.items():
        runs = list(arm.values())
        ends, greedy = final_lines(runs, "sampled"), final_lines(runs, "greedy")
        in_training = mean_over(list(map(mean_success, runs))).value
        rows.append([
            name,
            len(runs),
            in_training,
            mean_of_evaluations(ends, "success"),
            mean_of_evaluations(greedy, "success"),
            mean_of_evaluations(ends, "format_mean"),
            mean_of_evaluations(ends, "finished_mean"),
            mean_of_evaluations(ends, "length_mean")])
    formats = {"arm": "", "seeds": "d", "training": ".1%", "sampled": ".1%", "greedy": ".1%",
               "format": ".2f", "finished": ".0%", "length": ".0f"}
    columns = without_format(by_row(formats, rows))
    greedy_success = np.array(columns["greedy"][1], float)
    notes = [GREEDY_NOTE] if np.isfinite(greedy_success).any() else []
    return Table("arms", "The arms, means over seeds", columns, notes=notes, headings={
        "training": "success in training", "sampled": "held-out at the end, sampled answers",
        "greedy": "held-out at the end, greedy (likeliest token at every place)",
        "format": "format at the end, mean score",
        "finished": "finished before the limit", "length": "tokens in an answer"})


def mean_of_evaluations(lines: list[Json], key: str) -> float:
    """The mean of one number of these evaluations; NaN where there are none."""
    return mean_over([line[key] for line in lines]).value


def primary_metric(comparison: Comparison) -> tuple[str, str]:
    """The primary metric, and why it is not success in training. It is success in training unless
    that says little; then it is the evaluation at the end, and the reason is not empty."""
    doubt = doubt_about_training(comparison.runs)
    return (AT_THE_END if doubt else IN_TRAINING), doubt


def doubt_about_training(runs: list[Run]) -> str:
    """The reason why success in training says little about these runs; empty if there is none."""
    configs = [run["config"] for run in runs]
    if any(config.get("pairs") for config in configs):
        return "the answers of training were not sampled from the policy"
    if any(config.get("dynamic_sampling", 1) > 1 for config in configs):
        return "--dynamic_sampling has chosen the answers on record by their rewards"
    # Runs that are compared have the same data, steps and problems in a step, so one tells of all.
    recorded = next((run for run in runs if run["steps"]), None)
    repeated = share_seen_before(recorded) if recorded else 0.0
    if repeated > MOST_REPEATED:
        return (f"{repeated:.0%} of the problems of training had come before, so an answer may "
                "be remembered")
    return ""


def differences(comparison: Comparison, measure: str, is_primary: bool = True,
                doubt: str = "") -> Table:
    """The gain of each arm over the baseline, and over its own placebo: two questions, each with
    its own correction."""
    arms, baseline = comparison.arms, comparison.baseline
    pairs_with_placebo = {}
    for name in arms:
        for placebo in comparison.placebos_of(name):
            pairs_with_placebo[f"{name} - {placebo}"] = arms[name], arms[placebo]
    over_placebos = gains(pairs_with_placebo, measure)
    found = gains(over_baseline(arms, baseline), measure) | over_placebos
    notes = [MEASURE_NOTES[measure], VERDICT_NOTE]
    if over_placebos:
        notes.append(PLACEBO_NOTE)
    if not is_primary:
        notes.append(f"This is not the primary metric, because {doubt}" if doubt
                     else SECONDARY_NOTE)
    could_see = [gain.could_see for gain in found.values()]
    title = f"{measure.capitalize()}: each arm minus the arm {baseline}, in percentage points"
    return gain_table(measure, title, found, {"could see": ("size", could_see)},
                      f"the arm {baseline}", notes, {"could see": "detectable gain"})


def stability(comparison: Comparison) -> Table:
    """Gradient norms and seconds of each arm, means over its runs."""
    rows: list[Row] = []
    for name, arm in comparison.arms.items():
        measured = []
        for run in arm.values():
            norm = np.array([line["gradient_norm"] or 0 for line in run["metrics"]])
            seconds = np.array([line["seconds"] for line in run["metrics"]], float)
            norm = norm[norm > 0]
            if len(norm):
                first, last = norm[:10].mean(), norm[-10:].mean()
                peak = norm.max() / np.median(norm)
                measured.append([first, last, peak, seconds.mean()])
        if measured:
            rows.append([name, len(measured), *np.mean(measured, 0).tolist()])
    formats = {"arm": "", "runs": "d", "first": ".3f", "last": ".3f", "peak": ".1f",
               "seconds": ".1f"}
    return Table("stability", "Gradient norm before clipping, and cost", by_row(formats, rows), "",
                 ["All numbers are means over the runs of an arm"],
                 {"first": "norm in the first ten steps", "last": "norm in the last ten steps",
                  "peak": "largest norm / median norm", "seconds": "seconds for a step"})


def shares_of_arms(comparison: Comparison) -> Table:
    """The table of where each arm's gradient went, as means over its runs."""
    rows: list[Row] = []
    for name, arm in comparison.arms.items():
        shares = []
        for run in arm.values():
            if run["steps"]:
                tally = Tally(run["folder"])
                shares.append([*tally.shares("kind"), *tally.shares("section")[1:]])
        if shares:
            rows.append([name, *np.mean(shares, 0).tolist()])
    formats = {"arm": "", **dict.fromkeys((*KINDS, *SECTIONS[1:]), ".0%")}
    return Table("credit by class", "Share of the gradient by kind of token and by section",
                 by_row(formats, rows), "",
                 ["Shares are shares of the sum of abs(A) w s, the sizes of the gradients at the "
                  "logits. All numbers are means over the runs of an arm. Arms do not differ by "
                  "their weighting alone: policies that learned different things also write "
                  "different texts"])


def learning_curves(comparison: Comparison, folder: Path) -> tuple[Path, str]:
    """A picture of how each arm learned: held out, in training, and its gradient norm."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4))
    has_several = False
    for number, (name, arm) in enumerate(comparison.arms.items()):
        style, runs = style_of(number), list(arm.values())
        has_several = has_several or len(runs) > 1
        label = f"{name} ({len(runs)} run{'' if len(runs) == 1 else 's'})"
        curves_of_arm(middle, runs, "success", style, label)
        curves_of_arm(right, runs, "gradient_norm", style)
        held_out_means(left, runs, style)
    left.set(xlabel="step", ylabel="share of right answers",
             title="Success on held-out problems, sampled answers")
    middle.set(xlabel="step", ylabel="share of right answers", title="Success in training batches")
    for axis in (left, middle):  # a share is between 0 and 1, also where its interval is not
        axis.set_ylim(*np.clip(axis.get_ylim(), -0.01, 1.01))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    right.set(xlabel="step", ylabel="norm before clipping", yscale="log",
              title="Norm of the gradient")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # it may span less than a decade
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("")
    whole_steps(left, middle, right)
    legend_below(figure, middle, ncols=min(3, len(comparison.arms)))
    caption = (f"How each arm learned. Curves of at least {2 * WINDOW} steps are means over "
               f"{WINDOW} steps at a time")
    if has_several:
        caption += (". A thick line is the mean of an arm's runs, and a thin line is one run. The "
                    "bars of held-out success are 95% intervals over seeds")
    return save(figure, folder, "learning_curves", caption)


def curves_of_arm(axis: Axes, runs: list[Run], key: Literal["success", "gradient_norm"],
                  style: Style, label: str = "") -> None:
    """Draw the mean of the runs, and each of them thinly, up to the last step that all of them
    have."""
    length = min(len(run["metrics"]) for run in runs)
    if not length:
        return
    curves = np.empty((len(runs), length))
    for curve, run in zip(curves, runs):
        curve[:] = [line[key] for line in run["metrics"][:length]]
    window = WINDOW if length >= 2 * WINDOW else 1
    points = length - window + 1
    smooth = np.empty((len(runs), points))
    for i in range(points):
        smooth[:, i] = curves[:, i:i + window].mean(1)
    steps = np.arange(points) + (window + 1) / 2
    if len(runs) > 1:
        axis.plot(steps, smooth.T, alpha=0.4, lw=0.6, **style)
    axis.plot(steps, smooth.mean(0), lw=1.8, label=label, **style)


def held_out_means(axis: Axes, runs: list[Run], style: Style) -> None:
    """Draw the mean of the runs' evaluations with its interval over seeds, and each run thinly."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        curve = {line["step"]: line["success"] for line in evaluations(run, "sampled")}
        for step, success in curve.items():
            by_step.setdefault(step, []).append(success)
        if len(runs) > 1:
            axis.plot(list(curve), list(curve.values()), alpha=0.4, lw=0.6, **style)
    steps, means, reaches = sorted(by_step), [], []
    for step in steps:
        found = mean_over(by_step[step])
        means.append(found.value)
        reaches.append(found.high - found.value)
    axis.errorbar(steps, means, np.nan_to_num(reaches),  # a single seed has no interval
                  marker="o", ms=3, lw=1.3, capsize=2, **style)
