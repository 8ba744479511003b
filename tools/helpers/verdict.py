"""What paired runs say of an idea: a table, sentences, a picture.

Runs are given as look[arm][seed], of the arms plain, idea and placebo. There may be a second look:
who is ahead on some seeds is asked again on new ones, and by these alone it is called ahead. So of
100 ideas that change nothing not one is, but two or three are on the first seeds.
"""
import textwrap
from pathlib import Path

from analysis.compare import (AT_THE_END, IN_TRAINING, MEASURES, difference, doubt_about_training,
                              farther_end, seeds_and_mean)
from analysis.plots import BLUE, GREY, ORANGE, legend_below, plt, save, whole_steps
from analysis.statistics import Estimate
from analysis.tables import Table, by_row, shown
from engine.choices import WHOLE_ANSWERS
from harness.screen import say

OTHERS = {"plain": "plain GRPO", "placebo": "its placebo"}
FEW = 8  # pairs; with fewer it is said what they can see
COLOURS = {"plain": GREY, "placebo": ORANGE, "idea": BLUE}


class Verdict:
    def __init__(self, name: str, first: dict):
        self.name, self.looks = name, [first]
        self.shuffled = "answers" if name in WHOLE_ANSWERS else "tokens"
        self.doubt = doubt_about_training(list(first["plain"].values()))
        self.measure = AT_THE_END if self.doubt else IN_TRAINING

    def lead(self, look: dict, other: str = "plain", measure: str = "") -> Estimate | None:
        return difference(look["idea"], look[other], measure or self.measure)[1]

    def is_ahead(self) -> bool:
        return self.lead(self.looks[-1]).low > 0

    def tell(self) -> None:
        say("\n" + self.table().to_text() + "\n")
        if self.doubt:
            decides = f"What decides is the held-out success at the end: {self.doubt}."
            say(textwrap.fill(decides, 100))
        for sentence in self.sentences():
            say(textwrap.fill(sentence, 100))

    def comparisons(self) -> list[tuple[str, dict, str]]:
        return [(label + which, look, other)
                for look, which in zip(self.looks, ("", ", new seeds"))
                for other, label in OTHERS.items()]

    def table(self) -> Table:
        rows = []
        for label, look, other in self.comparisons():
            found = [self.lead(look, other, measure) for measure in MEASURES]
            cells = [[one.value, one.interval] if one else [None, None] for one in found]
            rows.append([label, len(look["idea"]), *sum(cells, [])])
        formats = {"minus": "", "pairs": "d", "training": "points", "95%": "points",
                   "end": "points", "95% ": "points"}
        return Table("verdict", "", by_row(formats, rows), headings={
            "minus": f"{self.name} minus", "training": "success in training, points",
            "95%": "95% interval", "end": "held-out at the end, points", "95% ": "95% interval"})

    def sentences(self) -> list[str]:
        last = self.looks[-1]
        lead, chosen, seeds = self.lead(last), self.lead(last, "placebo"), len(last["idea"])
        once, name = in_points(self.lead(self.looks[0])), self.name
        before = (f"It was ahead on the first {seeds} seeds: {once} points."
                  if len(self.looks) > 1 else "")
        if len(self.looks) > 1 and lead.low > 0:
            said = (f"{name} is ahead of plain GRPO: {in_points(lead)} points on {seeds} new "
                    f"seeds. {before}")
        elif lead.high < 0:
            said = f"{name} is behind plain GRPO: {in_points(lead)} points, {seeds} pairs. {before}"
        else:
            better, worse = (shown(max(0.0, most), "size") for most in (lead.high, -lead.low))
            said = (f"No difference seen: {in_points(lead)} points, {seeds} pairs. {before} "
                    f"In this setting {name} is better by at most {better} points and worse by at "
                    f"most {worse}.")
        if chosen.low > 0 or chosen.high < 0:
            how = "better" if chosen.low > 0 else "worse"
            why = (f"On these seeds its choice of {self.shuffled} is {how} than chance "
                   f"({in_points(chosen)} points)")
        else:
            why = (f"That it chooses these {self.shuffled} and not others makes no difference that "
                   f"is seen, within {shown(farther_end(chosen), 'size')} points")
        return [" ".join(said.split()), *self.beside(), *about_few(lead, seeds),
                f"{why}: its placebo has the same numbers at other {self.shuffled}."]

    def beside(self) -> list[str]:
        """What the evaluation sees where the training decides."""
        end = self.lead(self.looks[-1], measure=AT_THE_END)
        if self.doubt or end is None or end.low <= 0 <= end.high:
            return []
        return [f"At the end, on held-out problems, the difference is {in_points(end)} points; "
                "success in training decides."]

    def draw(self, folder: Path) -> Path:
        """How the arms learned, and how far each pair is apart."""
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        for arm, colour in COLOURS.items():
            runs = [run for look in self.looks for run in look[arm].values()]
            label = f"{OTHERS.get(arm, self.name)}, mean of {len(runs)} runs"
            seeds_and_mean(left, runs, "success", {"color": colour}, label)
        left.set(xlabel="step", ylabel="share of answers that are right",
                 title="Success in training")
        whole_steps(left)
        comparisons = self.comparisons()
        for place, (_, look, other) in enumerate(comparisons):
            for seed, mine in look["idea"].items():
                pair = difference({seed: mine}, look[other], self.measure)[1].value
                right.plot(place, 100 * pair, "o", ms=4, alpha=0.6, color=COLOURS[other])
            found = self.lead(look, other)
            right.errorbar(place + 0.15, 100 * found.value, 100 * (found.high - found.value),
                           fmt="s", ms=5, capsize=3, color=BLUE)
        right.axhline(0, color="black", lw=0.8)
        labels = [f"minus {label}".replace(", ", "\n") for label, *_ in comparisons]
        right.set(xlim=(-0.5, len(labels) - 0.5), xticks=range(len(labels)), xticklabels=labels,
                  ylabel="points", title=f"{self.name}: each pair of a seed, and the mean")
        legend_below(figure, left, ncols=3)
        return save(figure, folder, "verdict", "Success in training, and each pair's difference")[0]


def about_few(lead: Estimate, pairs: int) -> list[str]:
    """What so few pairs can see, where their spread is known."""
    if pairs >= FEW or not lead.visible > 0:
        return []
    return [f"{pairs} pairs see little: with their spread, a true difference of "
            f"{shown(lead.visible, 'size')} points is found in 80 of 100 such experiments, a "
            "smaller one in fewer."]


def in_points(found: Estimate) -> str:
    return f"{shown(found.value, 'points')} ({shown(found.interval, 'points')})"
