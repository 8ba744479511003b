"""The rows of a card that published experiments show: what the method gained when it was trained.

An experiment has arms, each with its flags of train.py. An arm is the method of a card if it has
the method's name, and its flags have the same values, typed or not.
"""
from statistics import fmean

from analysis.statistics import Estimate, detectable, mean_over, student_quantile
from harness.flags import flags_of
from harness.settings import METHODS, read_flags
from research.boards.protocol import REPORTED
from research.publish.results import RESULTS, read_result, table_rows

Row = dict[str, object]
TINY = {"board": "board", "later": "gains"}  # the tiny model's leaderboards: result and table
REAL, CONTROLS = "real_board_brief_8_gpu", "real_controls"
CONTROL, CONTROL_OF_REAL = "measured", "measured 16"  # arms that know more than a method can
OF_ALL_ARMS = {"questions", "learning_rate"}  # these make no other method


def published_rows(name: str, flags: dict) -> dict[str, Row]:
    """The rows of what has been published of this method; empty if nothing has."""
    rows: dict[str, Row] = {}
    for result, table in TINY.items():
        for row in rows_of_method(result, table, name, flags):
            rows["board"] = gain_row(row) | {"plain": level_of_plain(result),
                                             "control": gain_of_arm("board", CONTROL)}
            if "seconds" in row:
                rows["board_cost"] = {"own": row["seconds"], "plain": 1.0}
    for row in rows_of_method("later", "entropy", name, flags):
        own = estimate_of(row["difference"])
        rows["board_entropy"] = {"own": own, "plain": row["entropy"] - own.value}
    for row in rows_of_method(REAL, "board", name, flags):
        rows["real"] = gain_row(row) | {"control": gain_of_arm(REAL, CONTROL_OF_REAL)}
    for row in rows_of_method(REAL, "pairs", name, flags):
        for other in rows_of_method(REAL, "pairs", name, flags, placebo="weights"):
            seeds = [key for key in row if key != "arm"]
            differences = [row[seed] - other[seed] for seed in seeds]
            rows["real_placebo"] = {"own": mean_over(differences)}
    for row in rows_of_method(CONTROLS, "held_out", name, flags):
        if row["beside"] == "none":
            rows["real_able"] = {"own": estimate_of(row["greedy"])}
            rows["real_sure"] = {"own": estimate_of(row["rest"])}
    return rows


def rows_of_method(result: str, table: str, name: str, flags: dict,
                   placebo: str = "none") -> list[dict]:
    """The rows of a published table whose arm is this method, or this placebo of it."""
    arms = read_result(RESULTS / f"{result}.json")["settings"]["arms"]
    return [row for row in table_rows(result, table)
            if is_method(arms.get(row["arm"], ""), name, flags, placebo)]


def is_method(typed: str, name: str, flags: dict, placebo: str) -> bool:
    """Whether these flags of train.py make this method, or its placebo, and change nothing else."""
    axis = next(axis for axis, choices in METHODS.items() if name in choices)
    if f"--{axis} {name} " not in f"{typed} ":  # also an arm whose method is no longer there
        return False
    given = {"placebo": "none"} | read_flags(typed.split())
    defaults = {flag: one.default for flag, one in flags_of(METHODS[axis][name]).items()}
    wanted = defaults | flags | {axis: name, "placebo": placebo}
    return wanted == defaults | {flag: value for flag, value in given.items()
                                 if flag not in OF_ALL_ARMS}


def gain_row(row: dict) -> Row:
    return {"own": estimate_of(row["gain"]), "could_see": could_see(row), "verdict": row["verdict"]}


def gain_of_arm(result: str, arm: str) -> Estimate:
    row = next(row for row in table_rows(result, "board") if row["arm"] == arm)
    return estimate_of(row["gain"])


def could_see(row: dict) -> float | None:
    """The gain that 80 of 100 such experiments would see; two pairs say nothing of it."""
    df = row["pairs"] - 1
    if df < 2:
        return None
    error = (row["gain"]["high"] - row["gain"]["low"]) / 2 / student_quantile(0.975, df)
    return float(error * detectable(df))


def level_of_plain(result: str) -> float:
    """Plain GRPO's mean success in training there. A run is stored with its answers to a step and
    how many of each step's were right."""
    levels = []
    for name, stored in read_result(RESULTS / f"{result}.json")["values"]["runs"].items():
        seed = int(name.replace("-s", " ").split()[-1])
        if name.startswith(("none 2.5e-4 ", "none-s")) and seed in REPORTED:
            answers, _, right = stored["in_short"] if isinstance(stored, dict) else stored
            levels.append(fmean(right) / answers)
    return fmean(levels)


def estimate_of(stored: dict) -> Estimate:
    return Estimate(*(float("nan") if stored[end] is None else stored[end]
                      for end in ("value", "low", "high")))
