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

import numpy as np

from analysis.statistics import Estimate, detectable, holm, needed
from analysis.tables import Table, by_row
from engine.errors import UserError
from research.experiments.finished import Values, late_success, paired, told_apart, verdict_on

PLACEBO = "-placebo"            # an arm's name with this is its placebo
CONTROLS = {"measured": "ahead", "shuffled": "behind"}
PLAIN = "none"


def is_candidate(arm: str) -> bool:
    return arm not in CONTROLS and not arm.endswith(PLACEBO)


def board_table(values: Values, planned: Iterable[str]) -> Table:
    """The arms of which a run is finished, the best first."""
    if PLAIN not in values:
        raise UserError(f"no run of {PLAIN} is finished yet, with which all are compared")
    late = {arm: {seed: late_success(curve) for seed, curve in curves.items()}
            for arm, curves in values.items()}
    late = dict(sorted(late.items(), key=lambda item: -np.mean(list(item[1].values()))))
    candidates = [arm for arm in late if arm != PLAIN and is_candidate(arm)]
    ahead = {arm: paired(late[arm], late[PLAIN], len(candidates) if arm in candidates else 1)
             for arm in late if arm != PLAIN}
    p = {arm: found.p for arm, found in ahead.items()}
    p |= zip(candidates, holm([p[arm] for arm in candidates]))
    verdicts = {arm: verdict_on(len(late[arm]), ahead[arm].value, p[arm]) if arm in ahead else ""
                for arm in late}
    seen = {}
    if "measured" in ahead:
        seen = {arm: chance_to_see(ahead["measured"].value / 2, ahead[arm], len(late[arm]),
                                   len(candidates)) for arm in candidates}
    rows = []
    for arm, of_seeds in late.items():
        ends, placebo = list(of_seeds.values()), late.get(arm + PLACEBO)
        rows.append([arm, len(ends), np.mean(ends), (min(ends), max(ends)), *both(ahead.get(arm)),
                     p.get(arm), *both(paired(of_seeds, placebo) if placebo else None),
                     seen.get(arm), verdicts[arm]])
    formats = {"arm": "", "seeds": "d", "end": ".1%", "ends": ".1%", "ahead": "points",
               "95%": "points", "p": "p", "placebo": "points", "placebo 95%": "points",
               "half": ".2f", "verdict": ""}
    headings = {"end": "late success", "ends": "of the seeds", "ahead": "minus none, same seeds",
                "95%": "95% interval", "p": "p, corrected", "placebo": "minus its placebo",
                "placebo 95%": "95% interval", "half": "chance to see half the headroom"}
    expected = {arm: place for arm, place in CONTROLS.items() if arm in planned}
    return Table("board", "Ways of spreading credit, by what became of training",
                 by_row(formats, rows), in_words(verdicts, list(seen.values()), expected),
                 ["differences are in points of held-out success; p and verdict are of those on "
                  "the same seeds; open: not told apart from plain GRPO; headroom: what measured "
                  f"leads by. The p of {' and '.join(CONTROLS)} and of placebos is not corrected"],
                 headings)


def chance_to_see(lead: float, found: Estimate, seeds: int, tests: int) -> float | None:
    """In which share of such experiments a lead of this size would be told apart."""
    if not np.isfinite(found.visible) or found.visible <= 0:
        return None
    error = found.visible / detectable(seeds - 1, tests)
    return float(np.mean(needed(seeds - 1, tests) < lead / error))


def both(estimate: Estimate | None) -> list:
    return [estimate.value, estimate.interval] if estimate else [None, None]


def in_words(verdicts: dict[str, str], seen: list[float | None], expected: dict[str, str]) -> str:
    """Who is told apart from plain GRPO, what could have been seen, and whether to believe it."""
    texts = told_apart({arm: verdict for arm, verdict in verdicts.items() if is_candidate(arm)})
    placebos = [arm for arm in verdicts if arm.endswith(PLACEBO) and verdicts[arm] == "behind"]
    if placebos:
        texts.append(f"Placebos behind it, one test each: {', '.join(placebos)}.")
    seen = [chance for chance in seen if chance is not None]
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
