"""The leaderboard: what each way of spreading credit knows, does to the gradient, does to training.

How it is decided, whatever comes out:

    measure     success on the held-out problems, one sampled answer each, at the end
    compared    with plain GRPO's. A seed stands for the problems it trains on, so success is taken
                to be a part of the arm, a part of the seed and chance, by least squares over all
                finished runs. Plain GRPO has twice as many seeds; those that it has alone show its
                spread, and add nothing to the comparison
    error       by the chance that is left, of all arms together: with few seeds that of one arm
                alone is hardly known
    verdict     ahead or behind if p, by Holm's correction over all arms, is below 0.05; otherwise
                open, and the finding says which difference would have been seen. Of an arm with
                one seed nothing is said
    controls    are no candidates: each is compared with plain GRPO as in the experiment control, by
                seed and by problem, without a correction

An arm that is ahead or behind is also compared with its own placebo, the same weights at other
tokens: what both have in common is not due to the arm's choice of tokens. The arm `measured` is a
control that must be ahead, `shuffled` one that must be behind.
"""
from dataclasses import dataclass

import numpy as np

from analysis.plots import BLUE, GREY, ORANGE, panels, save
from analysis.statistics import Estimate, estimate, holm
from analysis.tables import Table, by_row
from engine.errors import UserError
from research.experiments import forecast
from research.experiments.control import tokens_beside
from research.experiments.critics import critics_table
from research.experiments.experiments import RACE_STEPS, RACE_TO
from research.experiments.finished import END, Study, ahead, evaluated
from research.experiments.forecast import Racer, as_text
from research.probes.common import Findings

PLACEBO = "-placebo"            # an arm's name with this is its placebo
CONTROLS = ("measured", "shuffled")
SEEN = 0.05
FEWEST_SEEDS = 2  # before anything is said: a single run may collapse, in any arm


@dataclass
class Entry:
    """An arm on the board."""
    racer: Racer
    ahead: Estimate | None = None       # of plain GRPO
    p: float = float("nan")             # of that, corrected
    of_placebo: Estimate | None = None  # ahead of its own placebo
    beside: float = 0.0                 # tokens sampled for credit, by trained token

    @property
    def verdict(self) -> str:
        if self.racer.seeds < FEWEST_SEEDS or not np.isfinite(self.p):
            return "too few seeds"
        if self.p >= SEEN:
            return "open"
        return "ahead" if self.ahead.value > 0 else "behind"


def report(study: Study) -> Findings:
    plain = next(iter(study.experiment.arms))
    race = forecast.report(study)
    entries = make_entries(study, plain)
    board = board_table(entries, plain)
    picture, critics = draw(study, entries, plain), critics_table(study)
    tables = [board, *race.tables, *([critics] if critics else [])]
    return Findings("The leaderboard", study.intro(), tables,
                    ("board", "correlation"), pictures=[picture, *race.pictures],
                    places={"board": ("board",), **race.places})


def make_entries(study: Study, plain: str) -> list[Entry]:
    """Those of which a run is finished, the best first."""
    if plain not in study.runs:
        raise UserError(f"no run of {plain} is finished yet, with which all are compared")
    entries = {arm: Entry(racer, beside=tokens_beside(study.of(arm)))
               for arm, racer in forecast.racers_of(study).items()}
    compare_all(entries, parts_of_success(study), plain)
    for arm in CONTROLS:
        _, difference = ahead(study, arm, plain, END)
        if difference:  # they have a seed in common
            entries[arm].ahead, entries[arm].p = difference, difference.p
    return sorted(entries.values(), key=lambda entry: -entry.racer.success)


@dataclass
class Parts:
    """What success is made of, by least squares: the arms' parts first, then the seeds'."""
    arms: list[str]
    values: np.ndarray       # (arms and seeds,)
    covariance: np.ndarray
    freedom: int             # behind the chance that is left

    def difference(self, one: str, other: str, tests: int = 1) -> Estimate:
        sign = np.zeros(len(self.values))
        sign[self.arms.index(one)], sign[self.arms.index(other)] = 1, -1
        error = float(np.sqrt(sign @ self.covariance @ sign))
        return estimate(float(sign @ self.values), error, self.freedom, tests)


def parts_of_success(study: Study) -> Parts:
    """Of the finished runs, at the end. With two arms it is the paired comparison of the two."""
    arms = list(study.runs)
    seeds = sorted({seed for runs in study.runs.values() for seed in runs})
    rows, success = [], []
    for arm, runs in study.runs.items():
        for seed, run in runs.items():
            row = np.zeros(len(arms) + len(seeds))
            row[arms.index(arm)] = row[len(arms) + seeds.index(seed)] = 1
            rows.append(row)
            success.append(evaluated(run, END)["success"])
    design, success = np.array(rows), np.array(success)
    values, _, rank, _ = np.linalg.lstsq(design, success, rcond=None)
    freedom = len(success) - int(rank)
    left = float(np.square(success - design @ values).sum())
    variance = left / freedom if freedom else float("nan")
    return Parts(arms, values, variance * np.linalg.pinv(design.T @ design), freedom)


