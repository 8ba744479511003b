"""The leaderboard: what each way of spreading credit knows, and what it does to training.

How it is decided, whatever comes out:

    measure     sampled success on the held-out problems, as the mean of the evaluations after the
                middle of the training
    compared    with plain GRPO's, by Welch's t test over seeds: each arm has a variance of its own,
                and plain GRPO twice as many seeds
    verdict     ahead or behind if p, by Holm's correction over the candidates, is below 0.05;
                otherwise open, and the finding says which difference would have been seen. Of an
                arm with one seed nothing is said
    controls    and placebos are no candidates: their p is not corrected, and corrects no other
    forecast    the rank correlation over all arms of the cosine of one batch's gradient with the
                true one (probe noise, five seeds) with late success. It holds where the interval
                is above 0

An arm is also compared with its own placebo, the same weights at other tokens: what both have in
common is not due to the arm's choice of tokens. The arm `measured` is a control that must be ahead,
`shuffled` one that must be behind.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.runs import is_number
from analysis.statistics import Estimate, holm, rank_correlation, welch
from analysis.tables import Table, by_row
from engine.errors import UserError
from research.experiments import published
from research.experiments.experiments import RACE_STEPS, RACE_TO
from research.experiments.finished import (Study, late_success, moving_mean, numbers, told_apart,
                                           verdict_on)
from research.experiments.pictures import draw, draw_board

PLACEBO = "-placebo"            # an arm's name with this is its placebo
CONTROLS = {"measured": "ahead", "shuffled": "behind"}
WHEN = {"noise": "before training", "noise_third": "after a third of it"}  # results of the probe
SAME_DIRECTION = {"dr_grpo": "rloo"}  # a multiple of it
DRAWS = 4000
FEWEST_ARMS = 4


@dataclass
class Entry:
    """An arm on the board."""
    arm: str
    runs: dict[int, dict]
    ahead: Estimate | None = None       # of plain GRPO
    p: float = float("nan")             # of that, corrected
    of_placebo: Estimate | None = None  # ahead of its own placebo

    @property
    def ends(self) -> list[float]:
        return list(map(late_success, self.runs.values()))

    @property
    def success(self) -> float:
        return float(np.mean(self.ends))

    @property
    def is_candidate(self) -> bool:
        return self.arm not in CONTROLS and not self.arm.endswith(PLACEBO)

    @property
    def verdict(self) -> str:
        return verdict_on(len(self.runs), self.ahead.value, self.p) if self.ahead else ""

    @property
    def answers(self) -> float:
        """Trained on until the mean curve is where the race goes to; infinite if it never is."""
        config = next(iter(self.runs.values()))["config"]
        curve = moving_mean(np.mean(numbers(self.runs, "success"), axis=0), RACE_STEPS)
        there = np.flatnonzero(curve >= RACE_TO - 1e-9)
        if not len(there):
            return float("inf")
        return float((there[0] + RACE_STEPS) * config["questions"] * config["answers"])


def report(study: Study, folder: Path) -> tuple[list[Table], tuple]:
    """The tables, and the picture."""
    entries = make_entries(study)
    expected = {arm: place for arm, place in CONTROLS.items() if arm in study.experiment.arms}
    tables = [board_table(entries, expected), race_table(entries), correlation_table(entries)]
    return tables, draw(draw_board, folder / "board.png", tables[0].to_json())


def make_entries(study: Study) -> list[Entry]:
    """Those of which a run is finished, the best first."""
    plain = next(iter(study.experiment.arms))
    if plain not in study.runs:
        raise UserError(f"no run of {plain} is finished yet, with which all are compared")
    entries = {arm: Entry(arm, runs) for arm, runs in study.runs.items()}
    compare_all(entries, plain)
    return sorted(entries.values(), key=lambda entry: -entry.success)


def compare_all(entries: dict[str, Entry], plain: str) -> None:
    """Each arm with plain GRPO, and with its own placebo."""
    candidates = [arm for arm in entries if arm != plain and entries[arm].is_candidate]
    for arm, entry in entries.items():
        if arm != plain:
            tests = len(candidates) if arm in candidates else 1
            entry.ahead = welch(entry.ends, entries[plain].ends, tests)
            entry.p = entry.ahead.p
        if arm + PLACEBO in entries:
            entry.of_placebo = welch(entry.ends, entries[arm + PLACEBO].ends)
    for arm, p in zip(candidates, holm([entries[arm].p for arm in candidates])):
        entries[arm].p = p


def board_table(entries: list[Entry], expected: dict[str, str]) -> Table:
    rows = []
    for entry in entries:
        one, other = entry.ahead, entry.of_placebo
        rows.append([entry.arm, len(entry.runs), entry.success, (min(entry.ends), max(entry.ends)),
                     *([one.value, one.interval, entry.p] if one else [None] * 3),
                     *([other.value, other.interval] if other else [None] * 2), entry.verdict])
    formats = {"arm": "", "seeds": "d", "end": ".1%", "ends": ".1%", "ahead": "points",
               "95%": "points", "p": "p", "placebo": "points", "placebo 95%": "points",
               "verdict": ""}
    headings = {"end": "late success", "ends": "of the seeds", "ahead": "minus none",
                "95%": "95% interval", "p": "p, corrected", "placebo": "minus its placebo",
                "placebo 95%": "95% interval"}
    return Table("board", "Ways of spreading credit, by what became of training",
                 by_row(formats, rows), in_words(entries, expected),
                 ["differences are in points of held-out success; open: not told apart from plain "
                  f"GRPO. The p of {' and '.join(CONTROLS)} and of placebos is not corrected"],
                 headings)


def in_words(entries: list[Entry], expected: dict[str, str]) -> str:
    """Who is told apart from plain GRPO, what could have been seen, and whether to believe it."""
    verdicts = {entry.arm: entry.verdict for entry in entries}
    texts = told_apart(verdicts)
    visible = [100 * entry.ahead.visible for entry in entries if entry.ahead
               and entry.is_candidate and np.isfinite(entry.ahead.visible)]
    if visible:
        texts.append(f"Of a candidate a difference of {np.median(visible):.1f} points (the median; "
                     f"{min(visible):.1f} to {max(visible):.1f}, as its seeds scatter) would have "
                     "been seen in 80 of 100 such experiments.")
    wrong = [arm for arm, should in expected.items() if verdicts.get(arm) != should]
    texts.append(f"The board is not to be trusted yet: {' and '.join(wrong)} should be told apart."
                 if wrong else "Each control is where it should be.")
    return "\n".join(texts)


def one_batch(entries: list[Entry], probed: str) -> list[float | None]:
    """What the probe noise, as published, measured of each arm; None of what it was not asked."""
    [table] = published.read_result(published.RESULTS / f"{probed}.json")["tables"]
    known = {row["arm"]: row["one batch"] for row in table["rows"]}
    return [known.get(SAME_DIRECTION.get(entry.arm, entry.arm)) for entry in entries]


def race_table(entries: list[Entry]) -> Table:
    """What could be known of each arm beside what became of it."""
    rows = [[entry.arm, *known, f"{entry.answers:,.0f}" if np.isfinite(entry.answers) else "never",
             entry.success] for entry, *known in zip(
                 entries, *(one_batch(entries, probed) for probed in WHEN))]
    formats = {"arm": "", "one batch": ".3f", "later one batch": ".3f", "answers": "", "end": ".1%"}
    return Table("race", "What could be known, and what became of it", by_row(formats, rows), "",
                 ["one batch: cosine of a single batch's gradient with the true one; answers "
                  "needed: trained on until the mean success of the last "
                  f"{RACE_STEPS} training steps reaches {RACE_TO:.0%}"],
                 {"one batch": "one batch before training",
                  "later one batch": "one batch after a third of it", "answers": "answers needed",
                  "end": "late success"})


def correlation_table(entries: list[Entry]) -> Table:
    """Arms that never got there are last, and equal."""
    rows, findings = [], []
    for probed, when in WHEN.items():
        known = [(value, entry) for value, entry in zip(one_batch(entries, probed), entries)
                 if is_number(value)]
        values = [value for value, _ in known]
        answers = spearman(values, [entry.answers for _, entry in known])
        success = spearman(values, [entry.success for _, entry in known])
        rows.append([when, len(known), answers.value, answers.interval, success.value,
                     success.interval])
        if np.isfinite(success.value):
            findings.append(f"What one batch knows {when} and late success have a rank "
                            f"correlation of {success.value:+.2f} ({success.low:+.2f} to "
                            f"{success.high:+.2f}) over {len(known)} arms.")
    formats = {"when": "", "arms": "d", "answers": "+.2f", "95%": "+.2f", "success": "+.2f",
               "its 95%": "+.2f"}
    return Table("correlation", "Rank correlation of what one batch knows, over arms",
                 by_row(formats, rows), "\n".join(findings),
                 ["a forecast that holds has -1 with answers needed, +1 with success; intervals "
                  "are a bootstrap over arms"],
                 {"when": "one batch measured", "answers": "with answers needed",
                  "95%": "95% interval", "success": "with late success",
                  "its 95%": "95% interval"})


def spearman(first: list[float], second: list[float]) -> Estimate:
    """With an interval by a bootstrap over arms."""
    unknown, count = float("nan"), len(first)
    if count < FEWEST_ARMS:
        return Estimate(unknown, unknown, unknown, unknown)
    x, y = np.array(first), np.array(second)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, count, count) for _ in range(DRAWS)]
    draws = [rank_correlation(x[arms], y[arms]) for arms in drawn]
    low, high = np.nanquantile(draws, [0.025, 0.975]).tolist()
    return Estimate(rank_correlation(x, y), low, high, unknown)
