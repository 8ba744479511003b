"""Gains of stored arms over plain GRPO at equal steps, for as many sampled tokens and in as much
time, by the one rule of lab/analysis/cost.py; and how dear a step may be until a gain is gone.

    python -m lab.tests.equal_cost     # lab/results/equal_cost.json and equal_cost.txt

What a row compares is written by hand into the file: an arm of a stored board, plain GRPO (`over`),
and where it is known what a step costs. The program fills in the numbers.

    tokens   answers of both arms are as long, so a step costs as its answers. `samples`: the arm of
             costs_of_scale.json that tells what a method samples besides, or "unknown"
    time     `clock`: board, whose runs were made in turns; an arm of costs_of_scale.json; or steps,
             where the work is the same. Seconds of the real model are no measure: arms with plain
             GRPO's work took 0.27 to 3.99 times its seconds
    words    by Holm's p over the methods of the board; that of a control is its own. *Ahead* takes
             two looks: both halves of twelve seeds, or a second file with new seeds (`again`)
"""
import json

from lab.analysis.comparison import AHEAD, AHEAD_ONCE, BEHIND, NOT_SEEN, Gain, called
from lab.analysis.cost import at_equal_time, at_factor, break_even, is_known, ratio_of
from lab.analysis.statistics import Estimate, holm, mean_over
from lab.analysis.tables import Table, by_row, shown
from lab.engine.errors import PROJECT
from lab.probes.claim_rules import stored_gain, stored_results, success_by_seed

FILE = PROJECT / "lab/results/equal_cost.json"
STEPS, TOKENS, TIME = "steps", "tokens", "time"
CONTROLS = {"none-16x8", "none-32x8", "measured", "measured 16", "half", "twice", "four times",
            "shuffled", "its placebo", "random", "two_epochs", "twice the rate"}


def filled(row):
    if "ends" in row:  # of a game is stored what is won after the last step alone
        gains = {column: stored_gain(board, row["arm"], over)
                 for column, (board, over) in row["ends"].items()}
        found = {"pairs": len(success_by_seed(row["ends"][STEPS][0], row["arm"]))}
        p = {column: gain.p for column, gain in gains.items()}
    else:
        gains, costs = gains_of(row, row["arm"])
        pairs = pairs_of(row, row["arm"])
        found = {"pairs": len(pairs), "costs": costs}
        p = {column: corrected_p(row, column) for column in gains}
    found["gains"] = {column: numbers(gain) for column, gain in gains.items()}
    words = {column: word(row, column, gain, p[column]) for column, gain in gains.items()}
    found["words"] = {column: words[STEPS if gain == gains[STEPS] else column]
                      for column, gain in gains.items()}
    if found["words"][STEPS].startswith("ahead") and "ends" not in row:
        found["break even"] = numbers(break_even(list(pairs.values())))
    return row | found


def pairs_of(row, arm):
    """The success (steps,) of both runs, by seed."""
    own, plain = success_by_seed(row["board"], arm), success_by_seed(*row["over"])
    return {seed: (own[seed], plain[seed]) for seed in sorted(own.keys() & plain.keys())}


def gains_of(row, arm):
    """At each yardstick where a step's cost is known, and this cost over plain GRPO's."""
    by_seed = pairs_of(row, arm)
    pairs, samples, clock = list(by_seed.values()), row.get("samples"), row.get("clock")
    gains, costs = {STEPS: at_factor(pairs, 1)}, {STEPS: 1}
    if samples != "unknown":
        runs = in_turns(samples) if samples else [of_board(row["board"], arm, *row["over"])]
        costs[TOKENS] = ratio_of([(own[0], plain[0]) for own, plain in runs]).value
        gains[TOKENS] = at_factor(pairs, costs[TOKENS])
    if clock == STEPS:
        gains[TIME], costs[TIME] = gains[STEPS], 1
    elif clock:
        runs = in_turns(clock)
        if clock == "board":
            runs = [of_board("board", arm, *row["over"], seed) for seed in by_seed]
        seconds = [(own[1], plain[1]) for own, plain in runs]
        if is_known(ratio_of(seconds)):
            gains[TIME] = at_equal_time(pairs, seconds)
            costs[TIME] = ratio_of(seconds).value
    return gains, costs


def of_board(board, arm, plain_board, plain, seed=None):
    """The stored run of an arm and that of plain GRPO: answers per step, seconds, right answers."""
    found = []
    for where, name in ((board, arm), (plain_board, plain)):
        runs = stored_results(where)["values"]["runs"]
        seeds = [seed] if seed else success_by_seed(where, name)
        found.append(runs[f"{name}-s{next(iter(seeds))}"])
    return found


def in_turns(arm):
    runs = stored_results("costs_of_scale")["values"]["runs"]
    return [(kept, runs[f"plain-s{name.rpartition('-s')[2]}"]) for name, kept in runs.items()
            if name.rpartition("-s")[0] == arm]


def corrected_p(row, column):
    """Of a method by Holm, with all methods of its board."""
    arms = [row["arm"]]
    if row["arm"] not in CONTROLS:
        runs = stored_results(row["board"])["values"]["runs"]
        arms = sorted({name.rpartition("-s")[0] for name in runs} - CONTROLS - {row["over"][1]})
    p = [gains_of(row, arm)[0][column].p for arm in arms]
    return dict(zip(arms, holm(p)))[row["arm"]]


def word(row, column, gain, p):
    first, again = Gain((0, 1), gain, p), None
    if column == STEPS and "again" in row:
        again = stored_gain(row["again"], row["arm"], row["ends"][STEPS][1])
    elif column == STEPS and "over" in row:
        gains = [own.mean() - plain.mean() for own, plain in pairs_of(row, row["arm"]).values()]
        if len(gains) == 12:  # the half that shows less
            again = max(mean_over(gains[:6]), mean_over(gains[6:]), key=lambda half: half.p)
    found = called(first, again and Gain((0, 1), again, again.p))
    return found if found in (AHEAD, BEHIND, NOT_SEEN) else AHEAD_ONCE


def numbers(found):
    return [round(number, 6) for number in (found.value, *found.interval)]


def in_words(rows):
    formats = {"arm": "", "pairs": "d", "at equal": "", "cost": ".2f", "gain": "points",
               "verdict": "", "gains below": ""}
    said = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        cells = []
        for row in (row for row in rows if row["panel"] == panel):
            for column, gain in row["gains"].items():
                most = shown(Estimate(*row["break even"]), ".1f") if "break even" in row else ""
                cells.append([row["name"], row["pairs"], column, row.get("costs", {}).get(column),
                              Estimate(*gain), row["words"][column], most])
        said.append(f"{panel}\n{Table('', '', by_row(formats, cells)).to_text()}\n")
    return "\n".join(said)


if __name__ == "__main__":
    stored = json.loads(FILE.read_text("utf-8"))
    rows = [filled(row) for row in stored["rows"]]
    FILE.write_text(json.dumps(stored | {"rows": rows}, indent=1) + "\n", "utf-8")
    heads = "\n".join([stored["command"], stored["question"], "", in_words(rows)])
    FILE.with_suffix(".txt").write_text(heads, "utf-8")
