"""The last column of the tables of docs/reference/methods.md, from stored outputs.

    python -m lab exact --all --json > lab/results/exact_all.json
    python -m lab.tests.methods_column          # writes the column into the page

A cell has the word, the noise and the cost: "yes; 0.95; 1.1". The noise is the median over all
worlds. The cost is the processor time of a step on the leaderboard, divided by plain GRPO's (the
median of its runs). A method that cannot be judged keeps its cell.
"""
import json
import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/methods.md"
ROW = re.compile(r"^(\| `(\w+)` \|.* )\| ([^|]+) \|$", re.M)


def costs():
    """Of each arm of the leaderboard, as a multiple of plain GRPO's."""
    seconds = {}
    runs = json.loads((ROOT / "lab/results/board.json").read_text())["values"]["runs"]
    for name, (_, of_step, _) in runs.items():
        seconds.setdefault(re.sub(r"-s\d+$", "", name), []).append(of_step)
    plain = median(seconds["none"])
    return {"grpo": 1.0, **{arm: median(found) / plain for arm, found in seconds.items()}}


def cell(found, cost):
    """`found` is the method's entry of the output of `lab exact`."""
    word = "yes"
    if found["word"] != "right":
        number = f"{found['cosine']:.2f}"
        word = f"no, {'>0.99' if number == '1.00' else number}"
    parts = [word, "-" if found["noise"] is None else f"{found['noise']:.2f}"]
    return "; ".join(parts + ([] if cost is None else [f"{cost:.1f}"]))


def with_column(page):
    stored = json.loads((ROOT / "lab/results/exact_all.json").read_text())
    judged = {one["method"]: one for one in stored if one["word"] != "cannot be judged"}
    cost = costs()

    def row(match):
        begin, name, _ = match.groups()
        if name not in judged:
            return match[0]
        return f"{begin}| {cell(judged[name], cost.get(name))} |"

    return ROW.sub(row, page)


if __name__ == "__main__":
    PAGE.write_text(with_column(PAGE.read_text("utf-8")), "utf-8")
