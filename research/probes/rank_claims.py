"""The six claims about the gradient's rank and sparsity, each with its numbers and its verdict.

Every claim_* function returns rows, and sentences for the summary.
"""
from typing import NamedTuple

import numpy as np

from analysis.statistics import Estimate
from analysis.tables import Table, by_row, shown
from research.probes import sparsity
from research.probes.rank_measurements import ONES, Measurements, Z

CREDIT, CRITIC, NOISE = "Monte Carlo credit", "critic", "random per token"
TRUE, EXACT = "true reward per token", "exact credit"
AGAINST_Z = "Entropy rank against the z-score's"
WORDS = {"none seen": "no clear change", "no change seen": "no clear change",
         "grows": "growing", "falls": "falling", "too few": "too little measured to say"}
LOOKED_AT = [(matrix, rank) for matrix in ("A", "B")
             for rank in ("entropy rank", "stable rank", "participation")]


class Row(NamedTuple):
    measured: str
    value: float
    interval: tuple | None
    visible: float | None    # a difference that would be seen in 80 of 100 repetitions
    all_ones: float | None   # the same number where every token has the advantage 1
    verdict: str


def claims_table(measured: Measurements, planted: Measurements, sparse: list[Table]) -> Table:
    """`planted` is measured on the planted task; `sparse` are the tables of sparsity.py."""
    claims = {"zero-sum gives rank 2": claim_rank_2(measured),
              "the rank is about 2": claim_about_2(measured),
              "whatever R is": claim_any_size(measured),
              "sparser over training": claim_sparser(sparse),
              "tokens' rewards raise it": claim_tokens(measured, planted),
              "other baselines raise it": claim_others(measured)}
    rows = []
    for claim, (of_claim, _) in claims.items():
        names = [claim] + [""] * (len(of_claim) - 1)
        rows += [(name, *row) for name, row in zip(names, of_claim)]
    answers = []
    for claim, (_, (first, *more)) in claims.items():
        answers += [f"{claim[0].upper()}{claim[1:]}? {first}", *more]
    headings = {"95%": "95% interval", "visible": "difference that would be seen",
                "all ones": "with all ones"}
    formats = {"claim": "", "measured": "", "value": ".3g", "95%": ".3g", "visible": ".2g",
               "all ones": ".3g", "verdict": ""}
    notes = ["All ones: the same number where every token has the advantage 1, which knows no "
             "reward and does not sum to zero. About 2: from 1.5 to 2.5. Difference that would "
             "be seen: in 80 of 100 repetitions. Intervals are not corrected for their "
             "number."]
    return Table("verdicts", "The claims, and what is found", by_row(formats, rows),
                 "\n".join(answers), notes, headings)


def claim_rank_2(measured: Measurements) -> tuple[list[Row], list[str]]:
    R, rows = measured.main, []
    for matrix in ("A", "B"):
        e, ones = (measured.mean(matrix, arm, R, "numerical") for arm in (Z, ONES))
        verdict = "rank 2" if e.value < 2.5 else "not rank 2"
        rows.append(Row(f"numerical rank of {matrix}, R = {R}", e.value, e.interval, None,
                        ones.value, verdict))
    for arm in (Z, "raw reward"):
        e, ones = (measured.mean("outside", one, R, "differences") for one in (arm, ONES))
        verdict = "inside" if e.value < 1e-4 else "outside"
        rows.append(Row(f"{arm}, outside the differences of C", e.value, e.interval, None,
                        ones.value, verdict))
    a, _, z, raw = rows
    answer = "No" if a.verdict == "not rank 2" else "Yes"
    return rows, [
        f"{answer}: with R = {R} answers the numerical rank of A is {a.value:.1f}, with all ones "
        f"{a.all_ones:.1f}.",
        "Zero-sum advantages put the update into the span of the differences of mean gradients: "
        f"the share outside is {z.value:.0e}, with the raw reward {raw.value:.2f}."]


