"""The list of docs/reference/how_a_run_fails.md: it names numbers that a run has, and mistakes
that are made here on purpose show what it says."""
import inspect
import re
from unittest.mock import patch

import numpy as np
import pytest

import grpo
from conftest import ROOT
from lab.harness.step_lines import METRICS
from lab.tools.diagnose import CHECKS
from lab_runs import SHORT, run
from runs import arrays, lines

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/reference/how_a_run_fails.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## From the symptom to the mistake")[2].partition("\n## ")[0]
ROWS = re.findall(r"^(\d+)\. \*\*(.+?)\*\*", SECTION, flags=re.M | re.S)  # number, symptom
OLD_IS_NEW = {  # row 11: each pass takes the old log-probs anew
    "clipped_loss(log_prob, old[part],": "clipped_loss(log_prob, log_prob.detach(),",
    "(last - old).exp()": "(last - last).exp()"}
PARTS = {"reward_format", "reward_answer"}  # of the reward, in each line of metrics.jsonl
STEP = [*SHORT, "--steps", "1", "--checkpoint_every", "0", "--questions", "4"]
RUNS = {
    "usual": [], "cut": ["--max_new_tokens", "30"],
    # so many answers that it is no matter of luck whether a best one loses its advantage
    "shuffled": ["--placebo", "advantages", "--questions", "8", "--answers", "8"],
    "sure": ["--mitigation", "inverse_logprob", "--epsilon", "0.0001"],
    "four": ["--epochs", "4"], "far": ["--epochs", "4", "--learning_rate", "0.003"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Metrics and credit of one step of each of RUNS, and of one with the mistake of row 11."""
    place = tmp_path_factory.mktemp("symptoms")
    for name, flags in RUNS.items():
        run(*STEP, "--max_new_tokens", "80", *flags, "--out", place / name)
    source = inspect.getsource(grpo.update)
    for right, wrong in OLD_IS_NEW.items():
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    mistaken = dict(vars(grpo))
    exec(source, mistaken)
    with patch.object(grpo, "update", mistaken["update"]):
        run(*STEP, *RUNS["four"], "--out", place / "old is new")
    return {name: (lines(place / name / "metrics.jsonl")[0],
                   arrays(place / name / "credit/step_000001.npz"))
            for name in (*RUNS, "old is new")}


def test_every_symptom_is_a_number_of_a_run():
    assert [int(number) for number, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert {check.row for check in CHECKS} <= set(range(len(ROWS) + 1))  # 0 is in no row
    for number, symptom in ROWS:
        named = set(re.findall(r"`([a-z_]+)`", symptom))
        assert named <= METRICS.keys() | PARTS, number
        assert named, number


def test_each_mistake_shows_what_the_list_says(made):
    """Answers are cut off; a right answer has less advantage than a wrong one; weight is where no
    gradient is; the ratio is that of a log-prob to itself; steps go too far."""
    metrics, credit = ({name: made[name][i] for name in made} for i in (0, 1))
    assert metrics["usual"]["finished"] > 0.9 > 0.4 > metrics["cut"]["finished"]
    assert metrics["cut"]["length"] > 0.9 * 30
    for name, are_in_order in (("usual", True), ("shuffled", False)):
        columns = credit[name]
        advantage, group = columns["advantage"][columns["episode_start"]], columns["group"]
        best = [advantage[group == g][columns["reward"][group == g].argmax()]
                == advantage[group == g].max() for g in np.unique(group)]
        assert all(best) == are_in_order
    assert metrics["sure"]["gradient_norm"] < metrics["usual"]["gradient_norm"] / 100
    same = metrics["old is new"]
    assert (same["ratio_mean"], same["clipped_share"]) == (1, 0)
    assert (credit["old is new"]["ratio"] == 1).all() and (credit["four"]["ratio"] != 1).any()
    near, far = (abs(1 - metrics[name]["ratio_mean"]) for name in ("four", "far"))
    assert 0 < near < far
    assert 0 < 2 * metrics["four"]["clipped_share"] < metrics["far"]["clipped_share"]
