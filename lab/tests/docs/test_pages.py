"""An interval of a page stands in a stored result, or follows from stored numbers; and a page's
verdict is the stored one."""
import json
import re

import numpy as np
import pytest
from PIL import Image

from conftest import ROOT, project_files
from lab.probes.claim_rules import success_by_seed
from docs import pictures
from lab.tests import equal_cost, methods_table
from stored import OF_THINKING, WEIGHTINGS, arms_of, excluded_above, stored_gain

NUMBER = r"([+-]?\d+(?:\.\d+)?)%?"
# +2.8 (+1.8 to +3.8), or 50.4%, 95% interval 47.9% to 53.0%
INTERVAL = re.compile(rf"(?<![\w.]){NUMBER}(?: points)?\**\s*(?:\(|\(?95% interval )"
                      rf"{NUMBER} to {NUMBER}")
PAGES = [path for path in project_files("**/*.md") if path.parent.name != "results"]


def intervals(path):
    """The value and the two ends of each interval of a file, as they are written there, also where
    a line ends within one."""
    return set(INTERVAL.findall(" ".join(path.read_text(encoding="utf-8").split())))


COMPUTED = [  # stored runs, an arm, and the arm that it is compared with
    ("real_board_brief_8_gpu", "by_kind without words", "its placebo"),
    ("real_board_brief_8_gpu", "equal_gradient", "random"),
    ("real_board_brief_8_gpu", "inverse_logprob", "random"),
    ("lora/held_out", "rank 1", "all"), ("lora/held_out", "rank 8", "all"),
    ("turns/guess", "without_luck", "grpo"), ("turns/guess", "grpo --questions 32", "grpo"),
    ("turns/guess", "turn_credit", "grpo"), ("turns/guess", "gae", "grpo"),
    ("turns/guess", "gigpo", "grpo")]
STORED = {interval for kind in ("txt", "json") for path in project_files(f"lab/results/**/*.{kind}")
          for interval in intervals(path)}
STORED |= {INTERVAL.findall(stored_gain(*pair))[0] for pair in COMPUTED}
ROWS = {(row["panel"], row["name"]): row
        for row in json.loads(equal_cost.FILE.read_text("utf-8"))["rows"]}
STORED |= {INTERVAL.findall(methods_table.scale_cell(row, "tokens", -1))[0]
           for row in ROWS.values() if row["name"] == "four times the answers"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_interval_of_a_page_stands_in_a_stored_result(page):
    """So a digit that is changed on one side alone is noticed. That it stands beside the right name
    is not."""
    assert not sorted(intervals(page) - STORED)


def test_a_row_of_the_game_follows_from_the_value_of_each_seed():
    lines = (ROOT / "lab/reports/turns.md").read_text(encoding="utf-8").splitlines()
    told = 0
    for arm in arms_of("turns/guess"):
        for row in lines:
            if row.startswith("|") and f"(`{arm}`)" in row:
                wins = [*success_by_seed("turns/guess", arm).values()]
                assert f"| {np.mean(wins):.0%} |" in row
                assert arm == "grpo" or stored_gain("turns/guess", arm, "grpo") in row
                told += 1
    assert told == 6


TINY, ALONE, THINKING = "board", "real_board_expression", "real_board_brief_8_gpu"
NOT_SEEN = "no difference seen"


@pytest.mark.parametrize("page, words, table, arms, verdict", [
    ("lab/README.md", "The control `measured` is ahead", TINY, "measured", "ahead"),
    ("lab/README.md", "On the real model `measured` gains nothing that was seen", ALONE, "measured",
     NOT_SEEN),
    ("lab/README.md", "`equal_gradient` and both forms of `inverse_logprob` were 14 to 27 points "
     "behind", THINKING, "equal_gradient inverse_logprob inverse_logprob_as_published", "worse"),
    ("lab/README.md", "Where it writes the answer alone no difference is seen", ALONE,
     "equal_gradient inverse_logprob inverse_logprob_as_published", NOT_SEEN),
    ("lab/README.md", "On the real model no difference is seen", THINKING,
     "entropy_weighted entropy_masking", NOT_SEEN),
    ("lab/reports/board.md", "**The control is ahead** at equal steps", TINY, "measured none-32x8",
     "ahead"),
    ("lab/reports/board.md", "Four methods and `random` are behind", TINY,
     "entropy_weighted entropy_ratio random entropy_masking span", "behind"),
    ("lab/reports/decided.md", "`entropy_weighted` is behind", TINY, "entropy_weighted", "behind")])
def test_a_verdict_of_a_page_is_the_stored_one(page, words, table, arms, verdict):
    assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    printed = (ROOT / f"lab/results/{table}.txt").read_text(encoding="utf-8")
    for arm in arms.split():
        first = next(line for line in printed.splitlines() if line.startswith(f"| {arm} "))
        assert first.split("|")[-2].strip() == verdict


def test_what_pages_exclude_follows_from_all_weightings():
    said = {}
    for weightings in (WEIGHTINGS, OF_THINKING):
        count, most = excluded_above(weightings)
        said[count] = f"{100 * most:.1f}"
    assert said == {26: "2.4", 9: "5.3"}
    for page in ("README.md", "lab/README.md", "docs/reference/methods.md"):
        text = " ".join((ROOT / page).read_text("utf-8").split())
        assert re.search(r"all 26 .{0,140}2\.4 |2\.4 .{0,60}all 26 ", text), page
        assert "5.3" in text, page


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: f"{row['panel']}, {row['name']}")
def test_a_row_at_equal_cost_follows_from_stored_runs(row):
    again = equal_cost.filled(row)
    assert again["words"] == row["words"] and again["pairs"] == row["pairs"]
    for column, gain in row["gains"].items():
        assert again["gains"][column] == pytest.approx(gain, abs=2e-6)


def test_four_times_the_answers_for_as_many_answers_by_hand():
    """15 steps of 256 answers beside 60 of 64: t of 11 degrees of freedom is 2.2010."""
    runs = json.loads((ROOT / "lab/results/board.json").read_text("utf-8"))["values"]["runs"]
    right = {name: np.array(kept[2].split(), float) for name, kept in runs.items()}
    gains = [right[f"none-32x8-s{seed}"][:15].mean() / 256 - right[f"none-s{seed}"].mean() / 64
             for seed in range(40, 52)]
    half = 2.2010 * np.std(gains, ddof=1) / 12 ** 0.5
    mean = np.mean(gains)
    row = ROWS["the tiny model", "four times the answers"]
    assert row["gains"]["tokens"] == pytest.approx([mean, mean - half, mean + half], abs=1e-5)
    assert row["words"] == {"steps": "ahead", "tokens": "behind", "time": "behind"}
    assert ROWS["the tiny model", "twice the answers"]["words"]["steps"] == "ahead once"


def test_the_picture_of_the_readme_shows_the_stored_numbers():
    with Image.open(ROOT / "docs/found.png") as picture:
        assert picture.text["Shows"] == pictures.drawn(pictures.found())
