"""The table of docs/reference/methods.md. What a method is and needs, its paper and its claim are
written by hand; the other cells come from stored outputs.

    python -m lab exact --all --json > lab/results/exact_all.json
    python -m lab.tests.methods_table          # writes the cells into the page

    right on average    lab exact's word, or the lowest cosine; noise: the median over all worlds
    cost                processor time of a step of the tiny model over plain GRPO's: medians over
                        the runs of a board, or those of costs.json
    gains               as a board printed them: gain, pairs; bold where its verdict, which is
                        Holm's, is that the method is ahead or behind
"""
import json
import re
from statistics import median

from lab.analysis.tables import shown
from lab.engine.errors import PROJECT
from lab.probes.claim_rules import stored_gain

PAGE = PROJECT / "docs/reference/methods.md"
RESULTS = PROJECT / "lab/results"
BY_HAND, COMPUTED = 2, 6  # cells after the name
ROW = re.compile(rf"^\| `(\w+)` \|((?: [^|]*\|){{{BY_HAND}}})((?: [^|]*\|){{{COMPUTED}}})$", re.M)
BOARDS = (("board", "later", "of_2026"),  # the tiny model
          ("real_board_brief_8_gpu",),     # the real one that thinks first
          ("real_board_expression",))      # and that writes the answer alone
DECIDED = "ahead", "better", "behind", "worse"
ARMS = {"dr_grpo": "dr_grpo --loss_norm constant", "outcome_conditional": "outcome_conditional 0.5",
        "by_kind": "by_kind without words"}  # the arm's name where it is not the method's
OF_GAME = "turn_credit", "without_luck", "gigpo"
ESTIMATE = r"[+-]\d+\.\d \([+-]\d+\.\d to [+-]\d+\.\d\)"


def with_cells(page):
    judged = {one["method"]: one for one in json.loads((RESULTS / "exact_all.json").read_text())}
    cost = costs()

    def row(match):
        name, by_hand, _ = match.groups()
        cells = [*exact_cells(judged.get(name)), cost.get(name, ""), *gain_cells(name)]
        return f"| `{name}` |{by_hand}" + "".join(f" {cell} |" if cell else " |" for cell in cells)

    return ROW.sub(row, page)


def exact_cells(found):
    """`found` is the method's entry of the output of `lab exact`."""
    if found is None or found["word"] == "cannot be judged":
        return "not judged", ""
    word = "yes"
    if found["word"] != "right":
        number = f"{found['cosine']:.2f}"
        word = ">0.99" if number == "1.00" else number
    return word, "" if found["noise"] is None else f"{found['noise']:.2f}"


def costs():
    """Of each method, as a multiple of plain GRPO's."""
    found = {"none": "1.0", "grpo": "1.0"}
    for board in ("costs", "later", "board"):  # the last one has the last word
        runs, seconds = json.loads((RESULTS / f"{board}.json").read_text())["values"]["runs"], {}
        for name, (_, of_step, _) in runs.items():
            seconds.setdefault(name.rpartition("-s")[0], []).append(of_step)
        for arm, of_arm in seconds.items():
            plain = seconds["plain game" if arm in OF_GAME + ("turn_mean", "mt_grpo") else "none"]
            name = next((one for one, other in ARMS.items() if other == arm), arm)
            found[name] = f"{median(of_arm) / median(plain):.1f}"
    return found


def gain_cells(name):
    """The gains with their pairs, on each board."""
    cells = []
    for boards in BOARDS:
        found = [printed(board, arm) for board in boards for arm in (name, ARMS.get(name))]
        cells.append(next(filter(None, found), ""))
    if name in OF_GAME:
        game = json.loads((RESULTS / "turns/guess.json").read_text())["values"]["runs"]
        gain, pairs = stored_gain("turns/guess", name, "grpo"), sum(
            run.startswith(f"{name}-s") for run in game)
        cells[0] = gain_cell(shown(gain, "points"), pairs, gain.low > 0) + ", in a game"
    return cells


def gain_cell(gain, pairs, is_decided):
    return f"**{gain}**, {pairs}" if is_decided else f"{gain}, {pairs}"


def printed(board, arm):
    """An arm's gain with its pairs, from the first table that a board printed, or from its list of
    later runs."""
    text = (RESULTS / f"{board}.txt").read_text("utf-8")
    # the pairs stand before the gain, or behind it
    row = rf"^\| {arm} +\|.*?(\b\d+)?[ |]+({ESTIMATE})[ |]+(\d+ )?.*\| ([a-z, ]+?) *\|$"
    if found := re.search(row, text, re.M):
        return gain_cell(found[2], int(found[1] or found[3]), found[4] in DECIDED)
    if board == "board" and arm in ("vine", "causal_ablation"):
        text = (RESULTS / "board/evaluations.txt").read_text("utf-8")
        line = re.search(rf"^ +{arm} +((?:[+-]\d\.\d )+) +({ESTIMATE}) +p (\S+)", text, re.M)
        return gain_cell(line[2], len(line[1].split()), False)
    return None


if __name__ == "__main__":
    PAGE.write_text(with_cells(PAGE.read_text("utf-8")), "utf-8")
