"""The verdict on an idea, from paired runs: a table, sentences, a picture.

Runs are given as look[arm][seed], with the arms plain, idea and placebo. There may be a second
look. An idea that is better on the first seeds is tested again on new ones, and only the new ones
decide whether it is called ahead. The reason: of 100 ideas that change nothing, two or three are
better on the first seeds by luck, and none of these is better again on the new ones.
"""
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes

from analysis.compare import curves_of_arm, doubt_about_training
from analysis.gains import AT_THE_END, IN_TRAINING, Gain, gain_over, room_left
from analysis.plots import BLUE, GREY, ORANGE, legend_below, plt, save, whole_steps
from analysis.runs import evaluations
from analysis.statistics import Estimate
from analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from engine.choices import WHOLE_ANSWERS
from harness.screen import say

OTHERS = {"plain": "plain GRPO", "placebo": "its placebo"}
FEWEST = 4  # from fewer pairs not even their spread is known
FEW = 8  # with fewer pairs than these, a sentence says how large a difference they can see
COLOURS = {"plain": GREY, "placebo": ORANGE, "idea": BLUE}
Look = dict[str, dict[int, dict]]  # runs by arm and seed


class Verdict:
    def __init__(self, name: str, first: Look):
        self.name, self.looks = name, [first]
        self.shuffled = "answers" if name in WHOLE_ANSWERS else "tokens"
        self.doubt = doubt_about_training(list(first["plain"].values()))
        self.measure = AT_THE_END if self.doubt else IN_TRAINING

    def gain(self, look: Look, other: str = "plain", measure: str = "") -> Gain:
        """The idea's gain over another arm, by default by the primary metric."""
        return gain_over(look["idea"], look[other], measure or self.measure)

    def is_ahead(self) -> bool:
        """Whether the interval of the last look is above 0."""
        return self.gain(self.looks[-1]).estimate.low > 0

    def is_behind(self) -> bool:
        return self.gain(self.looks[-1]).estimate.high < 0

    def print_findings(self) -> None:
        say("\n" + self.table().to_text() + "\n")
        if self.doubt:
            say(textwrap.fill("The primary metric is here the held-out success at the end, because "
                              f"{self.doubt}.", 100))
        for sentence in self.sentences():
            say(textwrap.fill(sentence, 100))

    def comparisons(self) -> Iterator[tuple[str, Look, str]]:
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

    def sentences(self) -> list[str]:
        last = self.looks[-1]
        gain, over_placebo = self.gain(last), self.gain(last, "placebo")
        by_primary_metric = [self.over_plain(gain), *about_few(gain),
                             self.about_choice(over_placebo.estimate)]
        return [*by_primary_metric, *self.levels(), *self.held_out()]

    def over_plain(self, gain: Gain) -> str:
        """Whether the idea is ahead of plain GRPO, and if that is open, what the interval leaves
        room for."""
        name, estimate, before = self.name, gain.estimate, ""
        if len(self.looks) > 1:
            first = self.gain(self.looks[0])
            before = (f" On the first {first.pairs} seeds it was better: "
                      f"{in_points(first.estimate)}.")
        if estimate.low == estimate.high == 0:
            return (f"{name} and plain GRPO had the same {self.measure} in every pair of runs, so "
                    "there is no verdict. In the first step that is always so, because it is "
                    "sampled before any update.")
        if before and estimate.low > 0:
            return (f"{name} is ahead of plain GRPO: {in_points(estimate)} on {gain.pairs} new "
                    f"seeds.{before}")
        if estimate.high < 0:
            return (f"{name} is behind plain GRPO: {in_points(estimate)}, {gain.pairs} "
                    f"pairs.{before}")
        where = " in training" if self.at_the_end("plain") else ""
        return (f"No difference seen{where}: {in_points(estimate)}, {gain.pairs} pairs.{before} In "
                f"this setting {room_left(estimate)}.")

    def levels(self) -> list[str]:
        """A sentence about the share of held-out problems that is solved before and after."""
        before, after = [], {}
        for arm in ("plain", "idea"):
            runs = [evaluations(run, "sampled") for run in self.looks[-1][arm].values()]
            if not all(run and run[0]["step"] == 0 for run in runs):
                return []
            before += [run[0]["success"] for run in runs]
            after[arm] = fmean(run[-1]["success"] for run in runs)
        return [f"Before training the model solves {fmean(before):.1%} of the held-out problems. "
                f"After it plain GRPO solves {after['plain']:.1%} of them, and {self.name} "
                f"{after['idea']:.1%}."]

    def at_the_end(self, other: str) -> str:
        """How the idea differs from another arm on held-out problems at the end; empty if no
        difference is seen, or if this is the primary metric."""
        if self.doubt:
            return ""
        return difference_in_words(self.gain(self.looks[-1], other, AT_THE_END).estimate)

    def held_out(self) -> list[str]:
        """Sentences about the evaluation at the end, if it sees a difference and is not the
        primary metric."""
        seen = []
        for other, label in OTHERS.items():
            if word := self.at_the_end(other):
                estimate = self.gain(self.looks[-1], other, AT_THE_END).estimate
                seen.append(f"{word} than {label} ({in_points(estimate)})")
        if not seen:
            return []
        return [f"On held-out problems at the end {self.name} is {' and '.join(seen)}. This is the "
                "second measure: the verdict goes by the first, success in training. The intervals "
                "of the second are not corrected for there being two."]

    def about_choice(self, over_placebo: Estimate) -> str:
        """Whether it matters which tokens the idea chooses."""
        shuffled, word = self.shuffled, difference_in_words(over_placebo)
        seen = f"{word} than a random one ({in_points(over_placebo)})"
        if not word:
            seen = (f"not seen to differ from a random one: {in_points(over_placebo)}. Here "
                    f"{room_left(over_placebo)}")
        return (f"On these seeds its choice of {shuffled} is {seen}. The placebo is the "
                f"random choice: it has the same numbers at other {shuffled}.")

    def in_short(self, is_quick: bool) -> str:
        """The last paragraph of all: what was found, how sure that is, and what to do next."""
        gain, over_placebo = self.gain(self.looks[-1]), self.gain(self.looks[-1], "placebo")
        if gain.estimate.low == gain.estimate.high == 0:
            return f"In short: {self.over_plain(gain)} {self.next_step(is_quick)}"
        word = difference_in_words(over_placebo.estimate)
        choice = f"is {word} than" if word else "was not seen to differ from"
        return (f"In short: {self.found(gain)}. Its choice of {self.shuffled} {choice} a random "
                f"one. How sure is that? {self.how_sure(gain)} {self.next_step(is_quick)}")

    def found(self, gain: Gain) -> str:
        """A clause with the verdict, and with what the second measure adds to it."""
        name, end, where = self.name, self.at_the_end("plain"), "on held-out problems at the end"
        nothing_seen = f"no difference between {name} and plain GRPO was seen"
        if not self.is_decided():
            if not end:
                return nothing_seen
            return f"in training {nothing_seen}, but {name} is {end} {where}"
        verdict = f"{name} is {'ahead of' if gain.estimate.low > 0 else 'behind'} plain GRPO"
        if not end:
            return verdict
        both = "and" if end == difference_in_words(gain.estimate) else "but"
        return f"{verdict} in training, {both} {end} {where}"

    def is_decided(self) -> bool:
        """Whether the verdict is ahead, which takes a second look, or behind."""
        return self.is_behind() or (self.is_ahead() and len(self.looks) > 1)

    def how_sure(self, gain: Gain) -> str:
        low, high = shown(gain.estimate.low, "points"), shown(gain.estimate.high, "points")
        if not gain.estimate.low < gain.estimate.high:
            return f"These {gain.pairs} pairs give no interval."
        return (f"By its 95% interval, the difference in {self.measure} lies between {low} and "
                f"{high} points ({gain.pairs} pairs).")

    def next_step(self, is_quick: bool) -> str:
        """What to do after this verdict."""
        gain = self.gain(self.looks[-1])
        if gain.estimate.low == gain.estimate.high:
            return "What next? With more --steps the arms sample different answers."
        if gain.estimate.low > 0:
            return ("What next? See whether it is also better on other problems, for example with "
                    "--numbers 4, and with another --model.")
        if gain.estimate.high < 0:
            return "What next? More seeds will hardly change this, so try another idea."
        again = ""
        if self.at_the_end("plain"):
            again = ", and shows whether the difference on held-out problems is seen again"
        if is_quick:
            return ("What next? The same command without --quick has more seeds and steps. It sees "
                    f"smaller differences{again}.")
        worth = "" if again else "If a gain within the interval would be worth it, "
        return (f"What next? {worth}--seeds {2 * gain.pairs} sees smaller differences{again}; "
                "finished runs are used again.")

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
            for seed, mine in look["idea"].items():
                pair = gain_over({seed: mine}, look[other], self.measure).estimate.value
                axis.plot(number, 100 * pair, "o", ms=4, alpha=0.6, color=COLOURS[other])
            found = self.gain(look, other).estimate
            axis.errorbar(number + 0.15, 100 * found.value, 100 * (found.high - found.value),
                          fmt="s", ms=5, capsize=3, color=BLUE)
        axis.axhline(0, color="black", lw=0.8)
        axis.set(xlim=(-0.5, len(labels) - 0.5), xticks=range(len(labels)), xticklabels=labels,
                 ylabel="difference in success, points",
                 title=f"{self.name}: pairs of one seed, and their mean")


def about_few(gain: Gain) -> list[str]:
    """A sentence about the difference that so few pairs can see; none if there are enough pairs, or
    if their spread is not known."""
    visible = gain.estimate.visible
    if gain.pairs >= FEW or not visible > 0:
        return []
    if gain.pairs < FEWEST:
        return [f"{gain.pairs} pairs are too few to say how much pairs differ, so the interval is "
                "itself uncertain. More --seeds make it surer."]
    return [f"{gain.pairs} pairs can see only large differences. With the spread of these pairs, "
            f"80 of 100 such experiments would find a true difference of {shown(visible, 'size')} "
            f"points, and fewer would find a smaller one."]


def in_points(estimate: Estimate) -> str:
    """+4.0 (-8.7 to +16.7) points"""
    return f"{shown(estimate, 'points')} points"


def difference_in_words(estimate: Estimate) -> str:
    """better or worse, if the 95% interval lies wholly on one side of 0; otherwise empty."""
    if estimate.low > 0:
        return "better"
    return "worse" if estimate.high < 0 else ""
