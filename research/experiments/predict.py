"""What should an arm of the board lead by, if credit were a larger batch and nothing else?

    python -m research predict --runs runs/board

An arm whose gradient has half of plain GRPO's noise is read as plain GRPO with twice the batch. The
curve is plain GRPO's own: mean success in training with 8, 16 and 32 problems a step, on the seeds
that choose the learning rates, straight in the logarithm of the batch, and beyond its ends as it
was there. The noise is of the untrained model (research/results/board/noise.json). No number is
fitted. What a lead misses is bias, interference, clipping, and what changes on the way.
"""
import json
from pathlib import Path

import numpy as np

from analysis.compare import mean_success
from analysis.tables import Table, by_row, show
from engine.errors import UserError
from harness.files import read_json, replace_text
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.progress import say
from research.experiments.arms import CONTROLS, METHODS, PLAIN, SCALE
from research.experiments.protocol import Board
from research.experiments.published import RESULTS

FLAGS = {"runs": Flag("runs/board", "folder of the runs")}
NOISE, PREDICTIONS = (RESULTS / f"board/{name}.json" for name in ("noise", "predictions"))


def main(argv: list[str]) -> None:
    typed = add_flags(Parser("python -m research predict [flags]", __doc__), FLAGS).read(argv)
    board = Board(Path(with_defaults(typed, FLAGS).runs))
    ratios, curve = read_json(NOISE)["ratio"], curve_of(board)
    leads = {arm: lead_of(ratios[arm], curve) for arm in [*CONTROLS, *METHODS] if arm in ratios}
    leads = dict(sorted(leads.items(), key=lambda item: -item[1]))
    show(["Plain GRPO by its batch: " + ", ".join(
        f"{8 * 2 ** doublings:.0f}x8 {success:.1%}" for doublings, success in curve)], [
        Table("predicted", "The lead over plain GRPO, if noise were all", by_row(
            {"arm": "", "noise": ".2f", "lead": "points"},
            [[arm, ratios[arm], lead] for arm, lead in leads.items()]), "", [],
            {"noise": "noise ratio"})])
    replace_text(PREDICTIONS, json.dumps({arm: round(lead, 4) for arm, lead in leads.items()},
                                         indent=1) + "\n")
    say(f"written: {PREDICTIONS}")


def curve_of(board: Board) -> list[tuple[float, float]]:
    """Doublings of the batch, and mean success at the rate that suits it."""
    points = []
    for doublings, arm in enumerate((PLAIN, *SCALE)):
        runs = board.tuned(arm, board.rate(arm)) if board.rate(arm) else []
        if not runs:
            raise UserError(f"{board.folder}: the learning rate of {arm} is not known yet; python "
                            "-m research board --dry_run lists the runs that are missing")
        points.append((doublings, float(np.mean([mean_success(run) for run in runs]))))
    return points


def lead_of(ratio: float, curve: list[tuple[float, float]]) -> float:
    """Over the curve's first point, for a batch that is `ratio` times as large."""
    doublings, success = np.array(curve).T
    wanted = np.log2(ratio)
    piece = int(np.clip(np.searchsorted(doublings, wanted) - 1, 0, len(curve) - 2))
    slope = (success[piece + 1] - success[piece]) / (doublings[piece + 1] - doublings[piece])
    return float(success[piece] + slope * (wanted - doublings[piece]) - success[0])
