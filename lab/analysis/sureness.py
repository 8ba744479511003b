"""Less able, or only less sure? Two arms by the held-out success of sampled and of greedy answers.

A sampled answer draws each token from the model's distribution. A greedy answer takes the likeliest
token at every place. A weighting that keeps the model unsure of what to write loses success with
sampled answers, although its likeliest answers may be as good as those of plain GRPO. So the gain
with sampled answers is compared with the gain with greedy ones, pair by pair.
"""
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lab.analysis.gains import (AT_THE_END, FEWEST_PAIRS, GREEDY_AT_THE_END, LEVEL, Arm, Gain,
                                difference_at_the_end, gain_over)
from lab.analysis.run_folders import Run
from lab.analysis.statistics import Estimate, holm, mean_over
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown

LAST_STEPS = 10  # whose entropy is told
LESS, MORE = -1, 1
NOTE = (
    "A sampled answer draws each token from the model's distribution, and a greedy one takes the "
    "likeliest token at every place. An arm that loses more with sampled answers than with greedy "
    "ones has become less sure, which is not the same as less able. Ability goes by the gain with "
    "greedy answers, and sureness by the difference of the two gains, whose interval is Student's "
    f"t over the pairs of runs. A word stands from {FEWEST_PAIRS} pairs on, where p is below "
    f"{LEVEL:g} after Holm's correction for these two. It is not corrected for the number of arms. "
    f"The entropy is the mean of the last {LAST_STEPS} "
    "steps, in nats")


@dataclass(frozen=True)
class Sureness:
    """One arm beside another, over the seeds that both have."""
    sampled: Gain
    greedy: Gain
    difference: Estimate  # the gain with sampled answers minus that with greedy ones, by seed
    entropy: float        # of this arm
    other_entropy: float

    @property
    def words(self) -> str:
        """What is seen of ability and of sureness, such as `less sure, not seen to be less able`.
        They are two tests, so their p are corrected."""
        if self.greedy.has_few_pairs:
            return "not known: too few pairs"
        p_of_ability, p_of_sureness = holm([self.greedy.estimate.p, self.difference.p])
        able = side_of(self.greedy.estimate, p_of_ability)
        sure = side_of(self.difference, p_of_sureness)
        of_ability = {LESS: "less able", MORE: "more able"}
        of_sureness = {LESS: "less sure", MORE: "more sure"}
        if not able and not sure:
            return "not seen to differ in either"
        if not able:
            return f"{of_sureness[sure]}, not seen to be {of_ability[sure]}"
        if not sure:
            return f"{of_ability[able]}, not seen to be {of_sureness[able]}"
        joint = "and" if able == sure else "but"
        return f"{of_ability[able]}, {joint} {of_sureness[sure]}"

    def sentence(self, name: str, other: str) -> str:
        gains = [shown(one, "points") for one in (self.sampled.estimate, self.greedy.estimate)]
        seen = f"{name} is {self.words}"
        if self.greedy.has_few_pairs:
            seen = f"From {self.greedy.pairs} pairs that is not known"
        return (f"Less able or less sure? {seen}: on held-out problems at the "
                f"end {name} gains {gains[0]} points over {other} with sampled answers and "
                f"{gains[1]} with greedy ones, which take the likeliest token at every place. "
                f"Sampled minus greedy is {shown(self.difference, 'points')}. The mean entropy of "
                f"its last {LAST_STEPS} steps is {self.entropy:.3f}, and that of {other} "
                f"{self.other_entropy:.3f}.")


def side_of(estimate: Estimate, p: float) -> int:
    """MORE or LESS if a difference is seen, else 0."""
    if not p < LEVEL:
        return 0
    return MORE if estimate.value > 0 else LESS


def sureness(mine: Arm, theirs: Arm) -> Sureness | None:
    """None if fewer than two pairs were evaluated with sampled and with greedy answers."""
    sampled, greedy = (gain_over(mine, theirs, mode) for mode in (AT_THE_END, GREEDY_AT_THE_END))
    seeds = sorted(set(sampled.seeds) & set(greedy.seeds))
    if len(seeds) < 2:
        return None
    differences = []
    for seed in seeds:
        by_mode = [difference_at_the_end(mine[seed], theirs[seed], mode)
                   for mode in ("sampled", "greedy")]
        of_sampled, of_greedy = [float(np.mean(one)) for one in by_mode if one is not None]
        differences.append(of_sampled - of_greedy)
    return Sureness(sampled, greedy, mean_over(differences),
                    mean_over([last_entropy(mine[seed]) for seed in seeds]).value,
                    mean_over([last_entropy(theirs[seed]) for seed in seeds]).value)


def last_entropy(run: Run) -> float:
    """The mean entropy of the tokens that the last steps sampled."""
    return mean_over([line["entropy"] for line in run["metrics"][-LAST_STEPS:]]).value


def sureness_table(arms: Mapping[str, Arm], baseline: str) -> Table | None:
    """A row for each arm beside the baseline; None if no arm has greedy evaluations."""
    rows: list[Row] = []
    other_entropy = float("nan")
    for name, arm in arms.items():
        found = sureness(arm, arms[baseline]) if name != baseline else None
        if found:
            rows.append([name, found.greedy.estimate, found.difference, found.entropy, found.words])
            other_entropy = found.other_entropy
    if not rows:
        return None
    formats = {"arm": "", "greedy": "points", "difference": "points", "entropy": ".3f",
               "words": ""}
    return Table("able or sure",
                 f"Less able or less sure? Held-out success at the end: each arm minus {baseline}",
                 by_row(formats, rows), "",
                 ["Gains are in percentage points. "
                  f"{NOTE}. The arm {baseline} has {other_entropy:.3f}"],
                 {"greedy": f"gain with greedy answers{WITH_INTERVAL}",
                  "difference": f"gain with sampled ones minus that{WITH_INTERVAL}",
                  "words": "this arm is"})
