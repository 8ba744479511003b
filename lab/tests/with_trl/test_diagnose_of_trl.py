"""Logs that TRL's trainer wrote, healthy and with one mistake each: lab diagnose names the mistake,
and no other (lab/LOG.md says which program had them written). And the losses of the installed TRL,
read by lab.formula."""
from pathlib import Path

import pytest

from lab.formula import find_formula, of_trl
from lab.formula.report import codes
from lab.tests.with_trl import INSTALL
from lab.tools.diagnose import faults_of, filled, in_words
from lab.tools.logs import read_log

LOGS = Path(__file__).parent / "trl_logs"
ROWS = {  # the row of docs/reference/how_a_run_fails.md, 0 if it has none, and what is said
    "healthy": ([], "15 of 21 signs of a mistake could be looked for, and none is seen"),
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


def advantage(batch):
    """TRL's: the z-score with the std over n - 1, and 1e-4."""
    groups = batch.reward.view(len(batch.group.unique()), -1)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


@pytest.mark.slow
@pytest.mark.parametrize("flags, words", [
    ({"loss_type": "dapo"}, {"z n-1 0.0001", "token", "clip 0.2 0.2", "no kl", "understood"}),
    ({"loss_type": "dr_grpo"}, {"z n-1 0.0001", "constant 512", "understood"}),
    ({"loss_type": "cispo"}, {"cispo none -0.8", "token", "understood"}),
    ({"loss_type": "dapo", "beta": 0.04}, {"kl k3 0.04 with ratio", "understood"})])
def test_what_trl_computes_by_its_own_defaults(flags, words):
    trl = pytest.importorskip("trl", reason=INSTALL)
    found = set(codes(find_formula(of_trl(trl.GRPOTrainer, advantage, **flags))))
    assert words <= found, found
