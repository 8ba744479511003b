"""The verdict on an idea, from paired runs: a sentence first, then sentences, a table, a picture.

Runs are given as look[arm][seed], with the arms plain, idea and placebo. There may be a second
look. By the rule of all experiments (analysis/gains.py) an idea that is better on the first seeds
is tested again on new ones, and it is called ahead if it is better there, too.
"""
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from analysis.compare import curves_of_arm, doubt_about_training
from analysis.gains import (AHEAD, AT_THE_END, BEHIND, BETTER, IN_TRAINING, Gain, called,
                            chance_to_be_called, gain_over, room_left)
from analysis.plots import BLUE, GREY, ORANGE, legend_below, plt, save, whole_steps
from analysis.statistics import Estimate
from analysis.sureness import sureness
from analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from engine.methods import WHOLE_ANSWERS
from harness.screen import say
from tools.helpers.runs import Arms

OTHERS = {"plain": "plain GRPO", "placebo": "its placebo"}
# a pair lies far from the others if its distance from their median is so many times that within
# which half of the pairs lie, and at least two points
FAR, AT_LEAST = 8.0, 0.02
TRUE_GAINS = (0.01, 0.02, 0.04)  # for which it is said how often they are seen
COLOURS = {"plain": GREY, "placebo": ORANGE, "idea": BLUE}


