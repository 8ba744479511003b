"""The table of docs/reference/methods.md. What a method is and needs, its paper and its claim are
written by hand; the other cells come from stored outputs.

    python -m lab exact --all --json > lab/results/exact_all.json
    python -m lab.tests.methods_table          # writes the cells into the page

    right on average    lab exact's word, or the lowest cosine; noise: the median over all worlds
    cost                processor time of a step of the tiny model over plain GRPO's: medians over
                        the runs of a board, or those of costs.json
    gains               as a board printed them: gain, pairs; bold where its verdict, which is
                        Holm's, is that the method is ahead or behind. Placebos are no methods
    more answers, ...   rows without a method, from equal_cost.json
"""
import json
import re
from statistics import median

from lab.analysis.statistics import Estimate, holm
from lab.analysis.tables import shown
from lab.engine.errors import PROJECT
from lab.probes.claim_rules import stored_gain, success_by_seed

PAGE = PROJECT / "docs/reference/methods.md"
RESULTS = PROJECT / "lab/results"
BY_HAND, COMPUTED = 2, 6  # cells after the name
CELL = r"(?: [^|]*\|)"
ROW = re.compile(rf"^\| [`*]([\w ]+)[`*] \|({CELL}{{{BY_HAND}}})({CELL}{{{COMPUTED}}})$", re.M)
BOARDS = (("board", "later"),           # the tiny model
          ("real_board_brief_8_gpu",),  # the real one that thinks first
          ("real_board_expression",))   # and that writes the answer alone
PANELS = "the tiny model", "the real model, thinking", "the real model, the answer alone"
OF_2026 = "counterfactual", "quadrants", "delta", "oar_g"
DECIDED = "ahead", "behind", "worse"
ARMS = {"dr_grpo": "dr_grpo --loss_norm constant", "outcome_conditional": "outcome_conditional 0.5",
        "by_kind": "by_kind without words"}  # the arm's name where it is not the method's
OF_GAME = "turn_credit", "without_luck"
ESTIMATE = r"[+-]\d+\.\d \([+-]\d+\.\d to [+-]\d+\.\d\)"


def with_cells(page):
    judged = {one["method"]: one for one in json.loads((RESULTS / "exact_all.json").read_text())}
    cost = costs()
    known = json.loads((RESULTS / "equal_cost.json").read_text("utf-8"))["rows"]

    def row(match):
        name, by_hand, _ = match.groups()
        scale = {row["panel"]: row for row in known
                 if row["name"] == name.replace("the steps", "the answers")}
        cells = [*exact_cells(judged.get(name)), cost.get(name, ""), *gain_cells(name)]
        if scale:
            cells = scale_cells(scale, name.endswith("the steps"))
        start, _, _ = match[0].partition(" |")
        return f"{start} |{by_hand}" + "".join(f" {cell} |" if cell else " |" for cell in cells)

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
    # the last one has the last word
    for board in ("costs", "later", "board"):
        runs, seconds = json.loads((RESULTS / f"{board}.json").read_text())["values"]["runs"], {}
        for name, (_, of_step, _) in runs.items():
            seconds.setdefault(name.rpartition("-s")[0], []).append(of_step)
        for arm, of_arm in seconds.items():
            plain = seconds["plain game" if arm in (*OF_GAME, "turn_mean") else "none"]
            name = next((one for one, other in ARMS.items() if other == arm), arm)
            found[name] = f"{median(of_arm) / median(plain):.1f}"
    return found


def scale_cells(rows, is_more_steps):
    """At equal steps, and for as many sampled tokens where a step has more of them. More steps are
    compared with more answers, for as many."""
    tiny, cost = rows.get(PANELS[0]), ""
    if tiny and "time" in tiny["costs"] and not is_more_steps:
        cost = f"{tiny['costs']['time']:.1f}"
    cells = ["", "", cost]
    for panel in PANELS:
        row, parts = rows.get(panel), []
        if row and is_more_steps:
            parts = [scale_cell(row, "tokens", -1)]
        elif row:
            parts = [scale_cell(row, "steps")]
            if row["costs"]["tokens"] > 1:
                parts.append(f"for as many tokens {scale_cell(row, 'tokens')}")
        cells.append("; ".join(parts))
    return cells


def scale_cell(row, column, sign=1):
    low, value, high = sorted(sign * number for number in row["gains"][column])
    word = row["words"][column]
    if sign < 0 and word == "behind":
        word = "ahead once"
    gain = shown(Estimate(value, low, high), "points")
    return gain_cell(gain, row["pairs"], word in DECIDED) + ", ahead once" * (word == "ahead once")


def gain_cells(name):
    """The gains with their pairs, on each board."""
    cells = []
    for boards in BOARDS:
        found = [printed(board, arm) for board in boards for arm in (name, ARMS.get(name))]
        cells.append(next(filter(None, found), ""))
    if name in OF_GAME:
        gain = computed("turns/guess", name, OF_GAME, "grpo", "turns/equal_time")
        cells[0] = f"{gain}, in a game"
    if name in OF_2026:
        steps = len(success_by_seed("of_2026", "none")["120"])
        cells[0] = computed("of_2026", name, OF_2026) + f", {steps} steps" * (steps != 60)
    return cells


def computed(board, name, methods, over="none", again=None):
    """A gain of a board; ahead is what is better in a second file, too, on new seeds."""
    gains = {method: stored_gain(board, method, over) for method in methods}
    p = dict(zip(gains, holm([gain.p for gain in gains.values()])))[name]
    gain, is_decided = gains[name], p < 0.05
    if is_decided and gain.value > 0:
        is_decided = again is not None and stored_gain(again, name, over).low > 0
    return gain_cell(shown(gain, "points"), len(success_by_seed(board, name)), is_decided)


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
