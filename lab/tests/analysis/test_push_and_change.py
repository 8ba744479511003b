"""The tables of push, change and credit, by hand."""
import numpy as np
import pytest
from conftest import credit_columns, write_log

import lab.analysis.program as analyze
from lab.analysis.answers import Viewer
from lab.analysis.change import ABOUT_CREDIT, change_table
from lab.analysis.tables import TOO_FEW_GROUPS
from lab.analysis.run_folders import read_run
from lab.analysis.tally import Tally
from lab.engine.tokens import NUMBER, WORD
from lab.harness.read_record import has_column


@pytest.fixture
def log(tmp_path):
    """p = 1/2 of two, so s^2 = 1/2. Step 1: two words and two numbers, A = 2, 2, -4 and 0. The
    change of step 2 was not measured."""
    kind, advantage = [WORD, WORD, NUMBER, NUMBER], [2, 2, -4, 0]
    first = credit_columns([2, 2], [0, 0], kind=kind, advantage=advantage,
                           change=[0.1, -0.3, 0.4, -0.2], true_credit=[0.5, 0, 0, -0.5],
                           decided=[0.3, 0, 0, 0.1])
    second = credit_columns([4], [0], kind=[WORD] * 4, advantage=[9] * 4)
    return write_log(tmp_path / "run", {1: first, 2: second})


def test_push_change_and_credit(log, monkeypatch):
    """Push 1, 1 and -2, 0 of 4; change 0.4 and 0.6 of 1; squared credit 0.3 and 0.1 of 0.4. Half of
    the push up went to a word that fell, all of the push down to a number that rose."""
    tally = Tally(log)
    assert [has_column(log, step, "change") for step in (1, 2)] == [True, False]
    assert Viewer(read_run(log)).chosen == {1}  # the page shows answers of such steps
    rows = {row["kind"]: row for row in change_table(tally, "kind").to_json()["rows"]}
    word, number = rows["word"], rows["number"]
    assert set(rows) == {"word", "number"}
    expected = {"tokens": 0.5, "push": 0.5, "change": 0.4, "decides": 0.75, "net push": 0.5,
                "net change": -0.2, "net decides": 0.5, "fell": 0.5, "rose": None}
    assert {name: word[name] for name in expected} == pytest.approx(expected)
    expected = {"push": 0.5, "change": 0.6, "decides": 0.25, "net push": -0.5, "net change": 0.2,
                "net decides": -0.5, "fell": None, "rose": 1.0}
    assert {name: number[name] for name in expected} == pytest.approx(expected)
    assert change_table(tally, "kind").finding == TOO_FEW_GROUPS  # of one group
    assert "On average the log-prob of a token changed by 0.250, up or down" in change_table(
        tally, "kind").notes  # 0.1, 0.3, 0.4 and 0.2
    monkeypatch.setattr("lab.analysis.change.FEWEST", 1)
    assert change_table(tally, "kind").finding == (
        "50% of the upward push went to tokens whose log-prob fell, and 100% of the downward push "
        "to tokens whose log-prob rose. Word tokens received 50% of the push and 40% of the "
        "change.")


def test_a_run_without_it_has_no_such_table(log):
    columns = dict(np.load(log / "credit/step_000001.npz"))
    for absent, has_table, has_credit in (("true_credit", True, False), ("change", False, False)):
        del columns[absent]
        np.savez_compressed(log / "credit/step_000001.npz", **columns)
        chapters = analyze.run_chapters({"evaluations": [], "metrics": []}, Tally(log))
        found = [table for tables in chapters.values() for table in tables
                 if table.name.startswith("change by")]
        assert bool(found) == has_table
        assert any("decides" in table.columns for table in found) == has_credit
        assert any(ABOUT_CREDIT in table.notes for table in found) == has_credit
