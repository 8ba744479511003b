"""The tables and pictures of the probe length.

`curves` has a list for each arm and length, one curve a seed: points (tokens spent, success).
`noise` has a list for each length, one {"grpo": ..., "exact": ...} a seed.
"""
from pathlib import Path

import numpy as np

from analysis.plots import COLOURS, legend_below, panels, save
from analysis.statistics import Estimate, mean_over, mean_reach, verdicts
from analysis.tables import Table, by_row
from research.probes.pictures import more_ticks, write_across

ENOUGH = 0.8  # success at which a policy counts as trained


def arms_of(curves: dict) -> list[str]:
    return list(dict.fromkeys(arm for arm, _ in curves))


def budget_of(curves: dict, length: int) -> int:
    """What plain GRPO spends."""
    tokens, _ = curves["grpo", length][0][-1]
    return tokens


def area(curve: list[tuple[int, float]], budget: int) -> float:
    """Mean success over the tokens up to `budget`; arms differ in the size of their steps."""
    spent, success = np.array(curve).T
    grid = np.linspace(0, budget, 1001)
    return float(np.interp(grid, spent, success).mean())


def success_at(curve: list[tuple[int, float]], budget) -> np.ndarray:
    spent, success = np.array(curve).T
    return np.interp(budget, spent, success)


def tokens_until_enough(curve: list[tuple[int, float]]) -> float:
    """Infinite where success never was enough."""
    return next((spent for spent, success in curve if success >= ENOUGH), np.inf)


def median_until_enough(of_seeds: list) -> float:
    return float(np.median([tokens_until_enough(curve) for curve in of_seeds]))


def areas_table(curves: dict, lengths: list[int]) -> Table:
    """Each arm against plain GRPO at the same length, paired by seed, at equal tokens."""
    rows, differences = {}, {}
    for length in lengths:
        budget = budget_of(curves, length)
        areas = {arm: np.array([area(curve, budget) for curve in curves[arm, length]])
                 for arm in arms_of(curves)}
        for arm, of_seeds in areas.items():
            ends = [float(success_at(curve, budget)) for curve in curves[arm, length]]
            row = ["", arm, of_seeds.mean(), np.mean(ends), None, None]
            if arm == "grpo":
                row[0] = str(length)
            else:
                e = mean_over(of_seeds - areas["grpo"])
                row[-2:] = e.value, e.interval
                differences[arm, length] = e
            rows[arm, length] = row
    words = verdicts(list(differences.values()), ("ahead", "behind"), null=0.0)
    words = dict(zip(differences, words))
    for place, row in rows.items():
        row.append(words.get(place, ""))
    finding = "\n".join(where_ahead(arm, lengths, differences, words)
                        for arm in arms_of(curves) if arm != "grpo")
    formats = {"length": "", "arm": "", "mean success": ".1%", "at the end": ".1%",
               "minus grpo": "+.1%", "95% interval": "+.1%", "verdict": ""}
    notes = ["The interval is over seeds, paired. Ahead and behind only where that survives Holm's "
             "correction over all rows, which it seldom does with few seeds."]
    return Table("area", "Success at equal tokens: mean over the budget, and at its end",
                 by_row(formats, list(rows.values())), finding, notes,
                 {"length": "tokens of an answer", "at the end": "success at the end",
                  "minus grpo": "lead over grpo"})


def where_ahead(arm: str, lengths: list[int], differences: dict, words: dict) -> str:
    parts = []
    for word in ("ahead", "behind"):
        places = [str(length) for length in lengths if words[arm, length] == word]
        if places:
            parts.append(f"{word} at {', '.join(places)}")
    points = [f"{100 * differences[arm, length].value:+.0f}" for length in lengths]
    text = " and ".join(parts) or "no clear difference from grpo at any length"
    return f"{arm}: {text} ({', '.join(points)} points of success)."