class Verdict:
    def __init__(self, name: str, first: Arms):
        self.name, self.looks = name, [first]
        self.shuffled = "answers" if name in WHOLE_ANSWERS else "tokens"
        self.doubt = doubt_about_training(list(first["plain"].values()))
        self.measure = AT_THE_END if self.doubt else IN_TRAINING

    def gain(self, look: Arms, other: str = "plain", measure: str = "") -> Gain:
        """The idea's gain over another arm, by default by the primary metric."""
        return gain_over(look["idea"], look[other], measure or self.measure)

    @property
    def word(self) -> str:
        """ahead, behind, or what else the rule of all experiments says."""
        return called(*[self.gain(look) for look in self.looks])

    def needs_second_look(self) -> bool:
        return len(self.looks) == 1 and self.gain(self.looks[0]).verdict == BETTER

    def print_findings(self) -> None:
        """The answer first, then what it rests on."""
        say("")
        for sentence in self.answer():
            say(textwrap.fill(sentence, 100))
        say(f"\n{self.table().to_text()}\n")
        for sentence in self.details():
            say(textwrap.fill(sentence, 100))

    def answer(self) -> list[str]:
        """The verdict in one sentence, and the sentences that say more of what was learned."""
        beside = sureness(self.looks[-1]["idea"], self.looks[-1]["plain"])
        of_sureness = [beside.sentence(self.name, "plain GRPO")] if beside else []
        return [self.verdict(), *self.far_pairs(), *self.held_out(), *of_sureness]

    def verdict(self) -> str:
        """Whether the idea is ahead of plain GRPO or behind it: one sentence."""
        first, last = self.gain(self.looks[0]), self.gain(self.looks[-1])
        if is_the_same(last):
            return (f"No verdict: {self.name} and plain GRPO had the same {self.measure} in every "
                    "pair of runs.")
        found = f"{in_points(last.estimate)} of {self.measure}"
        of_first = f"{in_points(first.estimate)} on the first {first.pairs}"
        if self.word == AHEAD:
            return (f"{self.name} is ahead of plain GRPO: {found} on {last.pairs} new seeds, after "
                    f"{of_first}.")
        if self.word == BEHIND:
            return f"{self.name} is behind plain GRPO: {found}, {last.pairs} pairs."
        if len(self.looks) > 1:
            return (f"{self.name} is not called ahead of plain GRPO: it gained {of_first} seeds, "
                    f"but {found} on {last.pairs} new ones.")
        too_few = ": too few" if last.has_few_pairs else ""
        return (f"No difference seen between {self.name} and plain GRPO: {found}, {last.pairs} "
                f"pairs{too_few}.")

    def pairs_of(self, look: Arms, other: str = "plain") -> dict[int, float]:
        """The gain of each pair over another arm, by seed."""
        found = {}
        for seed, mine in look["idea"].items():
            found[seed] = gain_over({seed: mine}, look[other], self.measure).estimate.value
        return found

    def far_pairs(self) -> list[str]:
        """A sentence about pairs that lie far from the others, as after a run that has collapsed;
        none if there is no such pair."""
        far = []
        for look in self.looks:
            if self.gain(look).has_few_pairs:
                continue
            pairs = self.pairs_of(look)
            median = np.median(list(pairs.values()))
            limit = max(FAR * np.median([abs(pair - median) for pair in pairs.values()]), AT_LEAST)
            for seed, pair in pairs.items():
                if abs(pair - median) > limit:
                    far.append(f"seed {seed} ({shown(pair, 'points')})")
        if not far:
            return []
        return [f"Look at the runs of {' and '.join(far)}: the pair lies far from the others, as "
                "if one of its runs had collapsed. Student's t takes pairs for normal. With such a "
                "pair, its intervals hold the truth less often than in 95 of 100 experiments."]

    def comparisons(self) -> Iterator[tuple[str, Arms, str]]:
        """The comparisons of the idea: for each a label, the look and the other arm."""
        for number, look in enumerate(self.looks):
            for other, label in OTHERS.items():
                yield (f"{label}, new seeds" if number else label), look, other

    def table(self) -> Table:
        rows: list[Row] = []
        for label, look, other in self.comparisons():
            in_training = self.gain(look, other, IN_TRAINING)
            at_the_end = self.gain(look, other, AT_THE_END)
            rows.append([label, len(look["idea"]), in_training.estimate, at_the_end.estimate])
        formats = {"minus": "", "pairs": "d", "training": "points", "end": "points"}
        return Table("verdict", "", by_row(formats, rows), headings={
            "minus": f"{self.name} minus",
            "training": f"gain in training, points{WITH_INTERVAL}",
            "end": f"gain on held-out problems at the end, points{WITH_INTERVAL}"})

    def details(self) -> list[str]:
        """Sentences about what the verdict rests on, and what it leaves open."""
        last = self.looks[-1]
        gain, over_placebo = self.gain(last), self.gain(last, "placebo")
        found = []
        if self.doubt:
            found.append("The primary metric is here the held-out success at the end, because "
                         f"{self.doubt}.")
        if is_the_same(gain):
            found.append("In the first step that is always so, because it is sampled before any "
                         "update.")
        elif self.word not in (AHEAD, BEHIND):
            found.append(f"In this setting {room_left(gain.estimate)}.")
        for look in self.looks:
            pairs = [f"{shown(pair, 'points')} (seed {seed})"
                     for seed, pair in self.pairs_of(look).items()]
            found.append(f"The pairs gain {', '.join(pairs)} points over plain GRPO.")
        found += could_have_seen(gain)
        if not is_the_same(gain):  # then nothing can be said of a choice
            found.append(self.about_choice(over_placebo))
        return found

    def held_out(self) -> list[str]:
        """Sentences about the evaluation at the end, if it sees a difference and is not the
        primary metric."""
        seen = []
        for other, label in OTHERS.items():
            gain = self.gain(self.looks[-1], other, AT_THE_END)
            word = difference_in_words(gain)
            if word:
                seen.append(f"{word} than {label} ({in_points(gain.estimate)})")
        if self.doubt or not seen:
            return []
        return [f"On held-out problems at the end {self.name} is {' and '.join(seen)}. This is the "
                "second measure: the verdict goes by the first, success in training. The intervals "
                "of the second are not corrected for there being two."]

    def about_choice(self, over_placebo: Gain) -> str:
        """Whether it matters which tokens the idea chooses."""
        shuffled, word = self.shuffled, difference_in_words(over_placebo)
        estimate = over_placebo.estimate
        seen = f"{word} than a random one ({in_points(estimate)})"
        if not word:
            seen = (f"not seen to differ from a random one: {in_points(estimate)}. Here "
                    f"{room_left(estimate)}")
        return (f"On these seeds its choice of {shuffled} is {seen}. The placebo is the "
                f"random choice: it has the same numbers at other {shuffled}.")

    def draw(self, folder: Path) -> Path:
        """A picture of how the arms learned, and of how far each pair is apart."""
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        for arm, colour in COLOURS.items():
            runs = [run for look in self.looks for run in look[arm].values()]
            label = f"{OTHERS.get(arm, self.name)}, mean of {len(runs)} runs"
            curves_of_arm(left, runs, "success", {"color": colour}, label)
        left.set(xlabel="step", ylabel="share of answers that are right",
                 title="Success in training")
        whole_steps(left)
        self.draw_pairs(right)
        legend_below(figure, left, ncols=3)
        caption = "Success in training, and the difference of each pair of runs"
        return save(figure, folder, "verdict", caption)[0]

    def draw_pairs(self, axis: Axes) -> None:
        labels = []
        for number, (label, look, other) in enumerate(self.comparisons()):
            labels.append(f"minus {label}".replace(", ", "\n"))
            for pair in self.pairs_of(look, other).values():
                axis.plot(number, 100 * pair, "o", ms=4, alpha=0.6, color=COLOURS[other])
            found = self.gain(look, other).estimate
            axis.errorbar(number + 0.15, 100 * found.value, 100 * (found.high - found.value),
                          fmt="s", ms=5, capsize=3, color=BLUE)
        axis.axhline(0, color="black", lw=0.8)
        axis.set(xlim=(-0.5, len(labels) - 0.5), xticks=range(len(labels)), xticklabels=labels,
                 ylabel="difference in success, points",
                 title=f"{self.name}: pairs of one seed, and their mean")


