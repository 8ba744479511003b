"""The learning rate of each arm of an experiment: the best of several, chosen on other seeds.

A weighting changes the size of the gradient, also one whose mean is 1. So at one and the same rate
an idea can be behind because of the rate. Where each arm has its own best rate, this is no reason
any more.
"""
from dataclasses import dataclass

import numpy as np

from analysis.compare import doubt_about_training
from analysis.gains import final_lines, mean_success
from analysis.run_folders import Run
from analysis.tables import Row, Table, by_row
from engine.errors import UserError


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

    def success(self, arm: str, rate: float) -> float:
        """The mean success of an arm at a rate by the primary metric; nan if one of its seeds has
        failed, as it does if the rate is far too high."""
        runs = list(self.runs[arm][rate].values())
        if len(runs) < max(map(len, self.runs[arm].values())) or not runs:
            return float("nan")
        if doubt_about_training(runs):
            return float(np.mean([line["success"] for line in final_lines(runs, "sampled")]))
        return float(np.mean([mean_success(run) for run in runs]))

    def best(self) -> dict[str, float]:
        """The rate of each arm with the largest success."""
        found = {}
        for arm, at in self.runs.items():
            known = {rate: self.success(arm, rate) for rate in at}
            known = {rate: success for rate, success in known.items() if np.isfinite(success)}
            if not known:
                raise UserError(f"{self.names[arm]}: its runs failed at every one of --rates")
            found[arm] = max(known, key=lambda rate: known[rate])
        return found

    def table(self) -> Table:
        rows: list[Row] = []
        for arm, at in self.runs.items():
            rows.append([self.names[arm], *(self.success(arm, rate) for rate in at)])
        rates = next(iter(self.runs.values()))
        formats = {"arm": "", **{f"{rate:g} times the rate": ".1%" for rate in rates}}
        return Table("rates", "", by_row(formats, rows))

    def sentence(self, base: float) -> str:
        """Which rate each arm has, and which of them are the ends of what was tried."""
        best = self.best()
        seeds = max(len(runs) for at in self.runs.values() for runs in at.values())
        chosen = ", ".join(f"{self.names[arm]} {rate:g}" for arm, rate in best.items())
        tried = list(next(iter(self.runs.values())))
        said = (f"Each arm has the best of its own learning rates, chosen on {seeds} other seeds. "
                f"As multiples of {base:g} they are: {chosen}.")
        ends = [self.names[arm] for arm, rate in best.items() if rate in (tried[0], tried[-1])]
        if ends:
            said += (f" Of {', '.join(ends)} it is the smallest or the largest that was tried, so "
                     "one beyond it may be better.")
        return said
