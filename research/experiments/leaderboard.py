"""The leaderboard: what each way of spreading credit does to training.

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

An arm is also compared with its own placebo, the same weights at other tokens: what both have in
common is not due to the arm's choice of tokens. The arm `measured` is a control that must be ahead,
`shuffled` one that must be behind.
"""
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from analysis.statistics import Estimate, detectable, holm
from analysis.tables import Table, by_row
from engine.errors import UserError
from research.experiments.finished import Values, late_success, paired, told_apart, verdict_on
from research.statistics import power

PLACEBO = "-placebo"            # an arm's name with this is its placebo
CONTROLS = {"measured": "ahead", "shuffled": "behind"}
PLAIN = "none"


@dataclass
class Entry:
    """An arm on the board."""
    arm: str
    late: dict[int, float]                # success by seed
    ahead: Estimate | None = None         # of plain GRPO, on the same seeds
    p: float = float("nan")               # of that, corrected
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


def board_table(values: Values, planned: Iterable[str]) -> Table:
    entries, rows = make_entries(values), []
    expected = {arm: place for arm, place in CONTROLS.items() if arm in planned}
    for entry in entries:
        rows.append([entry.arm, len(entry.late), entry.success, (min(entry.ends), max(entry.ends)),
                     *both(entry.ahead), entry.p if entry.ahead else None,
                     *both(entry.of_placebo), entry.sees_half, entry.verdict])
    formats = {"arm": "", "seeds": "d", "end": ".1%", "ends": ".1%", "ahead": "points",
               "95%": "points", "p": "p", "placebo": "points", "placebo 95%": "points",
               "half": ".2f", "verdict": ""}
    headings = {"end": "late success", "ends": "of the seeds", "ahead": "minus none, same seeds",
                "95%": "95% interval", "p": "p, corrected", "placebo": "minus its placebo",
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