def is_the_same(gain: Gain) -> bool:
    """Whether both arms had the same success in every pair."""
    return gain.estimate.low == gain.estimate.high == 0


def could_have_seen(gain: Gain) -> list[str]:
    """A sentence about the true gains that such an experiment calls; none if that is not known."""
    if not gain.spread > 0:
        return []
    if gain.has_few_pairs:
        return [f"{gain.pairs} pairs are too few to say how much pairs differ, so the interval is "
                "itself uncertain. More --seeds make it surer."]
    once, twice = [], []
    for size in TRUE_GAINS:
        chance = chance_to_be_called(size, gain.spread, gain.pairs)
        once.append(f"{100 * chance:.0f}")
        twice.append(f"{100 * chance ** 2:.0f}")
    sizes = in_a_row([f"{100 * size:g}" for size in TRUE_GAINS], "or")
    return [f"What could this experiment have seen? The {gain.pairs} pairs differ by a standard "
            f"deviation of {shown(gain.spread, 'size')} points. With it, a true gain of {sizes} "
            f"points would be seen in one look in {in_a_row(once)} of 100 such experiments, and "
            f"called ahead, which takes a second look, in {in_a_row(twice)}."]


def in_a_row(words: list[str], joint: str = "and") -> str:
    """1, 2 and 4"""
    return f"{', '.join(words[:-1])} {joint} {words[-1]}"


def in_points(estimate: Estimate) -> str:
    """+4.0 (-8.7 to +16.7) points"""
    return f"{shown(estimate, 'points')} points"


def difference_in_words(gain: Gain) -> str:
    """better or worse, if there are enough pairs and the 95% interval lies wholly on one side of 0;
    otherwise empty."""
    if gain.has_few_pairs:
        return ""
    if gain.estimate.low > 0:
        return "better"
    return "worse" if gain.estimate.high < 0 else ""
