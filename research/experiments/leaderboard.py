"""The leaderboard: what each way of spreading credit knows, and what it does to training.

How it is decided, whatever comes out:

    measure     sampled success on the held-out problems, as the mean of the evaluations after the
                middle of the training
    compared    with plain GRPO's on the same seeds: the mean of the differences, by Student's t.
                What a seed brings to both arms, its problems and their order, cancels
    verdict     ahead or behind if p, by Holm's correction over the candidates, is below 0.05;
                otherwise open. Of an arm with fewer than three seeds nothing is said
    controls    and placebos are no candidates: their p is not corrected, and corrects no other
    headroom    what the control `measured` leads by is the most that is known to be there. So the
                board says how likely a candidate's lead of half of it would have been seen
    forecast    the rank correlation over all arms of what is known without training with late
                success. It holds where the interval is above 0

The difference from plain GRPO's mean over all its seeds stands beside it, by Welch's t, and decides
nothing. With six seeds against twelve, at the levels that Holm asks for, the unpaired test errs
twice as often as it says where arms run against each other, and its interval is twice as wide as
need be where they run together; pairs err as often as they say. Where seeds share nothing pairs see
less: 59 of 100 effects of three standard deviations, where the unpaired test sees 94.

An arm is also compared with its own placebo, the same weights at other tokens: what both have in
common is not due to the arm's choice of tokens. The arm `measured` is a control that must be ahead,
`shuffled` one that must be behind.
"""
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from analysis.runs import is_number
from analysis.statistics import Estimate, detectable, holm
from analysis.tables import Table, by_row
from engine.errors import UserError
from research.experiments import published
from research.experiments.finished import Values, late_success, paired, told_apart, verdict_on
from research.statistics import power, rank_correlation, welch

PLACEBO = "-placebo"            # an arm's name with this is its placebo
CONTROLS = {"measured": "ahead", "shuffled": "behind"}
PLAIN = "none"
FORECASTS = {  # result, table and column of what a probe knows of an arm
    ("noise", "noise", "one batch"): "one batch before training",
    ("noise_third", "noise", "one batch"): "one batch after a third of it",
    ("scoreboard", "scores", "index"): "index before training",
    ("scoreboard_third", "scores", "index"): "index after a third of it"}
SAME_DIRECTION = {"dr_grpo": "rloo"}  # a multiple of it
DRAWS = 4000
FEWEST_ARMS = 4


@dataclass
class Entry:
    """An arm on the board."""
    arm: str
    late: dict[int, float]                # success by seed
    ahead: Estimate | None = None         # of plain GRPO, on the same seeds
    p: float = float("nan")               # of that, corrected
    of_all: Estimate | None = None        # ahead of the mean of all of plain GRPO's seeds
    of_placebo: Estimate | None = None    # ahead of its own placebo
    sees_half: float | None = None        # of a candidate: how likely half the headroom is seen

    @property
    def ends(self) -> list[float]:
        return list(self.late.values())

    @property
    def success(self) -> float:
        return float(np.mean(self.ends))

    @property
    def is_candidate(self) -> bool:
        return self.arm not in CONTROLS and not self.arm.endswith(PLACEBO)

    @property
    def verdict(self) -> str:
        return verdict_on(len(self.late), self.ahead.value, self.p) if self.ahead else ""


def make_entries(values: Values) -> list[Entry]:
    """Those of which a run is finished, the best first."""
    if PLAIN not in values:
        raise UserError(f"no run of {PLAIN} is finished yet, with which all are compared")
    entries = {arm: Entry(arm, {seed: late_success(curve) for seed, curve in curves.items()})
               for arm, curves in values.items()}
    compare_all(entries)
    return sorted(entries.values(), key=lambda entry: -entry.success)


def compare_all(entries: dict[str, Entry]) -> None:
    """Each arm with plain GRPO, and with its own placebo."""
    plain, measured = entries[PLAIN], entries.get("measured")
    candidates = [arm for arm in entries if arm != PLAIN and entries[arm].is_candidate]
    for arm, entry in entries.items():
        if arm != PLAIN:
            tests = len(candidates) if arm in candidates else 1
            entry.ahead = paired(entry.late, plain.late, tests)
            entry.of_all = welch(entry.ends, plain.ends)
            entry.p = entry.ahead.p
        if arm + PLACEBO in entries:
            entry.of_placebo = paired(entry.late, entries[arm + PLACEBO].late)
    for arm, p in zip(candidates, holm([entries[arm].p for arm in candidates])):
        entries[arm].p = p
        if measured:
            entries[arm].sees_half = chance_to_see(entries[arm], measured.ahead.value / 2,
                                                   len(candidates))