def trend_table(curves: dict, lengths: list[int]) -> Table:
    """What the probe asks, one number an arm: the change of its lead when length doubles."""
    slopes = {}
    for arm in arms_of(curves):
        if arm != "grpo":
            leads = lead_over_grpo(curves, arm, lengths)
            slope, _ = np.polyfit(np.log2(lengths), leads.T, 1)
            slopes[arm] = mean_over(slope)
    words = verdicts(list(slopes.values()), ("grows", "shrinks"), null=0.0)
    rows = [(arm, e.value, e.interval, word) for (arm, e), word in zip(slopes.items(), words)]
    parts = [trend_text(arm, e, word) for (arm, e), word in zip(slopes.items(), words)]
    finding = "\n".join(parts)
    formats = {"arm": "", "a doubling": "+.1%", "95% interval": "+.1%", "the lead": ""}
    notes = ["Slope of a straight line over the logarithm of the length, one for each seed; "
             "Student's t over seeds, Holm over the arms."]
    title = ("Change of the lead over plain GRPO when answers get twice as long, points of mean "
             "success")
    return Table("trend", title, by_row(formats, rows), finding, notes,
                 {"a doubling": "what a doubling brings"})


def lead_over_grpo(curves: dict, arm: str, lengths: list[int]) -> np.ndarray:
    """(seeds, lengths)"""
    leads = []
    for length in lengths:
        budget = budget_of(curves, length)
        pairs = zip(curves[arm, length], curves["grpo", length], strict=True)
        leads.append([area(curve, budget) - area(of_grpo, budget) for curve, of_grpo in pairs])
    return np.array(leads).T


def trend_text(arm: str, e: Estimate, word: str) -> str:
    word = word if word in ("grows", "shrinks") else "does not clearly change"
    return (f"The lead of {arm} over plain GRPO {word} when answers get twice as long: "
            f"{100 * e.value:+.1f} points ({100 * e.low:+.1f} to {100 * e.high:+.1f}).")


def tokens_table(curves: dict, lengths: list[int], answers: int) -> Table:
    """`answers`: how many the budget of plain GRPO is, at every length."""
    rows = []
    for length in lengths:
        median = {arm: median_until_enough(curves[arm, length]) for arm in arms_of(curves)}
        in_answers = [tokens / length if np.isfinite(tokens) else "more"
                      for tokens in median.values()]
        both = np.isfinite([median["grpo"], median["exact"]]).all()
        ratio = median["grpo"] / median["exact"] if both else None
        rows.append([str(length), *in_answers, ratio])
    formats = {"length": "", **{arm: ",.0f" for arm in arms_of(curves)}, "grpo / exact": ".1f"}
    columns = by_row(formats, rows)
    (_, of_grpo), (_, of_exact) = columns["grpo"], columns["exact"]
    parts = [f"Answers of {lengths[i]} tokens: grpo needs {count_text(of_grpo[i])}, exact "
             f"{count_text(of_exact[i])}." for i in (0, -1)]
    notes = ["Tokens over length: a column that stays the same needs the same number of answers. "
             f"More: not within the budget of {answers:,}."]
    title = (f"Tokens until {ENOUGH:.0%} of the keys are right, over the length of an answer "
             "(median over seeds)")
    return Table("tokens", title, columns, "\n".join(parts), notes,
                 {"length": "tokens of an answer"})


def count_text(count) -> str:
    return "more than the budget" if count == "more" else f"the tokens of {count:,.0f} answers"


def noise_table(noise: dict, lengths: list[int]) -> Table:
    rows = []
    for length in lengths:
        logs = np.log([[of_seed["grpo"], of_seed["exact"]] for of_seed in noise[length]])
        ratio = mean_over(logs[:, 0] - logs[:, 1])
        rows.append((str(length), *np.exp(logs.mean(0)).tolist(), np.exp(ratio.value),
                     tuple(np.exp(ratio.interval).tolist())))
    of_ratio, of_exact = [], []
    for of_lengths in zip(*(noise[length] for length in lengths)):  # seed by seed
        of_ratio.append(power(lengths, [x["grpo"] / x["exact"] for x in of_lengths]))
        of_exact.append(power(lengths, [x["exact"] for x in of_lengths]))
    slope, exact_slope = mean_over(of_ratio), mean_over(of_exact)
    finding = (f"The noise of the outcome's advantage over that of exact credit goes as length to "
               f"the power {slope.value:.2f} ({slope.low:.2f} to {slope.high:.2f}): "
               f"{slope_word(slope)}.\n"
               "The noise of exact credit itself goes as length to the power "
               f"{exact_slope.value:.2f} ({exact_slope.low:.2f} to {exact_slope.high:.2f}).")
    formats = {"length": "", "grpo": ".3f", "exact": ".3f", "grpo / exact": ".0f",
               "95% interval": ".0f"}
    notes = ["grpo: reward minus the mean of the others, which has the same mean as the true "
             "credit; the z-score is about a multiple of it."]
    title = "Noise of one batch's gradient at the fresh policy: variance over squared mean"
    return Table("noise", title, by_row(formats, rows), finding, notes,
                 {"length": "tokens of an answer", "grpo": "noise of grpo",
                  "exact": "noise of exact credit", "grpo / exact": "grpo over exact"})


