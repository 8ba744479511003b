"""At which tokens the reward is decided, and whether plain GRPO's gradient goes there.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import PercentFormatter

from analysis.plots import BLUE, GREY, ORANGE, legend_below, panels, save
from analysis.statistics import Estimate, jackknife, ratio_of_sums, verdicts
from analysis.tables import Table, by_row
from analysis.vocabulary import CLASSES
from countdown_task import KINDS, SECTIONS
from research.probes.measured_tokens import MeasuredTokens
from research.probes.pictures import at_most

NAMES = {"kind": KINDS, "section": SECTIONS, "class": CLASSES}
TITLES = {"kind": "What is decided at each kind of token, and what gradient it gets",
          "section": "The same by section of the answer",
          "class": "The same by the earlier experiment's classes: is filler wasted?"}
HEADINGS = {"of all": "of all tokens", "decided": "of what is decided", "95%": "95% interval",
            "gradient": "of plain GRPO's gradient", "95% ": "95% interval",
            "minus": "gradient minus decided", "95%  ": "95% interval",
            "idle": "of its gradient, idle"}
EXCESS_WORDS = {"too much": "That is too much", "too little": "That is too little",
                "about even": "That is about even"}
EVEN = 0.01  # a difference of shares that is too small to matter
NOTE = ("of what is decided: share of the sum of squared credits (products of independent "
        "estimates); of plain GRPO's gradient: share of abs(A) s; idle: what goes to tokens known "
        "to have no credit, most of the rest cannot be told apart from a little; too much and too "
        "little after Holm's correction, about even where the interval is within a point")


@dataclass
class Shares:
    """What a class of tokens has of the whole."""
    tokens: int
    of_all: float
    decided: Estimate
    gradient: Estimate
    excess: Estimate   # gradient minus decided
    idle: Estimate     # of its gradient, what goes to tokens known to have no credit


def decided_table(tokens: MeasuredTokens, partition: str) -> Table:
    shares = {}
    for code, name in enumerate(NAMES[partition]):
        inside = tokens.codes[partition] == code
        if inside.any():
            shares[name] = shares_of(tokens, inside)
    words = dict(zip(shares, excess_verdicts([share.excess for share in shares.values()])))
    rows = []
    for name, share in shares.items():
        rows.append([name, share.tokens, share.of_all, share.decided.value, share.decided.interval,
                     share.gradient.value, share.gradient.interval, share.excess.value,
                     share.excess.interval, share.idle.value, words[name]])
    formats = {partition: "", "tokens": ",d", "of all": ".1%", "decided": ".1%", "95%": ".1%",
               "gradient": ".1%", "95% ": ".1%", "minus": "+.1%", "95%  ": "+.1%", "idle": ".0%",
               "verdict": ""}
    nothing = tokens.truth.decided.sum() <= 0 or not gradient_sizes(tokens).any()
    finding = in_words(partition, shares, words, nothing)
    return Table(partition, TITLES[partition], by_row(formats, rows), finding, [NOTE], HEADINGS)


def gradient_sizes(tokens: MeasuredTokens) -> np.ndarray:
    """(n,): of plain GRPO, at the logits."""
    return np.abs(tokens.advantage) * tokens.size


def shares_of(tokens: MeasuredTokens, inside: np.ndarray) -> Shares:
    by, decided, gradient = tokens.by_question, tokens.truth.decided, gradient_sizes(tokens)
    decided_pair = (by(decided * inside), by(decided))
    gradient_pair = (by(gradient * inside), by(gradient))
    return Shares(
        tokens=int(inside.sum()), of_all=inside.mean(),
        decided=ratio_of_sums(*decided_pair), gradient=ratio_of_sums(*gradient_pair),
        excess=difference_of_shares(gradient_pair, decided_pair),
        idle=ratio_of_sums(by(gradient * inside * tokens.idle), by(gradient * inside)))


def difference_of_shares(one: tuple[np.ndarray, np.ndarray],
                         other: tuple[np.ndarray, np.ndarray]) -> Estimate:
    """Of two pairs, part and whole by problem: the first share minus the second."""
    values, without = [], []
    with np.errstate(invalid="ignore", divide="ignore"):
        for part, whole in (one, other):
            values.append(part.sum() / whole.sum())
            without.append((part.sum() - part) / (whole.sum() - whole))
    return jackknife(values[0] - values[1], without[0] - without[1])


def excess_verdicts(excesses: list[Estimate]) -> list[str]:
    words = verdicts(excesses, ("too much", "too little"), null=0.0)
    for i, excess in enumerate(excesses):
        if max(abs(excess.low), abs(excess.high)) < EVEN:
            words[i] = "about even"
    return words


def in_words(partition: str, shares: dict[str, Shares], words: dict[str, str],
             nothing: bool) -> str:
    if nothing:
        return "All answers to a problem got nearly the same reward: nothing is decided."
    most = max(shares, key=lambda name: shares[name].decided.value)
    decided = shares[most].decided
    if not decided.high - decided.low < 1:
        return "Too few problems and continuations to say where the reward is decided."
    if partition == "class" and "filler" in shares:
        return filler_in_words(shares["filler"], words["filler"])
    where = f"{most} tokens" if partition == "kind" else f"tokens of the {most} section"
    return (f"The {where} decide {percent(decided)} of the reward's variance.\n"
            f"The {where} get {percent(shares[most].gradient)} of plain GRPO's gradient.")


def filler_in_words(filler: Shares, verdict: str) -> str:
    excess = filler.excess
    return (f"Filler decides {percent(filler.decided)} of the reward's variance and gets "
            f"{percent(filler.gradient)} of plain GRPO's gradient.\n"
            f"{EXCESS_WORDS.get(verdict, 'Which of the two is more is not clear')}: "
            f"{100 * excess.value:+.0f} points ({100 * excess.low:+.0f} to "
            f"{100 * excess.high:+.0f}).\n"
            f"At least {filler.idle.value:.0%} of filler's gradient goes to tokens known to have "
            "no credit.")


def percent(share: Estimate) -> str:
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})"


def words_table(tokens: MeasuredTokens, tokenizer) -> Table:
    """The words at which most is decided."""
    count, decided = np.bincount(tokens.ids), np.bincount(tokens.ids, tokens.truth.decided)
    gradient = np.bincount(tokens.ids, gradient_sizes(tokens))
    all_decided, all_gradient = max(decided.sum(), 1e-300), max(gradient.sum(), 1e-300)
    rows = []
    for i in np.argsort(-decided)[:12]:
        word = repr(tokenizer.decode([int(i)], skip_special_tokens=False))
        rows.append([word, int(count[i]), decided[i] / all_decided, gradient[i] / all_gradient])
    formats = {"token": "", "times": ",d", "decided": ".1%", "gradient": ".1%"}
    note = ("chosen and measured by the same continuations, so the shares are somewhat too high; "
            "others can be below 0 by chance")
    headings = {"decided": "of what is decided", "gradient": "of plain GRPO's gradient"}
    return Table("words", "The words at which most is decided", by_row(formats, rows), "", [note],
                 headings)


def draw_decided(table: Table, folder: Path) -> tuple[Path, str]:
    figure, axis = panels(1)
    names, places = [row[0] for row in table.rows], np.arange(len(table.rows))
    bars = (("decided there", BLUE, 3, 4), ("plain GRPO's gradient", ORANGE, 5, 6),
            ("tokens", GREY, 2, None))  # colour, and the columns of value and interval
    for i, (label, colour, value, interval) in enumerate(bars):
        heights = np.array([row[value] for row in table.rows])
        reach = None
        if interval is not None:
            ends = np.array([row[interval] for row in table.rows], float).T
            reach = np.abs(ends - heights)
        axis.bar(places + 0.27 * (i - 1), heights, 0.25, color=colour, label=label, yerr=reach,
                 error_kw=dict(lw=0.8, capsize=2))
    axis.set(xticks=places, xticklabels=names, ylabel="share of the whole",
             title="Where the reward is decided, and where the gradient goes")
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    at_most("y", axis, -0.5, 1.5)
    legend_below(figure, axis, ncols=3)
    return save(figure, folder, "decided",
                "Shares of the squared true credit, of plain GRPO's gradient and of the tokens, "
                "with 95% intervals over problems; wide ones are cut off at the edge")