def claim_about_2(measured: Measurements) -> tuple[list[Row], list[str]]:
    R, rows = measured.main, []
    for matrix, rank in LOOKED_AT:
        e, ones = (measured.mean(matrix, arm, R, rank) for arm in (Z, ONES))
        rows.append(Row(f"{rank} of {matrix}, R = {R}", e.value, e.interval, None, ones.value,
                        about_2(e)))
    all_ones = ", ".join(f"{row.all_ones:.3g}" for row in rows)
    return rows, [*sentences(f"At R = {R}", rows),
                  f"With all ones these ranks are, in the order of the table, {all_ones}."]


def about_2(e: Estimate) -> str:
    if not np.isfinite(e.low):
        return "too few"
    return "may be 2" if e.low <= 2.5 and e.high >= 1.5 else "not 2"


def claim_any_size(measured: Measurements) -> tuple[list[Row], list[str]]:
    R, rows = measured.main, []
    for matrix, rank in LOOKED_AT:
        e, ones = (measured.change((matrix, arm, R), (matrix, arm, 2), rank) for arm in (Z, ONES))
        rows.append(Row(f"{rank} of {matrix}, R = {R} minus R = 2", e.value, e.interval, e.visible,
                        ones.value, change_verdict(e, "grows", "falls")))
    return rows, sentences(f"From R = 2 to {R}", rows)


def claim_sparser(sparse: list[Table]) -> tuple[list[Row], list[str]]:
    """The last columns of these tables are change, interval and verdict."""
    rows = []
    for table in sparse:
        for name, *_, change, interval, verdict in table.rows:
            if name in sparsity.DECIDE:
                rows.append(Row(name, change, interval, None, None, verdict))
    return rows, sentences("From the beginning to the end of the run", rows)


def claim_tokens(measured: Measurements,
                 planted: Measurements) -> tuple[list[Row], list[str]]:
    rows = []
    for matrix in ("A", "B"):
        rows += [against_z(measured, matrix, arm) for arm in (CREDIT, NOISE)]
        rows += [against_z(planted, matrix, arm, "planted ") for arm in (TRUE, EXACT, NOISE)]
    return rows, sentences(AGAINST_Z, rows)


def claim_others(measured: Measurements) -> tuple[list[Row], list[str]]:
    largest = max(largest_gap(measured, matrix, arm)
                  for matrix in ("A", "B") for arm in ("mean only", "rloo"))
    verdict = "the same" if largest < 1e-3 else "not the same"
    rows = [Row("mean only and rloo, any R", largest, None, None, None, verdict),
            *(against_z(measured, matrix, CRITIC) for matrix in ("A", "B"))]
    return rows, sentences(AGAINST_Z, rows)


def largest_gap(measured: Measurements, matrix: str, arm: str) -> float:
    """Between an arm and the z-score: over group sizes, problems and definitions of rank."""
    gaps = []
    for R in measured.sizes:
        for q, values in measured.values.get((matrix, arm, R), {}).items():
            of_z = measured.values[matrix, Z, R][q]
            gaps += [abs(value - of_z[name]) for name, value in values.items()]
    return max(gaps, default=0.0)


def against_z(measured: Measurements, matrix: str, arm: str, task: str = "") -> Row:
    e, ones = measured.against_z(matrix, arm), measured.against_z(matrix, ONES)
    return Row(f"{task}{arm} in {matrix}, R = {measured.main}, minus z-score", e.value, e.interval,
               e.visible, ones.value, change_verdict(e))


def change_verdict(e: Estimate, rise: str = "higher", fall: str = "lower") -> str:
    if not np.isfinite(e.low):
        return "too few"
    if max(abs(e.low), abs(e.high)) < 1e-3:  # rounding
        return "the same"
    if e.low > 0:
        return rise
    return fall if e.high < 0 else "none seen"


def sentences(start: str, rows: list[Row]) -> list[str]:
    """What was measured and its value, a sentence for each verdict."""
    by_verdict = {}
    for row in rows:
        name = row.measured.partition(", R =")[0]
        by_verdict.setdefault(row.verdict, []).append(f"{name} ({shown(row.value, '.3g')})")
    return [f"{start}, {WORDS.get(verdict, verdict)}: {', '.join(names)}."
            for verdict, names in by_verdict.items()]
