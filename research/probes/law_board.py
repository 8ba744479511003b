"""The noise-to-batch-size prediction on the tiny model (`python -m research law --against board`).

The leaderboard's predictions (research/results/board/predictions.json) were made before its runs,
from the noise of each method's gradient and from a curve of plain GRPO's gain over its batch. That
curve had one or two seeds. The leaderboard itself has trained plain GRPO with one, two and four
times the batch on twelve seeds. Here the same noise is read from that curve as well. The gains and
this curve come from the same seeds, and the comparison was made afterwards.
"""
import math
from collections.abc import Mapping

import numpy as np

from analysis.tables import Row, Table, by_row
from engine.errors import read_json
from research.boards.arms import SCALE
from research.publish.results import RESULTS, table_rows
from research.probes.common import Findings, rank_correlation

CLOSE = 0.015  # a prediction that is off by no more counts as close
BEFORE, AFTERWARDS, NONE = ("the curve of one or two seeds, before the runs",
                            "the curve of twelve seeds, afterwards", "no gain for any method")


def compare_with_leaderboard() -> Findings:
    noise = read_json(RESULTS / "board/noise.json")
    before = read_json(RESULTS / "board/predictions.json")
    gains = {row["arm"]: row["gain"] for row in table_rows("board", "board")}
    curve = [0.0, *(gains[arm]["value"] for arm in SCALE)]
    rows: list[Row] = []
    measured: list[float] = []
    predicted: dict[str, list[float]] = {BEFORE: [], AFTERWARDS: [], NONE: []}
    for arm, gain in gains.items():
        if arm in SCALE:
            continue
        times = noise["ratio"][arm]
        by_curve = gain_of_batch(times, curve)
        rows.append([arm, times, noise["cosine"][arm], before[arm], by_curve, gain["value"]])
        measured.append(gain["value"])
        predicted[BEFORE].append(before[arm])
        predicted[AFTERWARDS].append(by_curve)
        predicted[NONE].append(0.0)
    points = ", ".join(f"{100 * gain:+.1f} with {2 ** doublings} times the batch"
                       for doublings, gain in enumerate(curve))
    return Findings("Does noise before training predict the gains of the leaderboard?",
                    [f"Plain GRPO's own gains, in points, over twelve seeds: {points}."],
                    [rules_table(predicted, measured), arms_table(rows)])


def gain_of_batch(times: float, curve: list[float]) -> float:
    """Plain GRPO's gain with so many times the batch. `curve` has its gains at once, twice and four
    times. Between them the line is straight by the logarithm, and beyond them it goes on."""
    doublings = math.log2(times)
    piece = min(max(math.ceil(doublings) - 1, 0), len(curve) - 2)
    slope = curve[piece + 1] - curve[piece]
    return curve[piece] + slope * (doublings - piece)


def rules_table(predicted: Mapping[str, list[float]], measured: list[float]) -> Table:
    rows: list[Row] = []
    for rule, gains in predicted.items():
        off = np.abs(np.array(gains) - measured)
        rank = rank_correlation(gains, measured) if any(gains) else math.nan
        rows.append([rule, len(off), int((off <= CLOSE).sum()), float(off.mean()), rank])
    formats = {"rule": "", "arms": "d", "close": "d", "deviation": "size", "rank": ".2f"}
    return Table("rules", "Predicted gains against measured ones", by_row(formats, rows), "",
                 ["Methods and the control `measured`. Within 1.5 points: how many predictions are "
                  "off by no more. Mean deviation: the mean size of the difference, in points"],
                 {"rule": "predicted by", "arms": "methods and control",
                  "close": "within 1.5 points", "deviation": "mean deviation, points",
                  "rank": "rank correlation"})


def arms_table(rows: list[Row]) -> Table:
    formats = {"arm": "", "times": ".2f", "cosine": ".2f", "before": "points",
               "afterwards": "points", "gain": "points"}
    return Table("arms", "Each arm's noise, its predicted gains and its measured one",
                 by_row(formats, rows), "",
                 ["The noise is that of the untrained model's gradient, as a batch of plain GRPO "
                  "so many times as large has. The cosine is that of the arm's mean gradient with "
                  "the true one"],
                 {"times": "as little noise as a batch so many times as large",
                  "before": f"predicted by {BEFORE}", "afterwards": f"predicted by {AFTERWARDS}",
                  "gain": "gain over plain GRPO, points"})
