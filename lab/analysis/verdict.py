"""The verdict on an idea, from paired runs: a sentence first, then a table, then more sentences.

Runs are given as look[arm][seed]. The arms are plain, idea, and the placebos: any, kind. There may
be a second look, by the rule of all experiments (lab/analysis/comparison.py).

Whoever tries many ideas finds one that is better by luck. So each comparison with plain GRPO is
written down beside plain GRPO's runs, in tries.json, and the p-value of a verdict is corrected for
all of them by Holm's method. The same idea on other seeds is another try, because whoever adds
seeds until the verdict pleases tries more than once.
"""
import json
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from lab.analysis.comparison import (AHEAD, AHEAD_ONCE, AT_EQUAL_TIME, AT_EQUAL_TOKENS, AT_THE_END,
                                     BEHIND, FEWEST_PAIRS, GREEDY_AT_THE_END, IN_TRAINING, LABELS,
                                     NOT_SEEN, Arms, Gain, about_cost, called, comparable,
                                     deciding, doubt_about_training, gain_over, gains, in_words,
                                     with_excluded)
from lab.analysis.statistics import Estimate, holm
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from lab.engine.errors import UserError, read_json
from lab.engine.methods import WHOLE_ANSWERS
from lab.harness.record import replace_text
from lab.harness.screen import say

OTHERS = {"plain": "plain GRPO", "any": "its placebo", "kind": "its placebo within kinds"}
CHOICES = {"any": "its choice of {}", "kind": "its choice among {} of the same category"}


@dataclass(frozen=True)
class Try:
    """A comparison of an idea with plain GRPO."""
    idea: str          # with its flags
    seeds: list[int]
    p: float | None    # not corrected; None if there were too few pairs for a test

    def __str__(self) -> str:
        return f"{self.idea} ({len(self.seeds)} seeds)"


class Tries:
    """The tries on some runs of plain GRPO. Without a path they are not kept, and there are no
    others."""

    def __init__(self, idea: str = "", digest: str = "", path: Path | None = None):
        self.idea, self.digest, self.path = idea, digest, path

    def add(self, seeds: tuple[int, ...], p: float) -> list[Try]:
        """Write down a try of this idea, and return the other tries that share runs of plain GRPO
        with it. `digest` tells ideas apart whose settings differ."""
        if self.path is None:
            return []
        known = read_json(self.path) if self.path.exists() else {}
        own = f"{self.digest} on seeds {' '.join(map(str, seeds))}"
        known[own] = asdict(Try(self.idea, list(seeds), p if p == p else None))
        replace_text(self.path, json.dumps(known, indent=1) + "\n")
        others = []
        for key, value in known.items():
            try:
                one = Try(**value)
            except TypeError:
                raise UserError(f"{self.path}: {key} is no try, which has an idea, seeds and a p"
                                ) from None
            if key != own and set(one.seeds) & set(seeds):
                others.append(one)
        return others


