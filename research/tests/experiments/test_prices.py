"""The arms of the experiments about the price of credit."""
import json
import re

from research.experiments import prices
from research.experiments.experiments import FINAL_RATES
from research.experiments.published import RESULTS


def test_steps_follow_from_the_time_there_is():
    """640 answers in all, 32 a step, evaluated four times: 20 steps, one evaluation each 5."""
    assert prices.at_equal_time(64, {"vine": 0.1}) == {
        "vine-4x8-2.5e-4": "--advantage vine --questions 4 --answers 8 --learning_rate 2.5e-4 "
                           "--steps 20 --eval_every 5"}


def test_the_chosen_cells_are_those_that_were_highest_after_the_same_time():
    result = json.loads((RESULTS / "price_choice.json").read_text())
    [rows] = [table["rows"] for table in result["tables"] if table["name"] == "price"]
    best = {}
    for row in sorted(rows, key=lambda row: row["seconds"]):
        method, _, cell = row["arm"].partition("-")
        best[method] = cell
    assert {method: cell for method, (_, _, cell) in prices.METHODS.items()} == best


def test_the_rates_of_the_finals_are_those_that_ended_highest():
    result = json.loads((RESULTS / "finals_rates.json").read_text())
    [rows] = [table["rows"] for table in result["tables"] if table["name"] == "success"]
    best = {}
    for row in sorted(rows, key=lambda row: (row["end"], -float(named(row)[1]))):
        name, rate = named(row)
        best[name] = rate
    assert FINAL_RATES == best


def named(row):
    """Arm and rate of gae-trunk-1.2e-4."""
    return re.fullmatch(r"(.+)-([\d.]+e-4)", row["arm"]).groups()
