"""pass@k: by hand, by enumeration, and of a run before its training and after it."""
import itertools
import re

import numpy as np
import pytest

from lab.engine.policy import derived_seed
from lab.harness.build import load_policy
from lab.harness.settings import make_settings
from runs import everything
from lab.tools import pass_at_k
from lab.tools.pass_at_k import pass_at_k_table


@pytest.mark.parametrize("right, tries, k", [
    (0, 5, 3), (1, 5, 1), (1, 5, 3), (2, 5, 2), (3, 5, 3), (5, 5, 1), (4, 6, 5)])
def test_it_is_the_share_of_all_choices_of_k_tries_that_have_a_right_one(right, tries, k):
    choices = list(itertools.combinations([True] * right + [False] * (tries - right), k))
    assert pass_at_k.pass_at_k(right, tries, k) == pytest.approx(np.mean(list(map(any, choices))))


def test_a_table_by_hand():
    """Two problems, four tries. Before: 1 and 0 right, after: 2 and 0. With two tries the first
    problem has 3 / 6 = 50% and 1 - 1/6 = 83.3%, with four both models solve it."""
    table = pass_at_k_table({"before": [1, 0], "after": [2, 0]}, 4)
    by_k = {row[0]: [cell.value for cell in row[1:]] for row in table.rows}
    assert by_k == {1: pytest.approx([1 / 8, 2 / 8, 1 / 8]),
                    2: pytest.approx([1 / 4, 5 / 12, 1 / 6]),
                    4: pytest.approx([1 / 2, 1 / 2, 0])}
    [low] = {cell.low for cell in table.rows[0][1:2]}
    assert low == 0  # a share is not below 0
    assert [*pass_at_k_table({"one": [1, 2]}, 3).columns] == ["tries, k", "one"]
    assert [row[0] for row in pass_at_k_table({"one": [1, 2]}, 3).rows] == [1, 2, 3]


def test_the_interval_is_over_the_problems():
    """Ten problems, five always and five never solved: the standard error is sqrt(0.25 / 9), and t
    with nine degrees of freedom is 2.262."""
    table = pass_at_k_table({"one": [2] * 5 + [0] * 5}, 2)
    assert table.rows[0][1].low == pytest.approx(0.5 - 2.262 * (0.25 / 9) ** 0.5, abs=1e-3)


def test_a_run_is_asked_before_and_after_and_nothing_is_written(recorded, capsys):
    files = everything(recorded)
    pass_at_k.main([str(recorded), "--tries", "4", "--problems", "5", "--seed", "3"])
    printed = capsys.readouterr().out
    assert files == everything(recorded)
    assert "4 tries at each of 5 held-out problems" in printed
    policy = load_policy(make_settings({"config": f"{recorded}/config.json"}))
    settings, found = policy.settings, []
    at_once = max(1, settings.questions * settings.answers // 4)
    problems = policy.task.held_out_problems(5)
    for first in range(0, 5, at_once):
        batch = policy.ask(problems[first:first + at_once], 4, derived_seed("pass at k", 3, first))
        found += (batch.scores["answer"] > 0).float().tolist()
    row = re.search(r"^\| +1 \| +([\d.]+)% \(.*\| +([\d.]+)% \(.*\| +[-+][\d.]+ \(", printed, re.M)
    assert float(row[1]) == pytest.approx(100 * np.mean(found), abs=0.06)
    none = sum(not any(found[4 * i:4 * i + 4]) for i in range(5))
    assert f"before training: {none} problems were solved by none of 4 tries" in printed