class Verdict:
    """The verdict on an idea, or on an edit that is compared with `other` than plain GRPO."""

    def __init__(self, name: str, first: Arms, tries: Tries | None = None,
                 other: str = OTHERS["plain"]):
        self.name, self.tries, self.other = name, tries or Tries(), other
        self.shuffled = "answers" if name in WHOLE_ANSWERS else "tokens"
        self.doubt = doubt_about_training(list(first["plain"].values()))
        self.measure = AT_THE_END if self.doubt else deciding(first["idea"], first["plain"])
        self.said = in_words(self.measure, first["plain"].values())
        self.looks: list[Arms] = []
        # of each look the gain over plain GRPO by the primary metric, whose p is corrected, the
        # same p before that, and the other tries that it is corrected for
        self.primary: list[Gain] = []
        self.alone: list[float] = []
        self.others: list[list[Try]] = []
        self.add(first)

    def add(self, look: Arms) -> None:
        look, _ = comparable(look)
        gain = self.gain(look)
        self.others.append(self.tries.add(gain.seeds, gain.p))
        self.looks.append(look)
        self.alone.append(gain.p)
        self.primary.append(self.corrected(gain))

    def corrected(self, gain: Gain) -> Gain:
        """The gain with Holm's correction for the other tries on these runs."""
        p, *_ = holm([gain.p, *(np.nan if one.p is None else one.p for one in self.others[-1])])
        return replace(gain, p=p)

    def gain(self, look: Arms, other: str = "plain", measure: str = "") -> Gain:
        """The idea's gain over another arm, by default by the primary metric. Its p is not
        corrected."""
        return gain_over(look["idea"], look[other], measure or self.measure)

    @property
    def word(self) -> str:
        """ahead, behind, or what else the rule of all experiments says."""
        return called(*self.primary)

    def needs_second_look(self) -> bool:
        return len(self.looks) == 1 and self.primary[0].verdict == AHEAD_ONCE

    def print_findings(self) -> None:
        """The answer first, then what it rests on."""
        say("")
        for sentence in self.answer():
            say(textwrap.fill(sentence, 100))
        say(f"\n{self.table().to_text()}\n")
        for sentence in self.details():
            say(textwrap.fill(sentence, 100))

    def answer(self) -> list[str]:
        """The verdict in one sentence, what else was measured of the same gain, and how many others
        were tried."""
        limit = self.primary[-1].excluded_above()
        said = [self.verdict()]
        if self.primary[-1].verdict == NOT_SEEN and np.isfinite(limit):
            said.append(f"Gains above {shown(limit, 'points')} points are excluded (95%).")
        return [*said, *self.about_cost(), *self.about_tries()]

    def about_cost(self) -> list[str]:
        """The gain by the other yardsticks, and how dear a step is and may be."""
        if self.doubt or is_the_same(self.primary[-1]):
            return []
        look, found = self.looks[-1], []
        for measure in (IN_TRAINING, AT_EQUAL_TOKENS, AT_EQUAL_TIME):
            gain = self.corrected(self.gain(look, measure=measure))
            if measure == self.measure or not gain.pairs or not gain.is_told:
                continue
            cost = f", where a step costs {gain.cost.value:.2f} times as much"
            found.append(f"At {LABELS[measure]}{'' if measure == IN_TRAINING else cost}: "
                         f"{in_points(gain.estimate)}, {with_excluded(gain)}.")
        return [*found, *(f"{self.name} {clause} one of {self.other}."
                          for clause in about_cost(look["idea"], look["plain"]))]

    def verdict(self) -> str:
        """Whether the idea is ahead of plain GRPO or behind it: one sentence."""
        first, last = self.primary[0], self.primary[-1]
        if is_the_same(last):
            return (f"No verdict: {self.name} and {self.other} had the same {self.said} in "
                    "every pair of runs.")
        found = f"{in_points(last.estimate)} of {self.said}"
        of_first = f"{in_points(first.estimate)} on the first {first.pairs}"
        if self.word == AHEAD:
            return (f"{self.name} is ahead of {self.other}: {found} on {last.pairs} new seeds, "
                    f"after {of_first}.")
        if self.word == BEHIND:
            return f"{self.name} is behind {self.other}: {found}, {last.pairs} pairs."
        if len(self.looks) > 1:
            return (f"{self.name} is not called ahead of {self.other}: it gained {of_first} "
                    f"seeds, but {found} on {last.pairs} new ones.")
        too_few = ": too few" if last.pairs < FEWEST_PAIRS else ""
        return (f"No difference seen between {self.name} and {self.other}: {found}, {last.pairs} "
                f"pairs{too_few}.")

    def about_tries(self) -> list[str]:
        """A sentence for each look that shares its runs of plain GRPO with other tries."""
        found = []
        for gain, alone, others in zip(self.primary, self.alone, self.others):
            if not others:
                continue
            names = ", ".join(map(str, others))
            on_seeds = f"seeds {gain.seeds[0]} to {gain.seeds[-1]}"
            found.append(f"On {on_seeds} {self.other} was compared {1 + len(others)} times: with "
                         f"{self.name} here, and with {names}. So p = {shown(alone, 'p')} becomes "
                         f"{shown(gain.p, 'p')} by Holm's correction.")
        return found

    def table(self) -> Table:
        """A row for each arm that the idea is compared with, of each look."""
        rows: list[Row] = []
        for number, look in enumerate(self.looks):
            for other, label in {**OTHERS, "plain": self.other}.items():
                if other in look:
                    rows.append([f"{label}, new seeds" if number else label, len(look["idea"]), *(
                        self.gain(look, other, measure).estimate
                        for measure in (IN_TRAINING, AT_THE_END, GREEDY_AT_THE_END))])
        formats = {"minus": "", "pairs": "d", "training": "points", "end": "points",
                   "greedy": "points"}
        return Table("verdict", "", by_row(formats, rows), headings={
            "minus": f"{self.name} minus",
            "training": f"gain in training, points{WITH_INTERVAL}",
            "end": f"gain on held-out problems at the end, sampled answers{WITH_INTERVAL}",
            "greedy": f"the same, greedy answers{WITH_INTERVAL}"})

    def details(self) -> list[str]:
        """Sentences about what the verdict rests on, and what it leaves open."""
        found = []
        if self.doubt:
            found.append(f"The primary metric is here the {self.said}, because {self.doubt}.")
        elif is_the_same(self.primary[-1]):
            found.append("In the first step that is always so, because it is sampled before any "
                         "update.")
        found += self.about_rate()
        if not is_the_same(self.primary[-1]):  # then nothing can be said of a choice
            found += self.about_choices()
        return found

    def about_rate(self) -> list[str]:
        """If all arms had one learning rate, a sentence on that."""
        rate, *others = {run.config["learning_rate"] for arm in self.looks[-1].values()
                         for run in arm.values()}
        return [] if others else [
            f"All arms had {self.other}'s learning rate, {rate:g}, and another may suit "
            f"{self.name} better. With --learning_rate all arms are trained at another."]

    def about_choices(self) -> list[str]:
        """Whether it matters which tokens the idea chooses: a sentence for each placebo. Their
        p-values are corrected for how many placebos there are."""
        look = self.looks[-1]
        family = {other: (look["idea"], look[other]) for other in CHOICES if other in look}
        found = []
        for other, gain in gains(family, self.measure).items():
            choice = CHOICES[other].format(self.shuffled)
            estimate = gain.estimate
            if is_the_same(gain):
                seen = "changes nothing: the placebo had the same results in every pair"
            elif gain.pairs < FEWEST_PAIRS or gain.verdict == NOT_SEEN:
                seen = f"is not seen to differ from a random one: {in_points(estimate)}"
            else:
                seen = (f"is {'better' if estimate.value > 0 else 'worse'} than a random one "
                        f"({in_points(estimate)})")
            found.append(f"On these seeds {choice} {seen}.")
        if family:
            found.append("A placebo is the random choice: it has the same numbers at other "
                         f"{self.shuffled}.")
        return found


def is_the_same(gain: Gain) -> bool:
    """Whether both arms had the same success in every pair."""
    return gain.estimate.low == gain.estimate.high == 0


def in_points(estimate: Estimate) -> str:
    """+4.0 (-8.7 to +16.7) points"""
    return f"{shown(estimate, 'points')} points"
