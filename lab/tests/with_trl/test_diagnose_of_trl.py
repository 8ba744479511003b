"""Logs that TRL's trainer wrote, healthy and with one mistake each: lab diagnose names the mistake,
and no other. lab/LOG.md says which program had them written."""
from pathlib import Path

import pytest

from lab.tools.diagnose import faults_of, filled, in_words
from lab.tools.logs import read_log

LOGS = Path(__file__).parent / "trl_logs"
ROWS = {  # the row of docs/reference/how_a_run_fails.md, 0 if it has none, and what is said
    "healthy": ([], "16 of 22 signs of a mistake could be looked for, and none is seen"),
    "destroyed": ([6], "far too high"),
    "dead": ([3], "equal_groups is 1 in every step"),
    "hacked": ([9], "divides went from"),
    "collapsed": ([5], "one answer for all"),
    "cut_off": ([7], "finished is 0 in every step"),
    "no_rate": ([0], "learning_rate is 0 in every step"),
    "no_gradient": ([0], "gradient_norm is 0 in every step"),
    "length": ([9], "may pay for the length"),
    "passes": ([6], "far too high")}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_said_of_a_log_of_trl(name):
    [path] = LOGS.glob(f"{name}-*.json")
    rows, words = ROWS[name]
    log = read_log(path)
    found = faults_of(log)
    assert [fault.check.row for fault in found] == rows
    assert words in " ".join(filled(in_words(log, found)).split())