def power(lengths: list[int], values: list[float]) -> float:
    """The exponent with which the values go with length; undefined where one of them is."""
    if not np.isfinite(values).all():
        return np.nan
    slope, _ = np.polyfit(np.log(lengths), np.log(values), 1)
    return float(slope)


def slope_word(slope: Estimate) -> str:
    if slope.low > 0:
        return "it grows"
    return "it falls" if slope.high < 0 else "no clear change"


def draw_curves(curves: dict, lengths: list[int], folder: Path) -> tuple[Path, str]:
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    figure, axes = panels(len(chosen), sharey=True, squeeze=False)
    for axis, length in zip(axes[0], chosen):
        grid = np.linspace(0, budget_of(curves, length), 101)
        for arm, colour in zip(arms_of(curves), COLOURS):
            success = np.stack([success_at(curve, grid) for curve in curves[arm, length]])
            mean, reach = success.mean(0), mean_reach(success)
            axis.plot(grid / length, mean, color=colour, lw=1.5, label=arm)
            axis.fill_between(grid / length, mean - reach, mean + reach, color=colour, alpha=0.12,
                              lw=0)
        axis.set(xlabel="tokens spent / length", title=f"Answers of {length} tokens", ylim=(0, 1))
    axes[0][0].set_ylabel("expected reward of the policy")
    legend_below(figure, axes[0][0], ncols=5)
    return save(figure, folder, "curves",
                "Expected reward against tokens spent, means over seeds with 95% intervals")


def draw_scaling(curves: dict, noise: dict, lengths: list[int],
                 folder: Path) -> tuple[Path, str]:
    figure, (tokens, scatter) = panels(2)
    for arm, colour in zip(arms_of(curves), COLOURS):
        median = [median_until_enough(curves[arm, length]) for length in lengths]
        median = np.array(median) / lengths
        tokens.plot(lengths, np.where(np.isfinite(median), median, np.nan), "o-", color=colour,
                    label=arm)
    tokens.set(ylabel="tokens / length", ylim=(0, None),
               title=f"Tokens until {ENOUGH:.0%} of the keys are right")
    if not any(np.isfinite(line.get_ydata()).any() for line in tokens.lines):
        write_across(tokens, "No arm got there within the budget")
    draw_noise(scatter, noise, lengths)
    for axis in (tokens, scatter):
        axis.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="tokens of an answer", xticks=lengths, xticklabels=lengths)
    legend_below(figure, tokens, ncols=5)
    return save(figure, folder, "scaling",
                "What grows with the length of the answer; points that are missing were not "
                "reached within the budget")


def draw_noise(axis, noise: dict, lengths: list[int]) -> None:
    """In the colours of the arms; nothing is drawn of noise that could not be told."""
    for name, colour in (("grpo", COLOURS[0]), ("exact", COLOURS[4])):
        logs = [[np.log(of_seed[name]) for of_seed in noise[length]] for length in lengths]
        axis.plot(lengths, np.exp(np.mean(logs, axis=1)), "o-", color=colour, label=name)
    axis.set(ylabel="variance / squared mean", title="Noise of one batch's gradient, fresh policy")
    if any(np.isfinite(line.get_ydata()).any() for line in axis.lines):
        axis.set(yscale="log")
        more_ticks(axis)
