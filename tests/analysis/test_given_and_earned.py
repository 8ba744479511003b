"""The tables of given, became and earned, by hand."""
import numpy as np
import pytest
from conftest import credit_columns, write_log

import analyze
from analysis.became import became
from analysis.tables import NOTHING
from analysis.tally import Tally
from engine.tokens import NUMBER, WORD


@pytest.fixture
def log(tmp_path):
    """p = 1/2 of two, so s^2 = 1/2. Step 1: two words and two numbers, A = 2, 2, -4 and 0. What
    became of step 2 was not measured."""
    kind, advantage = [WORD, WORD, NUMBER, NUMBER], [2, 2, -4, 0]
    first = credit_columns([2, 2], [0, 0], kind=kind, advantage=advantage,
                           change=[0.1, -0.3, 0.4, -0.2], true_credit=[0.5, 0, 0, -0.5],
                           decided=[0.3, 0, 0, 0.1])
    second = credit_columns([4], [0], kind=[WORD] * 4, advantage=[9] * 4)
    return write_log(tmp_path / "run", {1: first, 2: second})


def test_given_became_and_earned(log, monkeypatch):
    """Given 1, 1 and -2, 0 of 4; became 0.4 and 0.6 of 1; earned 0.3 and 0.1 of 0.4. Half of
    the push up went to a word that fell, all of the push down to a number that rose."""
    tally = Tally(log)
    assert tally.watched == [1]
    rows = {row["kind"]: row for row in became(tally, "kind").to_json()["rows"]}
    word, number = rows["word"], rows["number"]
    assert set(rows) == {"word", "number"}
    expected = {"tokens": 0.5, "given": 0.5, "became": 0.4, "earned": 0.75, "net given": 0.5,
                "net became": -0.2, "net earned": 0.5, "fell": 0.5, "rose": None}
    assert {name: word[name] for name in expected} == pytest.approx(expected)
    expected = {"given": 0.5, "became": 0.6, "earned": 0.25, "net given": -0.5, "net became": 0.2,
                "net earned": -0.5, "fell": None, "rose": 1.0}
    assert {name: number[name] for name in expected} == pytest.approx(expected)
    assert became(tally, "kind").finding == NOTHING  # of one group
    monkeypatch.setattr("analysis.became.FEWEST", 1)
    said = became(tally, "kind").finding
    assert said == ("Of the push up 50% went to tokens that fell, of the push down 100% to tokens "
                    "that rose. Word tokens were given 50% and got 40% of all change.")


def test_a_run_without_it_has_no_such_table(log, capsys):
    columns = dict(np.load(log / "credit/step_000001.npz"))
    for absent, has_table, has_earned in (("true_credit", True, False), ("change", False, False)):
        del columns[absent]
        np.savez_compressed(log / "credit/step_000001.npz", **columns)
        tables = analyze.run_chapters({"evaluations": [], "metrics": []}, Tally(log))
        found = [table for tables in tables.values() for table in tables if "became" in table.name]
        assert bool(found) == has_table
        assert any("earned" in table.columns for table in found) == has_earned
        assert any("earned" in note for table in found for note in table.notes) == has_earned