def compare_all(entries: dict[str, Entry], parts: Parts, plain: str) -> None:
    """Each candidate with plain GRPO, and with its own placebo."""
    candidates = {arm: entry for arm, entry in entries.items() if arm not in (plain, *CONTROLS)}
    for arm, entry in candidates.items():
        entry.ahead = parts.difference(arm, plain, len(candidates))
        if arm + PLACEBO in entries:
            entry.of_placebo = parts.difference(arm, arm + PLACEBO)
    known = [entry for entry in candidates.values() if np.isfinite(entry.ahead.p)]
    for entry, p in zip(known, holm([entry.ahead.p for entry in known])):
        entry.p = p


def board_table(entries: list[Entry], plain: str) -> Table:
    rows = [row_of(entry) for entry in entries]
    formats = {"arm": "", "seeds": "d", "end": ".1%", "ends": ".1%", "ahead": "points",
               "95%": "points", "p": "p", "placebo": "points", "placebo 95%": "points",
               "answers": "", "beside": ".1f", "verdict": ""}
    headings = {"end": "success at the end", "ends": "of the seeds",
                "ahead": f"minus {plain}", "95%": "95% interval", "p": "Holm's p",
                "placebo": "minus its placebo", "placebo 95%": "95% interval",
                "answers": "answers needed", "beside": "tokens beside"}
    return Table("board", "Ways of spreading credit, by what became of training",
                 by_row(formats, rows), in_words(entries, plain), notes(plain), headings)


def row_of(entry: Entry) -> list:
    racer = entry.racer
    ahead = [entry.ahead.value, entry.ahead.interval, entry.p] if entry.ahead else [None] * 3
    placebo = [None, None]
    if entry.of_placebo:
        placebo = [entry.of_placebo.value, entry.of_placebo.interval]
    verdict = entry.verdict if entry.ahead else ""
    return [racer.arm, racer.seeds, racer.success, racer.ends, *ahead, *placebo,
            as_text(racer.answers), entry.beside, verdict]


def in_words(entries: list[Entry], plain: str) -> str:
    """Who is told apart from plain GRPO, and what could have been seen."""
    compared = [entry for entry in entries if entry.ahead]
    return "\n".join([*told_apart(entries, plain), *could_be_seen(entries),
                      controls_in_words(compared)])


def told_apart(entries: list[Entry], plain: str) -> list[str]:
    compared = [entry for entry in entries if entry.ahead]
    ahead, behind = ([entry.racer.arm for entry in compared if entry.verdict == verdict]
                     for verdict in ("ahead", "behind"))
    return [f"Ahead of {plain}: {', '.join(ahead) or 'none'}.",
            f"Behind it: {', '.join(behind) or 'none'}."]


def could_be_seen(entries: list[Entry]) -> list[str]:
    visible = [entry.ahead.visible for entry in entries
               if entry.ahead and np.isfinite(entry.ahead.visible)]
    if not visible:
        return []
    return [f"A difference of {100 * np.median(visible):.1f} points would have been seen in 80 of "
            "100 such experiments."]


def controls_in_words(compared: list[Entry]) -> str:
    verdicts = {entry.racer.arm: entry.verdict for entry in compared}
    should = dict(zip(CONTROLS, ("ahead", "behind")))
    wrong = [arm for arm in CONTROLS if verdicts.get(arm) != should[arm]]
    if wrong:
        return f"The board is not to be trusted yet: {' and '.join(wrong)} should be told apart."
    return "Both controls are where they should be."


def notes(plain: str) -> list[str]:
    return ["differences are in points of held-out success; answers needed: trained on until the "
            f"mean success of the last {RACE_STEPS} training steps reaches {RACE_TO:.0%}; beside: "
            "tokens sampled for the credit, by trained token; open: not told apart from "
            f"{plain}. The controls {' and '.join(CONTROLS)} are compared by seed and by problem, "
            "and their p is not corrected"]


def draw(study: Study, entries: list[Entry], plain: str):
    compared = [entry for entry in entries if entry.ahead][::-1]
    figure, axis = panels(1, figsize=(8.0, 1.2 + 0.27 * len(compared)))
    colours = {"ahead": BLUE, "behind": ORANGE}
    for height, entry in enumerate(compared):
        colour, ahead = colours.get(entry.verdict, GREY), entry.ahead
        if np.isfinite(ahead.low):
            axis.plot([100 * ahead.low, 100 * ahead.high], [height, height], color=colour, lw=2)
        axis.plot(100 * ahead.value, height, "o", color=colour, ms=5)
    axis.axvline(0, color="black", lw=0.8)
    axis.set(yticks=range(len(compared)), yticklabels=[entry.racer.arm for entry in compared],
             xlabel=f"points of held-out success, minus {plain}",
             title="Who is ahead of plain GRPO? Blue: ahead, orange: behind, grey: open")
    return save(figure, study.folder, "board",
                f"Held-out success at the end, each arm minus {plain}, with 95% intervals")
