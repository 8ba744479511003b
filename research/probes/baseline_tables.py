"""The tables and the picture of the probe baseline."""
from pathlib import Path

import numpy as np

from analysis.plots import BLUE, GREY, ORANGE, panels, save
from analysis.statistics import FEWEST, Estimate, verdicts
from analysis.tables import Table, by_row
from research.probes.baseline_noise import (
    BEST, GROUPS, LENGTH, MEAN, NOTHING, OWN, TOKEN, Answers, correlations,
    mean_over_questions, ratio_over_questions, weighted_mean)
from research.probes.pictures import legend_under

CLAIM_VERDICTS = {"less noise": "holds", "more noise": "the opposite", "none seen": "not seen",
                  "too few": "too few"}


def gap_verdicts(of_questions: list[Estimate]) -> list[str]:
    """On which side of the mean b* lies."""
    return verdicts(of_questions, ("higher", "lower"), 0.0)


def noise_verdicts(beside: dict[tuple, Estimate]) -> dict[tuple, str]:
    """On all baselines that are scored on answers they were not made from."""
    tested = {row: e for row, e in beside.items() if row[0] not in (MEAN, OWN)}
    words = verdicts(list(tested.values()), ("more noise", "less noise"), 0.0)
    return {**dict.fromkeys(beside, "-"), **dict(zip(tested, words))}


def percent(e: Estimate) -> str:
    if not np.isfinite(e.value):
        return "unknown"
    interval = f" ({e.low:+.1%} to {e.high:+.1%})" if np.isfinite(e.low) else ""
    return f"{e.value:+.1%}{interval}"


def claims_table(answers: Answers, of_questions: list[Estimate], beside: dict[tuple, Estimate],
                 saving: Estimate) -> Table:
    """What is claimed of the mean, and of what others put in its place."""
    clear = sum(side in ("higher", "lower") for side in gap_verdicts(of_questions))
    known = int(answers.known.sum())
    nothing, *better = noise_claims(beside)
    rows = [nothing,
            ("the group's mean is the best", "Cov(|g|^2, R) = 0",
             f"clearly not in {clear} of {known} problems", "refuted" if clear else "not refuted"),
            ("the zero sum makes it the best", "sum of R - b = 0",
             f"true of the mean in all {len(of_questions)}", "no condition"),
            ("the mean is good enough", "(mean - b*)^2 E|g|^2 small", percent(saving),
             saving_verdict(saving)),
            *better]
    average = mean_over_questions(np.array([e.value for e in of_questions]))
    finding = (f"The mean is clearly not the best baseline in {clear} of {known} problems.\n"
               f"On average b* - mean is {average.value:+.3f} ({average.low:+.3f} to "
               f"{average.high:+.3f}).\n"
               f"The exact b* would save {percent(saving)} of the mean's noise.")
    notes = ["Advantages R - b sum to zero over a group exactly when b is its mean, whatever "
             "|g|^2 does. That the sum is zero says which baseline was chosen; it cannot say that "
             "it is the best. What the exact b* would save is an estimate: chance can put it "
             "below 0."]
    headings = dict.fromkeys(("claim", "which asks for", "measured", "verdict"), "")
    return Table("claims", "Is the group's mean the best baseline?", by_row(headings, rows),
                 finding, notes)


def noise_claims(beside: dict[tuple, Estimate]) -> list[tuple]:
    """Rows on baselines that are said to have less noise: nothing first, then the others."""
    words = noise_verdicts(beside)
    most = max(k for _, k in beside)
    in_group = max(k for _, k in beside if k + 1 in GROUPS)
    claims = {(NOTHING, most): "nothing need be subtracted"}
    for name in (BEST, LENGTH, TOKEN):
        for k in sorted({most, in_group}, reverse=True):
            claims[name, k] = f"{name} is better, {k} others"
    return [(claim, "less noise than the mean", percent(beside[row]), CLAIM_VERDICTS[words[row]])
            for row, claim in claims.items()]


def saving_verdict(saving: Estimate) -> str:
    if saving.low > 0:
        return f"at least {saving.low:.1%}"
    return f"at most {saving.high:.1%}" if np.isfinite(saving.high) else "too few"