def chance_to_see(entry: Entry, lead: float, tests: int) -> float | None:
    """In which share of such experiments a lead of this size would be told apart."""
    freedom = len(entry.late) - 1
    if not np.isfinite(entry.ahead.visible) or entry.ahead.visible <= 0:
        return None
    return power(lead, entry.ahead.visible / detectable(freedom, tests), freedom, tests)


def make_tables(entries: list[Entry], planned: Iterable[str]) -> list[Table]:
    expected = {arm: place for arm, place in CONTROLS.items() if arm in planned}
    return [board_table(entries, expected), correlation_table(entries)]


def board_table(entries: list[Entry], expected: dict[str, str]) -> Table:
    rows = []
    for entry in entries:
        rows.append([entry.arm, len(entry.late), entry.success, (min(entry.ends), max(entry.ends)),
                     *both(entry.ahead), entry.p if entry.ahead else None, *both(entry.of_all),
                     *both(entry.of_placebo), entry.sees_half, entry.verdict])
    formats = {"arm": "", "seeds": "d", "end": ".1%", "ends": ".1%", "ahead": "points",
               "95%": "points", "p": "p", "all": "points", "all 95%": "points",
               "placebo": "points", "placebo 95%": "points", "half": ".2f", "verdict": ""}
    headings = {"end": "late success", "ends": "of the seeds", "ahead": "minus none, same seeds",
                "95%": "95% interval", "p": "p, corrected", "all": "minus none, all its seeds",
                "all 95%": "95% interval", "placebo": "minus its placebo",
                "placebo 95%": "95% interval", "half": "chance to see half the headroom"}
    return Table("board", "Ways of spreading credit, by what became of training",
                 by_row(formats, rows), in_words(entries, expected),
                 ["differences are in points of held-out success; p and verdict are of those on "
                  "the same seeds; open: not told apart from plain GRPO; headroom: what measured "
                  f"leads by. The p of {' and '.join(CONTROLS)} and of placebos is not corrected"],
                 headings)


def both(estimate: Estimate | None) -> list:
    return [estimate.value, estimate.interval] if estimate else [None, None]


def in_words(entries: list[Entry], expected: dict[str, str]) -> str:
    """Who is told apart from plain GRPO, what could have been seen, and whether to believe it."""
    verdicts = {entry.arm: entry.verdict for entry in entries}
    texts = told_apart({entry.arm: entry.verdict for entry in entries if entry.is_candidate})
    placebos = [arm for arm in verdicts if arm.endswith(PLACEBO) and verdicts[arm] == "behind"]
    if placebos:
        texts.append(f"Placebos behind it, one test each: {', '.join(placebos)}.")
    seen = [entry.sees_half for entry in entries if entry.sees_half is not None]
    if seen:
        texts.append("A candidate that leads by half as much as measured would be seen in "
                     f"{100 * np.median(seen):.0f} of 100 such experiments (the median; "
                     f"{100 * min(seen):.0f} to {100 * max(seen):.0f}, as its seeds scatter).")
    wrong = [arm for arm, should in expected.items() if verdicts.get(arm) != should]
    if wrong:
        texts.append("The board is not to be trusted yet: "
                     f"{' and '.join(wrong)} should be told apart.")
    elif expected:
        where = ", ".join(f"{arm} {place}" for arm, place in expected.items())
        texts.append(f"Each control is where it should be: {where}.")
    return "\n".join(texts)


def measured_by(entries: list[Entry], probed: str, table: str, column: str) -> list[float | None]:
    tables = published.read_result(published.RESULTS / f"{probed}.json")["tables"]
    [rows] = [found["rows"] for found in tables if found["name"] == table]
    known = {row["arm"]: row[column] for row in rows}
    return [known.get(SAME_DIRECTION.get(entry.arm, entry.arm)) for entry in entries]


def correlation_table(entries: list[Entry]) -> Table:
    rows, findings = [], []
    for place, words in FORECASTS.items():
        known = [(value, entry.success) for value, entry
                 in zip(measured_by(entries, *place), entries) if is_number(value)]
        found = spearman(*map(list, zip(*known))) if known else spearman([], [])
        rows.append([words, len(known), found.value, found.interval])
        if np.isfinite(found.value):
            findings.append(f"{words.capitalize()} and late success have a rank correlation of "
                            f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f}) over "
                            f"{len(known)} arms.")
    formats = {"known": "", "arms": "d", "success": "+.2f", "95%": "+.2f"}
    return Table("correlation", "Rank correlation of what is known without training, over arms",
                 by_row(formats, rows), "\n".join(findings),
                 ["a forecast that holds has +1; intervals are a bootstrap over arms"],
                 {"known": "known", "success": "with late success", "95%": "95% interval"})


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
