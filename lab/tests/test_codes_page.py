"""The page of codes called GRPO shows what lab.formula says of each reported mistake."""
import pytest

from conftest import ROOT
from lab.formula import find_formula, judge
from lab.formula.report import remarks
from lab.tests.formula_losses import LOSSES

PAGE = (ROOT / "lab/reports/codes.md").read_text(encoding="utf-8")
MISTAKES = {"mlx-lm-lora 55": "nothing", "ms-swift 10117": "divided twice",
            "TRL 3021": "micro-batch", "TRL 5815": "sum for mean and k3",
            "Search-R1 88": "groups mixed", "Liger 1088": "hundred times"}


@pytest.mark.parametrize("report, name", MISTAKES.items())
def test_the_page_shows_what_the_tool_says_of_a_mistake(report, name):
    row = next(line for line in PAGE.splitlines() if f"({report})" in line)
    found = find_formula(LOSSES[name][0])
    said = [remark.sentence for remark in remarks(found)] + judge(found).in_words()
    assert row.split("|")[2].strip() in said