def baselines_table(answers: Answers, noise: dict[tuple, np.ndarray],
                    beside: dict[tuple, Estimate]) -> Table:
    words = noise_verdicts(beside)
    most, fewest = max(k for _, k in noise), min(k for _, k in noise)
    mean = noise[MEAN, most]
    extra = {row: ratio_over_questions(moment - mean, mean) for row, moment in noise.items()}
    variance = [ratio_over_questions(moment - mean, mean - answers.squared_mean)
                for moment in noise.values()]
    columns = {"baseline": ("", [name for name, _ in noise]),
               "others": ("d", [None if name in (NOTHING, OWN) else k for name, k in noise]),
               "second moment": ("+.1%", [e.value for e in extra.values()]),
               "variance": ("+.1%", [e.value for e in variance]),
               "95%": ("+.1%", [e.interval for e in variance]),
               "against a mean": ("", [words[row] for row in noise])}
    finding = (f"Subtracting nothing changes the noise by {percent(beside[NOTHING, most])}.\n"
               f"Made from all {most} others, b* changes it by {percent(beside[BEST, most])}, the "
               f"length-weighted mean by {percent(beside[LENGTH, most])}, the baseline by token by "
               f"{percent(beside[TOKEN, most])}.\n"
               f"In a group of {fewest + 1} the mean of the others changes it by "
               f"{percent(extra[MEAN, fewest])}.")
    share = ratio_over_questions(answers.squared_mean, mean).value
    notes = [f"The squared expectation is {share:.1%} of the second moment. It is the same for all "
             "baselines, so what one adds to the second moment it adds to the variance. A mean of "
             "k others has Var(R) E|g|^2 / k more noise than the exact one. Beside a mean: of as "
             "many others.",
             f"{OWN}: scored on the answers it was made from, which makes a best baseline look "
             "better than it is."]
    title = f"Noise of each baseline, over that of the mean of all {most} others"
    headings = {"others": "made from so many others", "second moment": "second moment, change",
                "variance": "variance, change", "95%": "95% interval of it",
                "against a mean": "beside a mean of as many"}
    return Table("baselines", title, columns, finding, notes, headings)


def questions_table(answers: Answers, of_questions: list[Estimate]) -> Table:
    sides, mean = gap_verdicts(of_questions), answers.reward.mean(1)
    columns = {
        "question": ("d", list(range(1, len(mean) + 1))),
        "mean": (".3f", mean.tolist()),
        "b*": (".3f", weighted_mean(answers.reward, answers.square).tolist()),
        "b* - mean": ("+.3f", [e.value for e in of_questions]),
        "95%": ("+.3f", [e.interval for e in of_questions]),
        "p": ("p", [e.p for e in of_questions]),
        "cor(|g|^2, R)": ("+.2f", correlations(answers.square, answers.reward).tolist()),
        "b* is": ("", sides)}
    lower = sum(e.value < -1e-9 for e in of_questions)
    finding = (f"b* is clearly higher than the mean in {sides.count('higher')} problems and "
               f"clearly lower in {sides.count('lower')}.\n"
               f"Clearly or not, b* is lower in {lower} of {len(sides)} problems.")
    notes = ["Intervals and p by Student's t over answers, p before Holm's correction. Too few: "
             f"fewer than {FEWEST} answers on one side of the mean."]
    headings = {"question": "problem", "mean": "mean reward", "95%": "95% interval",
                "cor(|g|^2, R)": "correlation of |g|^2 and R"}
    return Table("questions", "b* and the mean, problem by problem", columns, finding, notes,
                 headings)


