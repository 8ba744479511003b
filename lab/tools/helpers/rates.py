"""The learning rate of each arm of an experiment, chosen among several on other seeds.

A weighting changes the size of the gradient, also one whose mean is 1. So at one and the same rate
an idea can be behind because of the rate. Where each arm has its own best rate, this is no reason
any more.
"""
from dataclasses import dataclass

import numpy as np

from lab.analysis.compare import doubt_about_training
from lab.analysis.gains import final_lines, mean_success
from lab.analysis.run_folders import Run
from lab.analysis.statistics import mean_over
from lab.analysis.tables import Row, Table, by_row
from lab.engine.errors import UserError


def rates_of(typed: str) -> list[float]:
    """The numbers of --rates, the smallest first; none if it was not typed."""
    if not typed:
        return []
    try:
        rates = sorted({float(word) for word in typed.split(",")})
    except ValueError:
        rates = []
    if len(rates) < 2 or not 0 < rates[0] or not rates[-1] < 1e6:
        raise UserError(f"--rates {typed}: expected at least two different numbers above 0, such "
                        "as 0.5,1,2")
    return rates


@dataclass
class Rates:
    """The runs of each arm at each rate, by seed. `names` are those of the arms."""
    runs: dict[str, dict[float, dict[int, Run]]]
    names: dict[str, str]

    def successes(self, arm: str, rate: float) -> list[float]:
        """The success of each run of an arm at a rate, in the order of the seeds, by the primary
        metric; none if one of its seeds has failed, as it does if the rate is far too high."""
        by_seed = self.runs[arm][rate]
        runs = [by_seed[seed] for seed in sorted(by_seed)]
        if len(runs) < max(map(len, self.runs[arm].values())) or not runs:
            return []
        if doubt_about_training(runs):
            return [line["success"] for line in final_lines(runs, "sampled")]
        return list(map(mean_success, runs))

    def best(self) -> dict[str, float]:
        """The rate of each arm. That of plain GRPO, which stands first, is the one with the largest
        success. Another arm has the same, unless it is better at another by more than chance, in
        pairs of runs with the same seed. If each took its own largest success, arms that are equal
        would often get different rates, and then differ by these."""
        found: dict[str, float] = {}
        for arm, at in self.runs.items():
            known = {rate: of_rate for rate in at if (of_rate := self.successes(arm, rate))}
            if not known:
                raise UserError(f"{self.names[arm]}: its runs failed at every one of --rates")
            best = max(known, key=lambda rate: sum(known[rate]))
            usual = next(iter(found.values()), best)
            if usual in known:
                gains = np.subtract(known[best], known[usual]).tolist()
                best = best if mean_over(gains).low > 0 else usual
            found[arm] = best
        return found

    def table(self) -> Table:
        rows: list[Row] = []
        for arm, at in self.runs.items():
            rows.append([self.names[arm], *(mean_over(self.successes(arm, rate)).value
                                            for rate in at)])
        rates = next(iter(self.runs.values()))
        formats = {"arm": "", **{f"{rate:g} times the rate": ".1%" for rate in rates}}
        return Table("rates", "", by_row(formats, rows))

    def sentence(self, base: float) -> str:
        """Which rate each arm has, and which of them are the ends of what was tried."""
        best = self.best()
        seeds = max(len(runs) for at in self.runs.values() for runs in at.values())
        chosen = ", ".join(f"{self.names[arm]} {rate:g}" for arm, rate in best.items())
        tried = list(next(iter(self.runs.values())))
        said = ("Each arm has plain GRPO's best learning rate, or another at which it was better "
                f"by more than chance, on {seeds} other seeds. As multiples of {base:g} they are: "
                f"{chosen}.")
        ends = [self.names[arm] for arm, rate in best.items() if rate in (tried[0], tried[-1])]
        if ends:
            said += (f" Of {', '.join(ends)} it is the smallest or the largest that was tried, so "
                     "one beyond it may be better.")
        return said
