"""The programs that measure: their cases, flags and tables. Nothing is timed."""
import json
import sys

import pytest

from benchmarks import cases, cost, memory, speed, work
from benchmarks.cases import Case
from harness.command_line import read_flags
from engine.errors import UserError
from harness.settings import make_settings
from harness.registry import MITIGATIONS

SMALL = dict(questions=2, answers=2, new_tokens=4, micro_batch=3)


@pytest.mark.parametrize("size, what", [
    ("tiny", "rollout"), ("tiny", "update, unequal"), ("tiny", "step"), ("shipped", "step")])
def test_every_kind_of_work_counts_its_tokens(size, what):
    result = work.WORK[what](Case(size, what, **SMALL))()
    assert 0 < result["tokens"] and result["floor"]
    if what == "update, unequal":
        assert result["tokens"] < 16
    elif size == "tiny":
        assert result["tokens"] == 16
    assert ("record_bytes" in result) == (what == "step")


def test_a_case_travels_to_a_process_of_its_own_and_back(monkeypatch, capsys):
    """In this process: what the command line would be given, and what it prints."""
    case = Case("tiny", "rollout", **SMALL)
    commands = []

    def run(command, **more):
        commands.append((command, more))
        speed.main(command[3:])
        printed = capsys.readouterr().out
        return type("Result", (), {"returncode": 0, "stdout": printed, "stderr": ""})
    monkeypatch.setattr(cases.subprocess, "run", run)
    monkeypatch.setattr(speed, "measure", lambda given: {"same": given == case})
    assert cases.in_a_process(case, "benchmarks.speed") == {"same": True}
    command, more = commands[0]
    assert command[:3] == [sys.executable, "-m", "benchmarks.speed"]
    assert more["cwd"] == cases.PROJECT


def test_a_process_that_failed_is_named_with_its_last_line(monkeypatch):
    failed = type("Result", (), {"returncode": 1, "stdout": "", "stderr": "Trace\nout of memory\n"})
    monkeypatch.setattr(cases.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="^tiny, update: out of memory$"):
        cases.in_a_process(Case("tiny", "update"), "benchmarks.memory")


def test_a_count_is_beside_its_account(capsys):
    case = {"size": "tiny", "what": "update", "questions": 1, "answers": 4, "new_tokens": 6}
    memory.main(["--case", json.dumps(case)])
    counts = json.loads(capsys.readouterr().out)
    assert counts["kept"] == counts["kept, floor"] > 0
    assert counts["peak"] > 0 and counts["peak, floor"] > 0


@pytest.mark.parametrize("module, argv, words", [
    (speed, ["--sizes", "huge"], "--sizes huge is not one of"),
    (speed, ["--dtype", "int8"], "--dtype int8 is not one of"),
    (speed, ["--repeats", "0"], "--repeats 0 should be at least 1"),
    (speed, ["--picture", "x.png"], "give --sweep too"),
    (speed, ["--size", "tiny"], "did you mean --sizes"),
    (memory, ["--sizes", "tiny,huge"], "--sizes huge is not one of"),
    (cost, ["gea"], "no arm gea; there are: none"),
])
def test_wrong_flags_get_one_line(module, argv, words):
    with pytest.raises(UserError, match=words):
        module.main(argv)


def test_a_row_of_speeds_by_hand():
    """100 and 80 tokens in a second; the floor takes half of it by its operations."""
    case = Case("tiny", "rollout", questions=2, answers=5)
    rival = Case("tiny", "transformers", questions=2, answers=5)
    turns = [{"tokens": 100, "seconds": 1.0, "floor": [[50, 1]], "memory": 2 ** 20},
             {"tokens": 80, "seconds": 1.0, "floor": [[50, 1]], "memory": 2 ** 21}]
    theirs = [{"tokens": 50, "seconds": 1.0, "memory": 0}] * 2
    limit = [{"rate": 100, "bandwidth": 100}] * 2
    row = speed.speed_row(case, {case: turns, rival: theirs}, limit)
    assert row == ["tiny", "rollout", "10 x 10", 90, (80, 100), 0.5, "operations", 1.5, 1.8]


def test_the_table_of_costs_by_hand():
    """Two steps of an arm against two of plain GRPO, and every weighting has its row."""
    def line(credit, update, memory, extra=0):
        return {"credit_seconds": credit, "update_seconds": update, "seconds": 2.0, "tokens": 100,
                "extra_tokens": extra, "peak_memory_bytes": memory * 2 ** 20}
    plain = [line(0.0, 1.0, 600), line(0.002, 1.0, 610)]
    row = cost.row("gae", [line(0.5, 1.1, 640, 250), line(0.502, 1.1, 650, 250)], plain)
    assert row == "| gae | 501.0 | +25.0% | 1100 | +30% | 2.5 | 129 | +40 |"
    assert set(MITIGATIONS) <= set(cost.ARMS)
    for flags in cost.ARMS.values():
        make_settings(read_flags(flags))
