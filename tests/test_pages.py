"""An interval of a page stands in a stored result, or follows from stored numbers; and a page's
verdict is the stored one."""
import re

import pytest
from conftest import ROOT, project_files
from stored import stored_gain

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
    ("lora/held_out", "rank 1", "all"), ("lora/held_out", "rank 8", "all")]
STORED = {interval for kind in ("txt", "json") for path in project_files(f"lab/results/**/*.{kind}")
          for interval in intervals(path)}
STORED |= {INTERVAL.findall(stored_gain(*pair))[0] for pair in COMPUTED}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_interval_of_a_page_stands_in_a_stored_result(page):
    """So a digit that is changed on one side alone is noticed. That it stands beside the right name
    is not."""
    assert not sorted(intervals(page) - STORED)


def test_the_last_line_of_a_run_is_that_of_its_stored_transcript():
    text = (ROOT / "docs/reference/real_models.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^  .* \(95% interval .* held-out problems, .*$", text, flags=re.M)
    assert line in (ROOT / "lab/results/real_run.txt").read_text(encoding="utf-8").splitlines()