def sizes_table(answers: Answers) -> Table:
    """Do the stand-ins grow as |g|^2 does, and differ between good and bad answers as it does?"""
    sizes = {"|g|^2": answers.square, "length": answers.length, "sum s^2": answers.logit_square}
    alike, ratio, shift = [], [], []
    for size in sizes.values():
        correlation = correlations(answers.square, size)
        alike.append(mean_over_questions(correlation[np.isfinite(correlation)]))
        ratio.append(mean_over_questions(worse_over_better(answers, size)))
        baseline = weighted_mean(answers.reward, size)
        shift.append(mean_over_questions(baseline - answers.reward.mean(1)))
    times, known = [np.exp(e.value) for e in ratio], int(answers.known.sum())
    columns = {
        "size": ("", list(sizes)),
        "correlation": (".2f", [e.value for e in alike]),
        "95%": (".2f", [e.interval for e in alike]),
        "worse/better": (".2f", times),
        "95% ": (".2f", [tuple(np.exp(e.interval)) for e in ratio]),
        "b - mean": ("+.3f", [e.value for e in shift]),
        "95%  ": ("+.3f", [e.interval for e in shift])}
    lines = ["Too few problems have answers on both sides of their mean reward."]
    if known >= FEWEST:
        lines = [f"Answers below their problem's mean reward have {times[0]:.2f} times the |g|^2 "
                 f"of those above, {times[1]:.2f} times the length and {times[2]:.2f} times the "
                 "sum of s^2."]
    if np.isfinite([alike[1].value, alike[2].value]).all():
        lines.append(f"Within a problem |g|^2 correlates with the length at {alike[1].value:.2f}, "
                     f"with the sum of s^2 at {alike[2].value:.2f}.")
    notes = [f"Means over problems. Worse over better: geometric mean over the {known} problems "
             f"with at least {FEWEST} answers on either side of the mean reward. b - mean: where "
             "the baseline lies that weights answers by this size."]
    title = "The length and the sizes at the logits in the place of |g|^2"
    headings = {"correlation": "correlation with |g|^2", "95%": "95% interval of it",
                "worse/better": "worse over better answers", "95% ": "95% interval of that",
                "95%  ": "95% interval of b - mean"}
    return Table("sizes", title, columns, "\n".join(lines), notes, headings)


def worse_over_better(answers: Answers, size: np.ndarray) -> np.ndarray:
    """Logarithms, one for each known problem: the mean size of answers below over that above."""
    above = answers.above
    return np.array([np.log(size[q, ~above[q]].mean() / size[q, above[q]].mean())
                     for q in np.flatnonzero(answers.known)])


def draw(answers: Answers, of_questions: list[Estimate], beside: dict[tuple, Estimate],
         folder: Path) -> tuple[Path, str]:
    figure, (left, right) = panels(2)
    draw_questions(left, answers.reward.mean(1), of_questions)
    draw_noise(right, beside)
    return save(figure, folder, "baseline",
                "Left: the best baseline of each problem against its mean reward, intervals over "
                "answers. Right: noise of the other baselines, intervals over problems. Grey: no "
                "clear difference")


def draw_questions(axis, mean: np.ndarray, of_questions: list[Estimate]) -> None:
    sides = gap_verdicts(of_questions)
    for x, e, side in zip(mean, of_questions, sides):
        colour = {"higher": BLUE, "lower": ORANGE}.get(side, GREY)
        axis.errorbar(x, x + e.value, [[e.value - e.low], [e.high - e.value]], fmt="o", ms=4,
                      lw=1.2, capsize=2, color=colour)
    axis.axline((mean[0], mean[0]), slope=1, color="#000000", lw=0.8, ls="--", label="b* = mean")
    clear = sides.count("higher") + sides.count("lower")
    axis.set(xlabel="mean reward of the problem", ylabel="b*",
             title=f"b* is clearly not the mean in {clear} of {len(sides)} problems")
    legend_under(axis)


def draw_noise(axis, beside: dict[tuple, Estimate]) -> None:
    words = noise_verdicts(beside)
    rows = [row for row in beside if row[0] not in (NOTHING, MEAN, OWN)][::-1]
    for y, row in enumerate(rows):
        value, low, high = (100 * x for x in (beside[row].value, *beside[row].interval))
        colour = {"less noise": BLUE, "more noise": ORANGE}.get(words[row], GREY)
        axis.barh(y, value, 0.7, xerr=[[value - low], [high - value]], color=colour,
                  error_kw=dict(lw=0.9, capsize=2))
    axis.axvline(0, color="#000000", lw=0.8)
    axis.set(yticks=range(len(rows)), yticklabels=[f"{name}, {k} others" for name, k in rows],
             xlabel="% more noise", title="Noise beside the mean of as many others")
