"""The programs that measure: their cases, flags and tables. Nothing is timed."""
import subprocess
from dataclasses import replace

import pytest

from benchmarks import cases, count, gpu
from benchmarks.cases import Case
from conftest import assert_bounded
from engine.errors import UserError

SMALL = Case("rollout", questions=2, answers=2, new_tokens=8, micro_batch=3)


@pytest.mark.parametrize("what, flags", [
    ("rollout", {}), ("update", {}), ("step", {}),
    ("step", {"dtype": "bfloat16", "checkpointing": True, "offload_optimizer": True})])
def test_every_kind_of_work_counts_its_tokens(what, flags):
    assert cases.work_of(replace(SMALL, what=what, **flags))() == {"tokens": 32}


def test_a_process_may_take_so_long(monkeypatch):
    """What it prints, and how its error is told, is in test_gpu.py."""
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)
    monkeypatch.setattr(cases.subprocess, "run", run)
    with pytest.raises(UserError, match="^tiny, rollout: not done after 5 seconds$"):
        cases.in_a_process(SMALL, most=5)


def test_every_number_has_bounds_and_its_defaults_lie_within():
    assert_bounded({f"{module.__name__} {name}": flag for module in (count, gpu)
                    for name, flag in module.FLAGS.items()})
